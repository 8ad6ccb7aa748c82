"""Numbers as people read them, and the columns of the main table made of such."""

from collections.abc import Callable
from operator import attrgetter

import pandas as pd

MISSING, NOT_RUN = "n/a", "not run"


def _interval(centre: str, low: str, high: str) -> str:
    return centre if centre == MISSING else f"{centre} [{low}, {high}]"


def rounded(value: object) -> str:
    """Return a cell for people: floats with three decimals, tiny ones as powers of ten."""
    if pd.isna(value):
        return MISSING
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.0005 else f"{value:.0e}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f}"


# --- the columns of the main table, each from a row of numbers ------------------------------------


def _n_prompts(row) -> str:
    return str(row.n_prompts)


def _outcomes(row) -> str:
    return f"{row.safe} / {row.abstained} / {row.unsafe}"


def _safety_rate(row) -> str:
    rates = (row.safety_rate, row.safety_wilson_low, row.safety_wilson_high)
    return _interval(*map(_percent, rates))


def _safety_lower(row) -> str:
    return _percent(row.safety_lower95)


def _reward(row) -> str:
    return _interval(*map(rounded, (row.reward_mean, row.reward_low, row.reward_high)))


def _reward_answered(row) -> str:
    return rounded(row.reward_answered)


def _cost(row) -> str:
    return rounded(row.cost_mean)


def _seconds(row) -> str:
    return f"{row.seconds_per_prompt:.2f}"


PRETTY: dict[str, Callable[..., str]] = {  # header -> its text
    "Policy": attrgetter("policy"),
    "Method": attrgetter("method"),
    "n": _n_prompts,
    "Safe / abstained / unsafe": _outcomes,
    "Safe % [Wilson 95 %]": _safety_rate,
    "Lower bound % (95 %)": _safety_lower,
    "Reward [95 %]": _reward,
    "Reward, all answered": _reward_answered,
    "Cost": _cost,
    "s / prompt": _seconds,
}
WITHOUT_PROMPTS = ("Policy", "Method", "n")  # what a row of a method that was not run says


def main_row(row) -> list[str]:
    return [
        text(row) if row.n_prompts or name in WITHOUT_PROMPTS else NOT_RUN
        for name, text in PRETTY.items()
    ]


def any_row(row) -> list[str]:
    return [rounded(value) for value in row]
