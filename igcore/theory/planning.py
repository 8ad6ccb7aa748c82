"""Exact solutions of finite token MDPs: backward induction, value iteration and brute force.

`occupancy` gives the law of any policy's trajectory. Every function takes an `Augmented` MDP, whose
unsafe states cost n at each step (the truncated task cost, section 4.2 of the paper), or a plain
`MDP`, where all states are safe and n plays no role.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import ParameterError
from .mdp import MDP, truncated_cost


class Trajectory(NamedTuple):
    """One way from a state to the end: its last state, its length and its discounted task cost.

    The length is the number of actions.
    """

    leaf: int
    steps: int
    task: float


def unsafe_value(mdp: MDP, n: float) -> float:
    """Return V^n of an unsafe state, which no action leaves: n at every step, n / (1 - gamma).

    Without discount (gamma = 1) the sum would be infinite; n is then charged once.
    """
    return n / (1 - mdp.gamma) if mdp.gamma < 1 else n


def action_values(
    mdp: MDP,
    v: np.ndarray,
    cost: np.ndarray | None = None,
    states: np.ndarray | slice = slice(None),
) -> np.ndarray:
    """Return q(s, y) = cost(s, y) + gamma v(s + y), shape (states, A); infinite if not allowed.

    The cost is C_task and the states are all, unless they are given.
    """
    cost = mdp.task if cost is None else cost
    child = mdp.child[states]
    later = mdp.gamma * v[child]
    return np.where(child >= 0, cost[states] + later, math.inf)


def _mean(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the expectation of q over actions."""
    # an action of probability 0 must not count, and 0 * inf would be NaN
    return (p * np.where(p > 0, q, 0)).sum(axis=1)


def _backup(
    mdp: MDP, cost: np.ndarray, v: np.ndarray, states: np.ndarray, policy: np.ndarray | None
) -> np.ndarray:
    """Return the right side of the Bellman equation at states with actions, shape (len(states),).

    That is the minimum of cost + gamma v over actions, or the mean under a policy. Where nature
    moves, it is the mean under nature's probabilities.
    """
    q = action_values(mdp, v, cost, states)
    chosen = q.min(axis=1) if policy is None else _mean(policy[states], q)
    by_nature = _mean(mdp.reference[states], q)
    return np.where(mdp.chance[states], by_nature, chosen)


def values(mdp: MDP, n: float = math.inf, policy: np.ndarray | None = None) -> np.ndarray:
    """Return V^{*,n}, or V^n of a policy, by backward induction (paper, section 5.1, equation 8).

    The paper defines V^{*,n} in the latent space; by Theorem 1(c) it is that of the token space.

    Parameters
    ----------
    n : float
        What each step in an unsafe state costs, in units of the task cost; infinite for the
        untruncated task cost.
    policy : ndarray, shape (S, A), optional
        Probabilities of the actions; the optimum when left out. Chance states follow nature.

    Returns
    -------
    ndarray, shape (S,)
        Expected discounted task cost from each state on. Without unsafe states (an `MDP` that was
        not augmented) n plays no role.
    """
    cost = truncated_cost(mdp, n)
    dtype = np.result_type(mdp.task, np.asarray(mdp.gamma))  # object where Fractions are
    v = np.zeros(len(mdp.child), dtype=np.result_type(dtype, float))
    v[~mdp.safe] = unsafe_value(mdp, n)
    for states in mdp.layers[1:]:
        v[states] = _backup(mdp, cost, v, states, policy)
    return v


def bellman(mdp: MDP, v: np.ndarray, n: float) -> np.ndarray:
    """Return T v, with T the Bellman operator (paper, appendix B.1; Theorem 1(a): V = T V).

    The horizon is infinite: an unsafe state leads to itself and costs n at every step (once when
    gamma = 1), and a finished safe text leads to itself at no cost.

    Parameters
    ----------
    v : ndarray, shape (S,)
    n : float
        As in `truncated_cost`.

    Returns
    -------
    ndarray, shape (S,)
    """
    cost = truncated_cost(mdp, n)
    new = mdp.gamma * v  # right for finished texts
    unsafe = ~mdp.safe
    stay = cost[unsafe, 0]  # any action leads back
    new[unsafe] = stay + new[unsafe] if mdp.gamma < 1 else stay
    inner = np.flatnonzero(mdp.allowed.any(axis=1))
    new[inner] = _backup(mdp, cost, v, inner, None)
    return new


def value_iteration(mdp: MDP, n: float, sweeps: int) -> np.ndarray:
    """Return v_0 = 0, v_1 = T v_0, ..., shape (sweeps + 1, S) (paper, appendix B.1, Theorem 4)."""
    iterates = [0 * mdp.task[:, 0]]
    for _ in range(sweeps):
        iterates.append(bellman(mdp, iterates[-1], n))
    return np.stack(iterates)


def greedy(mdp: MDP, v: np.ndarray) -> np.ndarray:
    """Return the policy that takes the first best action under v, shape (S, A).

    Chance states follow nature.
    """
    q = action_values(mdp, v)
    policy = np.zeros(q.shape, dtype=int)
    best = q.argmin(axis=1)
    policy[np.arange(len(q)), best] = 1
    policy *= mdp.allowed
    return np.where(mdp.chance[:, None], mdp.reference, policy)


def trajectories(mdp: MDP, start: int = 0) -> Iterator[Trajectory]:
    """Yield every trajectory from a state to a terminal or unsafe one.

    Raises
    ------
    ParameterError
        When nature moves: a policy is then no mixture of trajectories.
    """
    if mdp.chance.any():
        raise ParameterError("nature moves; give an MDP of deterministic dynamics only")
    children, tasks = mdp.child.tolist(), mdp.task.tolist()
    stack = [Trajectory(start, 0, 0)]
    while stack:
        way = stack.pop()
        s = way.leaf
        if not mdp.allowed[s].any():
            yield way
        discount = mdp.gamma**way.steps
        for child, cost in zip(children[s], tasks[s], strict=True):
            if child >= 0:
                stack.append(Trajectory(child, way.steps + 1, way.task + discount * cost))


def brute_force(mdp: MDP, n: float = math.inf, start: int = 0) -> float:
    """Return V^{*,n} of a state as a minimum over all trajectories: the slow check of `values`."""
    penalty = unsafe_value(mdp, n)
    best = math.inf
    for way in trajectories(mdp, start):
        after = 0 if mdp.safe[way.leaf] else mdp.gamma**way.steps * penalty
        best = min(best, way.task + after)
    return best


def occupancy(mdp: MDP, policy: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the probability that a trajectory visits each state, shape (S,).

    On the terminal and unsafe states it is the law of the trajectory.
    """
    p = np.where(mdp.chance[:, None], mdp.reference, policy)
    mass = np.zeros(len(p), dtype=p.dtype)
    mass[start] = 1
    for states in reversed(mdp.layers):
        moves = mdp.allowed[states]
        children = mdp.child[states][moves]
        moved = mass[states][:, None] * p[states]
        np.add.at(mass, children, moved[moves])
    return mass


def violation(mdp: MDP, policy: np.ndarray, start: int = 0) -> float:
    """Return the probability that a policy breaks the budget; 0 for an optimal one (Theorem 2)."""
    return occupancy(mdp, policy, start)[~mdp.safe].sum()
