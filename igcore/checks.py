"""Where the cost of a text is checked: at the ends of blocks, of words, or of tokens.

The paper's constraint holds at every step. ``block`` checks what a search sees anyway, the text at
the end of each block. ``word`` adds the end of every word, and ``token`` every token of the cost
model, for language models that give all of these costs in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import regex  # type: ignore[import-untyped]

from .scorers import reads_tokens
from .scoring import Cached, checked_tokens

BOUNDARY = regex.compile(r"(?w)\b")  # Unicode's default word boundaries (UAX #29)
LETTER = regex.compile(r"\w")


@dataclass(frozen=True)
class Reading:
    """The costs of a text at its checks.

    Attributes
    ----------
    ends : list of int
        Character offsets at which the text was cut, ascending; the whole text last.
    costs : list of float
        U of the text up to there; higher is worse, NaN where the scorer failed.
    one_pass : bool
        Whether the scorer gave all costs when it read the whole text.
    """

    ends: list[int]
    costs: list[float]
    one_pass: bool = False

    @property
    def asked(self) -> list[int]:
        """The lengths of the texts that the scorer was given."""
        return self.ends[-1:] if self.one_pass else self.ends


def word_ends(text: str, since: int = 0) -> list[int]:
    """Return the character offsets after `since`, before the end of the text, where a word ends.

    A word is a piece between Unicode's word boundaries that holds a letter, a digit or another word
    character. In scripts without spaces nearly every character is such a piece; emoji are none.
    """
    bounds = [match.start() for match in BOUNDARY.finditer(text)]
    return [
        end
        for start, end in pairwise(bounds)
        if since < end < len(text) and LETTER.search(text, start, end)
    ]


def readings(
    scorer: Cached,
    checks: str,
    prompts: Sequence[str],
    texts: Sequence[str],
    finished: Sequence[bool],
    since: Sequence[int],
) -> list[Reading]:
    """Return the costs of texts at their checks after the first `since` characters of each.

    Parameters
    ----------
    checks : str
        See `igcore.SearchConfig`; ``token`` checks the words of a text where the scorer cannot give
        the cost of every token.
    finished : sequence of bool
        Whether a text is complete; what it was cut to never is.
    """
    if checks == "token" and reads_tokens(scorer.scorer):
        found = checked_tokens(scorer.scorer, prompts, texts, since, scorer.tally)
        return [Reading(ends, costs, one_pass=True) for ends, costs in found]
    cuts: list[list[int]] = [[] for _ in texts]
    if checks != "block":
        cuts = [word_ends(text, start) for text, start in zip(texts, since, strict=True)]
    asked: list[tuple[str, str, bool]] = []
    for prompt, text, ended, ends in zip(prompts, texts, finished, cuts, strict=True):
        asked += [(prompt, text[:end], False) for end in ends]
        asked.append((prompt, text, ended))
    costs = iter(scorer.score(*zip(*asked, strict=True)) if asked else ())
    return [
        Reading([*ends, len(text)], [float(next(costs)) for _ in range(len(ends) + 1)])
        for text, ends in zip(texts, cuts, strict=True)
    ]


def tokens_in(n_tokens: int, length: int, cuts: Sequence[int]) -> int:
    """Return the policy tokens in a text of `n_tokens` and in what it was cut to, all together.

    Within a block tokens count in proportion to their characters.
    """
    return sum(round(n_tokens * cut / length) if length else n_tokens for cut in cuts)
