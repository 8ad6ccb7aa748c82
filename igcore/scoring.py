"""Asking scorers: failures become NaN, which is never safe, and texts are remembered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from .errors import ScorerError, ScorerWarning, said
from .scorers import Scorer, Scores

AT_LEAST = 100  # texts before a share of failures says something


# --- failing closed -------------------------------------------------------------------------------


@dataclass
class Tally:
    """The texts that a scorer was given in a run, and those that it failed on.

    Attributes
    ----------
    rate : float
        Largest share of texts that may fail; from `AT_LEAST` texts on, a larger one stops the run.
    asked, failed : int
    """

    rate: float = 0.5
    asked: int = 0
    failed: int = 0

    def add(self, scorer: Scores, scores: np.ndarray, why: str) -> None:
        """Count scores (n,), NaN where the scorer failed, for the reason given.

        Raises
        ------
        ScorerError
            When too many texts have failed.
        """
        self.asked += len(scores)
        self.failed += int(np.isnan(scores).sum())
        name = getattr(scorer, "name", type(scorer).__name__)
        if self.asked >= AT_LEAST and self.failed > self.rate * self.asked:
            raise ScorerError(
                f"scorer {name!r} failed on {self.failed} of {self.asked} texts"
                f"{', the last time because it ' + why if why else ''}; mend the scorer, or raise "
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
    itself. It fails when the scorer raises, or answers with anything but one number per text.

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
    scores, why = asked_once(scorer, prompts, responses, finished)
    if why and len(responses) > 1:
        texts = zip(prompts, responses, finished, strict=True)
        alone = [asked_once(scorer, [p], [r], [f]) for p, r, f in texts]
        scores = np.concatenate([score for score, _ in alone])
        why = next((reason for _, reason in alone if reason), "")
    if tally:
        tally.add(scorer, scores, why)
    return scores


def asked_once(
    scorer: Scores, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
) -> tuple[np.ndarray, str]:
    """Return the scores of one call (n,) float64, NaN where not finite, and why it failed."""
    failed = np.full(len(responses), np.nan)
    try:
        # lists of its own, which it may change without harm
        found = scorer.score(list(prompts), list(responses), list(finished))
        scores = _array(found)
    except NoNumber as error:
        return failed, str(error)
    except Exception as error:
        from .engine.device import out_of_memory  # here: it needs torch, and a function does not

        if out_of_memory(error):  # not the scorer's fault: the caller tries a smaller batch
            raise
        return failed, f"raised {said(error)}"
    if scores.shape != failed.shape:
        return failed, f"returned scores of shape {scores.shape} for {len(responses)} texts"
    # as float64 first: a wider float may be finite and not fit
    with np.errstate(over="ignore"):
        scores = scores.astype(np.float64)
    known = np.isfinite(scores) & ~np.ma.getmask(found)  # a masked number is none
    return np.where(known, scores, np.nan), ""


class NoNumber(ValueError):
    """What a scorer returned is no number; the message says what would help."""


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
    """Return a number as a float; true and false, and one alone in an array or tensor, are some."""
    if np.ma.is_masked(value):
        return math.nan
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise _no_number(value)
    return float(value)


def _no_number(value: Any) -> NoNumber:
    """Return the error for what is no number."""
    shown = " ".join(f"{value!r:.60}".split())
    return NoNumber(
        f"returned {shown} ({type(value).__name__}), which is no number; return a number, or True "
        "or False"
    )


def checked_tokens(
    scorer: Any,
    prompts: Sequence[str],
    responses: Sequence[str],
    since: Sequence[int],
    tally: Tally | None = None,
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
        why = f"raised {said(error)}"
    if tally:
        # a text counts once, however many tokens it has
        worst = np.array([math.nan if math.isnan(sum(scores)) else 0.0 for _, scores in out])
        tally.add(scorer, worst, why)
    return out


# --- caches ---------------------------------------------------------------------------------------


Text = tuple[str, str, bool]  # prompt, response, and whether the response is finished


class Cached:
    """A scorer with a cache by text; its failures become NaN.

    Every group of prompts has a new one. A longer life would let a resume, or the order of work,
    change which texts share a batch, and with it the last bits of a score.

    Parameters
    ----------
    tally : Tally, optional
        Counts the texts of a whole run, and how many of them the scorer failed on.
    pooled : object, optional
        Where scores are looked up first, and kept.
    """

    def __init__(self, scorer: Scorer, tally: Tally | None = None, pooled: Any = None):
        self.scorer, self.tally, self.pooled = scorer, tally or Tally(), pooled
        # `finished` is in the key: a scorer may treat a complete answer and a prefix differently
        self.known: dict[Text, float] = {}

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,), NaN where the scorer gave no finite number.

        Raises
        ------
        ScorerError
            When the scorer has failed on too many texts of the run, see `Tally`.
        """
        keys = list(zip(prompts, responses, finished, strict=True))
        if self.pooled is not None:
            self.known |= self.pooled.get([k for k in keys if k not in self.known])
        # each new text once, in the order given: the composition of a batch must not vary
        if new := list(dict.fromkeys(k for k in keys if k not in self.known)):
            asked, texts, ended = zip(*new, strict=True)
            scores = checked_score(self.scorer, asked, texts, ended, self.tally)
            found = dict(zip(new, scores.tolist(), strict=True))
            self.known |= found
            if self.pooled is not None:
                self.pooled.add(found)
        return np.array([self.known[k] for k in keys])
