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
    data = b"".join(key.to_bytes(16, "little") for key in keys)
    words = np.frombuffer(data, dtype="<u4").reshape(len(keys), WORDS)
    # the middle of each of 2^32 intervals: 0 could give a token without mass, 1 one past the last
    return (words + 0.5) * 2.0**-32


def gumbel(key: int) -> float:
    """Return a standard Gumbel number.

    With such a number added to each of some scores, the highest is a sample from their softmax.
    """
    u = uniforms([key])[0, 0]
    return float(-np.log(-np.log(u)))


def check_finite(numbers: Tensor) -> None:
    """Raise ``PolicyError`` where logits gave a number that is not finite."""
    if not numbers.isfinite().all():
        raise PolicyError(
            "the policy gave logits that are not finite; load it in float32, or check its weights"
        )


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
    if logits.device.type == "mps":  # Apple's has no float64
        logits = logits.cpu()
    u = u.to(logits.device)
    # on a CPU a few rows at a time, so that their probabilities stay in the cache
    on_cpu = logits.device.type == "cpu"
    size = max(1, CHUNK // logits.shape[1]) if on_cpu else len(logits)
    drawn: Drawn = [], [], [], []
    for at in range(0, len(logits), size):
        rows = range(at, min(at + size, len(logits)))
        chunk = {row - at: factors[row] for row in rows if row in factors}
        part = _draw(logits[at : at + size], u[at : at + size], chunk)
        drawn[0].extend(part[0])
        drawn[1].extend(part[1])
        drawn[2].extend(part[2])
        drawn[3].extend(part[3])
    return drawn


def _draw(logits: Tensor, u: Tensor, factors: RowFactors) -> Drawn:
    """Sample one token per row; see `draw`, which calls it with a few rows at a time."""
    reference = logits.softmax(-1, dtype=torch.float32)  # (R, V)
    weights = reference.clone() if factors else reference
    for row, factor in factors.items():
        weights[row, list(factor)] *= torch.tensor(list(factor.values())).to(weights)
    levels = _levels(weights)
    mass = levels[-1].sum(-1)  # (R,)
    check_finite(mass)
    if not mass.all():  # the factors left a row without mass: restore its reference
        weights = weights.where(mass[:, None] > 0, reference)
        levels = _levels(weights)
        mass = levels[-1].sum(-1)
    tokens, near = _descend(levels, u)
    p = reference.gather(1, tokens[:, None])[:, 0]  # (R,)
    q = weights.gather(1, tokens[:, None])[:, 0] / mass if factors else p
    return tokens.tolist(), p.log().tolist(), q.log().tolist(), near.tolist()


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
        index = node[:, None, None].expand(-1, BRANCH, 1)
        below = children.gather(2, index)[:, :, 0]
        digit, close = _choose(below, u[:, depth])
        node = digit * children.shape[2] + node
        near = near | close
    return node, near


def _choose(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of k weights (R, k) whose cumulative share exceeds u, and if it was near.

    An edge is near where logits that move by `NEAR_TIE` could move it across u. Logits that move by
    at most e move an edge at F by at most 2 e F (1 - F).
    """
    edges = weights.double().cumsum(1)
    edges = edges / edges[:, -1:]
    u = u[:, None]
    distance = (edges - u).abs()
    near = distance < 2 * NEAR_TIE * edges * (1 - edges)
    chosen = (edges <= u).sum(1)
    return chosen, near.any(1)
