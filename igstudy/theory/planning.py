"""Exact solutions of finite token MDPs: backward induction and value iteration.

`trajectories` lists the trajectories, `occupancy` gives their law under a policy. Every function
takes an `Augmented` MDP, whose unsafe states cost n at each step (the truncated task cost, section
4.2 of the paper), or a plain `MDP`, where all states are safe and n plays no role.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from igcore.errors import ParameterError

from .mdp import MDP, Augmented, truncated_cost

StateIndex = Sequence[int] | np.ndarray | slice


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


def action_values(mdp: MDP, v: np.ndarray, states: StateIndex = slice(None)) -> np.ndarray:
    """Return q(s, y) = C_task(s, y) + gamma v(s + y), shape (states, A); infinite if not allowed.

    The states are all, unless they are given.
    """
    later = mdp.gamma * v[mdp.child[states]]
    q = mdp.task[states] + later
    return np.where(mdp.allowed[states], q, math.inf)


def _mean(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the expectation of q over actions."""
    # an action of probability 0 must not count, and 0 * inf would be NaN
    possible = np.where(p > 0, q, 0)
    mean: np.ndarray = (p * possible).sum(axis=1)
    return mean


def _backup(
    mdp: MDP, v: np.ndarray, states: StateIndex, policy: np.ndarray | None = None
) -> np.ndarray:
    """Return the right side of the Bellman equation at states with actions, shape (len(states),).

    That is the minimum of q over actions, or the mean under a policy. Where nature moves, it is the
    mean under nature's probabilities.
    """
    q = action_values(mdp, v, states)
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
    gamma = np.asarray(mdp.gamma)
    dtype = np.result_type(mdp.task, gamma, float)  # object where Fractions are
    v = np.zeros(len(mdp.child), dtype)
    v[~mdp.safe] = unsafe_value(mdp, n)
    inner = np.flatnonzero(mdp.allowed.any(axis=1))
    for s in reversed(inner):  # children first
        v[[s]] = _backup(mdp, v, [s], policy)
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
    new = mdp.gamma * v  # right for finished texts
    unsafe = ~mdp.safe
    stay = truncated_cost(mdp, n)[unsafe, 0]  # any action leads back
    new[unsafe] = stay + new[unsafe] if mdp.gamma < 1 else stay
    inner = np.flatnonzero(mdp.allowed.any(axis=1))
    new[inner] = _backup(mdp, v, inner)
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
    # an allowed one even where all are infinite, as those that are not allowed are
    best = (mdp.allowed & (q == q.min(axis=1, keepdims=True))).argmax(axis=1)
    one_hot = np.eye(mdp.child.shape[1], dtype=int)
    policy = one_hot[best] * mdp.allowed
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
    stack = [Trajectory(start, 0, 0)]
    while stack:
        way = stack.pop()
        s = way.leaf
        actions = np.flatnonzero(mdp.allowed[s])
        if not len(actions):
            yield way
        discount = mdp.gamma**way.steps
        for a in actions:
            task = way.task + discount * mdp.task[s, a]
            longer = Trajectory(mdp.child[s, a], way.steps + 1, task)
            stack.append(longer)


def occupancy(mdp: MDP, policy: np.ndarray) -> np.ndarray:
    """Return the probability that a trajectory from the prompt visits each state, shape (S,).

    On the terminal and unsafe states it is the law of the trajectory.
    """
    p = np.where(mdp.chance[:, None], mdp.reference, policy)
    mass = np.zeros(len(p), dtype=p.dtype)
    mass[0] = 1
    for s, allowed in enumerate(mdp.allowed):  # children come later
        children = mdp.child[s, allowed]
        np.add.at(mass, children, mass[s] * p[s, allowed])
    return mass


def violation(mdp: MDP, policy: np.ndarray) -> float:
    """Return the probability that a policy breaks the budget; 0 for an optimal one (Theorem 2)."""
    mass = occupancy(mdp, policy)
    broken: float = mass[~mdp.safe].sum()
    return broken


# --- bounds ---------------------------------------------------------------------------------------


def n_star(mdp: Augmented, start: int = 0, limit: np.ndarray | None = None) -> float:
    """Return n*(s), how big the n of the truncated cost must be (paper, section 4.2: a big n).

    Above it V^{*,n}(s) = V^{*,inf}(s), and every optimal policy from s is safe: Theorem 2 of
    section 5.1, restated for finite n. The paper gives no formula; on deterministic dynamics::

        n*(s) = max(0, max over unsafe trajectories of (V^{*,inf}(s) - J_pre) / W)

    with J_pre the task cost before the violation and W the discounted weight of the unsafe steps.

    Parameters
    ----------
    start : int
        The state s.
    limit : ndarray, shape (S,), optional
        V^{*,inf} of `values`, which saves time for many s; computed when left out.

    Returns
    -------
    float
        In units of the task cost; infinite when s has no safe trajectory.

    Raises
    ------
    ParameterError
        When nature moves, see `trajectories`.
    """
    best = (values(mdp) if limit is None else limit)[start]
    least = 0
    for way in trajectories(mdp, start):
        if not mdp.safe[way.leaf]:
            weight = mdp.gamma**way.steps * unsafe_value(mdp, 1)
            least = max(least, (best - way.task) / weight)
    return least


def abstention_bound(masses: Sequence[float], n_samples: int, rounds: int = 1) -> float:
    """Return sum_b (1 - p_b)^{N M} >= P(abstain), capped at 1.

    Algorithm 1 (paper, appendix C) samples finitely often, and the theorems do not speak of that.
    The bound is an equality for one block without a penalty.

    Parameters
    ----------
    masses : sequence of float
        p_b for each block b, the reference's mass of safe and viable next blocks: the least over
        the prefixes that may be kept there.
    n_samples, rounds : int
        N samples in a round and M rounds.
    """
    draws = n_samples * rounds
    failures = [(1 - p) ** draws for p in masses]
    return min(1, sum(failures))
