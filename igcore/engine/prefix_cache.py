"""Prefix cache: the state of many sequences, with the KV cache of every prompt kept once.

A beam search samples many continuations of few prompts. Here a prompt is prefilled once, and all
its rows attend to the same KV cache. The keys and values of new tokens are written in place, into
slots; see `igcore.engine.attention`. `igcore.engine.agreement` tests whether a model supports
this.

Inside `igcore.engine.prepack.use_prepacked`, and from call to call, the same prompts together are
read once, see `prefixes`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import Packing, Prompts, Slab
from .block import Ids
from .kv_cache import DynamicRows, History, Rows, forward, padded, padded_keys
from .prepack import viewed

MOST_KEPT = 2**28  # bytes of prompts in the cache of a view
PADDING = 1.25  # longest over shortest prompt of a batch, at most: the rest would be padding
LONG = 256  # tokens; a longer prompt is read without others, and its near ties start from it


@dataclass
class SharedRows:
    """The state of R sequences that share the KV cache of their prompts.

    Rows may differ in length, and more than one token may be appended at a time (`read`).
    """

    model: PreTrainedModel
    prompts: Prompts
    slab: Slab
    slots: list[int]  # of each row
    lengths: list[int]  # new tokens of each row
    hidden: Tensor  # (R, H) o_t
    logits: Tensor  # (R, V) W o_t
    watch: int | None = None

    @classmethod
    def open(cls, model: PreTrainedModel, prompts: Ids, watch: int | None = None) -> "SharedRows":
        """Prefill prompts, left-padded to one length."""
        read = prefixes(model, prompts, watch)
        # zip turns the layers of each prompt into the prompts of each layer: (P, heads, L, d)
        keys = list(map(padded_keys, zip(*(prefix.keys for prefix in read), strict=True)))
        values = list(map(padded_keys, zip(*(prefix.values for prefix in read), strict=True)))
        hidden = torch.stack([prefix.hidden for prefix in read])  # (P, H)
        logits = torch.stack([prefix.logits for prefix in read])  # (P, V)
        _, mask = padded(prompts, hidden.device)
        numbers = list(range(len(prompts)))
        shared = Prompts(numbers, keys, values, mask.bool())
        # one slot per prompt and no column: no new token yet
        slab = Slab.empty(shared, 1, 0, hidden)
        return cls(model, shared, slab, numbers[:], [0] * len(prompts), hidden, logits, watch)

    def owner(self, row: int) -> int:
        """Return the number of a row's prompt."""
        return self.prompts.ids[self.slots[row] // self.slab.width]

    @torch.inference_mode()
    def gather(
        self, sources: Sequence[tuple[Self, int]], reserve: int = 0, lengths: Sequence[int] = ()
    ) -> "SharedRows":
        """Copy the new tokens of rows of states that descend from this one, in this order.

        The sources do not change. Each slot has space for `reserve` more tokens. With `lengths`
        only so many tokens of each row are copied.
        """
        owners = [state.owner(row) for state, row in sources]
        ids = [i for i in self.prompts.ids if i in owners]  # prompts without a row are dropped
        # the same number of slots for every prompt, so that one matrix product serves them all; it
        # is that of the prompt with most rows, and the others have empty slots
        width = max(Counter(owners).values())
        # each row gets the first free slot of its prompt
        free = {owner: count(at * width) for at, owner in enumerate(ids)}
        slots = [next(free[owner]) for owner in owners]
        lengths = list(lengths) or [state.lengths[row] for state, row in sources]
        prompts = self.prompts.take(ids)
        slab = Slab.empty(prompts, width, max(lengths) + reserve, self.hidden)
        # one copy per source state and not per row: few large copies are faster than many small
        states = {id(state): state for state, _ in sources}
        for state in states.values():
            chosen = [i for i, (source, _) in enumerate(sources) if source is state]
            new = [slots[i] for i in chosen]
            old = [state.slots[sources[i][1]] for i in chosen]
            longest = max(lengths[i] for i in chosen)
            slab.copy_from(new, state.slab, old, longest)
        hidden = torch.stack([state.hidden[row] for state, row in sources])
        logits = torch.stack([state.logits[row] for state, row in sources])
        return SharedRows(self.model, prompts, slab, slots, lengths, hidden, logits, self.watch)

    def step(self, going: Sequence[int], tokens: Sequence[int]) -> "SharedRows":
        """Append one token to each row that goes on."""
        rows = self
        owners = Counter(map(self.owner, going))
        # slots that `gather` would make for the rows that go on
        needed = len(owners) * max(owners.values())
        # a copy pays only when it frees half of the slots; until then ended rows leave theirs empty
        if 2 * needed <= len(self.slab.hidden):
            reserve = self.slab.hidden.shape[1] - max(self.lengths)
            rows = self.gather([(self, row) for row in going], reserve)
            going = range(len(going))
        rows.slots = [rows.slots[i] for i in going]
        rows.lengths = [rows.lengths[i] for i in going]
        return rows.read([[token] for token in tokens])

    @torch.inference_mode()
    def read(self, tokens: Ids) -> "SharedRows":
        """Append one token or more to every row, in place and in one pass."""
        counts = [len(row) for row in tokens]
        packing = Packing(self.prompts, self.slab, self.slots, self.lengths, counts)
        # rows one after the other, as one sequence without padding; the model's other layers treat
        # tokens one by one, and `attend` keeps rows apart
        sequence = [token for row in tokens for token in row]
        inputs = {
            "input_ids": torch.tensor([sequence], device=packing.slot.device),  # (1, T)
            "position_ids": packing.position[None],  # of each row's text, not of the sequence
            "cache": packing,
            "logits_to_keep": 0,  # all: rows end anywhere in the packed sequence
        }
        hidden, logits = forward(self.model, self.watch, **inputs)
        self.slab.hidden[packing.slot, packing.column] = hidden[0]
        self.hidden = hidden[0]
        self.logits = logits[0]
        if packing.n_steps > 1:  # else each row's only token; indexing would copy the large logits
            last = [end - 1 for end in accumulate(counts)]
            self.hidden = self.hidden[last]
            self.logits = self.logits[last]
        self.lengths = [a + n for a, n in zip(self.lengths, counts, strict=True)]
        return self

    def alone(self, row: int, sequence: Sequence[int]) -> Rows:
        """Read a sequence that grew from a row's prompt, in one piece and without others.

        A long prompt was read without others already: only its last token is read again.
        """
        # a short prompt was read beside others, padded, so its cache has their rounding
        prompt = self.slots[row] // self.slab.width
        length = int(self.prompts.mask[prompt].sum())
        if length <= LONG:
            return DynamicRows.open(self.model, [sequence])
        # all but the last token: a pass needs one token to read, and starts with this one. Padding
        # is on the left, so the last `length` columns are the prompt
        keys = [layer[[prompt], :, -length:-1] for layer in self.prompts.keys]
        values = [layer[[prompt], :, -length:-1] for layer in self.prompts.values]
        known = Prompts([0], keys, values, self.prompts.mask[[prompt], -length:-1])
        rest = sequence[length - 1 :]
        slab = Slab.empty(known, 1, len(rest), self.hidden)
        return replace(self, prompts=known, slab=slab, slots=[0], lengths=[0]).read([rest])

    def last_hidden(self, row: int, length: int, count: int = 1) -> Tensor:
        """Return o_t (count, H) of the last `count` of a row's first `length` new tokens.

        With `length` 0 it is o_t of its prompt, (1, H).
        """
        if not length:
            return self.hidden[row][None]
        return self.slab.hidden[self.slots[row], length - count : length]

    def history(self, rows: Sequence[int], keys: bool = True) -> History:
        """Copy the states of these rows, which a critic reads, with the KV cache if `keys`."""
        slots = [self.slots[row] for row in rows]
        n = max(self.lengths[row] for row in rows)  # rows of one length, as the engine asks
        layers, prefix = len(self.slab.keys) if keys else 0, self.prompts
        # indexing by a list copies: later steps write into the slab
        return History.of(
            self.slab.hidden[slots, :n],
            self.watch,
            keys=[x[slots, :, :n] for x in self.slab.keys[:layers]],
            values=[x[slots, :, :n] for x in self.slab.values[:layers]],
            prompts=History(prefix.mask, keys=prefix.keys, values=prefix.values) if keys else None,
            owner=[slot // self.slab.width for slot in slots],
        )


# --- prompts --------------------------------------------------------------------------------------


@dataclass
class Prefix:
    """The cached KV cache of a prompt of l tokens, and its last states."""

    keys: list[Tensor]  # (heads, l, head_dim) per layer
    values: list[Tensor]
    hidden: Tensor  # (H,) o_t, or (2 H,), see `igcore.engine.kv_cache.forward`
    logits: Tensor  # (V,) W o_t

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.nbytes for x in [*self.keys, *self.values, self.hidden, self.logits])


def prefixes(model: PreTrainedModel, prompts: Ids, watch: int | None) -> list[Prefix]:
    """Return the keys and values of each prompt; cached prompts are not read again.

    The cache lives as long as the model's view and holds at most `MOST_KEPT` bytes; the prompts
    that were used last stay.
    """
    cache, wanted = viewed(model).prefixes, list(map(tuple, prompts))
    read: dict[tuple[int, ...], Prefix] = {}
    # one order, because the batch decides the last bits of its prompts. So only a whole batch is
    # found again: what was read before changes no bit
    for part in _batches(sorted(set(wanted), key=lambda prompt: (len(prompt), prompt))):
        key = (watch, *part)
        # taken out and put back: the order of the dictionary is the order of use
        cache[key] = cache.pop(key, None) or _read(model, part, watch)
        read |= cache[key]
    size = sum(prefix.nbytes for known in cache.values() for prefix in known.values())
    while size > MOST_KEPT:  # evict the least recently used
        size -= sum(prefix.nbytes for prefix in cache.popitem(last=False)[1].values())
    return [read[prompt] for prompt in wanted]


def _batches(prompts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield batches of prompts, the shortest first, of about one length: the rest is padding."""
    while prompts:
        most = min(PADDING * len(prompts[0]), LONG)  # a long one is read alone
        part = [prompt for prompt in prompts if len(prompt) <= most] or list(prompts[:1])
        yield part
        prompts = prompts[len(part) :]


def _read(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], watch: int | None
) -> dict[tuple[int, ...], Prefix]:
    """Read prompts in one batch."""
    rows = DynamicRows.open(model, prompts, watch)
    return {
        # clones without the padding: slices would keep the large tensors of the whole batch
        prompt: Prefix(
            [layer.keys[i, :, -len(prompt) :].clone() for layer in rows.cache.layers],
            [layer.values[i, :, -len(prompt) :].clone() for layer in rows.cache.layers],
            rows.hidden[i],
            rows.logits[i].clone(),
        )
        for i, prompt in enumerate(prompts)
    }
