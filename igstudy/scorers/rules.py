"""Costs that a reader can check by eye: new numbers, long sentences, and a cost of the last words.

All of them are functions of the prompt and the text alone: a text costs the same whether it is
finished or a prefix of one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from igcore.files import digest_of
from igcore.models.registry import ScorerName, load_scorer
from igcore.scorers import COST, FunctionScorer, Scorer, Texts, check_sign, reads_prompts
from igcore.settings import Count, Named, settings

NUMBER = re.compile(r"\d+(?:,\d+)*(?:\.\d+)?")
# such as "1." or "2)" at the start of a line, and "1" there while nothing follows it
MARKER = re.compile(r"^[ \t#*]*\d{1,2}(?:[.)](?=\s|\Z)|\Z)", re.MULTILINE)
# a mark at the end of a word, as no mark within 3.5 is, or a line break
SENTENCE_END = re.compile(r"[.!?]+[\"'”’)*_]*(?=\s|\Z)|[\r\n]")
MOST_WORDS = 20  # of a sentence that costs nothing


def count_new_numbers(prompt: str, response: str) -> int:
    """Return how many numbers of a response are not in its prompt.

    A number is written in digits: "1,000" is 1000, "two" is none, and of "3 x 5" both count. Every
    occurrence counts. List markers at the start of a line are left out.

    A number at the very end of a text may still grow. There it counts, unless it may become one
    that is allowed: it is the beginning of a number in the prompt, or of a marker at the start of a
    line. So a finished answer that ends in "15" is not charged for it where the prompt has 150, nor
    where "15" is all that its last line holds.
    """
    known = {plain(number) for number in NUMBER.findall(prompt)}
    text = MARKER.sub("", response)
    found = list(NUMBER.finditer(text))
    rest = plain(text[found[-1].start() :]) if found else ""  # the last number and all after it
    if found and any(number.startswith(rest) for number in known):
        found.pop()
    return sum(plain(number.group()) not in known for number in found)


def plain(number: str) -> str:
    """Return a number without its commas."""
    return number.replace(",", "")


def count_words_over(response: str) -> int:
    """Return by how many words the longest sentence is longer than `MOST_WORDS`.

    A word is a piece between blanks that has a letter or a digit; a word that the end of the text
    cuts is one. A sentence ends with ``.``, ``!`` or ``?`` at the end of a word, or with its line.
    """
    sentences = SENTENCE_END.split(response)
    words = [[*filter(is_word, sentence.split())] for sentence in sentences]
    return max(0, max(map(len, words)) - MOST_WORDS)


def is_word(piece: str) -> bool:
    """True if a piece of text has a letter or a digit."""
    return any(map(str.isalnum, piece))


def new_numbers() -> Scorer:
    """Return the cost `count_new_numbers`."""
    takes = {"prompt": "prompt", "response": "response"}
    return FunctionScorer(count_new_numbers, "new-numbers", COST, takes, unit="count", digest="1")


def long_sentence() -> Scorer:
    """Return the cost `count_words_over`."""
    takes = {"response": "response"}
    return FunctionScorer(count_words_over, "long-sentence", COST, takes, unit="words", digest="1")


@settings(kw_only=True)
class LastWords:
    """Another cost, of the last words of a response alone; higher is worse.

    Read at every word, it sees each part of an answer for itself. The cost of a whole answer may
    fall below its budget again, because every further word dilutes it.

    Attributes
    ----------
    cost : str or dict
        See `igcore.load_scorer`.
    words : int
        How many words it reads: pieces between blanks, with the blanks between them.
    """

    cost: ScorerName = Named("offensive-language")
    words: Count = 16

    def load(self) -> "LastWordsScorer":
        """Return the scorer."""
        return LastWordsScorer((check_sign(load_scorer(self.cost), "cost"),), self.words)


@dataclass(frozen=True)
class LastWordsScorer:
    """See `LastWords`; `parts` holds the one cost."""

    parts: tuple[Any]
    words: int
    sign = COST

    @property
    def name(self) -> str:
        """Such as ``last-16-words(offensive-language)``."""
        return f"last-{self.words}-words({self.parts[0].name})"

    @property
    def digest(self) -> str:
        """Hash of the cost and the number of words."""
        return digest_of(["last-words", self.words, self.parts[0].digest])

    @property
    def unit(self) -> str:
        """The unit of the cost."""
        return str(self.parts[0].unit)

    @property
    def reads_prompts(self) -> bool:
        """True if the cost reads prompts."""
        return reads_prompts(self.parts[0])

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> Any:
        """Return the cost of the last words of each response."""
        return self.parts[0].score(prompts, [self.ending(text) for text in responses], finished)

    def ending(self, text: str) -> str:
        """Return the last words of a text as they stand there."""
        starts = [word.start() for word in re.finditer(r"\S+", text)]
        return text[starts[-self.words] :] if len(starts) > self.words else text
