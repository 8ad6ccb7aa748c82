"""Sequences at depths of their own: each goes on from any beginning of what it has read.

A search with steps back asks for the next token of a text that it has cut. The KV cache is then cut
to what the text shares with what was read; the last token of that is read again, because its logits
are needed. A sliding window or a recurrent state cannot be cut, so such a text is read again.
"""

from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix

import torch
from torch import Tensor

from .kv_cache import Rows
from .prefix_cache import SharedRows

Read = tuple[Tensor, list[int]]  # logits (R, V) after each text, and the tokens read for each


class SharedDepths:
    """Sequences in the shared cache of their prompts, which are cut and grow in place.

    Parameters
    ----------
    root : SharedRows
        The prompts, a row each.
    depth : int
        Most tokens of a text.
    """

    def __init__(self, root: SharedRows, depth: int):
        self.root, self.depth = root, depth
        self.places: list[int] = []  # row of the root in each place
        self.held: dict[int, list[int]] = {}  # row -> the tokens in the cache
        self.rows: SharedRows = root

    @torch.inference_mode()
    def read(self, rows: Sequence[int], texts: Sequence[list[int]]) -> Read:
        """Read what is new in the texts of these rows; the places of other rows become free."""
        self._take(rows)
        at, starts, new = [], [], []
        for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
            if text:
                # the last token at least: its logits are not kept
                shared = len(commonprefix([self.held[row], text]))
                start = min(shared, len(text) - 1)
                at.append(place)
                starts.append(start)
                new.append(text[start:])
            self.held[row] = text
        logits = self.root.logits[list(rows)]  # of the prompts, where a text is empty
        if at:
            slots = [self.rows.slots[place] for place in at]
            logits[at] = replace(self.rows, slots=slots, lengths=starts).read(new).logits
        self.rows.lengths = [len(text) for text in texts]
        counts = dict(zip(at, map(len, new), strict=True))
        return logits, [counts.get(place, 0) for place in range(len(rows))]

    def _take(self, rows: Sequence[int]) -> None:
        """Give each of these rows a place, in this order; a change of rows copies the cache."""
        if list(rows) == self.places:
            return
        before = {row: (self.rows, place) for place, row in enumerate(self.places)}
        sources = [before.get(row, (self.root, row)) for row in rows]
        longest = max(state.lengths[place] for state, place in sources)
        self.rows = self.root.gather(sources, self.depth - longest)
        self.held = {row: self.held[row] if row in before else [] for row in rows}
        self.places = list(rows)


class DynamicDepths:
    """Sequences in transformers' own cache, each read by itself.

    Parameters
    ----------
    root : Rows
        The prompts, a row each.
    """

    def __init__(self, root: Rows):
        self.root = root
        self.live: dict[int, tuple[list[int], Rows]] = {}  # row -> its text and state

    def read(self, rows: Sequence[int], texts: Sequence[list[int]]) -> Read:
        """Read what is new in the texts of these rows; the states of other rows are freed."""
        self.live = {row: self.live[row] for row in rows if row in self.live}
        counts = []
        for row, text in zip(rows, texts, strict=True):
            read, state = self.live.get(row, ([], None))
            if state is None or text[: len(read)] != read:
                read, state = [], self.root.gather([(self.root, row)])
            for token in text[len(read) :]:
                state = state.step([0], [token])
            self.live[row] = text, state
            counts.append(len(text) - len(read))
        return torch.cat([self.live[row][1].logits for row in rows]), counts


def depths_of(root: Rows, depth: int) -> SharedDepths | DynamicDepths:
    """Return the sequences of prompts that were opened, before their first token."""
    if isinstance(root, SharedRows):
        return SharedDepths(root, depth)
    return DynamicDepths(root)
