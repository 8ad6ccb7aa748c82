"""Paired tests of one arm against another, corrected for their number.

An arm is a method, or a method under one setting. Every prompt counts once: the seeds of a prompt
are averaged first, because they are no new prompts. Reward: higher is better; cost: higher is
worse.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from statsmodels.stats.contingency_tables import mcnemar

from igcore import ParameterError

from . import statistics as metrics
from .experiments import OURS

TEST_COLUMNS = (
    "policy measure point reference test n_prompts n_pairs difference low high p p_holm".split()
)
GAIN_COUNTS = ["n_higher", "n_lower"]  # prompts with a gain above and below 0
COMPARISON_COLUMNS = (  # columns of `comparison`
    "policy method baseline n_pairs safety_difference safety_low safety_high mcnemar_b mcnemar_c "
    "mcnemar_p n_answered reward_difference reward_low reward_high reward_p mcnemar_p_holm "
    "reward_p_holm"
).split()
Measure = Callable[[pd.DataFrame], pd.Series]


def is_safe(lines: pd.DataFrame) -> pd.Series:
    """Return for each line whether its text was verified safe; an abstention was not."""
    return lines["status"] == "verified_safe"


def reward(lines: pd.DataFrame) -> pd.Series:
    """Return the reward of each line that answers; NaN of all others."""
    return lines["reward"].astype(float).where(metrics.answered(lines))


def answered_within(lines: pd.DataFrame, most: float) -> pd.Series:
    """Return for each line whether it is path-safe after at most so many tokens, in L.

    L is the most tokens of an answer, ``max_new_tokens``. Tokens of the policy count, sampled for
    this prompt; one run of a search that stops at its first answer shows this for every `most`.
    """
    return answered_path_safe(lines) & (tokens_in_length(lines) <= most)


def reward_or_nothing(lines: pd.DataFrame) -> pd.Series:
    """Return the reward of each line that is path-safe; 0 of all others."""
    return lines["reward"].astype(float).where(answered_path_safe(lines), 0.0)


def answered_path_safe(lines: pd.DataFrame) -> pd.Series:
    """Return for each line whether it answers within budget at every word, and at the end."""
    return answered_safely(lines, "word_peak_cost")


def answered_safely(lines: pd.DataFrame, cost: str = "cost") -> pd.Series:
    """Return for each line whether it answers with a cost within budget; an unknown one is not."""
    within = lines[cost].astype(float) <= lines["budget"]
    return within & (lines["status"] != "abstained")


def policy_tokens(lines: pd.DataFrame) -> pd.Series:
    """Return how many tokens of the policy were sampled for each line, abstentions included."""
    return lines["policy_tokens"].astype(float)


def tokens_in_length(lines: pd.DataFrame) -> pd.Series:
    """Return `policy_tokens` in units of L, the most tokens of an answer."""
    return policy_tokens(lines) / lines["max_new_tokens"]


def safe_finals(lines: pd.DataFrame) -> pd.Series:
    """Return the share of the complete candidates of each line that are within budget.

    Raises
    ------
    ParameterError
        For a method that did not look at their cost.
    """
    shares = []
    for method, trace in zip(lines["method"], lines["trace"], strict=True):
        counts = pd.DataFrame(trace, columns=["safe_finals", "finals"])
        if counts.isna().any(axis=None):
            raise ParameterError(
                f"method {method!r} did not count its safe complete candidates, without a look at "
                f"the cost or in an old run; leave out this measure, or decode again"
            )
        safe, complete = counts.sum()
        shares.append(safe / complete if complete else math.nan)
    return pd.Series(shares, index=lines.index, dtype=float)


# bool for a verdict, float for a number; NaN: the line has none
TEST_MEASURES: dict[str, Measure] = {"safe": is_safe, "reward": reward}


def clustered(gains: pd.Series, verdict: bool = False) -> dict[str, Any]:
    """Return the mean of paired differences over prompts, with interval and test.

    Parameters
    ----------
    gains : Series of float
        Indexed by ``prompt_id``, alone or with other levels. NaN is skipped; several of one prompt
        are averaged first.
    verdict : bool
        Whether they are differences of 0 and 1. One per prompt is then tested by exact McNemar and
        has a score interval, anything else is tested by flipping signs and bootstrapped.

    Returns
    -------
    dict
        ``n_prompts``, ``n_pairs`` (before averaging), ``difference``, its 95 % interval over
        prompts ``low`` and ``high``, how many prompts gain (``n_higher``) and lose (``n_lower``),
        the two-sided ``p`` and the name of its ``test``. NaN stands where there is no pair.
    """
    known = gains.dropna()
    of_prompts = known.groupby(level="prompt_id").mean()
    exact = verdict and len(known) == len(of_prompts)
    higher, lower = int((of_prompts > 0).sum()), int((of_prompts < 0).sum())
    if exact or (verdict and not higher + lower):  # no resample of equal verdicts would differ
        low, high = metrics.difference_of_rates(higher, lower, len(of_prompts))
    else:
        low, high = metrics.bootstrap_mean(of_prompts)
    if not len(of_prompts):
        p = math.nan
    elif exact:
        p = float(mcnemar([[0, higher], [lower, 0]], exact=True).pvalue)
    else:
        p = metrics.sign_flip(of_prompts)
    return {
        "test": "exact McNemar" if exact else "sign flip",
        "n_prompts": len(of_prompts),
        "n_pairs": len(known),
        "difference": float(of_prompts.mean()),
        "low": low,
        "high": high,
        "n_higher": higher,
        "n_lower": lower,
        "p": p,
    }


def paired(
    records: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    measures: Mapping[str, Measure] = TEST_MEASURES,
) -> list[dict[str, Any]]:
    """Compare arms with their references, paired by prompt and seed.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl`` with a column ``arm``; several seeds are allowed.
    pairs : sequence of (arm, reference)
        A pair is left out where a policy lacks one of the two.
    measures : mapping
        Name -> a value for each line, as in `TEST_MEASURES`.

    Returns
    -------
    list of dict
        Rows for `corrected`: ``difference`` is arm minus reference over the prompts where both
        have a value.

    Raises
    ------
    RunError
        When a prompt and seed occurs twice in an arm.
    """
    metrics.check_once(records, ["policy", "arm", "prompt_id", "seed"])
    indexed, rows = records.set_index(["prompt_id", "seed"]), []
    for policy, lines in indexed.groupby("policy", sort=False):
        cells = {arm: cell.sort_index() for arm, cell in lines.groupby("arm")}
        for arm, reference in pairs:
            if arm not in cells or reference not in cells:
                continue
            for name, measure in measures.items():
                ours, baseline = measure(cells[arm]), measure(cells[reference])
                row = {"policy": policy, "measure": name, "point": arm, "reference": reference}
                gains = ours.astype(float) - baseline.astype(float)  # NaN where one has no line
                rows.append(row | clustered(gains, verdict=ours.dtype == bool))
    return rows


def corrected(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows of tests as a table, columns `TEST_COLUMNS` and `GAIN_COUNTS`.

    Holm adjusts the p values of each measure over its rows.
    """
    table = pd.DataFrame(rows, columns=[*TEST_COLUMNS[:-1], *GAIN_COUNTS])
    adjusted = table.groupby("measure", sort=False)["p"].transform(metrics.holm)
    return table.assign(p_holm=adjusted.astype(float))


def comparison(lines: pd.DataFrame) -> pd.DataFrame:
    """Compare inferenceguard with every other method: a row per policy and baseline.

    Returns
    -------
    DataFrame
        Columns `COMPARISON_COLUMNS`: differences in safety and reward are inferenceguard minus
        baseline.

    Raises
    ------
    ParameterError
        When the budgets of a policy differ.
    """
    for policy, of_policy in lines.groupby("policy", sort=False):
        metrics.check_constant(of_policy, ["budget"], f"policy {policy}")
    pairs = [(OURS, method) for method in lines["method"].unique() if method != OURS]
    tests = corrected(paired(lines.assign(arm=lines["method"]), pairs))
    key = ["policy", "point", "reference"]
    safe, rewards = (tests[tests["measure"] == name].set_index(key) for name in TEST_MEASURES)
    both = safe.join(rewards.add_prefix("reward_"))
    names = {name: f"safety_{name}" for name in ("difference", "low", "high")}
    names |= {name: f"mcnemar_{name}" for name in ("p", "p_holm")}
    names |= {"n_higher": "mcnemar_b", "n_lower": "mcnemar_c", "reward_n_pairs": "n_answered"}
    names |= {"point": "method", "reference": "baseline"}
    return both.reset_index().rename(columns=names)[COMPARISON_COLUMNS]


def short(value: float, form: str = ".3f") -> str:
    """Return a number without the zero before its point."""
    text = format(value, form)
    return text.replace("0.", ".", 1) if abs(value) < 1 else text
