"""The state of many sequences in transformers' own cache, for any decoder-only model. Knows models
and ids, nothing of sampling.

Every row has its own copy of the prompt's keys and values, and each step copies the cache.
`igcore.engine.prefix_cache` does neither, for the models that it fits; both answer to the same four
names::

    Rows.open(model, prompts)      encode prompts, one row each
    rows.gather(sources, room)     new rows copied from rows of one or more states, with room for so many tokens
    rows.step(going, tokens)       append one token to the rows that go on; the others are dropped
    rows.history(rows, keys)       o_t, keys and values of all tokens of these rows since the prompt
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from ..errors import PolicyError
from .prepack import products_of


@dataclass
class History:
    """What a critic reads of R rows of n tokens each.

    Attributes
    ----------
    hidden : Tensor (R, n, H)
        o_t: the hidden state after the final norm.
    middle : Tensor (R, n, H) or None
        The output of the layer that was watched.
    keys, values : list of Tensor (R, heads, n, head_dim)
        h_t: one pair per layer that has attention, of every token since the prompt; of a sliding
        window, as many as it keeps.
    """

    hidden: torch.Tensor
    middle: torch.Tensor | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def of(cls, states: torch.Tensor, watch: int | None, keys: list, values: list) -> "History":
        """Split states (R, n, H or 2 H) as `forward` joins them."""
        hidden, middle = (states, None) if watch is None else states.chunk(2, dim=-1)
        return cls(hidden, middle, keys, values)


@torch.inference_mode()
def forward(model, watch: int | None = None, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model with a head or without; return o_t, which is the input of the head, and the
    logits, if any.

    The hidden state is caught at the head, because ``output_hidden_states`` would keep those of
    every layer. With `watch` the output of that decoder layer follows it in the same tensor: (...,
    H) becomes (..., 2 H).

    Raises
    ------
    PolicyError
        When the model left aside the keys and values that it was given: every token would be drawn
        without its context.
    """
    head, seen = model.get_output_embeddings(), {}
    hooks = (
        []
        if head is None
        else [head.register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))]
    )
    if head is None:
        inputs.pop("logits_to_keep")
    if watch is not None:
        layer = model.get_decoder().layers[watch]
        hooks.append(
            layer.register_forward_hook(
                lambda _, __, out: seen.update(middle=out[0] if isinstance(out, tuple) else out)
            )
        )
    try:
        with products_of(model):
            out = model(use_cache=True, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if (
        "past_key_values" in inputs
        and getattr(out, "past_key_values", None) is not inputs["past_key_values"]
    ):
        raise PolicyError(
            f"{type(model).__name__} does not carry its state in past_key_values; choose a "
            f"model that does"
        )
    hidden = out.last_hidden_state if head is None else seen["hidden"]
    logits = hidden.new_zeros(*hidden.shape[:-1], 0) if head is None else out.logits
    return hidden if watch is None else torch.cat(
        [hidden, seen["middle"][:, -hidden.shape[1] :].to(hidden.device)], dim=-1
    ), logits


def pad_left(sequences: Sequence[Sequence[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (B, L) and mask (B, L), 1 where a token stands. Padded ids are masked, so that any
    id serves.
    """
    length = max(map(len, sequences))
    ids = torch.tensor([[0] * (length - len(s)) + list(s) for s in sequences], device=device)
    mask = torch.tensor([[0] * (length - len(s)) + [1] * len(s) for s in sequences], device=device)
    return ids, mask


@dataclass
class DynamicRows:
    """Carried state of R sequences of one length L (left padding included), of which the last
    `length` are new tokens.
    """

    model: object
    cache: DynamicCache  # keys and values (R, heads, L, head_dim) per layer
    mask: torch.Tensor  # (R, L)
    hidden: torch.Tensor  # (R, H) o_t, or (R, 2 H), see `forward`
    logits: torch.Tensor  # (R, V) W o_t
    past: torch.Tensor  # (R, length, H) o_t of every new token
    watch: int | None = None

    @classmethod
    def open(
        cls, model, prompts: Sequence[Sequence[int]], watch: int | None = None
    ) -> "DynamicRows":
        """Encode prompts of one token or more, left-padded to one length; `watch` is a layer whose
        output is kept beside o_t.
        """
        ids, mask = pad_left(prompts, model.device)
        rows = cls(
            model, DynamicCache(config=model.config), mask, None, None, None, watch
        )._forward(ids)
        rows.past = rows.hidden[:, None][:, :0]
        return rows

    @property
    def length(self) -> int:
        return self.past.shape[1]

    @torch.inference_mode()
    def gather(self, sources: Sequence[tuple["DynamicRows", int]], room: int = 0) -> "DynamicRows":
        """Copy rows of states of equal length, in this order; the sources are untouched. The cache
        grows by itself.
        """
        states = list({id(state): state for state, _ in sources}.values())
        first = {id(state): sum(len(s.mask) for s in states[:i]) for i, state in enumerate(states)}
        index = torch.tensor(
            [first[id(state)] + row for state, row in sources], device=self.mask.device
        )
        cache = copy.copy(states[0].cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for i, layer in enumerate(cache.layers):
            vars(layer).update(_pick([vars(state.cache.layers[i]) for state in states], index))
        joined = (
            _pick([getattr(state, name) for state in states], index)
            for name in ("mask", "hidden", "logits", "past")
        )
        return DynamicRows(self.model, cache, *joined, self.watch)

    @torch.inference_mode()
    def step(self, going: Sequence[int], tokens: Sequence[int]) -> "DynamicRows":
        rows = self if len(going) == len(self.mask) else self.gather([(self, row) for row in going])
        ids = torch.tensor(tokens, device=rows.mask.device)[:, None]  # (R, 1)
        rows.mask = torch.cat([rows.mask, torch.ones_like(ids)], dim=1)
        rows._forward(ids)
        rows.past = torch.cat([rows.past, rows.hidden[:, None]], dim=1)
        return rows

    def history(self, rows: Sequence[int] | None = None, keys: bool = True) -> History:
        """Copy what a critic reads of these rows, by default of all; keys and values only when they
        are wanted.
        """
        rows = list(range(len(self.mask)) if rows is None else rows)
        layers = [
            layer
            for layer in self.cache.layers
            if keys and getattr(layer, "keys", None) is not None
        ]
        parts = (
            [_last(getattr(layer, name), self.length)[rows] for layer in layers]
            for name in ("keys", "values")
        )
        return History.of(
            self.past[rows], self.watch, *parts
        )  # copies can be trained on: inference tensors cannot

    def _forward(self, ids: torch.Tensor) -> "DynamicRows":
        """Encode the last columns (R, S) of the sequences, which `mask` covers."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[
            :, -ids.shape[1] :
        ]  # (R, S) counted without the padding
        hidden, logits = forward(
            self.model,
            self.watch,
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        self.hidden, self.logits = hidden[:, -1], logits[:, -1]
        return self


def _pick(parts: Sequence, index: torch.Tensor):
    """Join tensors along their rows and take some of them, also inside dictionaries; whatever else
    is alike in all parts.
    """
    first = parts[0]
    if isinstance(first, dict):
        return {name: _pick([part[name] for part in parts], index) for name in first}
    if not isinstance(first, torch.Tensor) or not first.dim():
        return first
    return (torch.cat(parts) if len(parts) > 1 else first).index_select(0, index.to(first.device))


def _last(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return the last n tokens of (R, heads, L, head_dim), or as many as a sliding window has kept."""
    return x[:, :, max(0, x.shape[2] - n) :]
