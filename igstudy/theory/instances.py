"""Processes small enough to enumerate: random transformers, a bigram table, and their outcomes.

Notebook 10 computes the theorems on them. Token 0 ends a text.
"""

import math
from fractions import Fraction
from itertools import groupby, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, softmax
from scipy.stats import zscore

from .mdp import MDP, augment, token_mdp
from .planning import trajectories

ATTENTION_HEADS = 2
DIM = 16  # width of the model


def random_model(seed: int, vocabulary: int, horizon: int) -> SimpleNamespace:
    """Return the weights of a random transformer of two layers."""
    normal = np.random.default_rng(seed).normal
    return SimpleNamespace(
        tokens=normal(size=(vocabulary + 1, DIM)),  # the last one begins every text
        positions=normal(size=(horizon + 1, DIM)),
        attention=normal(scale=DIM**-0.5, size=(2, 4, DIM, DIM)),  # queries, keys, values, output
        wide=normal(scale=DIM**-0.5, size=(2, DIM, 4 * DIM)),
        narrow=normal(scale=(4 * DIM) ** -0.5, size=(2, 4 * DIM, DIM)),
        head=normal(scale=DIM**-0.5, size=(DIM, vocabulary)),
    )


def normed(x: np.ndarray) -> np.ndarray:
    deviation = x.std(axis=-1, keepdims=True)
    scaled: np.ndarray = (x - x.mean(axis=-1, keepdims=True)) / (deviation + 1e-5)
    return scaled


def last_logits(model: SimpleNamespace, prefixes: np.ndarray) -> np.ndarray:
    """Return the logits (B, V) after prefixes (B, t) of one length."""
    ids = np.insert(prefixes, 0, len(model.tokens) - 1, axis=1)
    rows, t = ids.shape
    x: np.ndarray = model.tokens[ids] + model.positions[:t]  # (B, t, W)
    future = np.triu(np.full((t, t), -np.inf), 1)
    for (*maps, out), wide, narrow in zip(model.attention, model.wide, model.narrow, strict=True):
        heads = [(normed(x) @ m).reshape(rows, t, ATTENTION_HEADS, -1).swapaxes(1, 2) for m in maps]
        query, key, value = heads
        scores = query @ key.swapaxes(2, 3) / query.shape[-1] ** 0.5 + future
        mixed = softmax(scores, axis=-1) @ value
        x = x + mixed.swapaxes(1, 2).reshape(rows, t, -1) @ out
        x = x + np.maximum(0, normed(x) @ wide) @ narrow
    logits: np.ndarray = normed(x)[:, -1] @ model.head
    return logits


def all_prefixes(vocabulary: int, horizon: int) -> list[tuple[int, ...]]:
    """Return all nonempty prefixes, the shortest first."""
    unfinished = [y for t in range(horizon) for y in product(range(1, vocabulary), repeat=t)]
    return [(*y, last) for y in unfinished for last in range(vocabulary)]


def random_process(
    seed: int, vocabulary: int, horizon: int, gamma: float = 1
) -> tuple[MDP, np.ndarray]:
    """Return a process made of three random transformers, and the task score of every prefix.

    One transformer is the reference policy, one scores safety (with a sign), one scores the task.
    """
    prefixes = [(), *all_prefixes(vocabulary, horizon)]
    same_length = [np.array(list(group), dtype=int) for _, group in groupby(prefixes, len)]
    logits = []
    for i in range(3):
        model = random_model(3 * seed + i, vocabulary, horizon)
        logits.append(np.concatenate([last_logits(model, rows) for rows in same_length]))
    policy, safety, task = logits
    scores, partial = zscore(safety[:, 0]), expit(2 * zscore(task[:, 0]))
    ended = [len(y) == horizon or y[-1:] == (0,) for y in prefixes]
    # the last token of a finished text pays the task cost
    table: dict[Any, Any] = {}
    reference: dict[Any, Any] = {}
    rows = softmax(policy, axis=-1)
    for s, y in enumerate(prefixes):
        if y:
            table[y] = scores[s], partial[s] * ended[s]
        if not ended[s]:
            reference[y] = dict(enumerate(rows[s]))
    return token_mdp(table, reference, gamma=gamma, signed=True), partial


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
