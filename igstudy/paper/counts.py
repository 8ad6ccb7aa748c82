"""Counts behind reported percentages: how many prompts, and how many only one method got right."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import poisson_binom
from statsmodels.stats.contingency_tables import mcnemar

CHANCE = 0.01  # a denominator is implied when chance would give so good a fit less often


def fitting_counts(percentage: str, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every n up to `largest` whether some k/n reads so: rounded, and cut off."""
    whole, _, decimals = percentage.partition(".")
    value, hundred = int(whole + decimals), 100 * 10 ** len(decimals)
    n = np.arange(1, largest + 1)
    gap = value * n % hundred  # from the k/n below up to the percentage, in 1/n of a last digit
    rounded = (2 * gap <= n) | (2 * (hundred - gap) <= n)  # a half may go either way
    cut = (gap == 0) | (hundred - gap < n)
    return rounded, cut


def chance_of_fit(percentages: Sequence[str], largest: int) -> np.ndarray:
    """Return the chance that a percentage with as many digits is some k/n: (percentages, n)."""
    digits = np.array([len(percentage.partition(".")[2]) for percentage in percentages])
    return np.minimum(1, np.arange(1, largest + 1) / (100 * 10.0 ** digits[:, None]))


def first(marks: np.ndarray) -> int:
    """Return the smallest n that is marked, 0 for none."""
    return int(np.argmax(marks)) + 1 if marks.any() else 0


def implied(percentages: Sequence[str], largest: int) -> dict[str, Any]:
    """Return the denominator that fits a group of percentages better than chance would.

    ``p`` is the chance of so good a fit at any n. ``common`` is the smallest n that fits all of
    them, and ``common_cut`` the smallest when digits may also have been cut off (0 for none).
    """
    distinct = list(dict.fromkeys(percentages))
    rounded, cut = np.array([fitting_counts(each, largest) for each in distinct]).swapaxes(0, 1)
    chance = chance_of_fit(distinct, largest)
    # of at most so many misses: `sf` of the fits would be 1 - cdf, which loses a small chance
    p = poisson_binom.cdf(len(chance) - rounded.sum(axis=0), 1 - chance.T)
    best = int(np.argmin(p))
    p_any = min(1.0, float(p[best]) * int((chance.min(axis=0) < 1).sum()))
    return {
        "rates": len(distinct),
        "n": best + 1,
        "fits": int(rounded[:, best].sum()),
        "by_chance": float(chance[:, best].sum()),
        "p": p_any,
        "implied": p_any <= CHANCE,
        "common": first(rounded.all(axis=0)),
        "common_cut": first((rounded | cut).all(axis=0)),
    }


def mcnemar_bounds(safe: int, others: int, n: int) -> tuple[float, float]:
    """Return the least and the largest exact p value of two methods, given their safe prompts of n.

    At best the worse method is right only where the better one is; at worst they are right together
    as seldom as possible.
    """
    few, many = sorted((safe, others))
    most = min(few, n - many)  # prompts that only the worse method can have got right
    nested = mcnemar([[0, many - few], [0, 0]], exact=True)
    apart = mcnemar([[0, many - few + most], [most, 0]], exact=True)
    return float(nested.pvalue), float(apart.pvalue)
