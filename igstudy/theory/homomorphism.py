"""Homomorphisms of decision processes and their latent processes (Theorem 1(c) of the paper).

A map phi gives every state a label. It is a homomorphism when the actions of states of one label
have the same costs and lead to the same labels.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from .mdp import MDP, Augmented


def conflict(mdp: MDP, labels: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return two states that phi merges although their actions differ, or None."""
    number = pd.Series(labels).factorize()[0]  # by first appearance
    next_label = np.append(number, -1)[mdp.child]  # -1 where the action is not allowed
    task, cost = (np.where(mdp.allowed, table, 0) for table in (mdp.task, mdp.cost))
    nature = np.where(mdp.chance[:, None], mdp.reference, -1)
    actions = np.hstack([next_label, task, cost, nature])
    states = pd.Series(range(len(number)))
    first = states.groupby(number).transform("first").to_numpy()
    different = np.flatnonzero((actions != actions[first]).any(axis=1))
    if not len(different):
        return None
    return int(first[different[0]]), int(different[0])


def latent_mdp(mdp: MDP, labels: Sequence[Hashable]) -> MDP:
    """Return the latent process (paper, section 5.1, Definition 5.1): a state for each label.

    Raises
    ------
    ValueError
        Naming two states that phi merges although their actions differ.
    """
    pair = conflict(mdp, labels)
    if pair:
        raise ValueError(f"phi merges {[mdp.names[s] for s in pair]}, whose actions differ")
    # the last state of each label represents it, so that children come later
    last = {label: s for s, label in enumerate(labels)}
    chosen = sorted(last.values())
    names = tuple(labels[s] for s in chosen)
    number = {label: i for i, label in enumerate(names)}
    # the last entry keeps -1, where no action is allowed, at -1
    latent_of = np.array([number[label] for label in labels] + [-1])
    return replace(
        mdp,
        child=latent_of[mdp.child[chosen]],
        cost=mdp.cost[chosen],
        task=mdp.task[chosen],
        reference=mdp.reference[chosen],
        chance=mdp.chance[chosen],
        names=names,
        safe=mdp.safe[chosen],
    )


def embed(mdp: Augmented, labels: Sequence[Hashable], latent: Augmented) -> np.ndarray:
    """Return the latent augmented state [phi(s), z] of every augmented state [s, z]."""
    number = {name: i for i, name in enumerate(latent.names)}
    return np.array([number[labels[s], z] for s, z in zip(mdp.origin, mdp.z, strict=True)])
