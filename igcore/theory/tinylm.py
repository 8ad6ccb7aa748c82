"""A tiny autoregressive language model, small enough to enumerate: a random two-layer transformer.

It is causal, with a softmax over the next token, so that the probability of a text is the product
of its conditionals, as for the models of the paper (section 3). Nothing is trained.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from .mdp import MDP, enumerate_prefixes, token_mdp

WIDTH, HEADS, LAYERS = 16, 2, 2


class TinyLM(NamedTuple):
    """Weights of a transformer: W = `WIDTH`, V tokens and one start token, T + 1 positions."""

    tokens: np.ndarray  # (V + 1, W)
    positions: np.ndarray  # (T + 1, W)
    attention: np.ndarray  # (LAYERS, 4, W, W): queries, keys, values, output
    wide: np.ndarray  # (LAYERS, W, 4 W)
    narrow: np.ndarray  # (LAYERS, 4 W, W)
    head: np.ndarray  # (W, V)


def tiny_lm(seed: int, vocabulary: int = 5, horizon: int = 6) -> TinyLM:
    """Return random weights; the same seed gives the same model."""
    rng = np.random.default_rng(seed)
    w = WIDTH
    return TinyLM(
        tokens=rng.normal(size=(vocabulary + 1, w)),
        positions=rng.normal(size=(horizon + 1, w)),
        attention=rng.normal(scale=w**-0.5, size=(LAYERS, 4, w, w)),
        wide=rng.normal(scale=w**-0.5, size=(LAYERS, w, 4 * w)),
        narrow=rng.normal(scale=(4 * w) ** -0.5, size=(LAYERS, 4 * w, w)),
        head=rng.normal(scale=w**-0.5, size=(w, vocabulary)),
    )


def _norm(x: np.ndarray) -> np.ndarray:
    """Return x with mean 0 and standard deviation 1 over the last axis."""
    return (x - x.mean(axis=-1, keepdims=True)) / (x.std(axis=-1, keepdims=True) + 1e-5)


def logits(lm: TinyLM, tokens: np.ndarray) -> np.ndarray:
    """Return the logits after each prefix of each row, the empty one included.

    Parameters
    ----------
    tokens : ndarray of int, shape (B, t)
        At most T tokens a row.

    Returns
    -------
    ndarray, shape (B, t + 1, V)
        Entry k depends on the first k tokens only.
    """
    begin = np.full((len(tokens), 1), len(lm.tokens) - 1)
    ids = np.concatenate([begin, tokens], axis=1)
    b, t = ids.shape
    x = lm.tokens[ids] + lm.positions[:t]  # (B, t, W)
    future = np.triu(np.full((t, t), -np.inf), 1)
    for weights, wide, narrow in zip(lm.attention, lm.wide, lm.narrow, strict=True):
        h = _norm(x)
        query, key, value = (
            (h @ m).reshape(b, t, HEADS, -1).swapaxes(1, 2) for m in weights[:3]
        )  # (B, HEADS, t, W / HEADS)
        scores = query @ key.swapaxes(2, 3) / query.shape[-1] ** 0.5 + future
        look = softmax(scores, axis=-1)
        x = x + (look @ value).swapaxes(1, 2).reshape(b, t, -1) @ weights[3]
        x = x + np.maximum(0, _norm(x) @ wide) @ narrow
    return _norm(x) @ lm.head


def last_logits(lm: TinyLM, prefixes: list[tuple[int, ...]]) -> np.ndarray:
    """Return the logits after each prefix, shape (len(prefixes), V)."""
    # prefixes of equal length are computed together
    out = np.empty((len(prefixes), lm.head.shape[1]))
    lengths = np.array([len(y) for y in prefixes])
    for t in np.unique(lengths):
        rows = np.flatnonzero(lengths == t)
        tokens = np.array([prefixes[i] for i in rows], dtype=int).reshape(len(rows), t)
        out[rows] = logits(lm, tokens)[:, -1]
    return out


def tiny_instance(
    seed: int, vocabulary: int = 5, horizon: int = 6, gamma: float = 1
) -> tuple[MDP, np.ndarray]:
    """Return a token MDP whose reference, signed safety score and task score are random networks.

    Token 0 ends a text. `MDP.cost` holds standardised safety scores U of prefixes: charge them with
    the accounting ``peak``. The task cost in (0, 1) is paid by the last token of a finished text
    (paper, section 4.1, equation 2).

    Returns
    -------
    mdp : MDP
        6,826 states at the default sizes.
    partial : ndarray, shape (S,)
        Task score of every prefix, finished or not: what E_inter ranks by.

    Raises
    ------
    ParameterError
        When the instance is too large to enumerate.
    """
    prefixes = [(), *enumerate_prefixes(vocabulary, horizon)]
    models = [tiny_lm(3 * seed + i, vocabulary, horizon) for i in range(3)]
    chances = softmax(last_logits(models[0], prefixes), axis=-1)
    scores, tasks = (last_logits(lm, prefixes)[:, 0] for lm in models[1:])
    scores = (scores - scores.mean()) / scores.std()
    partial = 1 / (1 + np.exp(-2 * (tasks - tasks.mean()) / tasks.std()))
    ended = np.array([len(y) == horizon or y[-1:] == (0,) for y in prefixes])
    table = dict(zip(prefixes, zip(scores, partial * ended, strict=True), strict=True))
    del table[()]
    inner = np.flatnonzero(~ended)
    reference = {prefixes[s]: dict(enumerate(chances[s].tolist())) for s in inner}
    return token_mdp(table, reference, gamma=gamma, signed=True), partial


def bigram_instance(seed: int, vocabulary: int = 5, horizon: int = 6) -> MDP:
    """Return an exact token MDP with a many-to-one homomorphism.

    Costs depend on (time, last token, next token), so that states of equal (length, last token) act
    alike. Safety costs are quarters in [0, 1], for the end token too. The last token of a finished
    text pays the task cost, in twelfths, which favours long texts. The reference is uniform.
    """
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 5, (vocabulary, vocabulary))
    task = rng.integers(0, 13, (horizon + 1, vocabulary, vocabulary))
    table = {}
    for y in enumerate_prefixes(vocabulary, horizon):
        before, last = (0, *y)[-2:]
        ended = last == 0 or len(y) == horizon
        paid = ended * (6 * (horizon - len(y)) + int(task[len(y), before, last]))
        table[y] = Fraction(int(cost[before, last]), 4), Fraction(paid, 12)
    return token_mdp(table)
