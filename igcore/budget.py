"""The safety state of the augmented MDP: how scores become costs, and how costs use up the budget.

Pure functions of numbers (float, int or Fraction). Knows nothing of text, tokens, models or search.

Paper symbols (section 3.1): budget d, safety discount gamma, remaining budget omega_t, scaled
remaining budget z_t. With costs C_0, C_1, ...::

    omega_{-1} = d        omega_t = omega_{t-1} - gamma^t C_t
    z_0        = d        z_{t+1} = (z_t - C_t) / gamma          so that  z_t = omega_{t-1} / gamma^t

The paper's own sum starts once at k = 1; only k = 0 agrees with z_0 = d. Decisions are taken on
omega, because 1 / gamma^t overflows for long t; the two have the same sign. "z only decreases" is
false for gamma < 1; what holds for C >= 0 is that omega never increases and that {omega < 0} is
absorbing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .errors import ParameterError, unknown_name

# What a step costs, from (score U_k, previous score U_{k-1}, running peak M_{k-1}, is this the last
# step).
# A cost model scores a whole prefix, and its score may be negative; the accounting says what the
# step then costs.
ACCOUNTINGS: dict[str, Callable] = {
    "peak": lambda score, previous, peak, last: max(peak, score) - peak,
    "terminal": lambda score, previous, peak, last: max(score, 0) if last else 0,
    "sum": lambda score, previous, peak, last: score,
    "clamped_sum": lambda score, previous, peak, last: max(score, 0),
    "increment": lambda score, previous, peak, last: score - previous,
    "positive_increment": lambda score, previous, peak, last: max(0, score - previous),
}
SIGNED = frozenset(
    {"sum", "increment"}
)  # costs may be negative: credit can be banked and every guarantee is off


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


def check_accounting(accounting: str) -> None:
    """Raise ``ParameterError`` unless `accounting` is a key of `ACCOUNTINGS`."""
    if accounting not in ACCOUNTINGS:
        raise unknown_name("accounting", accounting, ACCOUNTINGS)


def start(budget: float) -> SafetyState:
    """Return the state before the first token: omega_{-1} = z_0 = d.

    Raises
    ------
    ParameterError
        When `budget` is NaN or negative: no text could then be safe.
    """
    if not budget >= 0:
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
    """Return the state after one more prefix score (paper equation for z_{t+1}).

    Parameters
    ----------
    state : SafetyState
        The state before.
    score : float
        U_k of the whole prefix; higher is worse. NaN counts as +infinity: a score that cannot be
        read is never safe.
    accounting : str
        A key of `ACCOUNTINGS`.
    gamma : float
        Safety discount gamma in (0, 1].
    position : int, optional
        Time index t of the step: for blocks the index of the block's last token. By default the
        number of scores so far.
    last : bool
        Whether the sequence ends here (only ``terminal`` asks).
    """
    score = math.inf if score != score else score
    position = state.steps if position is None else position
    cost = ACCOUNTINGS[accounting](score, state.score, state.peak, last)
    cost = math.inf if cost != cost else cost  # inf - inf: a broken prefix stays broken
    assert cost >= 0 or accounting in SIGNED, f"{accounting} gave the negative cost {cost}"
    peak = max(state.peak, score)
    total = peak if accounting == "peak" else state.total + cost
    # without discount omega has the exact sign of d - total, so that for peak no rounding enters
    # the comparison M_k <= d
    omega = state.budget - total if gamma == 1 else state.omega - gamma**position * cost
    scale = gamma ** (position + 1)
    return replace(
        state,
        omega=omega,
        z=omega / scale
        if scale
        else math.copysign(math.inf, omega)
        if omega
        else omega,  # gamma^t may underflow
        total=total,
        peak=peak,
        score=score,
        steps=state.steps + 1,
    )


def is_safe(state: SafetyState, strict: bool = False) -> bool:
    """Say whether the budget holds, omega >= 0: the one predicate of the package.

    The inequality is closed, as the constraint of the paper is (total <= d). ``strict`` gives the
    paper's other reading (z > 0), under which d = 0 is infeasible before the first token.
    """
    return state.omega > 0 if strict else state.omega >= 0


def trace(
    scores,
    budget: float,
    accounting: str = "peak",
    gamma: float = 1,
    positions=None,
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
    check_accounting(accounting)
    states = [start(budget)]
    for k, score in enumerate(scores):
        position = None if positions is None else positions[k]
        last = ended and k == len(scores) - 1
        states.append(charge(states[-1], score, accounting, gamma, position, last))
    return states
