"""What every engine has, and what a call of it gives: a block of tokens for some candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .diversity import Penalty

if TYPE_CHECKING:
    from .kv_cache import History

# o_t (R, H) and the reference logits W o_t (R, V) -> the logits (R, V) to sample from
Steering = Callable[[Tensor, Tensor], Tensor]


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
        sampled from, penalised or steered (nats); NaN where an engine does not know it.
    near : list of list of bool
        Whether each token was a near tie (see `igcore.engine.sampling`), and drawn again alone.
    encoded : list of int
        Number of tokens that the model has read.
    """

    first: int
    tokens: list[list[int]]
    ended: list[bool]
    log_p: list[list[float]]
    log_q: list[list[float]]
    near: list[list[bool]]
    encoded: list[int]

    def append(self, c: int, token: int, log_p: float, log_q: float, near: bool) -> None:
        """Append a token to candidate `c`."""
        self.tokens[c].append(token)
        self.log_p[c].append(log_p)
        self.log_q[c].append(log_q)
        self.near[c].append(near)

    @classmethod
    def empty(cls, first: int, size: int) -> "Block":
        """Return a block of candidates without tokens."""
        return cls(
            first,
            tokens=[[] for _ in range(size)],
            ended=[False] * size,
            log_p=[[] for _ in range(size)],
            log_q=[[] for _ in range(size)],
            near=[[] for _ in range(size)],
            encoded=[0] * size,
        )


class Engine(Protocol):
    """What a search asks of an engine; `igcore.engine.local.LocalEngine` says it in full.

    One whose model runs elsewhere (`igcore.serve.engine.ServedEngine`) takes no `steering`, and
    its `history` has one middle layer at most: its policy refuses the methods that need more.
    """

    steering: Steering | None

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin with prompts, one row each."""

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalties: Sequence[Penalty | None] | None = None,
        last: bool = False,
    ) -> Block:
        """Sample one continuation of each given row."""
        ...

    def propose(self, rows: Sequence[int], k: int) -> Block:
        """Offer the k most probable next tokens of each row."""
        ...

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start; only `keep` may still be selected."""

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates the rows."""

    def history(self, candidates: Sequence[int], keys: bool = True) -> "History":
        """Return o_t and h_t of live candidates."""
        ...
