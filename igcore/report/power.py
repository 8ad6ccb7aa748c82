"""What the prompts of claims can resolve: the power of their tests, before the runs."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.power import TTestPower

from .claims import ClaimsFile, gains
from .statistics import ALPHA, clopper_pearson

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


# --- of claims ------------------------------------------------------------------------------------


def planned(file: ClaimsFile, pilot: pd.DataFrame) -> pd.DataFrame:
    """Return the power of each claim at its smallest difference that matters.

    Parameters
    ----------
    pilot : DataFrame
        Lines of the same arms on the prompts of `Regime.pilot`, see `decide`.

    Returns
    -------
    DataFrame
        What the pilot found, ``power`` at the number of prompts that the claim has, at the level
        that Holm's first step asks for, and how many prompts `POWER` takes. The spread of a number
        is the pilot's. Of verdicts, the share on which the arms differ is ``matters`` and twice
        the most prompts on which the reference may do better, by the pilot's exact interval.
    """
    alpha, rows, regimes = ALPHA / len(file.claims), [], file.pilot().regimes
    for name, claim in file.claims.items():
        regime = file.regimes[claim.regime]
        found, verdict = gains(regimes[claim.regime], claim, pilot)
        found = found.dropna()
        if verdict:
            # the reference does better on as many prompts as the pilot leaves open, and the arm on
            # as many more as matter
            against = int((claim.sign * found < 0).sum())
            _, at_most = clopper_pearson(against, len(found))
            spread = min(claim.matters + 2 * at_most, 1.0)
        else:
            spread = float(found.std(ddof=1))
        of_test = power_of_verdicts if verdict else power_of_mean
        named = {"difference": claim.matters, "alpha": alpha}
        power = partial(of_test, **{"discordant" if verdict else "sd": spread}, **named)
        rows.append(
            {
                "claim": name,
                "n_pilot": len(found),
                "difference_pilot": float(found.mean()),
                "discordant" if verdict else "sd": spread,
                "matters": claim.matters,
                "n_prompts": regime.n_prompts,
                "power": power(regime.n_prompts),
                "n_needed": prompts_needed(power, regime.n_prompts),
            }
        )
    return pd.DataFrame(rows)
