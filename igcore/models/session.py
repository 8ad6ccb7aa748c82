"""The KV cache through which scorers of one language model read a group of prompts.

A longer text costs only its new tokens: its ids are compared with the cached ones, and what follows
the longest common prefix is encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..engine.agreement import fits
from ..engine.prefix_cache import SharedRows

if TYPE_CHECKING:  # it opens sessions
    from .lm_scorer import Backbone


class Text(NamedTuple):
    """A text that begins with the cached prefix of its prompt."""

    prompt: str
    ids: list[int]  # after the prefix


@dataclass
class Known:
    """A text whose KV cache and hidden states a session holds."""

    ids: list[int]  # after the prompt's prefix
    place: tuple[SharedRows, int]  # a state, and a row of it

    def shared(self, ids: list[int]) -> int:
        """Return the number of first tokens that ids share with it."""
        return len(commonprefix([self.ids, ids]))


class Session:
    """The KV cache of one backbone over the texts of one group of prompts.

    Attributes
    ----------
    encoded : int
        Tokens that went through the model so far.
    """

    def __init__(self, backbone: "Backbone", prompts: Sequence[str]):
        """Prefill the prompts' common prefixes where the model fits the shared cache."""
        self.backbone = backbone
        self.prefixes = {prompt: backbone.prefix(prompt) for prompt in prompts}
        self.encoded = 0
        self.root: SharedRows | None = None  # row by row the prefixes
        self.known: dict[str, list[Known]] = {}
        if fits(backbone.model) and all(self.prefixes.values()):
            prefixes = list(self.prefixes.values())
            self.root = SharedRows.open(backbone.model, prefixes)
            self.encoded = sum(map(len, prefixes))
            self._forget()

    def hidden(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden state of the last token of each text, (R, H) float32."""
        sequences = [self.backbone.ids(p, r) for p, r in zip(prompts, responses, strict=True)]
        return torch.cat(self.states(prompts, sequences, [1] * len(sequences)))

    def states(
        self, prompts: Sequence[str], sequences: Sequence[list[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the hidden states of the last tokens of each text, one (count, H) float32 each.

        `sequences` are the ids of whole texts. The tokens asked for come after the prefix of the
        prompt; only the last token of a text may belong to it.
        """
        texts: list[Text | None] = []
        whole: list[list[int]] = []
        counts_of_whole: list[int] = []
        for prompt, ids, count in zip(prompts, sequences, counts, strict=True):
            text = self._after_prefix(prompt, ids)
            texts.append(text)
            if text is None:
                whole.append(ids)
                counts_of_whole.append(count)
        self.encoded += sum(map(len, whole))
        of_whole = iter(self.backbone.states(whole, counts_of_whole))
        self._read_on([text for text in texts if text])
        return [
            self._states_of(text, count) if text else next(of_whole)
            for text, count in zip(texts, counts, strict=True)
        ]

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Free all of the cache but what longer texts that begin with these can use."""
        kept: list[tuple[str, Known]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = self.backbone.ids(prompt, response)
            text = self._after_prefix(prompt, ids)
            if text:
                kept.append((prompt, self._nearest(text)))
        self._forget()
        if kept:
            rows = self.root.gather([known.place for _, known in kept])
            for row, (prompt, known) in enumerate(kept):
                self.known[prompt].append(Known(known.ids, (rows, row)))

    def _forget(self) -> None:
        """Know nothing but the prompts' prefixes."""
        for row, prompt in enumerate(self.prefixes):
            self.known[prompt] = [Known([], (self.root, row))]

    def _after_prefix(self, prompt: str, ids: list[int]) -> Text | None:
        """Return what follows the cached prefix of a prompt, or None where another text begins."""
        prefix = self.prefixes.get(prompt)
        if self.root is None or prefix is None or ids[: len(prefix)] != prefix:
            return None
        return Text(prompt, ids[len(prefix) :])

    def _nearest(self, text: Text) -> Known:
        """Return the known text that shares most tokens."""

        def shared(known: Known) -> int:
            """Return how many."""
            return known.shared(text.ids)

        return max(self.known[text.prompt], key=shared)

    def _read_on(self, texts: Sequence[Text]) -> None:
        """Encode the new tokens of texts whose prefixes are cached."""
        new = []
        for text in texts:
            shared = self._nearest(text).shared(text.ids)
            if shared < len(text.ids):
                new.append(text)
        if new:
            self._encode(_longest(new))

    def _states_of(self, text: Text, count: int) -> torch.Tensor:
        """Return the hidden states (count, H) of the last tokens of a text that is known."""
        rows, row = self._nearest(text).place
        states = rows.last_hidden(row, len(text.ids), count).float()
        if self.backbone.anchor:
            # where the prefix ends
            root, row = self.known[text.prompt][0].place
            anchor = root.last_hidden(row, 0).float()
            states = torch.cat([states, anchor.expand_as(states)], dim=-1)
        return states

    def _encode(self, texts: Sequence[Text]) -> None:
        """Encode what texts add to their nearest known text, and keep their cache."""
        nearest = [self._nearest(text) for text in texts]
        longest = max(len(text.ids) for text in texts)
        longest_known = max(len(known.ids) for known in nearest)
        room = max(0, longest - longest_known)
        rows = self.root.gather([known.place for known in nearest], room)
        new = []
        for row, (text, known) in enumerate(zip(texts, nearest, strict=True)):
            shared = known.shared(text.ids)
            rows.lengths[row] = shared  # crop the cache to the shared tokens
            new.append(text.ids[shared:])
        self.encoded += sum(map(len, new))
        rows.extend(new)
        for row, text in enumerate(texts):
            self.known[text.prompt].append(Known(text.ids, (rows, row)))


def _longest(texts: Sequence[Text]) -> list[Text]:
    """Return the texts that no other one begins with, of equal ones one.

    Encoding these caches all of the texts.
    """
    kept: list[Text] = []
    # backwards: a text stands right before one that begins with it
    for prompt, ids in sorted(texts, reverse=True):
        if not kept or (prompt, ids) != (kept[-1].prompt, kept[-1].ids[: len(ids)]):
            kept.append(Text(prompt, ids))
    return kept[::-1]
