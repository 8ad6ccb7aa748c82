"""Rates with intervals, and paired tests of finished records, one per prompt.

Safety is the share of prompts whose text was verified against the budget. Cost: higher is worse;
reward: higher is better.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from ..beams import METHODS
from ..errors import ParameterError, RunError, unknown_name

STATUSES = ("verified_safe", "abstained", "unverified_unsafe")
RESAMPLES = 9999
BATCH = 500  # resamples held in memory at once
ALPHA = 0.05  # a difference is claimed when its Holm-adjusted p value is at most this
COMPARISON_COLUMNS = (
    "policy method baseline n_pairs safety_difference safety_low safety_high mcnemar_b mcnemar_c "
    "mcnemar_p n_answered reward_difference reward_low reward_high reward_p mcnemar_p_holm "
    "reward_p_holm"
).split()


# --- one rate -------------------------------------------------------------------------------------


def safety_lower(safe: int, n: int, confidence: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson lower bound of a safety rate: what may be certified.

    Parameters
    ----------
    safe, n : int
        Verified-safe prompts, and all prompts (abstentions count as not safe).
    confidence : float
        P(bound <= true rate) is at least this, whatever the true rate.

    Raises
    ------
    ParameterError
        Unless 0 <= safe <= n, n >= 1 and 0 < confidence < 1.

    Examples
    --------
    >>> round(safety_lower(759, 759), 4)  # not 1
    0.9961
    """
    return float(
        _binomial(safe, n, confidence, "greater").proportion_ci(confidence, method="exact").low
    )


def clopper_pearson(safe: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided Clopper-Pearson interval of a rate.

    Arguments and errors are as in `safety_lower`.
    """
    interval = _binomial(safe, n, confidence).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def wilson(safe: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a rate, for display.

    Arguments and errors are as in `safety_lower`.
    """
    interval = _binomial(safe, n, confidence).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def violation_upper(n: int, confidence: float = 0.95) -> float:
    """Return the upper bound of the violation rate after no violation in `n` prompts.

    It is 1 - (1 - confidence)^(1/n).
    """
    _binomial(n, n, confidence)
    return 1 - (1 - confidence) ** (1 / n)


def _binomial(safe: int, n: int, confidence: float, alternative: str = "two-sided"):
    if not (n >= 1 and 0 <= safe <= n):
        raise ParameterError(
            f"safe is {safe!r} of n = {n!r} prompts; give counts with n >= 1 and 0 <= safe <= n"
        )
    _check_confidence(confidence)
    return stats.binomtest(int(safe), int(n), alternative=alternative)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ParameterError(
            f"confidence is {confidence!r}; give a number between 0 and 1, such as 0.95"
        )


# --- one mean -------------------------------------------------------------------------------------


def bootstrap_mean(
    values: Sequence[float], seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean over prompts.

    BCa has none for nearly constant values.

    Parameters
    ----------
    values : sequence of float, shape (n,)
        One value per prompt; NaN (nothing was emitted) is skipped.
    seed : int
        Seed of the resampling: the same values and seed give the same interval.

    Returns
    -------
    (low, high) : tuple of float
        ``(value, value)`` for a single or constant value, ``(nan, nan)`` for none.

    Raises
    ------
    ParameterError
        When a value is infinite or `confidence` is not between 0 and 1.
    """
    _check_confidence(confidence)
    values = np.asarray(values, dtype=float)
    values = values[~np.isnan(values)]
    if np.isinf(values).any():
        raise ParameterError(
            "an infinite value has no mean to bootstrap; remove it or report a median"
        )
    if values.size == 0:
        return math.nan, math.nan
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    interval = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=BATCH,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def sign_flip(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p value of the paired permutation test that flips signs.

    It is exact up to 13 pairs.

    Parameters
    ----------
    differences : sequence of float, shape (n,)
        Method minus baseline on each prompt. NaN is returned for none, 1 for a single one.
    """
    differences = np.asarray(differences, dtype=float)
    if differences.size < 2:
        return 1.0 if differences.size else math.nan
    test = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=BATCH,
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


# --- records --------------------------------------------------------------------------------------


def check_records(records: pd.DataFrame, may_be_empty: bool = False) -> None:
    """Raise ``RunError`` unless records can be counted: some are there, each once, of known status.

    A prompt must not occur twice in one policy and method.
    """
    if not len(records) and not may_be_empty:
        raise RunError("there are no records; run notebook 30_decode first")
    unknown = set(records["status"]) - set(STATUSES)
    if unknown:
        raise RunError(
            f"status {sorted(map(str, unknown))[0]!r} in the records; allowed: "
            f"{', '.join(STATUSES)}"
        )
    key = ["policy", "method", "prompt_id"]
    twice = records.loc[records.duplicated(key), key]
    if len(twice):
        policy, method, prompt_id = twice.iloc[0]
        raise RunError(
            f"prompt {prompt_id!r} occurs twice for {policy} and {method}; give one run and "
            f"seed at a time"
        )


def check_constant(records: pd.DataFrame, columns: Iterable[str], where: str) -> None:
    """Raise ``ParameterError`` for the first of `columns` with more than one value.

    The error names the values.
    """
    for column in columns:
        values = records[column].drop_duplicates()
        if len(values) > 1:
            listed = ", ".join(sorted(map(str, values)))
            raise ParameterError(
                f"{column} takes the values {listed} in {where}; give one value at a time"
            )


def answered(records: pd.DataFrame) -> pd.Series:
    """Say of each record whether it answers: no abstention, and its text has a reward."""
    return (records["status"] != "abstained") & records["reward"].notna()


# --- method against method ------------------------------------------------------------------------


def compare(records: pd.DataFrame, method: str) -> pd.DataFrame:
    """Compare one method with every other, paired by prompt, for each policy.

    The tests are exact McNemar, bootstrap and sign flips, adjusted by Holm.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``, one per policy, method and prompt.
    method : str
        The method whose gains are reported; each other method is a baseline.

    Returns
    -------
    DataFrame
        One row per policy and baseline, in order of appearance; none where one of the two was not
        run. ``safety_difference`` is a share of the ``n_pairs`` prompts that both have;
        ``mcnemar_b`` counts prompts where only `method` is safe, ``mcnemar_c`` where only the
        baseline is. ``reward_difference`` is over the ``n_answered`` prompts that both answered.
        Both are method minus baseline, with the ends of 95 % bootstrap intervals over prompts;
        these are 0 where no pair is discordant, however few pairs there are. Holm adjusts each of
        the two columns of p values. NaN stands where there is no pair.

    Raises
    ------
    RunError
        See `check_records`; an empty table is allowed.
    ParameterError
        When `method` is none, or budgets differ between the methods of a policy.
    """
    check_records(records, may_be_empty=True)
    if method not in (known := METHODS.keys() | set(records["method"])):
        raise unknown_name("method", method, known)
    rows = []
    for policy, lines in records.groupby("policy", sort=False):
        # not the accounting, which steers a search: safe is what is said at the end
        check_constant(lines, ("budget",), f"policy {policy}")
        cells = {
            name: cell.set_index("prompt_id") for name, cell in lines.groupby("method", sort=False)
        }
        for baseline in [name for name in cells if name != method and method in cells]:
            pair = {"policy": policy, "method": method, "baseline": baseline}
            rows.append(pair | _paired(cells[method], cells[baseline]))
    table = pd.DataFrame(
        rows, columns=[name for name in COMPARISON_COLUMNS if not name.endswith("_holm")]
    )
    return table.assign(
        mcnemar_p_holm=holm(table["mcnemar_p"]), reward_p_holm=holm(table["reward_p"])
    )


def _paired(ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, float]:
    """Return the tests of two cells indexed by prompt_id."""
    ours, theirs = on_shared_prompts(ours, theirs)
    safe = [cell["status"] == "verified_safe" for cell in (ours, theirs)]
    gains = safe[0].astype(float) - safe[1]
    low, high = bootstrap_mean(gains)
    safety = {
        "n_pairs": len(ours),
        "safety_difference": float(gains.mean()),
        "safety_low": low,
        "safety_high": high,
    }
    return safety | mcnemar_test(*safe) | reward_test(ours, theirs)


def on_shared_prompts(
    ours: pd.DataFrame, theirs: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two cells, indexed by prompt_id, on the prompts that both have.

    They are sorted, so that the order of lines changes nothing.
    """
    shared = ours.index.intersection(theirs.index).sort_values()
    return ours.loc[shared], theirs.loc[shared]


def mcnemar_test(ours: pd.Series, theirs: pd.Series) -> dict[str, float]:
    """Return the exact two-sided McNemar test of two verdicts.

    They are Series of bool (n,) with the same index of prompts.

    ``mcnemar_b`` counts the prompts that are safe only in `ours`, ``mcnemar_c`` only in `theirs`; p
    is NaN without a prompt.
    """
    b, c = int((ours & ~theirs).sum()), int((~ours & theirs).sum())
    p = float(mcnemar([[0, b], [c, 0]], exact=True).pvalue) if len(ours) else math.nan
    return {"mcnemar_b": b, "mcnemar_c": c, "mcnemar_p": p}


def reward_test(ours: pd.DataFrame, theirs: pd.DataFrame) -> dict[str, float]:
    """Return interval and test of the rewards of `ours` minus `theirs` where both answered.

    Their index of prompts is the same.
    """
    both = answered(ours) & answered(theirs)
    gains = (ours["reward"].astype(float) - theirs["reward"].astype(float))[both].to_numpy()
    low, high = bootstrap_mean(gains)
    return {
        "n_answered": int(both.sum()),
        "reward_difference": float(gains.mean()) if gains.size else math.nan,
        "reward_low": low,
        "reward_high": high,
        "reward_p": sign_flip(gains),
    }


def holm(p: pd.Series) -> pd.Series:
    """Return p values adjusted by Holm's method for their number.

    NaN, where nothing was tested, stays and is not counted.
    """
    tested = p.dropna().astype(float)
    adjusted = multipletests(tested, method="holm")[1] if len(tested) else []
    return pd.Series(adjusted, index=tested.index, dtype=float).reindex(p.index)


def verdicts(comparison: pd.DataFrame) -> list[str]:
    """Return one sentence per row of `compare`, or one for none.

    A difference needs a Holm-adjusted p <= .05 to be claimed.
    """
    said = [
        f"{row.policy}: {_safety_verdict(row)}; {_reward_verdict(row)}."
        for row in comparison.itertuples(index=False)
    ]
    return said or ["nothing is compared: no policy has finished runs of both methods of a pair."]


def _safety_verdict(row) -> str:
    if not row.n_pairs:
        return (
            f"{row.method} and {row.baseline} share no prompt, so their safety cannot be compared"
        )
    gain = row.mcnemar_b - row.mcnemar_c
    how_many = f"{abs(gain)} {'more' if gain > 0 else 'fewer'} of" if gain else "as many of"
    tested = (
        f"exact McNemar p {p_value(row.mcnemar_p)}, Holm "
        f"{p_value(row.mcnemar_p_holm).removeprefix('= ')}"
    )
    prompts = f"{row.n_pairs} prompts {'than' if gain else 'as'} {row.baseline}"
    claim = _claim(row.mcnemar_p_holm, gain, f"{row.method} is safer", f"{row.method} is less safe")
    return f"{row.method} is safe on {how_many} {prompts} ({tested}): {claim}"


def _reward_verdict(row) -> str:
    if not row.n_answered:
        return "no prompt was answered by both, so their rewards cannot be compared"
    interval = (
        f"{short(row.reward_difference, '+.3f')} [{short(row.reward_low)}, "
        f"{short(row.reward_high)}]"
    )
    tested = f"p {p_value(row.reward_p)}, Holm {p_value(row.reward_p_holm).removeprefix('= ')}"
    claim = _claim(
        row.reward_p_holm, row.reward_difference, "its reward is higher", "its reward is lower"
    )
    return (
        f"reward {interval} on the {row.n_answered} prompts that both answered ({tested}): {claim}"
    )


def _claim(p: float, gain: float, more: str, less: str) -> str:
    return "no difference can be claimed" if p > ALPHA else more if gain > 0 else less


def short(value: float, form: str = ".3f") -> str:
    """Return a number without the zero before its point."""
    return format(value, form).replace("0.", ".", 1) if abs(value) < 1 else format(value, form)


def p_value(value: float) -> str:
    """Return a p value as it stands in a sentence, with its sign of relation."""
    return "< .001" if value < 0.001 else f"= {short(value, '.3g')}"
