"""The state of many sequences with every prompt's keys and values kept once. Knows models and token
ids, nothing of sampling.

A beam search draws many continuations of few prompts. Here the keys and values of a prompt are
encoded once and read by all its rows; those of the new tokens stand in a slab of slots, equally
many to a prompt, and are written in place. New tokens are packed into one sequence without padding
for the matrix products, and scattered into their slots for the attention alone. That attention is
registered with transformers, so that no model is patched; which models it serves is tried once, see
`fits`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from .kv_cache import DynamicRows, History, forward

NAME = "igcore_shared_prefix"
# arguments by which models ask for an attention that is not plain: a capped or windowed score, a
# sink, a bias
NOT_PLAIN = ("softcap", "sliding_window", "s_aux", "position_bias", "attention_bias")


@dataclass
class Prompts:
    """Keys and values of P prompts, left-padded to one length.

    Attributes
    ----------
    ids : list of int
        Number of each prompt among those that were opened.
    keys, values : list of Tensor (P, heads, L, head_dim)
        One pair per layer.
    mask : Tensor (P, L) bool
        Where a token stands.
    """

    ids: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    mask: torch.Tensor

    @cached_property
    def padded(self) -> bool:
        return not self.mask.all()

    def take(self, ids: Sequence[int]) -> "Prompts":
        if list(ids) == self.ids:
            return self
        at = [self.ids.index(i) for i in ids]
        return Prompts(
            list(ids), [k[at] for k in self.keys], [v[at] for v in self.values], self.mask[at]
        )


@dataclass
class Slab:
    """Keys, values and last hidden states of new tokens: C = P * `width` slots, those of prompt p
    from p * `width` on.
    """

    width: int
    keys: list[torch.Tensor]  # (C, heads, capacity, head_dim) per layer
    values: list[torch.Tensor]
    hidden: torch.Tensor  # (C, capacity, H), or 2 H, see `igcore.engine.kv_cache.forward`

    @classmethod
    def empty(cls, prompts: Prompts, width: int, capacity: int, hidden: torch.Tensor) -> "Slab":
        slots = len(prompts.ids) * width
        keys, values = (
            [x.new_zeros(slots, x.shape[1], capacity, x.shape[3]) for x in part]
            for part in (prompts.keys, prompts.values)
        )
        return cls(width, keys, values, hidden.new_zeros(slots, capacity, hidden.shape[-1]))

    def copy_from(self, to: list[int], other: "Slab", slots: list[int], length: int) -> None:
        """Copy the first `length` columns of the other's slots."""
        for mine, theirs in zip(
            [*self.keys, *self.values], [*other.keys, *other.values], strict=True
        ):
            mine[to, :, :length] = theirs[slots, :, :length]
        self.hidden[to, :length] = other.hidden[slots, :length]


class Packing:
    """Where T packed tokens stand: which slot, which column, and what each may see. One per forward
    pass; read by all layers.
    """

    def __init__(
        self,
        prompts: Prompts,
        slab: Slab,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ):
        self.prompts, self.slab = prompts, slab
        device = prompts.mask.device
        self.slot = torch.tensor(
            [c for c, n in zip(slots, counts, strict=True) for _ in range(n)], device=device
        )  # (T,)
        self.step = torch.tensor(
            [s for n in counts for s in range(n)], device=device
        )  # (T,) which of its row's new tokens
        self.column = torch.tensor(
            [a + s for a, n in zip(starts, counts, strict=True) for s in range(n)], device=device
        )  # (T,)
        self.n_slots, self.n_steps = len(prompts.ids) * slab.width, max(counts)
        self.filled = max(a + n for a, n in zip(starts, counts, strict=True))
        self.dense = (
            list(slots) == list(range(self.n_slots)) and self.n_steps == 1
        )  # tokens are slots, nothing to scatter
        self.position = (
            prompts.mask.sum(1)[self.slot // slab.width] + self.column
        )  # (T,) counted without the padding
        self.mask = self._mask(slots, starts)

    def _mask(self, slots: Sequence[int], starts: Sequence[int]) -> torch.Tensor | None:
        """Return (P, 1, width, 1, S, L + n) bool, True where a query may look, or None when it may
        look everywhere.
        """
        prompt = self.prompts.mask
        if self.n_steps == 1 and len(set(starts)) == 1 and not self.prompts.padded:
            return None
        first = torch.zeros(self.n_slots, dtype=torch.long, device=prompt.device)
        first[list(slots)] = torch.tensor(starts, device=prompt.device)
        columns, steps = (
            torch.arange(n, device=prompt.device) for n in (self.filled, self.n_steps)
        )
        suffix = columns <= (first[:, None] + steps)[:, :, None]  # (C, S, n)
        suffix = suffix.view(len(prompt), 1, self.slab.width, 1, self.n_steps, self.filled)
        prefix = prompt[:, None, None, None, None].expand(*suffix.shape[:-1], -1)
        return torch.cat([prefix, suffix], dim=-1)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """(T, ...) -> (C, S, ...), zero where no token stands."""
        if self.dense:
            return x[:, None]
        out = x.new_zeros(self.n_slots, self.n_steps, *x.shape[1:])
        out[self.slot, self.step] = x
        return out

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """(C, S, ...) -> (T, ...)"""
        return x[:, 0] if self.dense else x[self.slot, self.step]

    # what transformers asks of a cache

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_, **__):
        """Write keys and values (1, heads, T, head_dim) of a layer into their slots; `attend` gets
        the packing instead of them.
        """
        for slab, new in ((self.slab.keys[layer], keys), (self.slab.values[layer], values)):
            if self.dense and self.mask is None:
                slab[:, :, self.filled - 1] = new[0].transpose(0, 1)
            else:
                slab[self.slot, :, self.column] = new[0].transpose(0, 1)
        return self, self

    def get_seq_length(self, *_) -> int:
        return self.filled


def attend(
    module,
    query: torch.Tensor,
    key: Packing,
    value: Packing,
    attention_mask,
    scaling=None,
    dropout=0.0,
    **options,
):
    """Attention of packed queries (1, heads, T, head_dim) over their prompt's and their own keys;
    returns (1, T, heads, head_dim).

    All queries of a prompt read its keys in one matrix product. Scores over both parts are
    normalised together.
    """
    if unusual := [name for name in NOT_PLAIN if options.get(name) is not None]:
        raise NotImplementedError(f"attention with {unusual}")
    packing, layer = key, module.layer_idx
    prompt_keys, prompt_values = packing.prompts.keys[layer], packing.prompts.values[layer]
    keys, values = (
        part[layer][:, :, : packing.filled] for part in (packing.slab.keys, packing.slab.values)
    )  # (C, h, n, d)
    (p, h, length, d), width, s, n = (
        prompt_keys.shape,
        packing.slab.width,
        packing.n_steps,
        packing.filled,
    )
    g = query.shape[1] // h  # query heads to a key head
    q = packing.scatter(
        query[0].transpose(0, 1) * (d**-0.5 if scaling is None else scaling)
    )  # (C, S, heads, d)
    q = q.view(p * width, s, h, g, d).permute(0, 2, 3, 1, 4).reshape(p * width, h, g * s, d)
    by_prompt = q.view(p, width, h, g * s, d).transpose(1, 2).reshape(p, h, width * g * s, d)
    over_prompt = by_prompt @ prompt_keys.transpose(2, 3)  # (P, h, width g S, L)
    over_suffix = q @ keys.transpose(2, 3)  # (C, h, g S, n)
    scores = torch.cat(
        [
            over_prompt.view(p, h, width, g * s, length),
            over_suffix.view(p, width, h, g * s, n).transpose(1, 2),
        ],
        dim=-1,
    )
    if packing.mask is not None:
        scores = (
            scores.view(p, h, width, g, s, -1)
            .masked_fill_(~packing.mask, -torch.inf)
            .view_as(scores)
        )
    weights = scores.softmax(
        -1
    )  # (P, h, width, g S, L + n); accumulates in float32 whatever the type
    out = (
        (weights[..., :length].reshape(p, h, width * g * s, length) @ prompt_values)
        .view(p, h, width, g * s, d)
        .transpose(1, 2)
    )
    out = out + (
        weights[..., length:].transpose(1, 2).reshape(p * width, h, g * s, n) @ values
    ).view(p, width, h, g * s, d)
    out = out.reshape(p * width, h, g, s, d).permute(0, 3, 1, 2, 4).reshape(p * width, s, h * g, d)
    return packing.collect(out)[None], None


AttentionInterface.register(NAME, attend)


@contextmanager
def _attention_of(model) -> Iterator[None]:
    """Let a model use `attend`, and give it back as it was. transformers builds no mask for an
    attention it has no mask for.
    """
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@dataclass
class SharedRows:
    """Carried state of R sequences; answers to the names of `igcore.engine.kv_cache`.

    Rows may differ in length, and more than one token may be appended at a time (`extend`).
    """

    model: object
    prompts: Prompts
    slab: Slab
    slots: list[int]  # of each row
    lengths: list[int]  # new tokens of each row
    hidden: torch.Tensor  # (R, H) o_t
    logits: torch.Tensor  # (R, V) W o_t
    watch: int | None = None

    @classmethod
    def open(
        cls, model, prompts: Sequence[Sequence[int]], watch: int | None = None
    ) -> "SharedRows":
        """Encode prompts of one token or more, left-padded to one length; `watch` is a layer whose
        output is kept beside o_t.
        """
        rows = DynamicRows.open(model, prompts, watch)
        layers, n = rows.cache.layers, range(len(prompts))
        shared = Prompts(
            list(n), [x.keys for x in layers], [x.values for x in layers], rows.mask.bool()
        )
        slab = Slab.empty(shared, 1, 0, rows.hidden)
        return cls(
            model, shared, slab, list(n), [0] * len(prompts), rows.hidden, rows.logits, watch
        )

    def owner(self, row: int) -> int:
        """Return the number of a row's prompt."""
        return self.prompts.ids[self.slots[row] // self.slab.width]

    @torch.inference_mode()
    def gather(self, sources: Sequence[tuple["SharedRows", int]], room: int = 0) -> "SharedRows":
        """Copy rows of states that descend from this one, in this order: their new tokens alone.
        The sources are untouched.
        """
        owners = [state.owner(row) for state, row in sources]
        ids = [i for i in self.prompts.ids if i in owners]
        width = max(map(owners.count, ids))
        slots = [ids.index(o) * width + owners[:i].count(o) for i, o in enumerate(owners)]
        lengths = [state.lengths[row] for state, row in sources]
        prompts = self.prompts.take(ids)
        slab = Slab.empty(prompts, width, max(lengths) + room, self.hidden)
        for state in {id(state): state for state, _ in sources}.values():
            mine = [i for i, (other, _) in enumerate(sources) if other is state]
            theirs = [state.slots[sources[i][1]] for i in mine]
            slab.copy_from(
                [slots[i] for i in mine], state.slab, theirs, max(lengths[i] for i in mine)
            )
        hidden, logits = (
            torch.stack([getattr(state, name)[row] for state, row in sources])
            for name in ("hidden", "logits")
        )
        return SharedRows(self.model, prompts, slab, slots, lengths, hidden, logits, self.watch)

    def step(self, going: Sequence[int], tokens: Sequence[int]) -> "SharedRows":
        rows = self
        owners = Counter(map(self.owner, going))
        if 2 * len(owners) * max(owners.values()) <= len(
            self.slab.hidden
        ):  # half of the slots can go
            rows = self.gather(
                [(self, row) for row in going], room=self.slab.hidden.shape[1] - max(self.lengths)
            )
            going = range(len(going))
        rows.slots, rows.lengths = [rows.slots[i] for i in going], [rows.lengths[i] for i in going]
        rows.extend([[token] for token in tokens])
        return rows

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append one token or more to every row, in place."""
        counts = [len(row) for row in tokens]
        packing = Packing(self.prompts, self.slab, self.slots, self.lengths, counts)
        ids = torch.tensor(
            [[token for row in tokens for token in row]], device=packing.slot.device
        )  # (1, T)
        last = [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
        inputs = {
            "input_ids": ids,
            "position_ids": packing.position[None],
            "past_key_values": packing,
        }
        with _attention_of(self.model):
            hidden, logits = forward(self.model, self.watch, **inputs, logits_to_keep=0)
        self.slab.hidden[packing.slot, packing.column] = hidden[0]
        single = packing.n_steps == 1  # indexing would copy the logits, which are large
        self.hidden, self.logits = (x[0] if single else x[0, last] for x in (hidden, logits))
        self.lengths = [a + n for a, n in zip(self.lengths, counts, strict=True)]

    def last_hidden(self, row: int, length: int) -> torch.Tensor:
        """Return o_t (H,) of a row's first `length` new tokens; of none, that of its prompt."""
        return self.slab.hidden[self.slots[row], length - 1] if length else self.hidden[row]

    def history(self, rows: Sequence[int] | None = None, keys: bool = True) -> History:
        """Copy what a critic reads of these rows, by default of all; keys and values only when they
        are wanted.
        """
        rows = range(len(self.slots)) if rows is None else rows
        slots, n = [self.slots[row] for row in rows], max(self.lengths[row] for row in rows)
        parts = (
            [x[slots, :, :n] for x in part] if keys else []
            for part in (self.slab.keys, self.slab.values)
        )
        return History.of(self.slab.hidden[slots, :n], self.watch, *parts)


_FITS: WeakKeyDictionary = WeakKeyDictionary()


def fits(model) -> bool:
    """Tell whether a model gives the same hidden states with the shared cache as with transformers'
    own.

    Models with a sliding window or a linear or latent attention do not fit by their configuration.
    Of the rest a few tokens are tried both ways, once per model: whatever else a model does with
    its keys shows there.
    """
    if model not in _FITS:
        _FITS[model] = _plain(model) and _agrees(model)
    return _FITS[model]


def _plain(model) -> bool:
    open_to_others = getattr(model, "_supports_attention_backend", False)
    return open_to_others and all(
        type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers
    )


def _agrees(model) -> bool:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = [
        i * vocabulary // 11 for i in range(1, 11)
    ]  # special tokens, which magnify rounding, stand at the ends
    states = [kind.open(model, [ids[:3], ids[3:5]]) for kind in (DynamicRows, SharedRows)]
    try:
        for rows, tokens in (((0, 1, 1), ids[5:8]), ((0, 1, 2), ids[7:10])):
            states = [
                s.gather([(s, row) for row in rows], room=1).step(range(3), tokens) for s in states
            ]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    theirs, ours = (s.hidden.float() for s in states)
    return bool(
        ((ours - theirs).norm() <= 4 * torch.finfo(model.dtype).eps ** 0.75 * theirs.norm()).item()
    )


def kv_bytes(model, prompts: int, prompt_tokens: int, rows: int, capacity: int) -> int:
    """Return the bytes of keys and values of `prompts` prompts and `rows` slots of `capacity` new
    tokens.

    layers * 2 * key heads * head_dim * bytes per number * (prompts * prompt_tokens + rows *
    capacity)
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = config.num_hidden_layers * 2 * heads * head_dim * model.dtype.itemsize
    return per_token * (prompts * prompt_tokens + rows * capacity)
