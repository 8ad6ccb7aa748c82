"""The result of one call of an engine: a block of new tokens per candidate."""

from collections.abc import Sequence
from dataclasses import dataclass

from .diversity import Penalty

Ids = Sequence[Sequence[int]]  # tokens of several sequences
Keys = Sequence[Sequence[int]]  # of each candidate: `random_key` of each position
Penalties = Sequence[Penalty | None] | None  # of each candidate; None for none at all


@dataclass
class Block:
    """Candidates of one call of `sample_block`, in the order of its rows.

    Attributes
    ----------
    first : int
        Number of the first candidate; the numbers run on over all rounds of a block.
    tokens : list of list of int
        Up to `length` tokens each; shorter when an end token was sampled, which is then the last.
    ended : list of bool
        Whether an end token was sampled.
    log_p, log_q : list of list of float
        Logprob of each token under the reference policy, and under the distribution that it was
        sampled from: tempered, truncated, penalised or steered (nats); NaN where an engine does not
        know it.
    near : list of list of bool
        Whether each token was a near tie (see `igcore.engine.sampling`); in float32 it was then
        sampled again from its sequence alone.
    encoded : list of int
        Number of tokens that the model has read.
    """

    # lists and not tensors: rows are ragged, because each ends at its own end token, and an engine
    # over a server has no tensors

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
            # a new list each: `[[]] * size` would be one list for all candidates
            tokens=[[] for _ in range(size)],
            ended=[False] * size,
            log_p=[[] for _ in range(size)],
            log_q=[[] for _ in range(size)],
            near=[[] for _ in range(size)],
            encoded=[0] * size,
        )
