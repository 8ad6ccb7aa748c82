"""The power of the tests of claims."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.power import TTestPower

from .claims import CLAIM_OUTCOMES, Claim, ClaimsFile
from .deciding import gains
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

    Of its two tails only the one in the direction of the difference counts.

    Parameters
    ----------
    sd : float
        Standard deviation of the differences. Without any, each prompt shows the difference.
    """
    if sd == 0:
        return 1.0
    # the other tail, of which scipy has no number for large effects, would be no finding
    return float(TTestPower().power(difference / sd, n, alpha / 2, alternative="larger"))


def prompts_needed(power: Callable[[int], float], n: int, most: int = 20_000) -> int:
    """Return how many prompts a function of them takes to reach `POWER`, to a twentieth.

    It is `n` where these are enough, and about `most` where no number below is.
    """
    while n < most and power(n) < POWER:
        n += max(n // 20, 1)
    return n


def level(file: ClaimsFile, claim: Claim) -> float:
    """Return the level of each test of a claim: 5 % over Holm's first step and its outcomes."""
    return ALPHA / len(file.claims) / len(claim.outcomes)


def planned(file: ClaimsFile, pilot: pd.DataFrame) -> pd.DataFrame:
    """Return the power of each comparison of each claim at the smallest difference that matters.

    Means have the spread of the pilot runs. For verdicts, the reference does better on as many
    prompts as the pilot leaves open, and the arm on as many more as matter. `level` has the level.

    Parameters
    ----------
    pilot : DataFrame
        Lines of the pilot runs, see `igstudy.report.deciding.decide`.
    """
    rows, regimes = [], file.pilot().regimes
    spread: dict[str, Any]
    for name, claim in file.claims.items():
        alpha = level(file, claim)
        for each in claim.comparisons:
            n = file.regimes[each.regime].n_prompts
            found = gains(regimes[each.regime], claim, each, pilot).dropna()
            kind, matters = CLAIM_OUTCOMES[each.outcome], claim.outcomes[each.outcome]
            if kind.verdict:
                against = int((kind.sign * found < 0).sum())
                at_most = clopper_pearson(against, len(found))[1]
                spread = {"discordant": min(matters + 2 * at_most, 1.0)}
            else:
                spread = {"sd": float(found.std(ddof=1))}
            of_test = power_of_verdicts if kind.verdict else power_of_mean
            power = partial(of_test, difference=matters, alpha=alpha, **spread)
            row: dict[str, Any] = {"claim": name, **each._asdict()}
            row |= {"matters": matters, "n_prompts": n, "power": power(n)}
            row |= {"n_needed": prompts_needed(power, n), "n_pilot": len(found)}
            rows.append(row | {"difference_pilot": float(found.mean())} | spread)
    return pd.DataFrame(rows)
