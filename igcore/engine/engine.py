"""The decoding state of many prompts x many beams. Knows token ids only: no text, no scores, no
budget.

A state holds, for every row, the keys and values of all layers at all positions so far (the paper's
h_t), the last hidden state after the final norm (o_t) and the reference logits W o_t. It is carried
from block to block, so no prefix is encoded twice::

    engine.open(prompts)               one row per prompt
    engine.sample_block(rows, keys)    candidates drawn from the given rows
    engine.propose(rows, k)            candidates of one token instead: the k most probable of each row
    engine.rollback(keep)              back to the block's start for a retry; of the candidates so far only `keep` stay selectable
    engine.select(candidates)          the survivors, over all rounds of the block, become the rows

Every sampled token is forwarded, so that o_t and h_t describe the block's end, except the last one
of a response; a proposed one only when it is selected. A row leaves the batch as soon as it ends.
Prompts are read by all their rows where the model allows it (`igcore.engine.prefix_cache`); for other
models every row has transformers' own cache (`igcore.engine.kv_cache`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ParameterError, PolicyError, unknown_name
from .kv_cache import DynamicRows, History
from .prefix_cache import SharedRows, fits
from .sampling import NEAR_TIE, WORDS, draw, uniforms

# What a penalty answers for (index of the row in the call, tokens of its block so far): the factor
# by which the reference
# probability of a token is multiplied before renormalising. Tokens that are not named keep their
# probability.
Penalty = Callable[[int, tuple[int, ...]], Mapping[int, float]]

# What a steering makes of o_t (R, H) and the reference logits W o_t (R, V): the logits to draw
# from.
Steering = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Block:
    """Candidates of one call of `Engine.sample_block` or `Engine.propose`, in the order of its
    rows.

    Attributes
    ----------
    first : int
        Number of the first candidate; they are numbered on over all rounds of a block.
    tokens : list of list of int
        Up to `length` tokens each; shorter when an end token was drawn, which is then the last.
    ended : list of bool
        Whether an end token was drawn.
    log_p, log_q : list of list of float
        Log-probability of each token under the reference policy, and under the one it was drawn
        from, penalised or steered (nats).
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
        tokens, log_p, log_q = ([[] for _ in range(size)] for _ in range(3))
        return cls(first, tokens, [False] * size, log_p, log_q, [0] * size, [0] * size)


CACHES = {
    "auto": lambda model: SharedRows if fits(model) else DynamicRows,
    "shared": lambda model: SharedRows,
    "dynamic": lambda model: DynamicRows,
}


class Engine:
    """Sample blocks of tokens for many sequences at once, carrying keys, values and the last hidden
    state.

    Parameters
    ----------
    model : transformers causal language model
        Decoder-only, in evaluation mode. Its weights are never touched.
    eos_ids : collection of int
        Tokens that end a sequence.
    cache : str
        How keys and values are kept, a key of `CACHES`: ``shared`` (prompts once), ``dynamic``
        (transformers' own), or ``auto``, which is ``shared`` for the models that it fits.
    watch : int, optional
        Decoder layer whose output `history` returns besides, as ``middle``.
    steering : callable, optional
        Changes the logits that blocks are drawn from, see `Steering`; keys and values stay those of
        the tokens drawn.

    Attributes
    ----------
    rows
        The current state, see `igcore.engine.kv_cache`.
    """

    def __init__(
        self,
        model,
        eos_ids: Sequence[int],
        cache: str = "auto",
        watch: int | None = None,
        steering: Steering | None = None,
    ):
        if cache not in CACHES:
            raise unknown_name("cache", cache, CACHES)
        self.model, self.eos_ids, self.kind, self.watch = (
            model,
            frozenset(eos_ids),
            CACHES[cache](model),
            watch,
        )
        self.steering, self.rows = steering, None
        self._rounds: list[
            tuple[object, dict[int, int]]
        ] = []  # per round: state of live candidates, candidate -> its row
        self._drawn = 0  # candidates drawn since the last select
        self._unread: dict[int, int] = {}  # candidate -> proposed token that is not encoded yet

    def steer(self, steering: Steering) -> None:
        """Change the logits that blocks are drawn from."""
        self.steering = steering

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Encode the prompts, one row each: B sequences of at least one token id."""
        self.rows = self.kind.open(self.model, prompts, self.watch)
        self._rounds, self._drawn, self._unread = [], 0, {}

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalty: Penalty | None = None,
        last: bool = False,
    ) -> Block:
        """Draw one continuation from each given row at temperature 1, without top-k or top-p; see
        `igcore.engine.sampling.draw`.

        Parameters
        ----------
        rows : sequence of R int
            Row of the current state from which each candidate starts; may repeat.
        keys : sequence of R sequences of `length` int
            One `random_key` per candidate and position.
        penalty : callable, optional
            Factors on the reference probabilities, see `Penalty`. Where they leave no mass the
            reference is used.
        last : bool
            Whether no candidate will be continued: its last token is then not forwarded, and none
            can be selected.

        Returns
        -------
        Block
        """
        length = len(keys[0])
        state = self.rows.gather([(self.rows, row) for row in rows], room=length)
        u = torch.from_numpy(uniforms([key for row in keys for key in row])).view(
            len(rows), length, WORDS
        )
        block = Block.empty(self._drawn, len(rows))
        live = list(range(len(rows)))  # candidate of each row of the state
        for step in range(length):
            factors = (
                {i: penalty(c, tuple(block.tokens[c])) for i, c in enumerate(live)}
                if penalty
                else {}
            )
            logits = self.steering(state.hidden, state.logits) if self.steering else state.logits
            tokens, log_p, log_q, ties = draw(logits, u[live, step], factors)
            if self.steering:
                log_p = _log_p(state.logits, tokens)
            for i, c in enumerate(live):
                block.tokens[c].append(tokens[i])
                block.log_p[c].append(log_p[i])
                block.log_q[c].append(log_q[i])
                block.near_ties[c] += ties[i]
                block.ended[c] = tokens[i] in self.eos_ids
            going = [i for i, c in enumerate(live) if not block.ended[c]]
            live = [live[i] for i in going]
            if last and step == length - 1:
                live = []
            if not live:
                break
            for c in live:
                block.encoded[c] += 1
            state = state.step(going, [tokens[i] for i in going])
        self._rounds.append((state, {self._drawn + c: i for i, c in enumerate(live)}))
        self._drawn += len(rows)
        return block

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], k: int) -> Block:
        """Offer the k most probable next tokens of each given row, the most probable first, as
        candidates of one token.

        Nothing is drawn and nothing encoded: the model reads a token when `select` takes it. A k-th
        token that logits moved by `igcore.engine.sampling.NEAR_TIE` would replace counts as a near tie.

        Raises
        ------
        ParameterError
            When the vocabulary has fewer than k tokens.
        PolicyError
            When a logit is not finite.
        """
        log_p = self.rows.logits[list(rows)].log_softmax(-1, dtype=torch.float32)  # (R, V)
        if k > log_p.shape[1]:
            raise ParameterError(
                f"{k} candidates per token were asked of a vocabulary of {log_p.shape[1]}; "
                f"lower top_k"
            )
        if log_p.isnan().any():
            raise PolicyError(
                "the policy gave logits that are not finite; load it in float32, or check "
                "its weights"
            )
        best, ids = log_p.topk(min(k + 1, log_p.shape[1]))  # (R, k + 1), or all of them
        tokens, log_p = (x[:, :k].flatten().tolist() for x in (ids, best))
        n, ended = len(tokens), [token in self.eos_ids for token in tokens]
        block = Block(
            self._drawn,
            [[t] for t in tokens],
            ended,
            [[x] for x in log_p],
            [[x] for x in log_p],
            [0] * n,
            [0] * n,
        )
        if best.shape[1] > k:
            block.near_ties[k - 1 :: k] = (
                (best[:, k - 1] - best[:, k] < 2 * NEAR_TIE).int().tolist()
            )
        live = [c for c in range(n) if not ended[c]]
        self._rounds.append((self.rows, {self._drawn + c: rows[c // k] for c in live}))
        self._unread |= {self._drawn + c: tokens[c] for c in live}
        self._drawn += n
        return block

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start, so that the next `sample_block` is a retry.

        The rows were never written to, so the state is the same bit for bit and nothing is copied.

        Parameters
        ----------
        keep : sequence of int
            Live candidates that may still be selected; the keys and values of all others are freed.
        """
        wanted = set(keep)
        kept = [
            (state, [c for c in row_of if c in wanted], row_of) for state, row_of in self._rounds
        ]
        self._rounds = [
            (
                state
                if len(chosen) == len(row_of)
                else state.gather([(state, row_of[c]) for c in chosen]),
                chosen,
            )
            for state, chosen, row_of in kept
            if chosen
        ]
        self._rounds = [
            (state, {c: i for i, c in enumerate(chosen)}) for state, chosen in self._rounds
        ]

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates, numbered over all rounds since the last `select`, the rows of
        the state, in this order.

        Raises
        ------
        KeyError
            When a candidate has ended, was freed or was never drawn: it has no state to continue
            from.
        """
        unread = [self._unread[c] for c in candidates if c in self._unread]
        self.rows = (
            self.rows.gather(self._places(candidates), room=int(bool(unread)))
            if candidates
            else None
        )
        if unread:
            self.rows = self.rows.step(range(len(candidates)), unread)
        self._rounds, self._drawn, self._unread = [], 0, {}

    def history(self, candidates: Sequence[int], keys: bool = True) -> History:
        """Return o_t and h_t of all tokens so far of live candidates, for a critic; no token is
        encoded for it.

        Parameters
        ----------
        candidates : sequence of int
            Of one length.
        keys : bool
            Whether keys and values are wanted, which are many times larger than o_t. What is
            returned is a copy.

        Raises
        ------
        KeyError
            As `select`.
        """
        places = self._places(candidates)
        state, rows = places[0][0], [row for _, row in places]
        if any(other is not state for other, _ in places):  # of several rounds
            state, rows = self.rows.gather(places), range(len(places))
        return state.history(rows, keys)

    def _places(self, candidates: Sequence[int]) -> list[tuple[object, int]]:
        place = {c: (state, row) for state, row_of in self._rounds for c, row in row_of.items()}
        if missing := set(candidates) - set(place):
            raise KeyError(
                f"candidates {sorted(missing)} have no state; select live candidates of this block"
            )
        return [place[c] for c in candidates]


@torch.inference_mode()
def _log_p(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of one token per row of logits (R, V), in nats."""
    index = torch.tensor(tokens, device=logits.device)[:, None]
    return logits.log_softmax(-1, dtype=torch.float32).gather(1, index)[:, 0].tolist()
