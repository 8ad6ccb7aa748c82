"""Was a token drawn? The uniform numbers that give a token, from the logits that are read again.

A token lies between two edges on each level of the tree of `igcore.engine.sampling`. Its key gives
a uniform number for each level. Where these lie beyond the edges, the logits must have moved since
the token was drawn from them.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from igcore.engine.agreement import LOWEST_LOGPROB
from igcore.engine.sampling import (
    AS_IS,
    BRANCH,
    CHUNK,
    NEAR_TIE,
    Sampling,
    check_finite,
    left_of,
    levels_of,
)

# How far logits of a type shorter than float32 move, as `NEAR_TIE` is for float32, in units of its
# precision and of their standard deviation. SmolLM2-135M, decoded beside up to 31 rows and read
# again alone: the numbers of a token lay beyond its edges by at most 5.4 in 3,048 tokens of
# bfloat16, 3.1 in 3,052 of float16, and 6.3 in 3,070 of bfloat16 under other instruction sets
# (`python -m tests.forgeries --moves`). The edges themselves moved by up to 13.7 in bfloat16, in a
# measurement that no command here repeats
HALF_TIE = 16


def moves_of(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far logits (R, V) move where they are computed again, (R,).

    Parameters
    ----------
    dtype : torch.dtype
        That they were computed in.
    """
    if dtype.itemsize >= 4:
        return torch.full(logits.shape[:1], NEAR_TIE, device=logits.device)
    # without the tokens that a model forbids by a logit far below all others
    scores = logits.float()
    known = scores.where(scores > scores.amax(1, keepdim=True) + LOWEST_LOGPROB, math.nan)
    spread = (known - known.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()
    return (HALF_TIE * torch.finfo(dtype).eps * spread).clamp(min=NEAR_TIE)


@torch.inference_mode()
def edges_of(
    logits: Tensor, tokens: Tensor, moves: Tensor, sampling: Sampling = AS_IS
) -> npt.NDArray[np.float64]:
    """Return between which edges the uniform numbers of a token's key lie, one row per token.

    Parameters
    ----------
    logits : Tensor (R, V)
        Reference logits.
    tokens : Tensor (R,) int64
        One token per row.
    moves : Tensor (R,)
        See `moves_of`; they decide which tokens top-k and top-p may have left.
    sampling : Sampling
        By default the reference itself.

    Returns
    -------
    array (R, levels, 2) float64
        The log-odds of the lower and the upper edge on each level, see `uniforms`. The lower one is
        infinite for a token that cannot have been left.

    Raises
    ------
    PolicyError
        When a logit is not finite.
    """
    if logits.device.type == "mps":  # Apple's GPUs have no float64
        logits, tokens, moves = logits.cpu(), tokens.cpu(), moves.cpu()
    size = max(1, CHUNK // logits.shape[1])
    rows = [slice(at, at + size) for at in range(0, len(tokens), size)]
    edges = [_edges(logits[part], tokens[part], moves[part], sampling) for part in rows]
    return torch.cat(edges).cpu().numpy()


def _edges(logits: Tensor, tokens: Tensor, moves: Tensor, sampling: Sampling) -> Tensor:
    """Return the edges of a few tokens, (R, levels, 2); see `edges_of`."""
    scores = logits.float() / sampling.temperature
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    check_finite(weights)
    surely, _, perhaps = left_of(scores, moves[:, None] / sampling.temperature, sampling)
    least, most = levels_of(weights * surely), levels_of(weights * perhaps)
    found, node = [], tokens  # from a leaf to the top
    for fewer, more in zip(least, most, strict=True):
        digit = node
        if fewer.dim() == 3:
            nodes = fewer.shape[2]
            digit, node = node // nodes, node % nodes
            index = node[:, None, None].expand(-1, BRANCH, 1)
            fewer, more = fewer.gather(2, index)[:, :, 0], more.gather(2, index)[:, :, 0]
        found.append(_log_odds(fewer.double(), more.double(), digit[:, None]))
    edges = torch.stack(found[::-1], dim=1)
    edges[:, :, 0].masked_fill_(~perhaps.gather(1, tokens[:, None]), math.inf)
    return edges


def _log_odds(least: Tensor, most: Tensor, digit: Tensor) -> Tensor:
    """Return the log-odds of the edges of a child, (R, 2).

    The children of its node weigh at least and at most so much (R, k); the edges are those that
    leave it most room.
    """
    place = torch.arange(least.shape[1], device=least.device)
    before, after = place < digit, place > digit
    own = most.gather(1, digit)[:, 0]
    lower = (least * before).sum(1) / (own + (most * after).sum(1))
    upper = ((most * before).sum(1) + own) / (least * after).sum(1)
    return torch.stack([lower, upper], dim=1).log()


def moved_by(
    edges: npt.NDArray[np.float64], u: npt.NDArray[np.float64], sampling: Sampling = AS_IS
) -> npt.NDArray[np.float64]:
    """Return how far logits must have moved since uniform numbers gave these tokens, (R,).

    It is 0 where u (R, WORDS) lies between the edges (R, levels, 2). Logits that move by e move the
    odds of an edge by a factor of at most exp(2 e / temperature).
    """
    place = np.log(u / (1 - u))[:, : edges.shape[1]]
    beyond = np.maximum(edges[:, :, 0] - place, place - edges[:, :, 1]).max(1)
    # NaN, of a token without weight, is no way to draw it
    beyond = np.where(np.isnan(beyond), np.inf, beyond.clip(min=0))
    return beyond * sampling.temperature / 2
