"""Attention with a shared prefix: all rows of a prompt attend to one KV cache of the prompt.

`Prompts` holds the KV cache of each prompt once. A `Slab` holds that of new tokens in slots; every
prompt has the same number of slots. For the matrix products new tokens are packed into one
sequence without padding; only for the attention they are scattered into their slots. A `Packing`
maps tokens to slots and positions. The attention is registered with transformers, so that no model
is patched.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "igcore_shared_prefix"
# arguments of models whose attention is not plain: capped or windowed scores, a sink, a bias
NOT_PLAIN = ("softcap", "sliding_window", "s_aux", "position_bias", "attention_bias")


@dataclass
class Prompts:
    """The KV cache of P prompts, left-padded to one length.

    Attributes
    ----------
    ids : list of int
        Number of each prompt among those that were opened.
    keys, values : list of Tensor (P, heads, L, head_dim)
        One pair per layer.
    mask : Tensor (P, L) bool
        True at tokens, False at padding.
    """

    ids: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor

    @cached_property
    def padded(self) -> bool:
        """Whether any prompt has padding."""
        return not self.mask.all()

    def take(self, ids: Sequence[int]) -> "Prompts":
        """Return some of the prompts, in this order; nothing is copied when these are all."""
        if list(ids) == self.ids:
            return self
        at = [self.ids.index(i) for i in ids]
        keys = [layer[at] for layer in self.keys]
        values = [layer[at] for layer in self.values]
        return Prompts(list(ids), keys, values, self.mask[at])


@dataclass
class Slab:
    """The KV cache and last hidden states of new tokens, in C = P * `width` slots.

    Those of prompt p begin at slot p * `width`; some may be empty.
    """

    width: int
    keys: list[Tensor]  # (C, heads, capacity, head_dim) per layer
    values: list[Tensor]
    hidden: Tensor  # (C, capacity, H), or 2 H, see `igcore.engine.kv_cache.forward`

    @classmethod
    def empty(cls, prompts: Prompts, width: int, capacity: int, hidden: Tensor) -> "Slab":
        """Return empty slots for `capacity` tokens, with the dtypes of `prompts` and `hidden`."""
        slots = len(prompts.ids) * width  # C
        # zeros and not `empty`: memory that was never written may hold NaN, and a softmax weight of
        # 0 times NaN is NaN, even where the mask hides the column

        def zeros(like: Tensor) -> Tensor:
            return like.new_zeros(slots, like.shape[1], capacity, like.shape[3])

        keys = [zeros(layer) for layer in prompts.keys]
        values = [zeros(layer) for layer in prompts.values]
        return cls(width, keys, values, hidden.new_zeros(slots, capacity, hidden.shape[-1]))

    def copy_from(self, to: list[int], other: "Slab", slots: list[int], length: int) -> None:
        """Copy the first `length` columns of the other's slots."""
        # one length for all: a shorter row copies columns beyond its end, which its mask hides
        ours = [*self.keys, *self.values]
        source = [*other.keys, *other.values]
        for new, old in zip(ours, source, strict=True):
            new[to, :, :length] = old[slots, :, :length]
        self.hidden[to, :length] = other.hidden[slots, :length]


class Packing:
    """Positions of T packed tokens and their attention masks, for one forward pass.

    transformers takes it for a cache: every layer writes its keys and values through `update`,
    which passes the packing on to `attend`.

    Parameters
    ----------
    slots, starts, counts : sequences of R int
        For each row: its slot, how many new tokens are there already, and how many follow now.

    Attributes
    ----------
    slot, step, column, position : Tensor (T,)
        For each token: its slot, its number among its row's tokens of this pass, its column in the
        slab, and its position in the text without the padding.
    n_slots, n_steps, filled : int
        C, S (most tokens of a row in this pass), and n (columns in use afterwards).
    mask : Tensor (P, 1, width, 1, S, L + n) bool, or None
        True where a query may attend; None where all queries may attend to all keys.
    """

    def __init__(
        self,
        prompts: Prompts,
        slab: Slab,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ):
        self.prompts = prompts
        self.slab = slab
        device = prompts.mask.device
        # rows lie one after the other: row r gives its counts[r] tokens in columns starts[r] on
        rows = list(zip(slots, starts, counts, strict=True))
        places = [(slot, step, start + step) for slot, start, n in rows for step in range(n)]
        # contiguous: every layer indexes by them
        self.slot, self.step, self.column = torch.tensor(places, device=device).T.contiguous()
        self.n_slots = len(prompts.ids) * slab.width
        self.n_steps = max(counts)
        self.filled = max(start + n for _, start, n in rows)
        # the prompt's real length and not L: padding must not shift the rotary positions
        lengths = prompts.mask.sum(1)  # (P,)
        self.position = lengths[self.slot // slab.width] + self.column
        self.mask = self._mask(slots, starts)

    def _mask(self, slots: Sequence[int], starts: Sequence[int]) -> Tensor | None:
        """Return the attribute ``mask``: causal on new tokens, and without the prompts' padding."""
        prompt = self.prompts.mask
        # every query is its row's last token, and all rows are equally long: each may attend to all
        # columns in use. This is the usual step, and masking its scores would cost a pass over them
        if self.n_steps == 1 and len(set(starts)) == 1 and not self.prompts.padded:
            return None
        first = torch.zeros(self.n_slots, dtype=torch.long, device=prompt.device)
        first[list(slots)] = torch.tensor(starts, device=prompt.device)
        columns = torch.arange(self.filled, device=prompt.device)
        # causal: each query sees the columns up to its own, not those of later tokens of this pass
        # and not those that a longer row or an earlier use has left in the slab
        last = first[:, None] + torch.arange(self.n_steps, device=prompt.device)  # (C, S)
        suffix = columns <= last[:, :, None]  # (C, S, n)
        # an empty slot sees its prompt and column 0: a fully masked row of the softmax would be NaN
        suffix = suffix.view(len(prompt), 1, self.slab.width, 1, self.n_steps, self.filled)
        prefix = prompt[:, None, None, None, None].expand(*suffix.shape[:-1], -1)
        return torch.cat([prefix, suffix], dim=-1)  # (P, 1, width, 1, S, L + n)

    def scatter(self, x: Tensor) -> Tensor:
        """Return packed x (T, ...) by slot, (C, S, ...), with zeros in empty columns."""
        out = x.new_zeros(self.n_slots, self.n_steps, *x.shape[1:])
        out[self.slot, self.step] = x
        return out

    def collect(self, x: Tensor) -> Tensor:
        """Return x by slot (C, S, ...) as packed, (T, ...)."""
        return x[self.slot, self.step]

    # the methods that transformers calls on a cache

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple["Packing", "Packing"]:
        """Write keys and values (1, heads, T, head_dim) of a layer into their slots.

        `attend` gets the packing in their place.
        """
        # in place: torch.cat, as in transformers' cache, would copy the whole cache at every step
        pairs = ((self.slab.keys, keys), (self.slab.values, values))
        for slab, new in pairs:
            slab[layer][self.slot, :, self.column] = new[0].transpose(0, 1)  # (T, heads, head_dim)
        return self, self

    def get_seq_length(self, *_: object) -> int:
        """Return the number of columns in use."""
        return self.filled


def attend(
    module: nn.Module,
    query: Tensor,
    key: Packing,
    value: Packing,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend with packed queries (1, heads, T, head_dim) to their prompt's and their own keys.

    All queries of a prompt attend to its keys in one matrix product. One softmax normalises the
    scores over both parts. Returns (1, T, heads, head_dim).
    """
    # an option that is ignored would give wrong tokens without a word; on this error
    # `igcore.engine.agreement` takes the other cache
    if unusual := [name for name in NOT_PLAIN if options.get(name) is not None]:
        raise NotImplementedError(f"attention with {unusual}")
    packing = key  # from `update`, in place of keys and values
    # `attention_mask` is None: transformers builds no mask for an attention it does not know
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # torch takes it for a submodule
    prompt_keys = packing.prompts.keys[layer]
    prompt_values = packing.prompts.values[layer]
    n = packing.filled
    keys = packing.slab.keys[layer][:, :, :n]  # (C, h, n, d)
    values = packing.slab.values[layer][:, :, :n]
    p, h, length, d = prompt_keys.shape
    width = packing.slab.width
    s = packing.n_steps
    g = query.shape[1] // h  # query heads to a key head (grouped-query attention)

    # 1. queries by slot. The g heads of a key head join its queries, so keys are never repeated
    scale = d**-0.5 if scaling is None else scaling
    scaled = query[0].transpose(0, 1) * scale  # (T, h g, d); cheaper here than on the scores
    q = packing.scatter(scaled).view(p * width, s, h, g, d)
    q = q.permute(0, 2, 3, 1, 4).reshape(p * width, h, g * s, d)  # (C, h, g S, d)
    # all slots of a prompt together: its keys are read once for all its rows
    by_prompt = q.view(p, width, h, g * s, d).transpose(1, 2)
    by_prompt = by_prompt.reshape(p, h, width * g * s, d)

    # 2. scores over the prompt and over the new tokens, side by side for one softmax: two softmaxes
    # would each sum to 1
    over_prompt = by_prompt @ prompt_keys.transpose(2, 3)  # (P, h, width g S, L)
    over_suffix = q @ keys.transpose(2, 3)  # (C, h, g S, n)
    over_prompt = over_prompt.view(p, h, width, g * s, length)
    over_suffix = over_suffix.view(p, width, h, g * s, n).transpose(1, 2)
    scores = torch.cat([over_prompt, over_suffix], dim=-1)  # (P, h, width, g S, L + n)
    if packing.mask is not None:
        # in place: the scores are the largest tensor here
        by_query = scores.view(p, h, width, g, s, -1)
        scores = by_query.masked_fill_(~packing.mask, -torch.inf).view_as(scores)
    weights = scores.softmax(-1)  # accumulates in float32, also for bfloat16

    # 3. weighted values of both parts, added
    on_prompt = weights[..., :length].reshape(p, h, width * g * s, length)
    of_prompt = (on_prompt @ prompt_values).view(p, h, width, g * s, d)
    on_suffix = weights[..., length:].transpose(1, 2).reshape(p * width, h, g * s, n)
    of_suffix = (on_suffix @ values).view(p, width, h, g * s, d)
    out = of_prompt.transpose(1, 2) + of_suffix
    # 4. back to the packed order; empty slots and columns are dropped here
    out = out.reshape(p * width, h, g, s, d).permute(0, 3, 1, 2, 4)  # (C, S, h, g, d)
    return packing.collect(out.reshape(p * width, s, h * g, d))[None], None


AttentionInterface.register(ATTENTION_NAME, attend)


@contextmanager
def attention_of(view: PreTrainedModel) -> Iterator[None]:
    """Let a view of a model use `attend` in a with-block, and restore its own attention."""
    # transformers reads the name from the config in every layer, and builds no mask for a name
    # that is not in its table of masks. A view has a config of its own: the user's is untouched
    config = view.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before
