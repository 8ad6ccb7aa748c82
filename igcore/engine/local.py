"""The local engine: a transformers model that keeps its KV cache from block to block.

For every row it keeps the KV cache of all layers (the paper's h_t), the last hidden state after the
final norm (o_t) and the reference logits W o_t, so that no prefix is encoded twice. The model reads
every sampled token, except the last one of a response, so that o_t and h_t are those of the block's
end. It reads a proposed token only when the token is selected. A row leaves the batch as soon as it
ends.

Where the model allows it, all rows of a prompt share one KV cache of the prompt
(`igcore.engine.prefix_cache`). Otherwise every row has transformers' own cache
(`igcore.engine.kv_cache`).
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ParameterError, PolicyError, unknown_name
from .kv_cache import DynamicRows, History
from .prefix_cache import SharedRows, fits
from .protocol import Block, Penalty, Steering
from .sampling import NEAR_TIE, WORDS, Drawn, RowFactors, draw, uniforms

Rows = DynamicRows | SharedRows

# how the KV cache is kept; `auto` is `shared` for the models that it fits
CACHES: dict[str, type[Rows] | None] = {"auto": None, "shared": SharedRows, "dynamic": DynamicRows}


class LocalEngine:
    """An `igcore.engine.protocol.Engine` with all its optional methods.

    Parameters
    ----------
    model : transformers causal language model
        Decoder-only, in evaluation mode. Its weights are never touched.
    eos_ids : collection of int
        Tokens that end a sequence.
    cache : str
        How the KV cache is kept, a key of `CACHES`: ``shared`` (each prompt once), ``dynamic``
        (transformers' own), or ``auto``, which is ``shared`` for the models that it fits.
    watch : int, optional
        Decoder layer whose output `history` also returns, as ``middle``.

    Attributes
    ----------
    rows
        The current state, see `igcore.engine.kv_cache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Collection[int],
        cache: str = "auto",
        watch: int | None = None,
    ):
        if cache not in CACHES:
            raise unknown_name("cache", cache, CACHES)
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.kind = CACHES[cache] or (SharedRows if fits(model) else DynamicRows)
        self.watch = watch
        self.steering: Steering | None = None
        self._start(None)

    def _start(self, rows: Rows | None) -> None:
        """Begin a block from these rows."""
        self.rows: Rows = rows  # type: ignore[assignment]  # None before and after all prompts
        # for each round the state of its live candidates, and candidate -> row of that state
        self._rounds: list[tuple[Rows, dict[int, int]]] = []
        self._drawn = 0  # number of candidates of all rounds so far
        self._unread: dict[int, int] = {}  # candidate -> proposed token that is not encoded yet

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill the prompts, one row each: B sequences of at least one token id."""
        self._start(self.kind.open(self.model, prompts, self.watch))

    def steer(self, steering: Steering | None) -> None:
        """Sample all further blocks from changed logits; None restores the reference.

        Only sampling changes: the KV cache stays that of the sampled tokens.
        """
        self.steering = steering

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Sequence[Sequence[int]],
        penalty: Penalty | None = None,
        last: bool = False,
    ) -> Block:
        """Sample one continuation of each given row; see `igcore.engine.protocol.Engine`."""
        length = len(keys[0])
        state: Rows = self.rows.gather([(self.rows, row) for row in rows], room=length)
        u = torch.from_numpy(uniforms([key for row in keys for key in row]))
        u = u.view(len(rows), length, WORDS)
        block = Block.empty(self._drawn, len(rows))
        # candidate of each row of the state; a row leaves the batch when its candidate ends
        live = list(range(len(rows)))
        for step in range(length):
            factors: RowFactors = {}
            if penalty:
                factors = {i: penalty(c, tuple(block.tokens[c])) for i, c in enumerate(live)}
            tokens, log_p, log_q, near = self._draw(state, u[live, step], factors)
            for i, c in enumerate(live):
                block.tokens[c].append(tokens[i])
                block.log_p[c].append(log_p[i])
                block.log_q[c].append(log_q[i])
                block.near_ties[c] += near[i]
                block.ended[c] = tokens[i] in self.eos_ids
            going = [i for i, c in enumerate(live) if not block.ended[c]]
            live = [live[i] for i in going]
            if last and step == length - 1:  # no candidate goes on: save the forward pass
                live = []
            if not live:
                break
            for c in live:
                block.encoded[c] += 1
            state = state.step(going, [tokens[i] for i in going])
        # ended candidates count in the numbering, but have no state to continue from
        self._rounds.append((state, {self._drawn + c: i for i, c in enumerate(live)}))
        self._drawn += len(rows)
        return block

    def _draw(self, state: Rows, u: Tensor, factors: RowFactors) -> Drawn:
        """Sample one token per row of a state; see `igcore.engine.sampling.draw`."""
        if self.steering is None:
            return draw(state.logits, u, factors)
        tokens, _, log_q, near = draw(self.steering(state.hidden, state.logits), u, factors)
        # log_p is that of the reference policy, whatever the token was sampled from
        return tokens, _log_p(state.logits, tokens), log_q, near

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], k: int) -> Block:
        """Offer the k most probable next tokens of each row, the most probable first.

        Each is a candidate of one token. Nothing is sampled or encoded: the model reads a token
        when it is selected. The k-th token counts as a near tie when logits that move by
        `igcore.engine.sampling.NEAR_TIE` could replace it.

        Raises
        ------
        ParameterError
            When the vocabulary has fewer than k tokens.
        PolicyError
            When a logit is not finite.
        """
        log_p = self.rows.logits[list(rows)].log_softmax(-1, dtype=torch.float32)  # (R, V)
        vocabulary = log_p.shape[1]
        if k > vocabulary:
            raise ParameterError(
                f"{k} candidates per token were asked of a vocabulary of {vocabulary}; lower top_k"
            )
        if log_p.isnan().any():
            raise PolicyError(
                "the policy gave logits that are not finite; load it in float32, or check "
                "its weights"
            )
        best, ids = log_p.topk(min(k + 1, vocabulary))  # (R, k + 1), the last to see near ties
        block = Block.empty(self._drawn, len(rows) * k)
        for c, token in enumerate(ids[:, :k].flatten().tolist()):
            block.tokens[c].append(token)
            block.ended[c] = token in self.eos_ids
        for c, value in enumerate(best[:, :k].flatten().tolist()):
            block.log_p[c].append(value)
            block.log_q[c].append(value)
        if k < vocabulary:  # the last of each row may trade places with the one left out
            near = best[:, k - 1] - best[:, k] < 2 * NEAR_TIE
            block.near_ties[k - 1 :: k] = near.int().tolist()
        # k candidates share one row until `select` encodes them
        live = [c for c in range(len(block.tokens)) if not block.ended[c]]
        self._rounds.append((self.rows, {self._drawn + c: rows[c // k] for c in live}))
        self._unread |= {self._drawn + c: block.tokens[c][0] for c in live}
        self._drawn += len(block.tokens)
        return block

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start; see `igcore.engine.protocol.Engine`.

        Blocks are sampled on copies of the rows, so the rows are still the same, bit for bit.
        """
        kept, rounds = set(keep), []
        for state, row_of in self._rounds:
            chosen = [c for c in row_of if c in kept]
            if not chosen:
                continue
            if len(chosen) < len(row_of):  # a smaller copy frees the KV cache of the others
                state = state.gather([(state, row_of[c]) for c in chosen])
                row_of = {c: i for i, c in enumerate(chosen)}
            rounds.append((state, row_of))
        self._rounds = rounds

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates the rows of the state; see `igcore.engine.protocol.Engine`."""
        if not candidates:
            self._start(None)
            return
        # the model reads proposed tokens only now
        unread = [self._unread[c] for c in candidates if c in self._unread]
        rows = self.rows.gather(self._places(candidates), room=1 if unread else 0)
        if unread:
            rows = rows.step(range(len(candidates)), unread)
        self._start(rows)

    def history(self, candidates: Sequence[int], keys: bool = True) -> History:
        """Return o_t and h_t of all tokens so far of live candidates; no token is encoded for it.

        Parameters
        ----------
        candidates : sequence of int
            Of one length.
        keys : bool
            Whether to return the KV cache, which is many times larger than o_t. It is a copy.

        Raises
        ------
        KeyError
            As `select`.
        """
        places = self._places(candidates)
        state, rows = places[0][0], [row for _, row in places]
        if any(other is not state for other, _ in places):  # candidates of several rounds
            state, rows = self.rows.gather(places), list(range(len(places)))
        return state.history(rows, keys)

    def _places(self, candidates: Sequence[int]) -> list[tuple[Rows, int]]:
        """Return the state of each candidate, and its row in that state."""
        place = {c: (state, row) for state, row_of in self._rounds for c, row in row_of.items()}
        if missing := set(candidates) - set(place):
            raise KeyError(
                f"candidates {sorted(missing)} have no state; select live candidates of this block"
            )
        return [place[c] for c in candidates]


@torch.inference_mode()
def _log_p(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the logprob of one token per row of logits (R, V), in nats."""
    index = torch.tensor(tokens, device=logits.device)[:, None]
    log_p = logits.log_softmax(-1, dtype=torch.float32).gather(1, index)[:, 0]
    return log_p.tolist()
