"""Sampling tokens from logits, with random numbers that depend on a key alone.

Every token is sampled by inverse CDF, level by level: tokens are the leaves of a tree with `BRANCH`
children per node, and every level has a uniform number of its own. A flat inverse CDF needs one
uniform number. But float32 logits differ by some 1e-5 between batches and machines, which shifts
every edge of the CDF, and among tens of thousands of edges that often changes the token. The path
to a token has some fifty edges, so near ties are rare. It also takes one pass over the
vocabulary instead of three.

By default a token is sampled from the policy itself, as in the paper. `Sampling` names the other
distributions.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PolicyError

# Logits that move by no more than this cannot change a token unless it is counted as a near tie.
# It is twice what a batch moves. SmolLM2-135M in float32, batches of 2 to 128 rows against their
# sequences in one piece: in 58,944 tokens the edges of the CDF moved as if logits moved by up to
# 5.2e-5, and once by 1.1e-4. By this a batch changes less than one token in 10^9 unseen. A constant
# in all logits moves no edge; single logits of rare tokens moved by up to 2.4e-4, edges by less.
# `tests/test_engine.py` measures a few tokens again
NEAR_TIE = 1e-4
BRANCH = 16  # children of a node
WIDEST = 128  # nodes on the top level, at most
CHUNK = 2**20  # probabilities handled at a time on a CPU, so that they stay in its cache
ROUNDING = 1e-6  # of a sum of float32 probabilities
WORDS = 4  # uniform numbers per key: enough for 128 * 16^3 tokens

UNCHANGED = {0: 1.0}  # factors that change nothing
RowFactors = Mapping[int, Mapping[int, float]]  # row -> {token: factor on its probability}
Drawn = tuple[list[int], list[float], list[float], list[bool]]  # tokens, log_p, log_q, near ties
# tokens (R, P) and the factors on their probabilities (R, P)
Changes = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sampling:
    """The distribution of the next token, made of logits as transformers' processors make it.

    The order is: factors of a retry, temperature, top-k, top-p. A factor f on a probability is a
    bias of log f on the raw logit. It comes before the temperature T, so that it acts as f^(1/T),
    and it may change which tokens are left.

    Attributes
    ----------
    temperature : float
        Divides the logits.
    top_p : float
        The fewest most probable tokens whose probabilities add up to this are left; 1 leaves all.
    top_k : int
        Number of most probable tokens that are left, and those that tie with the last; 0 leaves
        all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return that of a `igcore.SearchConfig`."""
        top_p = 1.0 if config.top_p is None else float(config.top_p)
        return cls(float(config.temperature), top_p, config.top_k or 0)

    @property
    def truncates(self) -> bool:
        """True if tokens may be left out."""
        return self.top_p < 1 or self.top_k > 0


AS_IS = Sampling()  # the policy's own distribution


def random_key(seed: int, prompt_id: str, round_: int, beam: int, position: int) -> int:
    """Return the 128 random bits that decide one token."""
    # a hash of coordinates and not a stream, so that a token depends neither on its batch or shard
    # nor on the order of work or a resume
    coordinates = f"{seed}|{prompt_id}|{round_}|{beam}|{position}".encode()
    return int.from_bytes(hashlib.blake2b(coordinates, digest_size=16).digest(), "little")


def uniforms(keys: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return `WORDS` numbers in (0, 1) per key, (R, WORDS) float64, from its lowest word on."""
    data = b"".join(key.to_bytes(16, "little") for key in keys)
    words = np.frombuffer(data, dtype="<u4").reshape(len(keys), WORDS)
    # the middle of each of 2^32 intervals: 0 could give a token without mass, 1 one past the last
    return (words + 0.5) * 2.0**-32


def check_finite(numbers: Tensor) -> None:
    """Raise ``PolicyError`` where logits gave a number that is not finite."""
    if not numbers.isfinite().all():
        raise PolicyError(
            "the policy gave logits that are not finite; load it in float32, or check its weights"
        )


@torch.inference_mode()
def draw(logits: Tensor, u: Tensor, factors: RowFactors, sampling: Sampling = AS_IS) -> Drawn:
    """Sample one token per row from softmax(logits) times the factors, shaped by `sampling`.

    Parameters
    ----------
    logits : Tensor (R, V)
        Reference logits; probabilities are float32.
    u : Tensor (R, WORDS) float64
        See `uniforms`.
    factors : mapping from row to {token: factor}
        Factors on the reference probabilities of a row. A row that they leave without mass is
        sampled without factors. Rows that share one object cost little more than one row.
    sampling : Sampling
        By default the reference itself.

    Returns
    -------
    tokens, log_p, log_q, near : lists of length R
        Token ids; their log-probability under softmax(logits), and under the distribution that they
        were sampled from (nats); whether logits that differ by `NEAR_TIE` could have given another
        token.

    Raises
    ------
    PolicyError
        When a probability is not finite: NaN would look like the last token of the vocabulary.
    """
    if logits.device.type == "mps":  # Apple's GPUs have no float64
        logits = logits.cpu()
    u = u.to(logits.device)
    # on a CPU a few rows at a time, so that their probabilities stay in the cache
    on_cpu = logits.device.type == "cpu"
    size = max(1, CHUNK // logits.shape[1]) if on_cpu else len(logits)
    changes = _changes_of(factors, len(logits), logits.device) if factors else None
    out: Drawn = [], [], [], []
    for at in range(0, len(logits), size):
        rows = slice(at, at + size)
        change = changes and (changes[0][rows], changes[1][rows])
        if sampling == AS_IS:
            *part, mass = _drawn(logits[rows], u[rows], change)
        else:
            *part, mass = _shaped_draw(logits[rows], u[rows], change, sampling)
        check_finite(mass)
        for i, new in enumerate(part):
            out[i].extend(new.tolist())
    return out


def _changes_of(factors: RowFactors, rows: int, device: torch.device) -> Changes:
    """Return the factors of each row."""
    own = [factors.get(row) or UNCHANGED for row in range(rows)]
    # one line of the table per object, however many rows share it
    _, first, lines = np.unique([id(f) for f in own], return_index=True, return_inverse=True)
    distinct = [own[row] for row in first]
    width = max(map(len, distinct))
    # a short line repeats itself: the same numbers are then written twice
    tokens = np.array([np.resize(list(f), width) for f in distinct], np.int64)
    values = np.array([np.resize(list(f.values()), width) for f in distinct], np.float32)
    index = torch.from_numpy(lines).to(device)
    return torch.from_numpy(tokens).to(device)[index], torch.from_numpy(values).to(device)[index]


def _drawn(
    logits: Tensor, u: Tensor, changes: Changes | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample one token per row; see `draw`, which calls it with a few rows at a time.

    Returns
    -------
    tokens, log_p, log_q, near, mass : Tensor (R,)
        The mass is what the factors have left; it is not finite where a logit is not.
    """
    # (R, V), the largest tensor: factors are written into it and taken back, without a copy of it
    weights = logits.softmax(-1, dtype=torch.float32)
    if changes:
        index, before = changes[0], weights.gather(1, changes[0])  # (R, P)
        weights.scatter_(1, index, before * changes[1])
    levels = levels_of(weights)
    mass = levels[-1].sum(-1)  # (R,)
    # a row that the factors left without mass gets its reference back
    if changes and not mass.all():
        weights.scatter_(1, index, weights.gather(1, index).where(mass[:, None] > 0, before))
        levels = levels_of(weights)
        mass = levels[-1].sum(-1)
    tokens, near = _descend(levels, u, NEAR_TIE)
    p = q = weights.gather(1, tokens[:, None])[:, 0]  # (R,)
    if changes:
        # without factors the mass is 1 up to rounding, and both are the same
        q = q.where((changes[1] == 1).all(1), q / mass)
        p = weights.scatter_(1, index, before).gather(1, tokens[:, None])[:, 0]
    return tokens, p.log(), q.log(), near, mass


def _shaped_draw(
    logits: Tensor, u: Tensor, changes: Changes | None, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample one token per row as `_drawn` does, from a distribution that `sampling` shapes."""
    scores = logits.float()
    if changes:
        index, factors = changes
        biased = scores.scatter(1, index, scores.gather(1, index) + factors.log())
        # a row that the factors left without a token gets its reference back
        scores = biased.where(biased.amax(1, keepdim=True) > -math.inf, scores)
    scores, near = _truncated(scores / sampling.temperature, sampling)
    weights = scores.softmax(-1)
    levels = levels_of(weights)
    tokens, close = _descend(levels, u, NEAR_TIE / sampling.temperature)
    mass, index = levels[-1].sum(-1), tokens[:, None]
    log_p = logits.log_softmax(-1, dtype=torch.float32).gather(1, index)[:, 0]
    log_q = (weights.gather(1, index)[:, 0] / mass).log()
    return tokens, log_p, log_q, near | close, mass


def _truncated(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return scores (R, V) with -inf for the tokens left out, and if a near tie decides it (R,)."""
    surely, kept, perhaps = left_of(scores, NEAR_TIE / sampling.temperature, sampling)
    return scores.masked_fill(~kept, -math.inf), (surely != perhaps).any(1)


def left_of(
    scores: Tensor, moved: Tensor | float, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens are left in any case, which are left, and which may be, (R, V) bool.

    Scores that move by `moved`, (R, 1) or one number, move the difference of two by at most
    `slack`, and the odds of a sum of the highest probabilities by a factor of at most exp(slack).
    """
    if not sampling.truncates:
        every = torch.ones_like(scores, dtype=torch.bool)
        return every, every, every
    vocabulary, slack = scores.shape[1], torch.as_tensor(2 * moved)
    k = min(sampling.top_k or vocabulary, vocabulary)
    best = pad(scores.topk(min(k + 1, vocabulary)).values, (0, 1), value=-math.inf)
    p = best[:, :k].softmax(-1, dtype=torch.float64)
    above = p.cumsum(1) - p  # the mass of the tokens before each one
    low = limit = high = torch.tensor(math.inf)
    if sampling.top_p < 1:
        odds = sampling.top_p / (1 - sampling.top_p)
        limit = torch.tensor(sampling.top_p, dtype=torch.float64)  # a float32 is another number
        low = 1 - 1 / (1 + odds * torch.exp(-slack)) - ROUNDING
        high = 1 - 1 / (1 + odds * torch.exp(slack)) + ROUNDING
    fewest, n, most = ((above < x).sum(1, keepdim=True).clamp(min=1) for x in (low, limit, high))
    surely = scores > best.gather(1, fewest) + slack  # than the first that is left out
    # a token that the model forbids is never left
    perhaps = (scores >= best.gather(1, most - 1) - slack) & (scores > -math.inf)
    return surely & perhaps, scores >= best.gather(1, n - 1), perhaps


def levels_of(weights: Tensor) -> list[Tensor]:
    """Sum (R, V) over groups of `BRANCH` until at most `WIDEST` are left.

    Return the levels, the finest first: [(R, BRANCH, V / BRANCH), ..., (R, top)].
    """
    levels = []
    while (width := weights.shape[1]) > WIDEST:
        if width % BRANCH:
            weights = pad(weights, (0, -width % BRANCH))  # tokens without mass, never sampled
        # child d of node n is d * nodes + n
        levels.append(weights.reshape(len(weights), BRANCH, -1))
        weights = levels[-1].sum(1)
    return [*levels, weights]


def _descend(levels: list[Tensor], u: Tensor, moved: float) -> tuple[Tensor, Tensor]:
    """Walk from the top to a leaf; return leaves (R,) and whether an edge of the path was near."""
    node, near = _choose(levels[-1], u[:, 0], moved)
    for depth, children in enumerate(reversed(levels[:-1]), start=1):
        index = node[:, None, None].expand(-1, BRANCH, 1)
        below = children.gather(2, index)[:, :, 0]
        digit, close = _choose(below, u[:, depth], moved)
        node = digit * children.shape[2] + node
        near = near | close
    return node, near


def _choose(weights: Tensor, u: Tensor, moved: float) -> tuple[Tensor, Tensor]:
    """Return the first of k weights (R, k) whose cumulative share exceeds u, and if it was near.

    An edge is near where log-weights that move by `moved` could move it across u. If they move by
    at most e, an edge at F moves by at most 2 e F (1 - F).
    """
    # float64: near 0 and 1 the tolerance below is smaller than the rounding of a float32 sum
    edges = weights.double().cumsum(1)
    edges = edges / edges[:, -1:]
    u = u[:, None]
    distance = (edges - u).abs()
    near = distance < 2 * moved * edges * (1 - edges)
    return (edges <= u).sum(1), near.any(1)
