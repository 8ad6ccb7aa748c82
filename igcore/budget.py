"""The safety state of the augmented MDP: how scores become costs, and how costs use up the budget.

Everything here is a pure function of numbers (float, int or Fraction).

The symbols are those of section 4.2 of the paper: budget d, safety discount gamma, remaining budget
omega_t, scaled remaining budget z_t. With costs C_0, C_1, ...::

    omega_{-1} = d        omega_t = omega_{t-1} - gamma^t C_t
    z_0        = d        z_{t+1} = (z_t - C_t) / gamma
    z_t = omega_{t-1} / gamma^t

The paper writes its sum once from k = 1 and once from k = 0; only k = 0 agrees with z_0 = d. That z
only decreases (appendix C) is false for gamma < 1. What holds for C >= 0 is that omega never
increases and that {omega < 0} is absorbing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .errors import ParameterError, unknown_name

# --- the cost of a step ---------------------------------------------------------------------------
# Each accounting is a function of the score U_k of the prefix, the score U_{k-1} before it, the
# running peak M_{k-1}, and whether this step is the last. Scores may be negative.


def peak_cost(score: float, previous: float, peak: float, last: bool) -> float:
    """Charge what the score adds to the worst score so far."""
    return max(peak, score) - peak


def terminal_cost(score: float, previous: float, peak: float, last: bool) -> float:
    """Charge the score of the finished sequence, and nothing before."""
    return max(score, 0) if last else 0


def sum_cost(score: float, previous: float, peak: float, last: bool) -> float:
    """Charge every score as it is, with its sign."""
    return score


def clamped_sum_cost(score: float, previous: float, peak: float, last: bool) -> float:
    """Charge every positive score."""
    return max(score, 0)


def increment_cost(score: float, previous: float, peak: float, last: bool) -> float:
    """Charge the change since the last score, with its sign."""
    return score - previous


def positive_increment_cost(score: float, previous: float, peak: float, last: bool) -> float:
    """Charge every rise since the last score."""
    return max(0, score - previous)


ACCOUNTINGS: dict[str, Callable[[float, float, float, bool], float]] = {
    "peak": peak_cost,
    "terminal": terminal_cost,
    "sum": sum_cost,
    "clamped_sum": clamped_sum_cost,
    "increment": increment_cost,
    "positive_increment": positive_increment_cost,
}
# costs that may be negative: credit can be banked and spent, and every guarantee is off
SIGNED = frozenset({"sum", "increment"})


def step_cost(accounting: str, score: float, previous: float, peak: float, last: bool) -> float:
    """Return C_t, the safety cost of one step (paper, section 4.1: C_safety of a partial answer).

    The paper takes C_t >= 0 as given. A cost model scores a whole prefix, and its score may be
    negative; the accounting says what a step costs then.

    Parameters
    ----------
    accounting : str
        A key of `ACCOUNTINGS`.
    score : float
        U_k of the prefix after the step, in units of the cost model; higher is worse. NaN counts as
        +infinity: a score that cannot be read is never safe.
    previous : float
        U_{k-1}; 0 before the first score.
    peak : float
        M_{k-1} = max(0, max_{j < k} U_j).
    last : bool
        Whether the sequence ends here; only ``terminal`` depends on it.

    Returns
    -------
    float
        C_t, in units of the cost model. Negative only for an accounting in `SIGNED`.

    Raises
    ------
    ParameterError
        For an unknown accounting.
    """
    if accounting not in ACCOUNTINGS:
        raise unknown_name("accounting", accounting, ACCOUNTINGS)
    cost = ACCOUNTINGS[accounting](_readable(score), previous, peak, last)
    cost = _readable(cost)  # inf - inf: a broken prefix stays broken
    # C >= 0 is what makes {omega < 0} absorbing, and every guarantee rests on that
    assert cost >= 0 or accounting in SIGNED, f"{accounting} gave the negative cost {cost}"
    return cost


def _readable(number: float) -> float:
    """Return the number, or +infinity for NaN."""
    return math.inf if number != number else number


# --- the safety state -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SafetyState:
    """The remaining budget of one sequence, after ``steps`` scores.

    Attributes
    ----------
    budget : float
        d, in units of the cost model.
    omega : float
        Remaining budget omega_{t-1}; negative means that the budget is broken.
    z : float
        Scaled remaining budget z_t = omega_{t-1} / gamma^t: what a critic is fed.
    total : float
        What has been charged, without discount. For ``peak`` this is M_k exactly, with no rounding.
    peak : float
        M_k = max(0, max_{j <= k} U_j).
    score : float
        The last score U_k; 0 before the first.
    steps : int
        Number of scores charged.
    """

    budget: float
    omega: float
    z: float
    total: float = 0
    peak: float = 0
    score: float = 0
    steps: int = 0


def start(budget: float) -> SafetyState:
    """Return the state before the first token: omega_{-1} = z_0 = d (paper, section 4.2).

    Raises
    ------
    ParameterError
        When `budget` is NaN or negative: no text could then be safe.
    """
    if not budget >= 0:  # unlike `budget < 0`, this refuses NaN, too
        raise ParameterError(
            f"budget is {budget!r}; it must be a number >= 0 in units of the cost model"
        )
    return SafetyState(budget=budget, omega=budget, z=budget)


def charge(
    state: SafetyState,
    score: float,
    accounting: str = "peak",
    gamma: float = 1,
    position: int | None = None,
    last: bool = False,
) -> SafetyState:
    """Return the safety state after one more prefix score (paper, section 4.2, equation 4).

    The equation gives z_{t+1} twice, and the code follows the first form::

        z_{t+1} = (omega_{t-1} - gamma^t C_t) / gamma^{t+1} = (z_t - C_t) / gamma

    The second would divide rounding errors by gamma at every step. Decisions are taken on omega,
    which has the sign of z, because 1 / gamma^t overflows for long t.

    Parameters
    ----------
    state : SafetyState
        The state before.
    score : float
        U_k of the whole prefix, in units of the cost model; higher is worse. NaN counts as
        +infinity: a score that cannot be read is never safe.
    accounting : str
        How scores become costs, a key of `ACCOUNTINGS`.
    gamma : float
        Safety discount gamma in (0, 1].
    position : int, optional
        Time index t of the step: for blocks the index of the block's last token. By default the
        number of scores so far.
    last : bool
        Whether the sequence ends here; only ``terminal`` depends on it.
    """
    score = _readable(score)
    t = state.steps if position is None else position
    cost = step_cost(accounting, score, state.score, state.peak, last)
    peak = max(state.peak, score)
    # the sum of the costs; the increments of a peak sum to the peak, which is taken as it is
    total = peak if accounting == "peak" else state.total + cost
    if gamma == 1:
        # omega has the exact sign of d - total, so that no rounding enters M_k <= d
        omega = state.budget - total
    else:
        omega = state.omega - gamma**t * cost
    return replace(
        state,
        omega=omega,
        z=_scaled(omega, gamma ** (t + 1)),
        total=total,
        peak=peak,
        score=score,
        steps=state.steps + 1,
    )


def _scaled(omega: float, discount: float) -> float:
    """Return omega / discount; infinite, with the sign of omega, where gamma^t underflows to 0."""
    if discount:
        return omega / discount
    return math.copysign(math.inf, omega) if omega else omega


def is_safe(state: SafetyState, strict: bool = False) -> bool:
    """True if the state is within budget: omega >= 0.

    Nothing else in the package decides this. The inequality is closed, as is the paper's constraint
    (section 4.2, equation 5: total <= d). ``strict`` gives the paper's other reading (equation 6:
    z > 0), under which d = 0 is infeasible before the first token.
    """
    # omega and not z: they have the same sign, but z overflows where gamma^t is tiny
    return state.omega > 0 if strict else state.omega >= 0


def trace(
    scores: Sequence[float],
    budget: float,
    accounting: str = "peak",
    gamma: float = 1,
    positions: Sequence[int] | None = None,
    ended: bool = True,
) -> list[SafetyState]:
    """Return the states z_0, z_1, ... of a sequence of prefix scores, the start included.

    Parameters
    ----------
    scores : sequence of float, length k
        U_1, ..., U_k; higher is worse.
    positions : sequence of int, optional
        Time index of each score, see `charge`.
    ended : bool
        Whether the last score belongs to the finished sequence.

    Returns
    -------
    list of SafetyState, length k + 1
    """
    states = [start(budget)]
    for k, score in enumerate(scores):
        position = None if positions is None else positions[k]
        # the last score of an unfinished sequence is no final cost
        last = ended and k == len(scores) - 1
        states.append(charge(states[-1], score, accounting, gamma, position, last))
    return states
