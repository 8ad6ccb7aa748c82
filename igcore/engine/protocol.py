"""What the search needs of a decoding engine. It deals in token ids: no text, scores or budget.

An engine keeps the state of many sequences at once, its rows, from block to block::

    engine.open(prompts)               one row per prompt
    engine.sample_block(rows, keys)    candidates sampled from the given rows
    engine.rollback(keep)              back to the block's start, for a retry
    engine.select(candidates)          the chosen candidates, of all rounds, become the rows

`igcore.engine.local.LocalEngine` does this with a transformers model in this process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from .kv_cache import History

# (index of the candidate in the call, tokens of its block so far)
# -> {token: factor on its reference probability}; other tokens keep theirs, sampling renormalises
Penalty = Callable[[int, tuple[int, ...]], Mapping[int, float]]

# o_t (R, H) and the reference logits W o_t (R, V) -> the logits (R, V) to sample from
Steering = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass
class Block:
    """Candidates of one call of `sample_block` or `propose`, in the order of its rows.

    Attributes
    ----------
    first : int
        Number of the first candidate; they are numbered on over all rounds of a block.
    tokens : list of list of int
        Up to `length` tokens each; shorter when an end token was sampled, which is then the last.
    ended : list of bool
        Whether an end token was sampled.
    log_p, log_q : list of list of float
        Logprob of each token under the reference policy, and under the distribution that it was
        sampled from, penalised or steered (nats).
    near_ties : list of int
        Number of tokens that were a near tie, see `igcore.engine.sampling`.
    encoded : list of int
        Number of tokens that the model has read.
    """

    first: int
    tokens: list[list[int]]
    ended: list[bool]
    log_p: list[list[float]]
    log_q: list[list[float]]
    near_ties: list[int]
    encoded: list[int]

    @classmethod
    def empty(cls, first: int, size: int) -> "Block":
        """Return a block of candidates without tokens."""
        tokens: list[list[int]] = [[] for _ in range(size)]
        log_p: list[list[float]] = [[] for _ in range(size)]
        log_q: list[list[float]] = [[] for _ in range(size)]
        return cls(first, tokens, [False] * size, log_p, log_q, [0] * size, [0] * size)


class Engine(Protocol):
    """Samples blocks of tokens for many sequences at once.

    Every engine promises three things, which make results, resumes and replays reproducible:

    * Keys decide tokens. A token depends on the logits and on its own key alone, never on its
      batch. Logits that differ by rounding change it only where `Block.near_ties` says so.
    * `rollback` is bit-equal. A retry with the same keys gives the same tokens and logprobs.
    * Candidates are numbered from 0 over all rounds since the last `open` or `select`, ended ones
      included. Row i is prompt i after `open`, and ``candidates[i]`` after `select`.

    Notes
    -----
    Only some methods need `history`, `propose` and `steer`; the others run without them.
    """

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill the prompts, one row each: B sequences of at least one token id."""

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalty: Penalty | None = None,
        last: bool = False,
    ) -> Block:
        """Sample one continuation of each given row, at temperature 1 without top-k or top-p.

        Parameters
        ----------
        rows : sequence of R int
            Row of the current state from which each candidate starts; may repeat.
        keys : sequence of R sequences of `length` int
            One `igcore.engine.sampling.random_key` per candidate and position.
        penalty : callable, optional
            Factors on the reference probabilities, see `Penalty`. Where they leave no mass the
            reference is used.
        last : bool
            Whether no candidate will be continued: the model then does not read the last tokens,
            and no candidate can be selected.
        """

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start, so that the next `sample_block` is a retry.

        Parameters
        ----------
        keep : sequence of int
            Live candidates that may still be selected; the KV cache of all others is freed.
        """

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates of any round the rows of the state, in this order.

        Raises
        ------
        KeyError
            When a candidate has ended, was freed or was never sampled: it has no state to continue
            from.
        """

    def history(self, candidates: Sequence[int], keys: bool = True) -> "History":
        """Return o_t and, with `keys`, the KV cache of live candidates, for a critic."""

    def propose(self, rows: Sequence[int], k: int) -> Block:
        """Offer the k most probable next tokens of each row, the most probable first."""

    def steer(self, steering: Steering | None) -> None:
        """Sample all further blocks from changed logits; None restores the reference."""
