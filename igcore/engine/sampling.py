"""Sampling tokens from logits, with random numbers that depend on a key alone.

Every token is sampled by inverse CDF, level by level: tokens are the leaves of a tree with `BRANCH`
children per node, and every level has a uniform number of its own. A flat inverse CDF needs one
uniform number. But float32 logits differ by some 1e-5 between batches and machines, which shifts
every edge of the CDF, and among tens of thousands of edges that often changes the token. A tree has
some fifty edges on the way to a token, so that near ties are rare. It also takes one pass over the
vocabulary instead of three.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import PolicyError

# logits that move by no more than this cannot change a token unless it is counted as a near tie
NEAR_TIE = 1e-4
BRANCH = 16  # children of a node
WIDEST = 128  # nodes on the top level, at most
CHUNK = 2**20  # probabilities handled at a time on a CPU, so that they stay in its cache
WORDS = 4  # uniform numbers per key: enough for 128 * 16^3 tokens

RowFactors = Mapping[int, Mapping[int, float]]  # row -> {token: factor on its probability}
Drawn = tuple[list[int], list[float], list[float], list[bool]]  # tokens, log_p, log_q, near ties


def random_key(seed: int, prompt_id: str, round_: int, beam: int, position: int) -> int:
    """Return the 128 random bits that decide one token."""
    # a hash of coordinates and not a stream, so that a token depends neither on its batch or shard
    # nor on the order of work or a resume
    coordinates = f"{seed}|{prompt_id}|{round_}|{beam}|{position}".encode()
    return int.from_bytes(hashlib.blake2b(coordinates, digest_size=16).digest(), "little")


def uniforms(keys: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return `WORDS` numbers in (0, 1) per key, (R, WORDS) float64, from its lowest word on."""
    words = np.frombuffer(b"".join(key.to_bytes(16, "little") for key in keys), dtype="<u4")
    # the middle of each of 2^32 intervals: 0 could give a token without mass, 1 one past the last
    return (words.reshape(len(keys), WORDS) + 0.5) * 2.0**-32


def gumbel(key: int) -> float:
    """Return a standard Gumbel number.

    With such a number added to each of some scores, the highest is a sample from their softmax.
    """
    return float(-np.log(-np.log(uniforms([key])[0, 0])))


@torch.inference_mode()
def draw(logits: Tensor, u: Tensor, factors: RowFactors) -> Drawn:
    """Sample one token per row from softmax(logits) times the factors.

    Parameters
    ----------
    logits : Tensor (R, V)
        Reference logits; probabilities are float32.
    u : Tensor (R, WORDS) float64
        See `uniforms`.
    factors : mapping from row to {token: factor}
        Factors on the reference probabilities of a row. A row that they leave without mass is
        sampled from the reference.

    Returns
    -------
    tokens, log_p, log_q, near : lists of length R
        Token ids; their log-probability before and after the factors (nats); whether logits that
        differ by `NEAR_TIE` could have given another token.

    Raises
    ------
    PolicyError
        When a probability is not finite: NaN would look like the last token of the vocabulary.
    """
    device = "cpu" if logits.device.type == "mps" else logits.device  # Apple's has no float64
    logits, u = logits.to(device), u.to(device)
    # on a CPU a few rows at a time, so that their probabilities stay in its cache
    size = max(1, CHUNK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = []
    for at in range(0, len(logits), size):
        rows = slice(at, at + size)
        chunk = {row - at: factor for row, factor in factors.items() if at <= row < at + size}
        parts.append(_draw(logits[rows], u[rows], chunk))
    tokens, log_p, log_q, near = (list(chain(*lists)) for lists in zip(*parts, strict=True))
    return tokens, log_p, log_q, near


def _draw(logits: Tensor, u: Tensor, factors: RowFactors) -> Drawn:
    """Sample one token per row; see `draw`, which calls it with a few rows at a time."""
    weights = logits.softmax(-1, dtype=torch.float32)  # (R, V)
    # the entries that have a factor, and their probabilities before it
    rows = [row for row, factor in factors.items() for _ in factor]
    named = [token for factor in factors.values() for token in factor]
    values = [value for factor in factors.values() for value in factor.values()]
    before = weights[rows, named]
    weights[rows, named] = before * torch.tensor(values).to(weights)
    levels = _levels(weights)
    mass = levels[-1].sum(-1)  # (R,)
    if not mass.isfinite().all():
        raise PolicyError(
            "the policy gave logits that are not finite; load it in float32, or check its weights"
        )
    if not mass.all():  # the factors left a row without mass: restore its reference
        weights[rows, named] = torch.where(mass[rows] > 0, weights[rows, named], before)
        levels = _levels(weights)
        mass = levels[-1].sum(-1)
    leaves, near = _descend(levels, u)
    q = weights.gather(1, leaves[:, None])[:, 0]  # (R,) with factors, before normalising
    tokens, log_w, log_q = leaves.tolist(), q.log().tolist(), (q / mass).log().tolist()
    # of a token that has a factor the reference probability is the one before it
    reference = dict(zip(zip(rows, named, strict=True), before.log().tolist(), strict=True))
    log_p = [reference.get(entry, w) for entry, w in zip(enumerate(tokens), log_w, strict=True)]
    return tokens, log_p, log_q if factors else log_p, near.tolist()


def _levels(weights: Tensor) -> list[Tensor]:
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


def _descend(levels: list[Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """Walk from the top to a leaf; return leaves (R,) and whether an edge on the way was near."""
    node, near = _choose(levels[-1], u[:, 0])
    for depth, children in enumerate(reversed(levels[:-1]), start=1):
        below = children.gather(2, node[:, None, None].expand(-1, BRANCH, 1))[:, :, 0]
        digit, close = _choose(below, u[:, depth])
        node, near = digit * children.shape[2] + node, near | close
    return node, near


def _choose(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of k weights (R, k) whose cumulative share exceeds u, and if it was near.

    An edge is near where logits that move by `NEAR_TIE` could move it across u. Logits that move by
    at most e move an edge at F by at most 2 e F (1 - F).
    """
    edges = weights.double().cumsum(1)
    edges = edges / edges[:, -1:]
    near = (edges - u[:, None]).abs() < 2 * NEAR_TIE * edges * (1 - edges)
    return (edges <= u[:, None]).sum(1), near.any(1)
