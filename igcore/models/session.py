"""The KV cache of a language model over the texts of a group of prompts.

A search asks for the cost of a text at each of its words, and then for texts that go on from it. Of
the texts of one call those that begin others are checks of them::

    1. the longest texts are read, each after the text in the cache that begins it
    2. what a check appends to its prefix (an end token, a turn after the answer, another last
       token) is read from the place of the prefix, a few checks at a time, and is not kept
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch

from ..engine.agreement import supports_shared_prefix
from ..engine.prefix_cache import SharedRows
from ..errors import ParameterError
from .backbone import Backbone
from .texts import Text, shared

Pair = tuple[str, str]  # prompt, response
CHECKS = 32  # checks whose last tokens are read together


class Session:
    """The KV cache of one backbone for the texts of one group of prompts.

    Attributes
    ----------
    prefixes : dict of str to list of int
        By prompt: the ids that begin all of its texts.
    root : SharedRows or None
        The state after these ids, row by row; None if the model or a prompt cannot be shared.
    known : dict of str to list of Text
        By prompt: the texts in the cache, that of the empty response first.
    """

    def __init__(self, backbone: Backbone, prompts: Sequence[str]):
        """Prefill the prompts' common prefixes if the model supports the shared cache."""
        self.backbone = backbone
        self.prefixes: dict[str, list[int]] = {}
        for prompt in prompts:
            with suppress(ParameterError):  # too long for this model: no text of it has a score
                self.prefixes[prompt] = backbone.prefix(prompt)
        self.root: SharedRows | None = None
        self.known: dict[str, list[Text]] = {}
        prefixes = list(self.prefixes.values())
        if prefixes and all(prefixes) and supports_shared_prefix(backbone.model):
            root = self.root = SharedRows.open(backbone.model, prefixes)
            openings = backbone.texts(list(self.prefixes), [""] * len(prefixes))
            for row, opening in enumerate(openings):
                opening.put((root, row), len(prefixes[row]))
                self.known[opening.prompt] = [opening]

    def texts(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Text]:
        """Return the texts of prompts and responses, each encoded from a longer or a known one.

        Raises
        ------
        ParameterError
            When a text exceeds the context.
        """
        pairs = list(zip(prompts, responses, strict=True))
        longest_of = _longest(pairs)
        longest = dict.fromkeys(longest_of.values())
        nearest = {pair: self._nearest(*pair) for pair in longest}
        found = {pair: near for pair, near in nearest.items() if near and near.response == pair[1]}
        found |= self._encoded({pair: nearest[pair] for pair in longest if pair not in found})
        for text in found.values():
            source = text.source
            # it goes on from a known text; else it is a cut of it, like the checks below
            if source and source.place and not source.response.startswith(text.response):
                text.put(source.place, min(text.shared, source.cached))
        sources = {pair: found[longest_of[pair]] for pair in longest_of if pair not in longest}
        found |= self._encoded({pair: text.source or text for pair, text in sources.items()})
        return [found[pair] for pair in pairs]

    def _encoded(self, sources: Mapping[Pair, Text | None]) -> dict[Pair, Text]:
        """Return the texts of some pairs, encoded from these sources."""
        if not sources:
            return {}
        prompts, responses = zip(*sources, strict=True)
        texts = self.backbone.texts(prompts, responses, list(sources.values()))
        return dict(zip(sources, texts, strict=True))

    def _nearest(self, prompt: str, response: str) -> Text | None:
        """Return a known text that begins with the response, or the one that it goes on from."""
        known = self.known.get(prompt, [])
        for text in known:
            if text.response.startswith(response):
                return text
        begun = [text for text in known if response.startswith(text.response)]
        parent = max(begun, key=lambda text: len(text.response), default=None)
        if parent and parent.response:
            return parent
        # after a step back, from the beginning of a known text
        return max(known, key=lambda text: shared(text.response, response), default=None)

    def states(self, texts: Sequence[Text], counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the head's input at the last tokens of each text, one (count, H) float32 each.

        `texts` come from the method of that name. The counted tokens must come after the prompt's
        prefix; only the last token of a text may belong to it.
        """
        self._read(dict.fromkeys(text.source or text for text in texts))
        found: dict[int, torch.Tensor] = {}
        alone, checks = [], []
        for at, text in enumerate(texts):
            cached = self._cached(text)
            if cached is None:
                alone.append(at)
            elif cached < text.n_tokens:
                checks.append(at)
            else:
                found[at] = self._kept(text, counts[at])
        for part in _parts(texts, checks):
            read = self._checked([texts[at] for at in part], [counts[at] for at in part])
            found |= zip(part, read, strict=True)
        states = self.backbone.states([texts[at].ids for at in alone], [counts[at] for at in alone])
        found |= zip(alone, states, strict=True)
        return [found[at] for at in range(len(texts))]

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Evict everything except prefixes that longer texts can still reuse."""
        nearest = [self._nearest(*pair) for pair in zip(prompts, responses, strict=True)]
        kept = [text for text in dict.fromkeys(nearest) if text and text.response]
        n_known = sum(len(texts) - 1 for texts in self.known.values())
        if self.root is None or len(kept) == n_known:
            return
        self.known = {prompt: texts[:1] for prompt, texts in self.known.items()}
        if kept:
            lengths = [self._length(text, text.cached) for text in kept]
            rows = self.root.gather([place_of(text) for text in kept], 0, lengths)
        for row, text in enumerate(kept):
            text.put((rows, row), text.cached)
            self.known[text.prompt].append(text)

    def _cached(self, text: Text) -> int | None:
        """Return how many first tokens of a text are cached; None if not those of its prompt."""
        source = text.source or text
        cached = min(text.shared, source.cached) if text.source else text.cached
        known = source.place is not None and cached >= len(self.prefixes[text.prompt])
        return cached if known else None

    def _length(self, text: Text, n_tokens: int) -> int:
        """Return how many of the first tokens of a text come after its prompt's prefix."""
        return n_tokens - len(self.prefixes[text.prompt])

    def _kept(self, text: Text, count: int) -> torch.Tensor:
        """Return the head's input at the last tokens of a text that is in the cache."""
        length = self._length(text, text.n_tokens)
        # the state of the prompt itself is in the root alone
        source = (text.source or text) if length else self.known[text.prompt][0]
        rows, row = place_of(source)
        return self._with_opening(text, rows.last_hidden(row, length, count))

    def _with_opening(self, text: Text, states: torch.Tensor) -> torch.Tensor:
        """Return the head's input (count, H) float32, given the states of the text's tokens."""
        root, row = place_of(self.known[text.prompt][0])
        return self.backbone.with_opening(states.float(), root.last_hidden(row, 0).float())

    def _read(self, texts: Iterable[Text]) -> None:
        """Read the new tokens of texts, and keep their states."""
        # an empty response is read like a check: more of it than the prompt's prefix is not kept
        new = [
            text
            for text in texts
            if text.response and self._cached(text) not in (None, text.n_tokens)
        ]
        if new:
            rows = self._grown(new)
            for row, text in enumerate(new):
                text.put((rows, row), text.n_tokens)
                self.known[text.prompt].append(text)

    def _checked(self, texts: Sequence[Text], counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the head's input at the last tokens of texts that are not kept."""
        rows = self._grown(texts)
        found = []
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            last = rows.last_hidden(row, rows.lengths[row], count)
            found.append(self._with_opening(text, last.clone()))  # a part of it would keep it all
        return found

    def _grown(self, texts: Sequence[Text]) -> SharedRows:
        """Return rows that have read texts: copies of what is cached, and then the new tokens."""
        cached = [self._cached(text) or 0 for text in texts]
        pairs = list(zip(texts, cached, strict=True))
        starts = [self._length(text, n) for text, n in pairs]
        new = [text.rest.ids[n - text.kept :] for text, n in pairs]
        longest = max(self._length(text, text.n_tokens) for text in texts)
        places = [place_of(text.source or text) for text in texts]
        root, _ = place_of(self.known[texts[0].prompt][0])
        return root.gather(places, longest - max(starts), starts).read(new)


def place_of(text: Text) -> tuple[SharedRows, int]:
    """Return where a cached text is."""
    assert text.place is not None
    return text.place


def _longest(pairs: Iterable[Pair]) -> dict[Pair, Pair]:
    """Return for each pair the longest one of its prompt that begins with it."""
    found: dict[Pair, Pair] = {}
    last = ("", "")
    # backwards: sorting puts a response right before those that begin with it
    for prompt, response in sorted(set(pairs), reverse=True):
        if not found or last[0] != prompt or not last[1].startswith(response):
            last = prompt, response
        found[prompt, response] = last
    return found


def _parts(texts: Sequence[Text], checks: Sequence[int]) -> Iterator[list[int]]:
    """Split checks into parts of `CHECKS`, each with about as many of every prompt.

    A state has the same number of slots for each of its prompts.
    """
    n_before: Counter[str] = Counter()
    turns = []
    for at in checks:
        prompt = texts[at].prompt
        turns.append((n_before[prompt], at))
        n_before[prompt] += 1
    ordered = [at for _, at in sorted(turns)]
    for first in range(0, len(ordered), CHECKS):
        yield ordered[first : first + CHECKS]
