"""The state of many sequences in transformers' own KV cache, for any decoder-only model.

Every row has its own copy of the prompt's KV cache, and each step copies the cache.
`igcore.engine.prefix_cache` avoids both; `igcore.engine.agreement` chooses between them. Both are
`Rows`.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from threading import get_ident
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from ..errors import PolicyError
from .attention import Packing, attention_of
from .block import Ids
from .device import device_of
from .prepack import viewed

Cache: TypeAlias = DynamicCache | Packing


@dataclass
class History:
    """The hidden states and KV cache of R rows, n tokens each since their prompts.

    Attributes
    ----------
    mask : Tensor (R, n) bool
        True at tokens; rows are padded on the right.
    hidden : Tensor (R, n, H) or None
        o_t: the hidden state after the final norm; None where the model was stopped before it.
    middle : Tensor (R, n, H) or None
        The output of the watched layer.
    keys, values : list of Tensor (R, heads, n, head_dim)
        h_t: one pair per layer that has attention; a sliding window has only its last tokens.
        Empty if they are not read.
    prompts : History or None
        The KV cache of P prompts, padded on the left and not copied; None if it is not read.
    owner : list of R int
        The index of each row's prompt.
    """

    mask: Tensor
    hidden: Tensor | None = None
    middle: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    prompts: "History | None" = None
    owner: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, states: Tensor, watch: int | None, **others: Any) -> "History":
        """Split states (R, n, H or 2 H) of rows of one length, as `forward` joins them."""
        # (R, n, 2 H): o_t first, the watched layer second
        hidden, middle = (states, None) if watch is None else states.chunk(2, dim=-1)
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return cls(mask, hidden, middle, **others)


class Rows(Protocol):
    """The state of R sequences, with the KV cache that they need to go on.

    Attributes
    ----------
    hidden : Tensor (R, H)
        o_t of each row.
    logits : Tensor (R, V)
        W o_t.
    """

    hidden: Tensor
    logits: Tensor

    @classmethod
    def open(cls, model: PreTrainedModel, prompts: Ids, watch: int | None = None) -> Self:
        """Prefill prompts of one token or more, one row each.

        `watch` is a layer whose output is kept beside o_t.
        """

    def gather(self, sources: Sequence[tuple[Self, int]], reserve: int = 0) -> Self:
        """Copy rows of one or more states of one kind, with space for `reserve` more tokens."""

    def step(self, going: Sequence[int], tokens: Sequence[int]) -> Self:
        """Append one token to each row that goes on; the others are dropped."""

    def read(self, tokens: Ids) -> Self:
        """Append equally many tokens to each row."""

    def alone(self, row: int, sequence: Sequence[int]) -> "Rows":
        """Read a sequence that grew from a row's prompt, in one piece and without others."""

    def history(self, rows: Sequence[int], keys: bool = True) -> History:
        """Copy o_t of all tokens of these rows since the prompt, with the KV cache if `keys`."""


def cache_name(model: PreTrainedModel) -> str:
    """Return a model's parameter for the KV cache: ``cache`` from transformers 5.24 on."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


class _StopForward(Exception):
    """Raised in a hook to end a forward pass early, when the last wanted tensor is there."""


def watched(
    view: PreTrainedModel, watch: int | None, cache: Cache | None, last: str = "", **inputs: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Run a view of a model; return its output and the tensors that hooks have recorded.

    These are ``hidden``, the input of its head, if it has one, and ``middle``, the output of the
    decoder layer `watch`. The pass ends as soon as `last` is recorded; the output is then None.
    """
    seen: dict[str, Tensor] = {}
    thread = get_ident()  # a model without a view may run in another thread at the same time

    def note(name: str, states: Tensor) -> None:
        # without this check that thread would write its states here, or be stopped
        if get_ident() == thread:
            seen[name] = states
            if name == last:
                raise _StopForward

    def at_head(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        note("hidden", args[0])

    def at_middle(_: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        note("middle", out[0] if isinstance(out, tuple) else out)  # some layers return a tuple

    # hooks, because ``output_hidden_states`` would keep the hidden states of every layer. They are
    # on the view and removed at the end, also after an error: the user's model never has them
    with ExitStack() as hooks:
        if (head := view.get_output_embeddings()) is not None:
            hooks.enter_context(head.register_forward_pre_hook(at_head))
        if watch is not None:
            layer = view.get_decoder().layers[watch]
            hooks.enter_context(layer.register_forward_hook(at_middle))
        if cache is not None:
            inputs[cache_name(view)] = cache
        # in the type of the weights, which caches and copies have, even if the caller casts
        with suppress(_StopForward), torch.autocast(device_of(view).type, enabled=False):
            return view(**{"use_cache": True, **inputs}), seen
    return None, seen


@torch.inference_mode()
def forward(
    model: PreTrainedModel, watch: int | None = None, cache: Cache | None = None, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Run a view of a model, on a KV cache if given; return o_t (the input of its head) and logits.

    With `watch` the output of that decoder layer follows o_t in the same tensor: (..., H) becomes
    (..., 2 H). A model without a head has logits of width 0. With a `Packing` as the cache, rows
    share prefixes.

    Raises
    ------
    NotImplementedError
        When rows cannot share prefixes, because the model has no view of its own.
    PolicyError
        When the model ignores the KV cache that it is given: every token would be sampled without
        its context.
    """
    view = viewed(model).model
    head = view.get_output_embeddings()
    if head is None:  # a backbone, as of a scorer: it does not know the argument
        inputs.pop("logits_to_keep")
    if not isinstance(cache, Packing):
        out, seen = watched(view, watch, cache, **inputs)
    elif view is model:  # the attention below would be set on the user's own model
        raise NotImplementedError(f"{type(model).__name__} has no view")
    else:
        with attention_of(view):
            out, seen = watched(view, watch, cache, **inputs)
    if cache is not None and getattr(out, cache_name(view), None) is not cache:
        raise PolicyError(
            f"{type(model).__name__} does not carry its state in a KV cache that it is given; "
            "choose a model that does"
        )
    # o_t is what the head reads: after the final norm, and after all that a model adds to it there
    hidden = out.last_hidden_state if head is None else seen["hidden"]  # (B, S, H)
    logits = hidden.new_zeros(*hidden.shape[:-1], 0) if head is None else out.logits
    if watch is None:
        return hidden, logits
    # `logits_to_keep` may cut the head's input to the last columns; the layer's output has them
    # all, and may be on another device
    middle = seen["middle"][:, -hidden.shape[1] :].to(hidden.device)
    return torch.cat([hidden, middle], dim=-1), logits


def padded(sequences: Ids, device: torch.device, side: str = "left") -> tuple[Tensor, Tensor]:
    """Return ids (B, L) and mask (B, L), 1 at tokens; the masked ids are 0."""
    # prompts are padded on the left, so that all rows end, and go on, in the same column
    rows = [torch.tensor(s, dtype=torch.long) for s in sequences]
    ones = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return ids.to(device), mask.to(device)


def padded_keys(rows: Sequence[Tensor]) -> Tensor:
    """Return keys or values (heads, l, head_dim) of prompts together, padded on the left."""
    by_token = [x.transpose(0, 1) for x in rows]
    together = pad_sequence(by_token, batch_first=True, padding_side="left")  # (P, L, heads, d)
    return together.transpose(1, 2).contiguous()


def inputs_of(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return a model's inputs for the last columns (B, S) of sequences.

    `mask` (B, L) covers the columns before them, too; left padding does not count in positions.
    """
    # models count positions from the first column unless they get them: a padded prompt would be
    # read at other positions than alone. clamp: padding would have -1, which no table holds
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}


@dataclass
class DynamicRows:
    """The state of R sequences of one length L, left padding included.

    The last columns are new tokens, those before them the prompts.
    """

    model: PreTrainedModel
    cache: DynamicCache  # keys and values (R, heads, L, head_dim) per layer
    mask: Tensor  # (R, L)
    hidden: Tensor  # (R, H) o_t, or (R, 2 H), see `forward`
    logits: Tensor  # (R, V) W o_t
    past: Tensor  # (R, length, H) o_t of every new token
    watch: int | None = None

    @classmethod
    def open(cls, model: PreTrainedModel, prompts: Ids, watch: int | None = None) -> "DynamicRows":
        """Prefill prompts, left-padded to one length."""
        ids, mask = padded(prompts, device_of(model))
        cache = DynamicCache(config=model.config)  # the config decides each layer's kind
        hidden, logits = _read(model, watch, ids, mask, cache)
        past = hidden[:, None][:, :0]  # no new token yet, in the right type and width
        return cls(model, cache, mask, hidden, logits, past, watch)

    @torch.inference_mode()
    def gather(self, sources: Sequence[tuple[Self, int]], reserve: int = 0) -> Self:
        """Copy rows of states of equal length, in this order; the sources do not change.

        `reserve` is for `SharedRows`: this cache grows by itself.
        """
        states, rows = zip(*sources, strict=True)
        # shallow copies, whose tensors are replaced; the sources keep theirs. So a rollback needs
        # no undoing: the rows of the block's start are still there, bit for bit
        cache = copy.copy(states[0].cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for i, layer in enumerate(cache.layers):
            # any kind of layer: keys and values, a window, a convolution, a recurrent state
            parts = [vars(state.cache.layers[i]) for state in states]
            vars(layer).update(_pick(parts, rows))
        tensors = {}
        for name in ("mask", "hidden", "logits", "past"):
            parts = [getattr(state, name) for state in states]
            tensors[name] = _pick(parts, rows)
        return replace(self, cache=cache, **tensors)

    @torch.inference_mode()
    def step(self, going: Sequence[int], tokens: Sequence[int]) -> Self:
        """Append one token to each row that goes on."""
        rows = self
        if len(going) < len(self.mask):  # drop the rows that have ended: they would only cost time
            rows = self.gather([(self, row) for row in going])
        ids = torch.tensor(tokens, device=rows.mask.device)[:, None]  # (R, 1)
        rows.mask = torch.cat([rows.mask, torch.ones_like(ids)], dim=1)
        rows.hidden, rows.logits = _read(self.model, self.watch, ids, rows.mask, rows.cache)
        rows.past = torch.cat([rows.past, rows.hidden[:, None]], dim=1)
        return rows

    def read(self, tokens: Ids) -> Self:
        """Append equally many tokens to each row."""
        rows = self
        # one at a time: a sliding window or a recurrent state cannot continue with several at once
        for column in zip(*tokens, strict=True):
            rows = rows.step(range(len(tokens)), column)
        return rows

    def alone(self, row: int, sequence: Sequence[int]) -> "DynamicRows":
        """Read a sequence that grew from a row's prompt, in one piece and without others."""
        return DynamicRows.open(self.model, [sequence])

    def history(self, rows: Sequence[int], keys: bool = True) -> History:
        """Copy the states of these rows, which a critic reads, with the KV cache if `keys`."""
        # indexing by a list copies. The tensors here are of inference mode, which autograd refuses;
        # their copies, made outside of it, can be trained on
        layers, new = attending(self.cache) if keys else [], self.past.shape[1]
        # each row has a copy of its prompt, so that row i owns prompt i
        prompts = History(
            self.mask[:, : self.mask.shape[1] - new].bool(),
            keys=[_first(x.keys, new) for x in layers],
            values=[_first(x.values, new) for x in layers],
        )
        return History.of(
            self.past[rows],
            self.watch,
            keys=[_last(x.keys, new)[rows] for x in layers],
            values=[_last(x.values, new)[rows] for x in layers],
            prompts=prompts if keys else None,
            owner=list(rows),
        )


def attending(cache: DynamicCache) -> list[Any]:
    """Return the layers with attention; some layers of a hybrid model keep no keys."""
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


def _read(
    model: PreTrainedModel, watch: int | None, ids: Tensor, mask: Tensor, cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Encode the last columns (R, S) of sequences, which `mask` covers; return o_t and logits."""
    # logits_to_keep=1: only the last token of a prompt is continued, and logits of all its tokens
    # would take L times the memory. The last column is the last token, by left padding
    hidden, logits = forward(model, watch, cache, logits_to_keep=1, **inputs_of(ids, mask))
    return hidden[:, -1], logits[:, -1]


def _pick(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Stack one row of each of some tensors, also inside dictionaries.

    Anything else is the same in all parts.
    """
    first = parts[0]
    # recurrent layers of transformers keep their states in dictionaries
    if isinstance(first, dict):
        return {name: _pick([part[name] for part in parts], rows) for name in first}
    if not isinstance(first, Tensor) or not first.dim():  # flags, sizes, counters
        return first
    return torch.stack([part[row] for part, row in zip(parts, rows, strict=True)])


def _first(x: Tensor, n: int) -> Tensor:
    """Return all but the last n tokens of (R, heads, L, head_dim)."""
    return x[:, :, : max(0, x.shape[2] - n)]


def _last(x: Tensor, n: int) -> Tensor:
    """Return the last n tokens of (R, heads, L, head_dim), or as many as a window has kept."""
    return x[:, :, max(0, x.shape[2] - n) :]
