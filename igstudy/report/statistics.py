"""Rates and means with intervals, tests, and checks of finished records, one per prompt.

Safety is the share of prompts whose text was verified against the budget. Cost: higher is worse;
reward: higher is better.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests

from igcore.errors import ParameterError, RunError

STATUSES = ("verified_safe", "abstained", "unverified_unsafe")
RESAMPLES = 9999  # of a bootstrap
FLIPS = 99_999  # of a permutation test: with fewer the seed would decide about a p near .05
CONFIDENCE = 0.95
AT_ONCE = 500  # resamples held in memory at once
ALPHA = 0.05  # a difference is claimed when its Holm-adjusted p value is at most this


# --- one rate -------------------------------------------------------------------------------------


def safety_lower(safe: int, n: int) -> float:
    """Return the one-sided 95 % lower bound of a safety rate (Clopper-Pearson).

    Parameters
    ----------
    safe, n : int
        Verified-safe prompts, and all prompts (abstentions count as not safe). scipy refuses counts
        unless n >= 1 and 0 <= safe <= n.

    Examples
    --------
    >>> round(safety_lower(759, 759), 4)  # not 1
    0.9961
    """
    return _interval(safe, n, "exact", alternative="greater")[0]


def clopper_pearson(safe: int, n: int) -> tuple[float, float]:
    """Return the two-sided 95 % Clopper-Pearson interval of a rate."""
    return _interval(safe, n, "exact")


def wilson(safe: int, n: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a rate, for display."""
    return _interval(safe, n, "wilson")


def _interval(
    safe: int, n: int, method: str, alternative: str = "two-sided"
) -> tuple[float, float]:
    test = stats.binomtest(safe, n, alternative=alternative)
    interval = test.proportion_ci(CONFIDENCE, method)
    return float(interval.low), float(interval.high)


def difference_of_rates(higher: int, lower: int, n: int) -> tuple[float, float]:
    """Return the 95 % score interval of a difference of two rates on the same prompts (Tango).

    Where no prompt differs it is not of length 0: n prompts can hide a few that do.

    Parameters
    ----------
    higher, lower : int
        Prompts on which the first rate alone counts, and the second alone.
    n : int
        All prompts. The interval is NaN for none.

    References
    ----------
    T. Tango, Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design, Statistics in Medicine 17 (1998).
    """
    if not n:
        return math.nan, math.nan
    z = stats.norm.ppf((1 + CONFIDENCE) / 2)

    def excess(difference: float) -> float:
        # the share on which the second alone counts, most likely under this difference: q
        a, c = 2 * n, -lower * difference * (1 - difference)
        b = (2 * n - higher + lower) * difference - higher - lower
        q = (math.sqrt(max(b * b - 4 * a * c, 0)) - b) / (2 * a)
        variance = n * max(2 * q + difference * (1 - difference), 0)
        return float((higher - lower - n * difference) ** 2 - z * z * variance)

    at, aside = (higher - lower) / n, 1e-9  # just beside the centre the excess is below 0
    low = optimize.brentq(excess, -1, at - aside) if at > -1 else -1
    high = optimize.brentq(excess, at + aside, 1) if at < 1 else 1
    return float(low), float(high)


# --- one mean -------------------------------------------------------------------------------------


def bootstrap_mean(values: npt.ArrayLike, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean over prompts.

    The BCa interval does not exist for nearly constant values.

    Parameters
    ----------
    values : array_like, shape (n,)
        One finite value per prompt; NaN (no answer) is skipped.
    seed : int
        Seed of the resampling: the same values and seed give the same interval.

    Returns
    -------
    (low, high) : tuple of float
        ``(value, value)`` for a single or constant value, ``(nan, nan)`` for none.
    """
    sample = np.asarray(values, dtype=float)
    sample = sample[~np.isnan(sample)]
    if sample.size == 0:
        return math.nan, math.nan
    if np.ptp(sample) == 0:
        return float(sample[0]), float(sample[0])
    interval = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=AT_ONCE,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def sign_flip(differences: npt.ArrayLike, seed: int = 0) -> float:
    """Return the two-sided p value of the paired permutation test that flips signs.

    It is exact up to 16 pairs.

    Parameters
    ----------
    differences : array_like, shape (n,)
        Method minus baseline on each prompt. The p value of no pair is NaN, of a single one 1.
    """
    sample = np.asarray(differences, dtype=float)
    if sample.size < 2:
        return 1.0 if sample.size else math.nan
    test = stats.permutation_test(
        (sample,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        batch=AT_ONCE,
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


def holm(p: pd.Series) -> pd.Series:
    """Return p values adjusted by Holm's method for their number.

    NaN, where nothing was tested, stays and is not counted.
    """
    tested = p.dropna().astype(float)
    adjusted = multipletests(tested, method="holm")[1] if len(tested) else []
    return pd.Series(adjusted, index=tested.index, dtype=float).reindex(p.index)


# --- records --------------------------------------------------------------------------------------


def check_once(records: pd.DataFrame, key: Sequence[str]) -> None:
    """Raise ``RunError`` for the first two records that agree in all columns of a key."""
    twice = records.loc[records.duplicated(key), key]
    for first in twice.to_dict("records")[:1]:
        named = ", ".join(f"{name} {value!r}" for name, value in first.items())
        raise RunError(f"{named} occurs twice; give every run once, and one seed at a time")


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
    """Return for each record whether it answers: no abstention, and its text has a reward."""
    return (records["status"] != "abstained") & records["reward"].notna()
