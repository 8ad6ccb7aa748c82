"""Texts as a language model reads them: a template writes them, a tokenizer encodes them.

A search asks for texts that go on from each other, and a check cuts one text at each of its words.
So a text is encoded from a known one: the tokens up to the last word that both share are those of
the known text, and only the rest is encoded.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonprefix
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase as Tokenizer

from ..engine.prefix_cache import SharedRows

# encoded before a rest, which begins with a space, as no tokenizer reads one in front
ANCHOR = "a"
# several scripts, with numbers, code, emoji, and spaces of all kinds
SAMPLE = (
    "The house, built in 1999 (re-built: 2003), isn't old.\n\n  * it's  red;\t3.14 € <b>x_y</b>  \n"
    "Ein Café um die Ecke, 今日はいい 天気です。 नमस्ते दुनिया 👍🏽 end!  "
)
log = logging.getLogger("igcore")


class Pieces(NamedTuple):
    """The tokens of a text, and where they end in it.

    Attributes
    ----------
    ids : list of int
    ends : list of int
        Character offsets, ascending; that of a token after the text is behind its end. Empty where
        the tokenizer does not know them.
    """

    ids: list[int]
    ends: list[int]

    def followed(self, kept: int, rest: "Pieces") -> "Pieces":
        """Return so many first tokens, and the rest after them."""
        return Pieces(self.ids[:kept] + rest.ids, self.ends[:kept] + rest.ends)


Source = tuple[str, Pieces] | None  # a text from which others are encoded, and its tokens


@dataclass(eq=False)
class Text:
    """A prompt and a response as a model reads them.

    Attributes
    ----------
    prompt, response : str
    opening, written : str
        What the template writes of the prompt with an empty response, and of both.
    verbatim : bool
        Whether the response is written as it is, with no special string broken up.
    source : Text or None
        The text from which it was encoded; None if it was encoded as a whole.
    kept : int
        Number of the source's tokens that begin it.
    rest : Pieces
        Its tokens after these.
    place : tuple of (rows, int) or None
        The state of a KV cache that has read the text, and its row.
    cached : int
        Number of its first tokens that are there.
    """

    prompt: str
    response: str
    opening: str
    written: str
    verbatim: bool
    source: "Text | None"
    kept: int
    rest: Pieces
    place: tuple[SharedRows, int] | None = field(default=None, repr=False)
    cached: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of its tokens."""
        return self.kept + len(self.rest.ids)

    @property
    def pieces(self) -> Pieces:
        """All of its tokens."""
        return self.source.pieces.followed(self.kept, self.rest) if self.source else self.rest

    @property
    def ids(self) -> list[int]:
        """The ids of all of its tokens."""
        return self.source.ids[: self.kept] + self.rest.ids if self.source else self.rest.ids

    @property
    def shared(self) -> int:
        """Number of first tokens that it has in common with its source."""
        if self.source is None:
            return 0
        others = self.source.ids[self.kept : self.n_tokens]
        return self.kept + len(commonprefix([self.rest.ids, others]))

    def put(self, place: tuple[SharedRows, int], cached: int) -> None:
        """Note the place of its KV cache; its source, which may go, is not needed any more."""
        self.rest, self.kept, self.source = self.pieces, 0, None
        self.place, self.cached = place, cached


class Tokens:
    """The tokens of texts.

    Parameters
    ----------
    tokenizer : Tokenizer
    special : bool
        True if the tokenizer adds its special tokens to a text.
    end_id : int, optional
        Token to append to every text.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, end_id: int | None):
        self.tokenizer, self.special, self.end_id = tokenizer, special, end_id
        self.fast = bool(getattr(tokenizer, "is_fast", False))
        self.added = set(tokenizer.added_tokens_decoder)

    def whole(self, texts: Sequence[str]) -> list[Pieces]:
        """Return the tokens of texts, each encoded as a whole."""
        if not self.fast:
            encodings = [self.tokenizer(text, add_special_tokens=self.special) for text in texts]
            return [Pieces(self._ended(e["input_ids"]), []) for e in encodings]
        found = []
        encoded = self.tokenizer(list(texts), add_special_tokens=self.special).encodings
        for text, encoding in zip(texts, encoded, strict=True):
            ends: list[int] = []
            pairs = zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            for (_, end), is_special in pairs:
                if is_special:  # in front of the text or behind it
                    end = len(text) + 1 if any(ends) else 0
                ends.append(end)
            behind = [len(text) + 1] * (self.end_id is not None)
            found.append(Pieces(self._ended(encoding.ids), ends + behind))
        return found

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """Return ids with the end token, if there is one; never none."""
        ids = list(ids) if self.end_id is None else [*ids, self.end_id]
        return ids or [self.tokenizer.eos_token_id]

    def after(self, texts: Sequence[str], sources: Sequence[Source]) -> list[tuple[int, Pieces]]:
        """Return for each text how many tokens of its source begin it, and its tokens after these.

        A source is another text and its tokens.
        """
        return self._after(texts, sources if any(sources) and self.can_cut else [None] * len(texts))

    def _after(self, texts: Sequence[str], sources: Sequence[Source]) -> list[tuple[int, Pieces]]:
        """Return what `after` does, whether it is right or not."""
        places = [self._place(*pair) for pair in zip(texts, sources, strict=True)]
        rests = [
            ANCHOR + text[at:] if at else text for text, (at, _) in zip(texts, places, strict=True)
        ]
        distinct = list(dict.fromkeys(rests))  # many checks end with a word, and have no rest
        pieces_of = dict(zip(distinct, self.whole(distinct), strict=True))
        found = []
        for (at, kept), rest in zip(places, rests, strict=True):
            pieces = pieces_of[rest]
            if at:
                first = bisect_right(pieces.ends, len(ANCHOR))
                ends = [end + at - len(ANCHOR) for end in pieces.ends[first:]]
                pieces = Pieces(pieces.ids[first:], ends)
            found.append((kept, pieces))
        return found

    def _place(self, text: str, source: Source) -> tuple[int, int]:
        """Return the last place up to which a text has the tokens of its source, and how many.

        There a word ends in both of them, before a space or at the end: no tokenizer that
        `can_cut` joins the characters on both sides.
        """
        if source is None:
            return 0, 0
        other, (ids, ends) = source
        at = shared(text, other)
        while at > 0:
            word_ends = text[at : at + 1] in ("", " ") and other[at : at + 1] in ("", " ")
            if word_ends and not text[at - 1].isspace():
                kept = bisect_right(ends, at)
                # a token that ends there, and no special one, after which a new text begins
                if kept and ends[kept - 1] == at and ids[kept - 1] not in self.added:
                    return at, kept
            at = text.rfind(" ", 0, at)
        return 0, 0

    @cached_property
    def can_cut(self) -> bool:
        """True if texts that are encoded from others have the tokens that they have as a whole."""
        if self.fast and self._agrees():
            return True
        name = type(self.tokenizer).__name__
        log.warning("%s cannot cut texts: each one is encoded as a whole, which is slower", name)
        return False

    def _agrees(self) -> bool:
        """True if a sample, cut anywhere and gone on from there, has its own tokens."""
        cuts = [SAMPLE[:n] for n in range(len(SAMPLE) + 1)]
        wholes = self.whole(cuts)
        sources = list(zip(cuts, wholes, strict=True))
        last, n = wholes[-1], len(cuts)
        shorter = self._after(cuts, sources[-1:] * n)
        longer = self._after(cuts[-1:] * n, sources)
        return all(
            last.followed(kept, rest) == whole and whole.followed(more, others) == last
            for whole, (kept, rest), (more, others) in zip(wholes, shorter, longer, strict=True)
        )


def shared(one: str, other: str) -> int:
    """Return the number of first characters that two texts share."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return bisect_left(range(n), True, key=lambda at: one[: at + 1] != other[: at + 1])
