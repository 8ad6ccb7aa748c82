"""The cost of the last words of a text, which sees every part of an answer for itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from igcore.files import digest_of
from igcore.models.registry import ScorerName, load_scorer
from igcore.scorers import COST, Texts, check_sign, reads_prompts
from igcore.settings import Count, Named, settings


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
        """Return the last words of a text, with the blanks between them."""
        starts = [word.start() for word in re.finditer(r"\S+", text)]
        return text[starts[-self.words] :] if len(starts) > self.words else text
