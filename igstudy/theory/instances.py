"""Processes small enough to enumerate: a random language model, bigrams, and their outcomes.

Notebook 10 computes the theorems on them. Token 0 ends a text.
"""

import math
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, softmax

from .mdp import MDP, augment, token_mdp
from .planning import trajectories


def all_prefixes(vocabulary: int, horizon: int) -> list[tuple[int, ...]]:
    """Return all nonempty prefixes, the shortest first."""
    unfinished = [y for t in range(horizon) for y in product(range(1, vocabulary), repeat=t)]
    return [(*y, last) for y in unfinished for last in range(vocabulary)]


def random_process(seed: int, vocabulary: int, horizon: int, gamma: float = 1) -> MDP:
    """Return a process of random numbers for every prefix.

    They are the logits of its next token under the reference policy, a safety score with a sign,
    and a task score in (0, 1).
    """
    prefixes = [(), *all_prefixes(vocabulary, horizon)]
    rng = np.random.default_rng(seed)
    policy = softmax(rng.normal(size=(len(prefixes), vocabulary)), axis=-1)
    safety, task = rng.normal(size=(2, len(prefixes)))
    table: dict[Any, Any] = {}
    reference: dict[Any, Any] = {}
    for s, y in enumerate(prefixes):
        ended = len(y) == horizon or y[-1:] == (0,)
        if y:  # the last token of a finished text pays the task cost
            table[y] = safety[s], expit(2 * task[s]) * ended
        if not ended:
            reference[y] = dict(enumerate(policy[s]))
    return token_mdp(table, reference, gamma=gamma, signed=True)


def bigram_process(seed: int, vocabulary: int, horizon: int) -> MDP:
    """Return an exact process whose costs depend on time, last token and next token only."""
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 5, (vocabulary, vocabulary))  # quarters
    task = rng.integers(0, 13, (horizon + 1, vocabulary, vocabulary))  # twelfths
    table: dict[Any, Any] = {}
    for y in all_prefixes(vocabulary, horizon):
        before, last = (0, *y)[-2:]
        ended = last == 0 or len(y) == horizon
        missing = horizon - len(y)  # favours long texts
        paid = ended * (6 * missing + int(task[len(y), before, last]))
        table[y] = Fraction(int(cost[before, last]), 4), Fraction(paid, 12)
    return token_mdp(table)


class Outcomes(NamedTuple):
    """The finished texts of a process."""

    names: tuple[Any, ...]
    task: np.ndarray  # discounted task cost
    cost: np.ndarray  # total safety cost, without discount


def outcomes(mdp: MDP, accounting: str = "sum") -> Outcomes:
    """Return all finished texts, charged by an accounting of `igcore.budget`."""
    tree = augment(mdp, math.inf, accounting=accounting)  # an infinite budget: nothing is unsafe
    texts = sorted(trajectories(tree))
    ends = [text.leaf for text in texts]
    names = tuple(mdp.names[s] for s in tree.origin[ends])
    task = np.array([text.task for text in texts])
    return Outcomes(names, task, tree.total[ends])


def budget_between(cost: np.ndarray, share: float) -> float:
    """Return a budget under which about `share` of the texts are safe.

    It lies strictly between two totals, because rounding would decide about one that is equal.
    """
    levels = np.unique(cost)
    k = np.searchsorted(levels[:-2], np.quantile(cost, share))
    return float(levels[k] + levels[k + 1]) / 2
