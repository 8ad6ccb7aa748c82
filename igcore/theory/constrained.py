"""The Lagrangian, the constraint in expectation, and how large a finite n must be.

These are the alternatives of sections 4.1 and 4.2 of the paper, and the n of section 5.1. The
trajectories of a deterministic token MDP are points (task, cost), both better when lower. A policy
is a mixture of these points. MDPs in which nature moves are refused.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from ..errors import ParameterError
from .mdp import MDP, Augmented, augment
from .planning import trajectories, unsafe_value, values


class Outcomes(NamedTuple):
    """The L trajectories of a token MDP.

    Attributes
    ----------
    names : tuple, length L
    task : ndarray, shape (L,)
        Discounted task cost.
    cost : ndarray, shape (L,)
        Total safety cost, without discount.
    """

    names: tuple
    task: np.ndarray
    cost: np.ndarray


def outcomes(mdp: MDP, accounting: str = "sum") -> Outcomes:
    """Return all trajectories of a prefix tree, charged by an accounting of `igcore.budget`.

    Raises
    ------
    ParameterError
        When nature moves, see `igcore.theory.planning.trajectories`.
    """
    tree = augment(mdp, math.inf, accounting=accounting)  # an infinite budget: nothing is unsafe
    ways = sorted(trajectories(tree))
    leaves = [way.leaf for way in ways]
    names = tuple(mdp.names[s] for s in tree.origin[leaves])
    task = np.array([way.task for way in ways])
    return Outcomes(names, task, tree.total[leaves])


def budget_between(cost: np.ndarray, share: float) -> float:
    """Return a budget d under which about `share` of the trajectories are safe."""
    # strictly between two attainable totals: rounding would decide about a budget equal to one
    levels = np.unique(cost)
    quantile = np.quantile(cost, share)
    k = np.searchsorted(levels[:-2], quantile)
    return (levels[k] + levels[k + 1]) / 2


def best_safe(points: Outcomes, budget: float) -> int | None:
    """Return the index of the almost surely safe optimum, or None.

    It is the least task cost among the trajectories with cost <= d.
    """
    safe = np.flatnonzero(points.cost <= budget)
    if not len(safe):
        return None
    best = np.argmin(points.task[safe])
    return int(safe[best])


def lagrangian(points: Outcomes, multiplier: float) -> int:
    """Return the index of the trajectory of least task + lambda cost (paper, sections 4.2 and 6).

    A tie goes to the lower cost.
    """
    scores = points.task + multiplier * points.cost
    best = np.flatnonzero(scores == scores.min())
    cheapest = np.argmin(points.cost[best])
    return int(best[cheapest])


def multipliers(points: Outcomes, chosen: int) -> tuple[float, float] | None:
    """Return the closed interval of lambda >= 0 under which a trajectory is optimal, or None.

    None means that no lambda picks it.
    """
    task = points.task - points.task[chosen]
    cost = points.cost - points.cost[chosen]
    # optimal means task + lambda cost >= 0 for the difference to every other trajectory
    if (task[cost == 0] < 0).any():
        return None
    dearer, cheaper = cost > 0, cost < 0
    low = (-task[dearer] / cost[dearer]).max(initial=0)
    high = (-task[cheaper] / cost[cheaper]).min(initial=math.inf)
    return (low, high) if low <= high else None


def expectation_optimum(points: Outcomes, budget: float) -> np.ndarray:
    """Return the mixture of least expected task cost with expected cost at most d.

    This is the problem of the paper's section 4.1, equation 3.

    Returns
    -------
    ndarray, shape (L,)
        Probability of each trajectory. The probability of violation is the mass where ``cost >
        budget``.

    Raises
    ------
    ParameterError
        When no mixture meets the budget.
    """
    task = points.task.astype(float)
    cost = points.cost.astype(float)
    ones = np.ones((1, len(task)))
    solution = linprog(task, A_ub=cost[None], b_ub=[budget], A_eq=ones, b_eq=[1], method="highs")
    if solution.x is None:
        raise ParameterError(f"no mixture meets the budget {budget}; raise the budget")
    return solution.x


def n_star(mdp: Augmented, start: int = 0) -> float:
    """Return n*(s), how big the n of the truncated cost must be (paper, section 4.2: a big n).

    Above it V^{*,n}(s) = V^{*,inf}(s), and every optimal policy from s is safe: Theorem 2 of
    section 5.1, restated for finite n. The paper gives no formula; on deterministic dynamics::

        n*(s) = max(0, max over unsafe trajectories of (V^{*,inf}(s) - J_pre) / W)

    with J_pre the task cost before the violation and W the discounted weight of the unsafe steps.

    Returns
    -------
    float
        In units of the task cost; infinite when s has no safe trajectory.

    Raises
    ------
    ParameterError
        When nature moves, see `igcore.theory.planning.trajectories`.
    """
    best = values(mdp)[start]
    weight = unsafe_value(mdp, 1)
    least = 0
    for way in trajectories(mdp, start):
        if not mdp.safe[way.leaf]:
            discounted = mdp.gamma**way.steps * weight
            least = max(least, (best - way.task) / discounted)
    return least
