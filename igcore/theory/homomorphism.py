"""Latent MDPs (paper, section 5.1, Theorem 1): homomorphisms, and the price of a lossy map.

A map phi gives every state one hashable label. The paper's (h_t, o_t) is such a label, and z_t is
kept beside it. Theorem 1(c) needs phi to be a homomorphism of MDPs; it need not be injective.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from ..errors import ParameterError
from .mdp import MDP, Augmented
from .planning import action_values, greedy, occupancy, values


def _actions(mdp: MDP, labels: Sequence[Hashable], s: int) -> tuple:
    """Return the next step from s as phi sees it.

    That is nature's probabilities, and of each action the next label, task cost and safety cost.
    """
    nature = tuple(mdp.reference[s]) if mdp.chance[s] else None
    actions = []
    for a in range(mdp.child.shape[1]):
        child = mdp.child[s, a]
        allowed = child >= 0
        actions.append((labels[child], mdp.task[s, a], mdp.cost[s, a]) if allowed else None)
    return nature, actions


def conflict(mdp: MDP, labels: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return two states that phi merges although their actions differ, or None.

    None means that phi is a homomorphism.

    Parameters
    ----------
    labels : sequence of hashable, length S
        phi(s) of every state.
    """
    seen: dict[Hashable, int] = {}
    for s, label in enumerate(labels):
        first = seen.setdefault(label, s)
        expected = _actions(mdp, labels, first)
        if expected != _actions(mdp, labels, s):
            return first, s
    return None


def latent_mdp(mdp: MDP, labels: Sequence[Hashable]) -> MDP:
    """Return the latent MDP (paper, section 5.1, Definition 5.1): one state for each value of phi.

    Raises
    ------
    ParameterError
        When phi is no homomorphism, naming two states.
    """
    if pair := conflict(mdp, labels):
        states = [mdp.names[s] for s in pair]
        raise ParameterError(
            f"phi merges {states}, whose actions differ; give a map under which equal labels act "
            "alike"
        )
    # the last state of each label stands for it, so that children come later
    last = {label: s for s, label in enumerate(labels)}
    chosen = sorted(last.values())
    number = {labels[s]: i for i, s in enumerate(chosen)}
    # the latent state of each state; the last entry keeps -1 at -1
    latent_of = np.array([number[label] for label in labels] + [-1])
    tables = ("cost", "task", "reference", "chance", "safe")
    kept = {name: getattr(mdp, name)[chosen] for name in tables}
    child = latent_of[mdp.child[chosen]]
    return replace(mdp, child=child, names=tuple(number), **kept)


def embed(mdp: Augmented, labels: Sequence[Hashable], latent: Augmented) -> np.ndarray:
    """Return the latent augmented state [phi(s), z] of every augmented state [s, z], shape (S,).

    Parameters
    ----------
    labels : sequence of hashable
        phi of every state of the MDP that was augmented to `mdp`.
    latent : Augmented
        The augmented latent MDP, with the same budget and discount.
    """
    number = {name: i for i, name in enumerate(latent.names)}
    pairs = zip(mdp.origin, mdp.z, strict=True)
    return np.array([number[labels[s], z] for s, z in pairs])


def averaged_policy(mdp: Augmented, labels: Sequence[Hashable], n: float) -> np.ndarray:
    """Return the greedy policy of the best critic that sees only labels.

    The critic predicts the mean of q^{*,n}(s, y) over the states of a label, weighted by how often
    the reference visits them: the limit of least squares on rollouts (paper, section 5.2).

    Parameters
    ----------
    labels : sequence of hashable, length S
        What the critic sees of each augmented state: phi(s), or (phi(s), z).
    n : float
        Finite cost of an unsafe step.

    Returns
    -------
    ndarray, shape (S, A)
    """
    q = action_values(mdp, values(mdp, n))
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    group = np.array([number[label] for label in labels])
    # the weight of each action: how often the reference visits its state
    weight = occupancy(mdp, mdp.reference)[:, None] * mdp.allowed
    weighted = weight * np.where(mdp.allowed, q, 0)
    total, mass = np.zeros((2, len(number), q.shape[1]))
    np.add.at(total, group, weighted.astype(float))
    np.add.at(mass, group, weight.astype(float))
    mean = np.full_like(total, math.inf)
    np.divide(total, mass, out=mean, where=mass > 0)
    critic = replace(mdp, task=mean[group])
    return greedy(critic, np.zeros(len(q)))


def violating_states(mdp: Augmented, policy: np.ndarray) -> tuple[int, int]:
    """Return from how many start states a policy can break the budget, and their number.

    The start states are the safe states with actions from which some policy is safe with
    probability one.
    """
    feasible = values(mdp) < math.inf
    starts = feasible & mdp.allowed.any(axis=1)
    unsafe = values(mdp, policy=policy) == math.inf
    broken = starts & unsafe
    return int(broken.sum()), int(starts.sum())


def best_blind(mdp: Augmented, labels: Sequence[Hashable], n: float = math.inf) -> float:
    """Return the least task cost of the deterministic policies that see only labels.

    All of them are tried, so give few labels.
    """
    moves = np.flatnonzero(mdp.allowed.any(axis=1) & ~mdp.chance)
    seen = {labels[s]: np.flatnonzero(mdp.allowed[s]) for s in moves}
    best = math.inf
    for choice in product(*seen.values()):
        action = dict(zip(seen, choice, strict=True))
        policy = np.zeros(mdp.child.shape, dtype=int)
        chosen = [action[labels[s]] for s in moves]
        policy[moves, chosen] = 1
        best = min(best, values(mdp, n, policy)[0])
    return best
