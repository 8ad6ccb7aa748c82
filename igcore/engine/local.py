"""The decoding engine: a transformers model that keeps its KV cache from block to block.

For every row it keeps the KV cache of all layers (the paper's h_t), the last hidden state after the
final norm (o_t) and the reference logits W o_t, so that no prefix is encoded twice. The model reads
every sampled token, except the last one of a response, so that o_t and h_t are those of the block's
end. A row leaves the batch as soon as it ends.

Where the model allows it, all rows of a prompt share one KV cache of the prompt
(`igcore.engine.prefix_cache`). Otherwise every row has transformers' own cache
(`igcore.engine.kv_cache`). `igcore.engine.agreement` tests which of them a model supports.
"""

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .agreement import cache_for
from .block import Block, Ids, Keys, Penalties
from .depths import DynamicDepths, SharedDepths, depths_of
from .diversity import Factors
from .kv_cache import History, Rows
from .sampling import AS_IS, Drawn, RowFactors, Sampling, draw, uniforms


class Engine(Protocol):
    """Samples blocks of tokens for many sequences at once, its rows.

    It works on token ids: no text, scores or budget. Candidates are numbered from 0 over all rounds
    since the last `open` or `select`, ended ones included. Row i is prompt i after `open`, and
    ``candidates[i]`` after `select`. A server has no `history`: no method that needs it gets
    there.
    """

    def open(self, prompts: Ids) -> None:
        """Begin with prompts, one row each: B sequences of at least one token id."""

    def sample_block(
        self, rows: Sequence[int], keys: Keys, penalties: Penalties = None, last: bool = False
    ) -> Block:
        """Sample one continuation of each given row.

        Parameters
        ----------
        rows : sequence of R int
            Row of the current state from which each candidate starts; may repeat.
        keys : sequence of R sequences of `length` int
            One `igcore.engine.sampling.random_key` per candidate and position.
        penalties : sequence of R Penalty or None, optional
            Factors on each candidate's reference probabilities, see
            `igcore.engine.sampling.Sampling`. Where they leave no mass the reference is used.
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

    def go_on(
        self, rows: Sequence[int], texts: Sequence[list[int]], keys: Keys, depth: int
    ) -> Block:
        """Sample the next token of texts, each of which follows the prompt of its row.

        Parameters
        ----------
        rows : sequence of R int
            Prompts in the order of `open`, each once.
        texts : sequence of R lists of int
            Tokens after the prompts, none at first; no end token is among them.
        keys : sequence of R sequences of int
            The first key of each decides its token. An engine may use more of them, and then
            sample as many tokens.
        depth : int
            Most tokens of a text; the same in all calls.
        """

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


class LocalEngine:
    """An `Engine` whose model is here.

    Two guarantees make results, resumes and replays reproducible:

    * Keys decide tokens. A token depends on its sequence and on its own key alone, never on its
      batch: where float32's rounding could change it, a near tie, it is sampled again from its
      sequence alone. In a shorter type near ties are only counted, and a token may depend on its
      batch.
    * `rollback` is bit-equal. A retry with the same keys gives the same tokens and logprobs.

    Parameters
    ----------
    model : transformers causal language model
        Decoder-only, in evaluation mode. Its weights are never touched.
    eos_ids : collection of int
        Tokens that end a sequence.
    cache : str
        How the KV cache is kept, a key of `igcore.engine.agreement.CACHES`: ``shared`` (each prompt
        once), ``dynamic`` (transformers' own), or ``auto``, the first that the model supports.
    watch : int, optional
        Decoder layer whose output `history` also returns, as ``middle``.
    sampling : Sampling, optional
        The distribution of all tokens; by default the policy's own.

    Attributes
    ----------
    rows
        The current state, see `igcore.engine.kv_cache`.
    sequences : list of list of int
        The token ids of each row so far, those of its prompt first.
    redraws : bool
        Whether near ties are sampled again: not in types shorter than float32.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Collection[int],
        cache: str = "auto",
        watch: int | None = None,
        sampling: Sampling | None = None,
    ):
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.kind = cache_for(model, cache)
        self.watch = watch
        self.sampling = sampling or AS_IS
        # in bfloat16 another batch changes 1 token in 8, and 1 in 1,000 is a near tie
        self.redraws = model.dtype.itemsize >= 4
        self._start(None, [])

    def _start(self, rows: Rows | None, sequences: list[list[int]]) -> None:
        """Begin a block from these rows."""
        # the last references to the old states go here, and with them their KV cache
        self.rows: Rows = rows  # type: ignore[assignment]  # None before and after all prompts
        self.sequences = sequences
        self._grown: dict[int, list[int]] = {}  # live candidate -> its sequence
        # live candidate of any round -> the state and the row that it has
        self._places: dict[int, tuple[Rows, int]] = {}
        self._drawn = 0  # number of candidates of all rounds so far
        self._depths: SharedDepths | DynamicDepths | None = None  # made by the first `go_on`

    def open(self, prompts: Ids) -> None:
        """Prefill the prompts, one row each."""
        self._start(self.kind.open(self.model, prompts, self.watch), list(map(list, prompts)))

    def sample_block(
        self,
        rows: Sequence[int],
        keys: Keys,
        penalties: Penalties = None,
        last: bool = False,
        known: Ids = (),
    ) -> Block:
        """Sample one continuation of each given row, see `Engine.sample_block`.

        Parameters
        ----------
        known : sequence of R sequences of int, optional
            The first tokens of each candidate, as many of each; the model reads them, and their
            logprobs are NaN. No end token is among them.
        """
        penalties = penalties or [None] * len(rows)
        length = len(keys[0])
        # 1. copy the rows, so that they stay unchanged for a retry. `reserve` makes space for
        # the whole block, so that steps can write in place
        state = self.rows.gather([(self.rows, row) for row in rows], reserve=length)
        u = torch.stack([torch.from_numpy(uniforms(row)) for row in keys])  # (R, length, WORDS)
        block = Block.empty(self._drawn, len(rows))
        # live[i] is the candidate of row i of the state; a row leaves the batch when its candidate
        # ends, and the numbers of candidates never change
        live = list(range(len(rows)))
        # 2. read the first tokens, which are known for every candidate, without sampling
        n_known = len(known[0]) if known else 0
        for c, tokens in enumerate(known):
            for token in tokens:
                block.append(c, token, math.nan, math.nan, False)
        if n_known:
            state = state.read(known)
        for step in range(n_known, length):
            # 3. sample the next token of each row
            factors: dict[int, Factors] = {}  # none in a first round, which is then cheaper
            for i, c in enumerate(live):
                if penalty := penalties[c]:
                    factors[i] = penalty.at(block.tokens[c])
            tokens, log_p, log_q, near = self.draw_next(state, u[live, step], factors)
            for i, c in enumerate(live):
                # logits differ by some 1e-5 between batches; near an edge of the CDF that decides.
                # Read alone the sequence gives the same token in every batch
                if near[i] and self.redraws:
                    tokens[i], log_p[i], log_q[i] = self._draw_alone(
                        rows[c], block.tokens[c], u[c, step], factors.get(i)
                    )
                block.append(c, tokens[i], log_p[i], log_q[i], near[i])
                block.ended[c] = tokens[i] in self.eos_ids
            # 4. let the model read these tokens, all but end tokens: nothing follows them
            going = [i for i, c in enumerate(live) if not block.ended[c]]
            live = [live[i] for i in going]
            if last and step == length - 1:  # no candidate goes on: save the forward pass
                live = []
            if not live:
                break
            for c in live:
                block.encoded[c] += 1
            state = state.step(going, [tokens[i] for i in going])
        # 5. number the candidates; ended ones get a number as well, but no state to continue from
        for i, c in enumerate(live):
            self._places[self._drawn + c] = (state, i)
            self._grown[self._drawn + c] = self.sequences[rows[c]] + block.tokens[c]
        self._drawn += len(rows)
        return block

    def go_on(
        self, rows: Sequence[int], texts: Sequence[list[int]], keys: Keys, depth: int
    ) -> Block:
        """Sample the next token of texts, see `Engine.go_on`.

        A text may be any: what it shares with the last one of its row is not read again, but for
        one token. Rows that a call leaves out lose their cache.
        """
        if self._depths is None:
            self._depths = depths_of(self.rows, depth)
        logits, encoded = self._depths.read(rows, texts)
        u = torch.from_numpy(uniforms([first for first, *_ in keys]))  # (R, WORDS)
        tokens, log_p, log_q, near = draw(logits, u, {}, self.sampling)
        block = Block.empty(self._drawn, len(rows))
        block.encoded = encoded
        for c, row in enumerate(rows):
            if near[c] and self.redraws:
                tokens[c], log_p[c], log_q[c] = self._draw_alone(row, texts[c], u[c], None)
            block.append(c, tokens[c], log_p[c], log_q[c], near[c])
            block.ended[c] = tokens[c] in self.eos_ids
        return block

    def _draw_alone(
        self, row: int, new: list[int], u: Tensor, factors: Factors | None
    ) -> tuple[int, float, float]:
        """Sample the token after a row and new tokens, read alone and without the cache."""
        # one sequence at a time: read in groups of 2 to 4, left-padded or packed, 95 and 15 % of
        # groups had other logits in SmolLM2-135M, 98 and 56 % in a tiny Llama. Without the row's
        # cache: read on top of it, one token differs between batches by as much as before (6e-5)
        alone = self.rows.alone(row, self.sequences[row] + new)
        tokens, log_p, log_q, _ = self.draw_next(alone, u[None], {0: factors or {}})
        return tokens[0], log_p[0], log_q[0]

    def draw_next(self, state: Rows, u: Tensor, factors: RowFactors) -> Drawn:
        """Sample one token per row of a state; see `igcore.engine.sampling.draw`."""
        return draw(state.logits, u, factors, self.sampling)

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start, see `Engine.rollback`.

        Blocks are sampled on copies of the rows, so the rows are still the same, bit for bit.
        """
        # a round with no kept candidate loses its state, and its memory, here
        self._places = {c: place for c, place in self._places.items() if c in keep}
        if self._places:
            # a copy: one kept row would hold the tensors of its whole round
            rows = self.rows.gather(list(self._places.values()))
            self._places = {c: (rows, i) for i, c in enumerate(self._places)}

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates the rows of the state, see `Engine.select`."""
        if not candidates:  # every search has ended
            self._start(None, [])
            return
        # no reserve: the next block copies the rows again, with space for its length
        rows = self.rows.gather(self._places_of(candidates))
        self._start(rows, [self._grown[c] for c in candidates])

    def history(self, candidates: Sequence[int], keys: bool = True) -> History:
        """Return o_t and h_t of live candidates, see `Engine.history`."""
        places = self._places_of(candidates)
        state = places[0][0]
        rows = [row for _, row in places]
        # candidates of several rounds lie in several states; one state gives one set of tensors
        if any(other is not state for other, _ in places):
            state = self.rows.gather(places)
            rows = list(range(len(places)))
        return state.history(rows, keys)

    def _places_of(self, candidates: Sequence[int]) -> list[tuple[Rows, int]]:
        """Return the state of each candidate, and its row in that state."""
        if missing := set(candidates) - set(self._places):
            raise KeyError(
                f"candidates {sorted(missing)} have no state; select live candidates of this block"
            )
        return [self._places[c] for c in candidates]
