"""Thresholds of a critic that come with a guarantee, found on calibration prompts.

A candidate is accepted when its critic score is *above* the threshold, so a higher threshold is the
more conservative one. Loss: higher is worse, in [0, 1], and abstaining has loss 0. The unit is the
prompt: a miss rate over candidates does not bound the rate over prompts, because a search picks the
best of N and so seeks out the misses (winner's curse).
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from scipy.special import bdtr

from ..errors import ParameterError
from .certificate import Certificate, certificate

# --- how many prompts -----------------------------------------------------------------------------


def p_value(losses: int, n_prompts: int, alpha: float) -> float:
    """Return P(Bin(n, alpha) <= losses): the chance of so few losses if the risk were alpha."""
    return float(bdtr(losses, n_prompts, alpha))


def smallest_n(alpha: float, delta: float | None = None) -> int:
    """Return the least number of calibration prompts with which any threshold can pass.

    With so many it passes without a single loss.

    For Learn-then-Test that is ceil(ln delta / ln(1 - alpha)): 45 at (.05, .1), 299 at (.01, .05),
    2,995 at (.001, .05). Without `delta`, for the two conformal methods, it is ceil(1 / alpha) - 1:
    19 at .05.

    Raises
    ------
    ParameterError
        Unless alpha, and delta where given, lie strictly between 0 and 1.
    """
    alpha = _level("alpha", alpha)
    if delta is None:
        # .29 is 29/100 here: no rank hangs on the last bit of a float
        return math.ceil(1 / Fraction(str(alpha))) - 1
    count = math.floor(math.log(_level("delta", delta)) / math.log1p(-alpha))
    return count if p_value(0, count, alpha) <= delta else count + 1


def _level(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ParameterError(
            f"{name} is {value!r}; give a number strictly between 0 and 1, such as 0.1"
        )
    return float(value)


def _check_enough(n_prompts: int, alpha: float, delta: float | None = None) -> None:
    least = smallest_n(alpha, delta)
    if n_prompts < least:
        levels = f"alpha {alpha:g}" + ("" if delta is None else f" and delta {delta:g}")
        raise ParameterError(
            f"{n_prompts} calibration prompts are too few: {levels} needs at least {least}, since "
            f"fewer can accept no threshold; add prompts or tolerate a larger alpha"
        )


# --- Learn-then-Test ------------------------------------------------------------------------------


def learn_then_test(
    thresholds: Sequence[float],
    losses: np.ndarray | Callable[[float], np.ndarray],
    alpha: float,
    delta: float,
) -> Certificate:
    """Return the last threshold that fixed-sequence testing accepts: P(its risk > alpha) <= delta.

    The risk curve may have any shape.

    From the most conservative threshold on, "the risk is above alpha" is rejected while the
    binomial p value is at most delta. The first that is not rejected ends the sequence, which is
    why many tests need no correction.

    Parameters
    ----------
    thresholds : sequence of float, shape (T,)
        Falling: from most to least conservative.
    losses : array, shape (n, T), or callable
        0 or 1 for each prompt and threshold. A callable ``loss(threshold) -> (n,)`` is called only
        as far as the tests go, because each threshold may re-run a search.
    alpha, delta : float
        The risk tolerated, and the chance over calibrations that it is exceeded.

    Raises
    ------
    ParameterError
        For fewer than `smallest_n` prompts, a loss that is not 0 or 1, thresholds that do not fall,
        or misfit shapes.
    """
    alpha, delta, thresholds = _level("alpha", alpha), _level("delta", delta), _falling(thresholds)
    columns = map(losses, thresholds) if callable(losses) else _matrix(losses, thresholds).T
    deployed, table, n = None, [], None
    for threshold, column in zip(thresholds, map(np.asarray, columns), strict=True):  # lazy
        if column.ndim != 1 or n not in (None, len(column)):
            raise ParameterError(
                f"losses at threshold {threshold:g} have shape {column.shape}; give one per "
                f"prompt, ({n or 'n'},)"
            )
        if n is None:
            n = len(column)
            _check_enough(n, alpha, delta)
        _check_binary(column, f"a loss at threshold {threshold:g}")
        lost = int(column.sum())
        p = p_value(lost, n, alpha)
        table.append(
            {
                "threshold": threshold,
                "losses": lost,
                "risk": lost / n,
                "p": p,
                "accepted": p <= delta,
            }
        )
        if p > delta:
            break
        deployed = threshold
    bound = (
        f"With probability at least {1 - delta:g} over the draw of the calibration prompts, the "
        f"expected loss of a new prompt is at most {alpha:g} at this threshold, with no cost model "
        f"at hand."
    )
    return certificate("learn-then-test", deployed, alpha, delta, n, bound, table)


# --- the two conformal methods --------------------------------------------------------------------


def simultaneous_conformal(
    scores: Sequence[Sequence[float]], unsafe: Sequence[Sequence[bool]], alpha: float
) -> Certificate:
    """Return the threshold above which no unsafe candidate scores, with chance 1 - alpha.

    S_i is the largest critic score over the unsafe candidates of prompt i, -inf when it has none;
    the threshold is the ceil((n + 1)(1 - alpha))-th smallest. All candidates are bounded at once,
    so that any rule may choose among the accepted. A rank above n would be an infinite threshold,
    which accepts nothing; that is refused as too few prompts.

    Parameters
    ----------
    scores, unsafe : array, shape (n, N), or n sequences of any lengths
        Critic score and terminal verdict (0 or 1) of each candidate of each prompt.
    alpha : float
        The chance tolerated, over calibration and new prompt together.

    Raises
    ------
    ParameterError
        For fewer than `smallest_n` prompts, a NaN score, a verdict that is not 0 or 1, or misfit
        shapes.
    """
    alpha, n = _level("alpha", alpha), len(scores)
    if len(unsafe) != n:
        raise ParameterError(
            f"scores are of {n} prompts and unsafe of {len(unsafe)}; give both for the same prompts"
        )
    _check_enough(n, alpha)
    worst = sorted(_worst(i, *pair) for i, pair in enumerate(zip(scores, unsafe, strict=True)))
    rank = n + 1 - math.floor(Fraction(str(alpha)) * (n + 1))  # ceil((n + 1)(1 - alpha)), exactly
    threshold = worst[rank - 1]
    above = sum(s > threshold for s in worst)
    row = {
        "threshold": threshold,
        "rank": rank,
        "prompts_with_unsafe": n - worst.count(-math.inf),
        "of_these_above": above,
    }
    bound = (
        f"With probability at least {1 - alpha:g} no unsafe candidate of a new prompt scores above "
        f"this threshold, whatever rule chooses among those that do. The probability is over the "
        f"calibration prompts and the new one together: for one calibration the risk may well be "
        f"above alpha."
    )
    return certificate("simultaneous-conformal", threshold, alpha, None, n, bound, [row])


def _worst(prompt: int, scores: Sequence[float], unsafe: Sequence[bool]) -> float:
    """Return S_i, the largest score over the unsafe candidates of prompt number `prompt`."""
    scores, unsafe = np.asarray(scores, dtype=float), np.asarray(unsafe)
    if scores.shape != unsafe.shape or scores.ndim != 1:
        raise ParameterError(
            f"prompt {prompt} has {scores.size} scores and {unsafe.size} verdicts; give one "
            f"of each per candidate"
        )
    if np.isnan(scores).any():
        raise ParameterError(
            f"prompt {prompt} has a critic score that is NaN; a critic that cannot be read "
            f"cannot be calibrated"
        )
    _check_binary(unsafe, f"a verdict of prompt {prompt}")
    return float(scores[unsafe == 1].max(initial=-math.inf))


def conformal_risk_control(
    thresholds: Sequence[float], losses: np.ndarray, alpha: float
) -> Certificate:
    """Return the least conservative threshold with (n R_n + 1) / (n + 1) <= alpha.

    Losses must be monotone and bounded by 1.

    Only the expectation over calibrations is bounded: the risk of a single one is often above
    alpha. Where that matters use `learn_then_test`.

    Parameters
    ----------
    thresholds : sequence of float, shape (T,)
        Falling: from most to least conservative.
    losses : array, shape (n, T)
        In [0, 1], never falling along a row.
    alpha : float
        The mean loss tolerated.

    Raises
    ------
    ParameterError
        For fewer than `smallest_n` prompts, a loss outside [0, 1] or that falls along a row, or
        thresholds that do not fall.
    """
    alpha, thresholds = _level("alpha", alpha), _falling(thresholds)
    losses = _matrix(losses, thresholds).astype(float)
    n = len(losses)
    _check_enough(n, alpha)
    outside = losses[~((losses >= 0) & (losses <= 1))]
    if outside.size:
        raise ParameterError(f"a loss is {outside[0]:g}; every loss must lie in [0, 1]")
    falls = np.argwhere(np.diff(losses, axis=1) < 0)
    if len(falls):
        i, j = falls[0]
        raise ParameterError(
            f"the loss of prompt {i} falls from {losses[i, j]:g} to {losses[i, j + 1]:g} as the "
            f"threshold falls to {thresholds[j + 1]:g}; give losses that never fall along a row, "
            f"or use learn_then_test, which needs none of that"
        )
    totals = losses.sum(axis=0).tolist()
    table = [
        {"threshold": t, "risk": r / n, "corrected_risk": (r + 1) / (n + 1)}
        for t, r in zip(thresholds, totals, strict=True)
    ]
    table = [row | {"accepted": row["corrected_risk"] <= alpha} for row in table]
    deployed = min((row["threshold"] for row in table if row["accepted"]), default=None)
    bound = (
        f"The expected loss of a new prompt is at most {alpha:g} on average over calibrations. "
        f"Nothing is promised of a single calibration: its risk may well be above alpha."
    )
    return certificate("conformal-risk-control", deployed, alpha, None, n, bound, table)


# --- checks ---------------------------------------------------------------------------------------


def _falling(thresholds: Sequence[float]) -> list[float]:
    values = np.asarray(thresholds, dtype=float)
    if (
        values.ndim != 1
        or not values.size
        or np.isnan(values).any()
        or not (values[1:] < values[:-1]).all()
    ):
        raise ParameterError(
            f"thresholds are {values.tolist()}; give numbers that fall, from most to least "
            f"conservative"
        )
    return values.tolist()


def _matrix(losses: np.ndarray, thresholds: list[float]) -> np.ndarray:
    losses = np.asarray(losses)
    if losses.ndim != 2 or losses.shape[1] != len(thresholds):
        raise ParameterError(
            f"losses have shape {losses.shape}; give one row per prompt, (n, {len(thresholds)})"
        )
    return losses


def _check_binary(values: np.ndarray, what: str) -> None:
    odd = values[(values != 0) & (values != 1)]
    if odd.size:
        raise ParameterError(f"{what} is {odd[0].item()!r}; give 0 or 1")
