"""Thresholds of a critic that come with a guarantee, found on calibration prompts.

A candidate is accepted when its critic score is *above* the threshold, so a higher threshold is the
more conservative one. The loss of a prompt is 1 when the text that the critic alone lets through is
unsafe, else 0; abstaining has loss 0. The unit is the prompt: a miss rate over candidates does not
bound the rate over prompts, because a search picks the best of N and so seeks out the misses
(winner's curse).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import bdtr

from ..errors import ParameterError
from .tables import markdown

LOSS = (
    "1 when the text that the critic alone lets through is unsafe by its terminal cost, else 0; "
    "abstaining is 0."
)
ASSUMPTIONS = (
    "The calibration prompts and the prompts served are exchangeable: drawn independently from one "
    "distribution, each used once.",
    "Serving uses the same reference policy, scorer, accounting and budget, the same N samples, "
    "M rounds, K beams and block size, and the same temperature.",
    "No calibration prompt was used to train, stop or choose the critic, nor to choose the "
    "settings of the search: the split is disjoint from both.",
    "Unsafe means what the cost model says at the end of the text; the cost model's own errors are "
    "not covered.",
    "The final check was off (behind it the loss would be 0 at every threshold and the certificate "
    "vacuous), and the thresholds and their order were fixed before any loss was seen.",
)


@dataclass(frozen=True)
class Certificate:
    """A threshold and what it promises; prints itself with its assumptions.

    Attributes
    ----------
    threshold : float or None
        Accept critic scores above it. None: no threshold passed, so always abstain.
    alpha, delta : float
        The risk (expected loss of a prompt) tolerated, and the chance that it is exceeded.
    n_prompts : int
        Calibration prompts.
    table : tuple of dict
        What was tested, a row each, in the order of the tests.
    """

    threshold: float | None
    alpha: float
    delta: float
    n_prompts: int
    table: tuple[dict, ...]

    @property
    def bound(self) -> str:
        """What is promised, in a sentence."""
        if self.threshold is None:
            return "No threshold passed: abstain on every prompt, which has loss 0."
        return (
            f"With probability at least {1 - self.delta:g} over the draw of the calibration "
            f"prompts, the expected loss of a new prompt is at most {self.alpha:g} at this "
            f"threshold, with no cost model at hand."
        )

    def __str__(self) -> str:
        # in full: a rounded threshold may accept more
        threshold = "none, always abstain" if self.threshold is None else self.threshold
        rows = [row | {"threshold": f"{row['threshold']:g}"} for row in self.table]
        return (
            f"**Threshold: {threshold}** (learn-then-test, alpha {self.alpha:g}, "
            f"delta {self.delta:g}, {self.n_prompts} prompts)\n\n"
            f"**Promise.** {self.bound}\n\n**Loss.** {LOSS}\n\n**Only if**\n\n"
            + "".join(f"- {sentence}\n" for sentence in ASSUMPTIONS)
            + f"\n**Tested**\n\n{markdown(pd.DataFrame(rows))}"
        )

    _repr_markdown_ = __str__


def p_value(losses: int, n_prompts: int, alpha: float) -> float:
    """Return P(Bin(n, alpha) <= losses): the chance of so few losses if the risk were alpha."""
    return float(bdtr(losses, n_prompts, alpha))


def smallest_n(alpha: float, delta: float) -> int:
    """Return the least number of calibration prompts with which any threshold can pass.

    With this many it passes without a single loss: ceil(ln delta / ln(1 - alpha)), which is 45 at
    (.05, .1), 299 at (.01, .05) and 2,995 at (.001, .05).

    Raises
    ------
    ParameterError
        Unless alpha and delta lie strictly between 0 and 1.
    """
    for name, value in (("alpha", alpha), ("delta", delta)):
        if not 0 < value < 1:
            raise ParameterError(
                f"{name} is {value!r}; give a number strictly between 0 and 1, such as 0.1"
            )
    count = math.floor(math.log(delta) / math.log1p(-alpha))
    return count if p_value(0, count, alpha) <= delta else count + 1


def learn_then_test(
    thresholds: Sequence[float], losses: np.ndarray, alpha: float, delta: float
) -> Certificate:
    """Return the last threshold that fixed-sequence testing accepts: P(its risk > alpha) <= delta.

    The risk curve may have any shape. From the most conservative threshold on, "the risk is above
    alpha" is rejected while the binomial p value is at most delta. The first that is not rejected
    ends the sequence, which is why many tests need no correction.

    Parameters
    ----------
    thresholds : sequence of float, shape (T,)
        Falling: from most to least conservative.
    losses : array, shape (n, T)
        0 or 1 for each prompt and threshold.
    alpha, delta : float
        The risk tolerated, and the chance over calibrations that it is exceeded.

    Raises
    ------
    ParameterError
        For fewer than `smallest_n` prompts, a loss that is not 0 or 1, thresholds that do not fall,
        or misfit shapes.
    """
    thresholds = np.asarray(thresholds, dtype=float)
    losses = np.asarray(losses)
    falls = thresholds.ndim == 1 and thresholds.size and (np.diff(thresholds) < 0).all()
    if not falls or np.isnan(thresholds).any():
        raise ParameterError(
            f"thresholds are {thresholds.tolist()}; give numbers that fall, from most to least "
            f"conservative"
        )
    if losses.ndim != 2 or losses.shape[1] != len(thresholds):
        raise ParameterError(
            f"losses have shape {losses.shape}; give one row per prompt, (n, {len(thresholds)})"
        )
    least, n = smallest_n(alpha, delta), len(losses)
    if n < least:
        raise ParameterError(
            f"{n} calibration prompts are too few: alpha {alpha:g} and delta {delta:g} needs at "
            f"least {least}, since fewer can accept no threshold; add prompts or tolerate a larger "
            f"alpha"
        )
    if not np.isin(losses, [0, 1]).all():
        wrong = losses[~np.isin(losses, [0, 1])]
        raise ParameterError(f"a loss is {wrong[0]}; give 0 or 1")
    passed, table = None, []
    for threshold, lost in zip(thresholds.tolist(), losses.sum(axis=0).tolist(), strict=True):
        p = p_value(lost, n, alpha)
        row = {"threshold": threshold, "losses": int(lost), "risk": lost / n, "p": p}
        table.append(row | {"accepted": p <= delta})
        if p > delta:
            break
        passed = threshold
    return Certificate(passed, alpha, delta, n, tuple(table))
