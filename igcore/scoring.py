"""Calls of scorers: a failure is NaN, which is never safe; scores are cached by text.

The paper's constraint holds at every step, so `readings` gives the cost of a text at its checks.
``block`` checks what a search sees anyway, the text at the end of each block. ``word`` adds the end
of every word, and ``token`` every token of the cost model, for language models that give all of
these costs in one pass.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import regex  # type: ignore[import-untyped]

from .errors import ScorerError, ScorerWarning, one_line
from .scorers import Scorer, Scores, Texts, reads_tokens

AT_LEAST = 100  # texts; a share of fewer means little
BOUNDARY = regex.compile(r"(?w)\b")  # Unicode's default word boundaries (UAX #29)
LETTER = regex.compile(r"\w")


# --- failing closed -------------------------------------------------------------------------------


@dataclass
class Tally:
    """The texts that a scorer was given in a run, and those that it failed on.

    Attributes
    ----------
    rate : float
        Largest share of texts that may fail; from `AT_LEAST` texts on, a larger one stops the run.
    scored, failed : int
    """

    rate: float = 0.5
    scored: int = 0
    failed: int = 0

    def add(self, scorer: Scores, scores: np.ndarray, why: str) -> None:
        """Count scores (n,), NaN where the scorer failed, for the reason given.

        Raises
        ------
        ScorerError
            When too many texts have failed.
        """
        self.scored += len(scores)
        self.failed += int(np.isnan(scores).sum())
        name = getattr(scorer, "name", type(scorer).__name__)
        if self.scored >= AT_LEAST and self.failed > self.rate * self.scored:
            raise ScorerError(
                f"scorer {name!r} failed on {self.failed} of {self.scored} texts"
                f"{', the last time because it ' + why if why else ''}; fix the scorer, or raise "
                f"failure_rate, which is {self.rate}"
            )
        if why:
            warnings.warn(
                f"scorer {name!r} {why}; the text counts as unsafe", ScorerWarning, stacklevel=2
            )


def checked_score(
    scorer: Scores,
    prompts: Sequence[str],
    responses: Sequence[str],
    finished: Sequence[bool],
    tally: Tally | None = None,
) -> np.ndarray:
    """Score texts and fail closed: NaN, which is never safe, where there is no finite number.

    A call that fails as a whole is made again for each text alone, so that a text costs only
    itself. It fails when the scorer raises, or returns anything but one number per text.

    Returns
    -------
    ndarray (n,) float64

    Raises
    ------
    ScorerError
        From the tally, which warns of failed calls as well.
    """
    if not len(responses):
        return np.zeros(0)
    scores, why = score_once(scorer, prompts, responses, finished)
    if why and len(responses) > 1:
        texts = zip(prompts, responses, finished, strict=True)
        alone = [score_once(scorer, [p], [r], [f]) for p, r, f in texts]
        scores = np.concatenate([score for score, _ in alone])
        why = next((reason for _, reason in alone if reason), "")
    if tally:
        tally.add(scorer, scores, why)
    return scores


def score_once(
    scorer: Scores, prompts: Texts, responses: Texts, finished: Sequence[bool]
) -> tuple[np.ndarray, str]:
    """Return the scores of one call (n,) float64, NaN where not finite, and why it failed."""
    failed = np.full(len(responses), np.nan)
    try:
        # copies, in case the scorer mutates its arguments
        found: Any = scorer.score(list(prompts), list(responses), list(finished))
        scores = _array(found)
    except NoNumber as error:
        return failed, str(error)
    except Exception as error:
        from .engine.device import out_of_memory  # here: it needs torch, and a function does not

        if out_of_memory(error):  # not the scorer's fault: the caller halves the batch
            raise
        return failed, f"raised {one_line(error)}"
    if scores.shape != failed.shape:
        return failed, f"returned scores of shape {scores.shape} for {len(responses)} texts"
    # as float64 first: a wider float may be finite and not fit
    with np.errstate(over="ignore"):
        scores = scores.astype(np.float64)
    known = np.isfinite(scores) & ~np.ma.getmask(found)  # a masked number is none
    return np.where(known, scores, np.nan), ""


class NoNumber(ValueError):
    """A scorer returned no number; the message says what to return instead."""


def _array(found: Any) -> np.ndarray:
    """Return the numbers that a scorer returned; raise `NoNumber` for anything else."""
    if isinstance(found, list | tuple):
        return np.array([_number(value) for value in found])
    if hasattr(found, "detach"):  # a tensor, which may be of a type that numpy does not have
        found = found.detach().cpu()
        found = found.double() if found.is_floating_point() else found
    scores = np.asarray(found)
    if scores.dtype.kind not in "biuf":
        raise _no_number(found)
    return scores


def _number(value: Any) -> float:
    """Return a number as a float; True, False and arrays or tensors of one element are numbers."""
    if np.ma.is_masked(value):
        return math.nan
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise _no_number(value)
    return float(value)


def _no_number(value: object) -> NoNumber:
    """Return the error for a value that is no number."""
    shown = " ".join(f"{value!r:.60}".split())
    return NoNumber(
        f"returned {shown} ({type(value).__name__}), which is no number; return a number, or True "
        "or False"
    )


def checked_tokens(
    scorer: Any, prompts: Texts, responses: Texts, since: Sequence[int], tally: Tally | None = None
) -> list[tuple[list[int], list[float]]]:
    """Return the scores of texts after each of their tokens, and fail closed.

    Parameters
    ----------
    since : sequence of int
        The tokens that end in the first `since` characters of a text are left out.

    Returns
    -------
    list of (ends, scores)
        Character offsets of the tokens' ends, the whole text last, and the scores there; NaN where
        there is no finite number, and for the whole text alone where the scorer fails.
    """
    out: list[tuple[list[int], list[float]]] = []
    why = ""
    try:
        for ends, scores in scorer.token_scores(prompts, responses, since):
            finite = [float(score) if math.isfinite(score) else math.nan for score in scores]
            if len(ends) != len(finite):
                raise ValueError(f"{len(finite)} scores for {len(ends)} tokens")
            out.append((list(ends), finite))
        if [ends[-1] for ends, _ in out] != [len(response) for response in responses]:
            raise ValueError("its scores do not end with those of the whole texts")
    except Exception as error:
        from .engine.device import out_of_memory

        if out_of_memory(error):
            raise
        if len(responses) > 1:
            texts = zip(prompts, responses, since, strict=True)
            alone = [checked_tokens(scorer, [p], [r], [s], tally) for p, r, s in texts]
            return [reading for (reading,) in alone]
        out = [([len(response)], [math.nan]) for response in responses]
        why = f"raised {one_line(error)}"
    if tally:
        # a text counts once, however many tokens it has
        worst = np.array([math.nan if math.isnan(sum(scores)) else 0.0 for _, scores in out])
        tally.add(scorer, worst, why)
    return out


# --- caches ---------------------------------------------------------------------------------------


TextKey = tuple[str, str, bool]  # prompt, response, and whether the response is finished


class Cached:
    """A scorer with a cache by text; its failures become NaN.

    Every group of prompts has a new one. A longer life would let a resume, or the order of work,
    change which texts share a batch, and with it the last bits of a score.

    Parameters
    ----------
    tally : Tally, optional
        Counts the texts of a whole run, and how many of them the scorer failed on.
    """

    def __init__(self, scorer: Scorer, tally: Tally | None = None):
        self.scorer, self.tally = scorer, tally or Tally()
        # `finished` is in the key: a scorer may treat a complete answer and a prefix differently
        self.known: dict[TextKey, float] = {}

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return one number per text (n,), NaN where the scorer gave no finite number.

        Raises
        ------
        ScorerError
            When the scorer has failed on too many texts of the run, see `Tally`.
        """
        keys = list(zip(prompts, responses, finished, strict=True))
        # each new text once, in the given order: the composition of a batch must not vary
        if new := list(dict.fromkeys(k for k in keys if k not in self.known)):
            new_prompts, texts, ended = zip(*new, strict=True)
            scores = checked_score(self.scorer, new_prompts, texts, ended, self.tally)
            self.known |= zip(new, scores.tolist(), strict=True)
        return np.array([self.known[k] for k in keys])


# --- checks ---------------------------------------------------------------------------------------


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
    def scored_ends(self) -> list[int]:
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
    parts: list[tuple[str, str, bool]] = []
    for prompt, text, ended, ends in zip(prompts, texts, finished, cuts, strict=True):
        parts += [(prompt, text[:end], False) for end in ends]
        parts.append((prompt, text, ended))
    costs = iter(scorer.score(*zip(*parts, strict=True)) if parts else ())
    return [
        Reading([*ends, len(text)], [float(next(costs)) for _ in range(len(ends) + 1)])
        for text, ends in zip(texts, cuts, strict=True)
    ]


def tokens_in(n_tokens: int, length: int, cuts: Sequence[int]) -> int:
    """Return the policy tokens in all prefixes of a text of `n_tokens` that end at `cuts`.

    Within a block tokens count in proportion to their characters.
    """
    return sum(round(n_tokens * cut / length) if length else n_tokens for cut in cuts)
