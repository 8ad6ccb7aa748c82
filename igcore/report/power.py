"""Power of the paired tests: how many prompts it takes to see a difference."""

from collections.abc import Callable

import numpy as np
from scipy import stats
from statsmodels.stats.power import TTestPower

POWER = 0.9  # that a test should have at the smallest difference that matters


def power_of_verdicts(n: int, discordant: float, difference: float, alpha: float) -> float:
    """Return the power of the exact McNemar test.

    Parameters
    ----------
    n : int
        Prompts.
    discordant : float
        Share of the prompts on which the two arms differ; at least `difference`.
    difference : float
        Of the two rates, above 0.
    alpha : float
        Level of the two-sided test.
    """
    higher = (discordant + difference) / (2 * discordant)  # chance that a discordant one is higher
    m = np.arange(1, n + 1)  # discordant prompts
    fewest = stats.binom.isf(alpha / 2, m, 0.5) + 1  # in one direction, that the test finds
    found = stats.binom.sf(fewest - 1, m, higher) + stats.binom.cdf(m - fewest, m, higher)
    return float(stats.binom.pmf(m, n, discordant) @ found)


def power_of_mean(n: int, sd: float, difference: float, alpha: float) -> float:
    """Return the power of a two-sided paired test of a mean, by the t-test's distribution.

    Parameters
    ----------
    sd : float
        Standard deviation of the differences, above 0.
    """
    return float(TTestPower().power(difference / sd, n, alpha))


def prompts_needed(power: Callable[[int], float], n: int, most: int = 20_000) -> int:
    """Return how many prompts a function of them takes to reach `POWER`, to a twentieth.

    It is `n` where these are enough, and about `most` where no number below is.
    """
    while n < most and power(n) < POWER:
        n += max(n // 20, 1)
    return n
