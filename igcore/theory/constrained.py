"""Other ways to constrain: the Lagrangian, the constraint in expectation, and how large a finite n
must be (paper, section 3).

Knows the trajectories of a deterministic token MDP as points (task, cost), of which both are better
when lower; a policy is a mixture of these points. Knows nothing of chance.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from ..errors import ParameterError
from .mdp import MDP, Augmented, augment, check_deterministic
from .planning import trajectories, unsafe_value, values


class Outcomes(NamedTuple):
    """Every trajectory of a token MDP: its name, discounted task cost and total safety cost; arrays
    of length L.
    """

    names: tuple
    task: np.ndarray
    cost: np.ndarray


def outcomes(mdp: MDP, accounting: str = "sum") -> Outcomes:
    """Return all trajectories of a prefix tree, charged without discount by an accounting of
    `igcore.budget`.

    Raises
    ------
    ParameterError
        When nature moves: a policy is then no mixture of trajectories.
    """
    check_deterministic(mdp)
    tree = augment(mdp, math.inf, accounting=accounting)  # an infinite budget: nothing is unsafe
    ways = sorted(trajectories(tree))
    leaves = [way.leaf for way in ways]
    return Outcomes(
        tuple(mdp.names[tree.origin[s]] for s in leaves),
        np.array([way.task for way in ways]),
        tree.total[leaves],
    )


def budget_between(cost: np.ndarray, share: float) -> float:
    """Return a budget d strictly between two attainable totals, such that about `share` of the
    trajectories are safe.

    A budget equal to a total would be decided by rounding.
    """
    levels = np.unique(cost)
    k = int(np.clip(np.searchsorted(levels, np.quantile(cost, share)), 0, len(levels) - 2))
    return (levels[k] + levels[k + 1]) / 2


def best_safe(found: Outcomes, budget: float) -> int | None:
    """Return the index of the least task cost among trajectories with cost <= d, or None: the
    almost surely safe optimum.
    """
    safe = np.flatnonzero(found.cost <= budget)
    return int(safe[np.argmin(found.task[safe])]) if len(safe) else None


def lagrangian(found: Outcomes, multiplier: float) -> int:
    """Return the index of the trajectory that minimises task + lambda cost (paper, section 3.2); a
    tie goes to the lower cost.
    """
    scores = found.task + multiplier * found.cost
    return min(range(len(scores)), key=lambda i: (scores[i], found.cost[i]))


def multipliers(found: Outcomes, chosen: int) -> tuple[float, float] | None:
    """Return the closed interval of lambda >= 0 under which a trajectory is optimal, or None when
    no lambda picks it.
    """
    low, high = 0, math.inf
    for task, cost in zip(
        found.task - found.task[chosen], found.cost - found.cost[chosen], strict=True
    ):
        if cost > 0:
            low = max(low, -task / cost)
        elif cost < 0:
            high = min(high, task / -cost)
        elif task < 0:
            return None
    return (low, high) if low <= high else None


def hull(found: Outcomes) -> list[int]:
    """Return the lower left corner points of the convex hull of (cost, task), by rising cost: what
    some lambda > 0 picks.
    """
    corners: list[int] = []
    for i in sorted(range(len(found.task)), key=lambda i: (found.cost[i], found.task[i])):
        if corners and found.task[i] >= found.task[corners[-1]]:
            continue
        while len(corners) > 1 and _turns_right(found, corners[-2], corners[-1], i):
            corners.pop()
        corners.append(i)
    return corners


def _turns_right(found: Outcomes, a: int, b: int, c: int) -> bool:
    """Say whether corner b lies on or above the line from a to c."""
    (x, y), (u, v) = (
        (found.cost[j] - found.cost[a], found.task[j] - found.task[a]) for j in (b, c)
    )
    return y * u >= v * x


def expectation_optimum(found: Outcomes, budget: float) -> np.ndarray:
    """Return the mixture of trajectories with the least expected task cost whose expected cost is
    at most d (paper, equation 1).

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
    task, cost = found.task.astype(float), found.cost.astype(float)
    solution = linprog(
        task, A_ub=cost[None], b_ub=[budget], A_eq=np.ones((1, len(task))), b_eq=[1], method="highs"
    )
    if solution.x is None:
        raise ParameterError(
            f"budget is {budget!r} but every trajectory costs at least {cost.min():g}; raise "
            f"the budget"
        )
    return solution.x


def shared_multiplier(
    prompts: list[Outcomes], budgets: list[float], grid: list[float]
) -> list[dict[str, float]]:
    """Return what one lambda for all prompts gives: a row per lambda with mean task cost and share
    of violating prompts.

    Parameters
    ----------
    prompts : list of Outcomes
        Trajectories of each prompt.
    budgets : list of float
        d of each prompt, in units of the cost model.
    grid : list of float
        The values of lambda.
    """
    rows = []
    for multiplier in grid:
        picks = [(found, lagrangian(found, multiplier)) for found in prompts]
        task = float(np.mean([found.task[i] for found, i in picks]))
        broken = float(
            np.mean([found.cost[i] > d for (found, i), d in zip(picks, budgets, strict=True)])
        )
        rows.append({"lambda": multiplier, "task": task, "violation": broken})
    return rows


def threshold(mdp: Augmented, start: int = 0) -> float:
    """Return n*(s): above it V^{*,n}(s) = V^{*,inf}(s) and every optimal policy from s is safe
    (Theorem 2, restated for finite n).

    n*(s) = max(0, max over unsafe trajectories of (V^{*,inf}(s) - J_pre) / W), with W the
    discounted weight of the unsafe steps and J_pre the task cost before the violation. Infinite
    when s has no safe trajectory.

    Raises
    ------
    ParameterError
        When nature moves.
    """
    check_deterministic(mdp)
    best = values(mdp)[start]
    weight = unsafe_value(mdp, 1)
    unsafe = [way for way in trajectories(mdp, start) if not mdp.safe[way.leaf]]
    return max([0, *((best - way.task) / (mdp.gamma**way.steps * weight) for way in unsafe)])


def threshold_by_bisection(
    mdp: Augmented, start: int = 0, high: float = 1e3, steps: int = 60
) -> float:
    """Return n*(s) as the least n with V^{*,n}(s) = V^{*,inf}(s), found by halving [0, high]: the
    slow check of `threshold`.
    """
    low, best = 0.0, values(mdp)[start]
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if values(mdp, middle)[start] >= best - 1e-13 else (middle, high)
    return high
