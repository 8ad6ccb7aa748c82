"""The decoding state of many prompts x many beams. Knows token ids only: no text, no scores, no budget.

A state holds, for every row, the keys and values of all layers at all positions so far (the paper's h_t), the last hidden state
after the final norm (o_t) and the reference logits W o_t. It is carried from block to block, so no prefix is encoded twice::

    engine.open(prompts)               one row per prompt
    engine.sample_block(rows, keys)     candidates drawn from the given rows
    engine.rollback(keep)              back to the block's start for a retry; of the candidates so far only `keep` stay selectable
    engine.select(candidates)          the survivors, over all rounds of the block, become the rows

Every sampled token except an end token is forwarded, so that o_t and h_t describe the block's end. A row leaves the batch as soon
as it ends.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from .errors import PolicyError

NEAR_TIE = 1e-4  # arrival times closer than this, relatively, may change places in another batch or on another machine

# What a penalty answers for (index of the row in the call, tokens of its block so far): the factor by which the reference
# probability of a token is multiplied before renormalising. Tokens that are not named keep their probability.
Penalty = Callable[[int, tuple[int, ...]], Mapping[int, float]]


def random_key(seed: int, prompt_id: str, round_: int, beam: int, position: int) -> int:
    """Return the 128 bits that decide one token.

    A hash of five coordinates rather than a stream, so that it depends neither on batch, shard, order nor resume.
    """
    coordinates = f"{seed}|{prompt_id}|{round_}|{beam}|{position}".encode()
    return int.from_bytes(hashlib.blake2b(coordinates, digest_size=16).digest(), "little")


def exponentials(keys: Sequence[int], size: int) -> np.ndarray:
    """Return one standard exponential per key and token, (R, size) float32, from the raw bits of a Philox counter."""
    bits = [np.random.Philox(key=key).random_raw((size + 1) // 2).astype("<u8").view("<u4")[:size] for key in keys]
    return _exponential(np.stack(bits))


def _exponential(bits: np.ndarray) -> np.ndarray:
    """Turn 32 random bits into -log(1 - w) with w in (0, 1): exact where it is small, which is where races are won."""
    w = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return -np.log1p(-np.minimum(w, np.float32(1 - 2**-24)))


@dataclass
class Block:
    """Candidates drawn by one call of `Engine.sample_block`, in the order of its rows.

    Attributes
    ----------
    first : int
        Number of the first candidate; they are numbered on over all rounds of a block.
    tokens : list of list of int
        Up to `length` tokens each; shorter when an end token was drawn, which is then the last.
    ended : list of bool
        Whether an end token was drawn.
    log_p, log_q : list of list of float
        Log-probability of each token under the reference policy, and under the penalised one it was drawn from (nats).
    near_ties : list of int
        Number of tokens of which another nearly won, see `draw`.
    """

    first: int
    tokens: list[list[int]]
    ended: list[bool]
    log_p: list[list[float]]
    log_q: list[list[float]]
    near_ties: list[int]

    @classmethod
    def empty(cls, first: int, size: int) -> "Block":
        tokens, log_p, log_q = ([[] for _ in range(size)] for _ in range(3))
        return cls(first, tokens, [False] * size, log_p, log_q, [0] * size)


@dataclass
class _Rows:
    """Carried state of R sequences of one length L (left padding included)."""

    cache: DynamicCache  # keys and values (R, heads, L, head_dim) per layer
    mask: torch.Tensor  # (R, L) 1 where a token stands, 0 where padding
    hidden: torch.Tensor  # (R, H) o_t
    logits: torch.Tensor  # (R, V) W o_t, float32

    def take(self, rows: Sequence[int]) -> "_Rows":
        """Return a copy with these rows, which may repeat; the original is untouched."""
        index = torch.tensor(rows, device=self.mask.device)
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        cache.batch_select_indices(index)  # makes new tensors inside the copied layers
        return _Rows(cache, self.mask[index], self.hidden[index], self.logits[index])


def _stack(parts: Sequence[_Rows]) -> _Rows:
    """Join states of equal length along the batch."""
    first = parts[0]
    if len(parts) == 1:
        return first
    cache = copy.copy(first.cache)
    cache.layers = [copy.copy(layer) for layer in first.cache.layers]
    for i, layer in enumerate(cache.layers):
        layer.keys = torch.cat([p.cache.layers[i].keys for p in parts])
        layer.values = torch.cat([p.cache.layers[i].values for p in parts])
    joined = [torch.cat([getattr(p, name) for p in parts]) for name in ("mask", "hidden", "logits")]
    return _Rows(cache, *joined)


class Engine:
    """Sample blocks of tokens for many sequences at once, carrying keys, values and the last hidden state.

    Parameters
    ----------
    model : transformers causal language model
        Decoder-only, in evaluation mode. Its weights are never touched.
    eos_ids : collection of int
        Tokens that end a sequence.
    """

    def __init__(self, model, eos_ids: Sequence[int]):
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.rows: _Rows | None = None
        self._rounds: list[tuple[_Rows, dict[int, int]]] = []  # per round: state of live candidates, candidate -> its row
        self._drawn = 0  # candidates drawn since the last select

    def open(self, prompts: Sequence[Sequence[int]]) -> None:
        """Encode the prompts, one row each, left-padded to one length.

        Parameters
        ----------
        prompts : sequence of B sequences of int
            Token ids, at least one per prompt.
        """
        length = max(map(len, prompts))
        ids = torch.zeros(len(prompts), length, dtype=torch.long)  # (B, L); padded ids are masked, so any id serves
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        device = self.model.device
        self.rows = self._forward(ids.to(device), mask.to(device), DynamicCache(config=self.model.config))
        self._rounds, self._drawn = [], 0

    def sample_block(self, rows: Sequence[int], keys: Sequence[Sequence[int]], penalty: Penalty | None = None) -> Block:
        """Draw one continuation from each given row at temperature 1, without top-k or top-p; see `draw`.

        Parameters
        ----------
        rows : sequence of R int
            Row of the current state from which each candidate starts; may repeat.
        keys : sequence of R sequences of `length` int
            One `random_key` per candidate and position.
        penalty : callable, optional
            Factors on the reference probabilities, see `Penalty`. Where they leave no mass the reference is used.

        Returns
        -------
        Block
        """
        state = self.rows.take(rows)
        block = Block.empty(self._drawn, len(rows))
        live = list(range(len(rows)))  # candidate of each row of the state
        for step in range(len(keys[0])):
            factors = {i: penalty(c, tuple(block.tokens[c])) for i, c in enumerate(live)} if penalty else {}
            tokens, log_p, log_q, ties = draw(state.logits, [keys[c][step] for c in live], factors)
            for i, c in enumerate(live):
                block.tokens[c].append(tokens[i])
                block.log_p[c].append(log_p[i])
                block.log_q[c].append(log_q[i])
                block.near_ties[c] += ties[i]
                block.ended[c] = tokens[i] in self.eos_ids
            going = [i for i, c in enumerate(live) if not block.ended[c]]
            if not going:
                live = []
                break
            if len(going) < len(live):
                state = state.take(going)
                live = [live[i] for i in going]
                tokens = [tokens[i] for i in going]
            state = self._step(state, tokens)
        self._rounds.append((state, {self._drawn + c: i for i, c in enumerate(live)}))
        self._drawn += len(rows)
        return block

    def rollback(self, keep: Sequence[int] = ()) -> None:
        """Return to the rows at the block's start, so that the next `sample_block` is a retry.

        The rows were never written to, so the state is the same bit for bit.

        Parameters
        ----------
        keep : sequence of int
            Live candidates that may still be selected; the keys and values of all others are freed.
        """
        self._rounds = [part for part in (_restrict(*r, keep) for r in self._rounds) if part]

    def select(self, candidates: Sequence[int]) -> None:
        """Make these live candidates, numbered over all rounds since the last `select`, the rows of the state, in this order.

        Raises
        ------
        KeyError
            When a candidate has ended, was freed or was never drawn: it has no state to continue from.
        """
        rounds = [part for part in (_restrict(*r, candidates) for r in self._rounds) if part]
        order = [c for _, row_of in rounds for c in row_of]
        if missing := set(candidates) - set(order):
            raise KeyError(f"candidates {sorted(missing)} have no state; select live candidates of this block")
        self.rows = None
        if rounds:
            rows = _stack([state for state, _ in rounds])
            self.rows = rows if order == list(candidates) else rows.take([order.index(c) for c in candidates])
        self._rounds, self._drawn = [], 0

    def _step(self, state: _Rows, tokens: Sequence[int]) -> _Rows:
        """Forward one token per row."""
        ids = torch.tensor(tokens, device=state.mask.device)[:, None]  # (R, 1)
        mask = torch.cat([state.mask, torch.ones_like(ids)], dim=1)  # (R, L + 1)
        return self._forward(ids, mask, state.cache)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> _Rows:
        """Encode the last columns of the sequences; `ids` (R, S) are new, `mask` (R, L) covers everything so far."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # (R, S) counted without the padding
        seen = {}
        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.update(hidden=inputs[0][:, -1]))
        try:
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            hook.remove()
        return _Rows(out.past_key_values, mask, seen["hidden"], out.logits[:, -1].float())


def _restrict(state: _Rows, row_of: dict[int, int], keep: Sequence[int]) -> tuple[_Rows, dict[int, int]] | None:
    """Return the state of those candidates of a round that are in `keep`, or None when there is none."""
    wanted = set(keep)
    chosen = [c for c in row_of if c in wanted]
    if len(chosen) == len(row_of):
        return (state, row_of) if chosen else None
    return (state.take([row_of[c] for c in chosen]), {c: i for i, c in enumerate(chosen)}) if chosen else None


def draw(logits: torch.Tensor, keys: Sequence[int], factors: Mapping[int, Mapping[int, float]]):
    """Draw one token per row from softmax(logits) times the factors, by a race of exponentials.

    Token v arrives at time E_v / q_v, and the first to arrive is a draw from q. An inverse CDF would do with one uniform, but
    float32 logits differ by some 1e-5 between batches and machines, which moves every edge of the CDF of a large vocabulary and
    with it the token drawn wherever edges lie dense. The winner of a race changes only when two arrive almost together.

    Parameters
    ----------
    logits : Tensor (R, V) float32
        Reference logits.
    keys : sequence of R int
        See `random_key`.
    factors : mapping from row to {token: factor}
        Factors on the reference probabilities of a row; a row that they leave without mass uses the reference.

    Returns
    -------
    tokens, log_p, log_q, near : lists of length R
        Token ids; their log-probability before and after the factors (nats); whether the second arrived within `NEAR_TIE`.

    Raises
    ------
    PolicyError
        When a probability is not finite: NaN would look like the first token of the vocabulary.
    """
    p = logits.softmax(-1)  # (R, V)
    if not p.isfinite().all():
        raise PolicyError("the policy gave logits that are not finite; load it in float32, or check its weights")
    q = p.clone() if factors else p
    for row, factor in factors.items():
        if factor:
            named = torch.tensor(list(factor), device=q.device)
            q[row, named] *= torch.tensor(list(factor.values()), dtype=q.dtype, device=q.device)
            mass = q[row].sum()
            q[row] = q[row] / mass if mass > 0 else p[row]
    times = torch.from_numpy(exponentials(keys, logits.shape[1])).to(q.device) / q  # (R, V)
    first, tokens = times.min(-1, keepdim=True)  # (R, 1)
    second = times.scatter(1, tokens, math.inf).min(-1, keepdim=True).values
    near = second < first * (1 + NEAR_TIE)
    log_p = p.gather(1, tokens).log()
    log_q = q.gather(1, tokens).log() if factors else log_p
    return tuple(x[:, 0].tolist() for x in (tokens, log_p, log_q, near))
