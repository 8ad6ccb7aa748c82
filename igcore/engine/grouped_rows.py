"""The state of sequences whose forward passes are by group, for models that mix up rows.

What a model says of a row should not depend on the rows beside it. These kinds of rows make it so
where transformers' own cache alone does not, and have the methods of
`igcore.engine.kv_cache.DynamicRows`. They are slower than it.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from .kv_cache import DynamicRows, History, Places, padded_keys


@dataclass
class GroupedRows:
    """Rows in groups of one length, which need no padding.

    For models that count positions from the length of their cache, padding included.
    """

    model: PreTrainedModel
    sequences: list[list[int]]  # of each row, its prompt included
    places: list[tuple[DynamicRows, int]]  # the group of each row, and its row there
    watch: int | None = None

    @classmethod
    def group(cls, model: PreTrainedModel, length: int) -> int:
        """Return the group of sequences of a length."""
        return length

    @classmethod
    def rereads(cls, model: PreTrainedModel, length: int) -> bool:
        """Tell whether sequences that grow to a length cannot use the cache that they have."""
        return False

    @classmethod
    def open(
        cls, model: PreTrainedModel, prompts: Sequence[Sequence[int]], watch: int | None = None
    ) -> "GroupedRows":
        """Prefill prompts of one token or more, see `DynamicRows.open`."""

        def read(rows: list[int]) -> DynamicRows:
            """Read some prompts together."""
            return DynamicRows.open(model, [prompts[row] for row in rows], watch)

        places = _placed([cls.group(model, len(prompt)) for prompt in prompts], read)
        return cls(model, [list(prompt) for prompt in prompts], places, watch)

    @property
    def hidden(self) -> Tensor:
        """The hidden states o_t (R, H), or (R, 2 H)."""
        return torch.stack([part.hidden[row] for part, row in self.places])

    @property
    def logits(self) -> Tensor:
        """The logits (R, V)."""
        return torch.stack([part.logits[row] for part, row in self.places])

    def gather(self, sources: Places, room: int = 0) -> "GroupedRows":
        """Copy rows of states of equal length, in this order; the sources do not change."""
        sequences = [state.sequences[row] for state, row in sources]
        old = [state.places[row] for state, row in sources]

        def copied(rows: list[int]) -> DynamicRows:
            """Copy rows of one width."""
            part: DynamicRows = old[rows[0]][0]
            return part.gather([old[row] for row in rows])

        # rows of one group in several states have one padding only if they have one width
        widths = [part.mask.shape[1] for part, _ in old]
        groups = [self.group(self.model, len(sequence)) for sequence in sequences]
        places = _placed(list(zip(widths, groups, strict=True)), copied)
        return replace(self, sequences=sequences, places=places)

    def step(self, going: Sequence[int], tokens: Sequence[int]) -> "GroupedRows":
        """Append one token to each row that goes on."""
        pairs = zip(going, tokens, strict=True)
        sequences = [[*self.sequences[row], token] for row, token in pairs]
        old = [self.places[row] for row in going]
        reread = [self.rereads(self.model, len(sequence)) for sequence in sequences]

        def grown(rows: list[int]) -> DynamicRows:
            """Append a token to rows of one part, or read them whole."""
            part, of_part = old[rows[0]][0], [old[row][1] for row in rows]
            if not reread[rows[0]]:
                return part.step(of_part, [tokens[row] for row in rows])
            new = DynamicRows.open(self.model, [sequences[row] for row in rows], self.watch)
            new.past = torch.cat([part.past[of_part], new.hidden[:, None]], dim=1)
            return new

        parts = [id(part) for part, _ in old]
        places = _placed(list(zip(parts, reread, strict=True)), grown)
        return replace(self, sequences=sequences, places=places)

    def read(self, tokens: Sequence[Sequence[int]]) -> "GroupedRows":
        """Append equally many tokens to each row."""
        rows = self
        for column in zip(*tokens, strict=True):
            rows = rows.step(range(len(tokens)), column)
        return rows

    def alone(self, row: int, sequence: Sequence[int]) -> DynamicRows:
        """Read a sequence that grew from a row's prompt, in one piece and without others."""
        return DynamicRows.open(self.model, [sequence])

    def history(self, rows: Sequence[int] | None = None, keys: bool = True) -> History:
        """Copy what a critic reads of these rows (by default all), with the KV cache if `keys`."""
        places = self.places if rows is None else [self.places[row] for row in rows]
        # as if all had been read together: padded on the left to one length
        cache = copy.copy(places[0][0].cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for i, layer in enumerate(cache.layers):
            if getattr(layer, "keys", None) is not None:
                of_rows = [(part.cache.layers[i], row) for part, row in places]
                layer.keys = padded_keys([x.keys[row] for x, row in of_rows])
                layer.values = padded_keys([x.values[row] for x, row in of_rows])
        masks = [part.mask[row] for part, row in places]
        mask = pad_sequence(masks, batch_first=True, padding_side="left")
        past = torch.stack([part.past[row] for part, row in places])
        whole = replace(places[0][0], cache=cache, mask=mask, past=past)
        return whole.history(keys=keys)


class SidedRows(GroupedRows):
    """Rows in groups on one side of each border of LongRoPE, see `borders_of`.

    Its rotary factors are those of the longest row of a forward pass. A row that crosses a border
    is read whole, as `generate` of transformers does.
    """

    @classmethod
    def group(cls, model: PreTrainedModel, length: int) -> int:
        """Return the number of borders that a length has crossed."""
        return sum(length > border for border in borders_of(model.config))

    @classmethod
    def rereads(cls, model: PreTrainedModel, length: int) -> bool:
        """Tell whether the last token has crossed a border."""
        return length - 1 in borders_of(model.config)


class RereadRows(GroupedRows):
    """Rows in groups of one length, of which every token is sampled from the text read whole.

    For models whose cache gives other numbers than the text without it.
    """

    @classmethod
    def rereads(cls, model: PreTrainedModel, length: int) -> bool:
        """Return True: no cache is used twice."""
        return True


def borders_of(config: PreTrainedConfig) -> set[int]:
    """Return the lengths above which a model with LongRoPE takes other rotary factors."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return {
        part.get("original_max_position_embeddings") or text.original_max_position_embeddings
        for part in by_layer
        if part.get("rope_type") == "longrope"
    }


def _placed(
    keys: Sequence[Hashable], read: Callable[[list[int]], DynamicRows]
) -> list[tuple[DynamicRows, int]]:
    """Return the places of rows, of which those with equal keys are read together."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    places: dict[int, tuple[DynamicRows, int]] = {}
    for rows in groups.values():
        part = read(rows)
        places |= {row: (part, i) for i, row in enumerate(rows)}
    return [places[row] for row in range(len(keys))]
