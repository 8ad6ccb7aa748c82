"""Scorers: text in, one number per text out. Knows nothing of policies, budgets or search.

A cost says how bad a response is (higher is worse), a reward how good (higher is better). A scorer
is any object with the members of `Scorer`; this is a whole one::

    class Shouting:
        name, digest, sign, unit = "shouting", "v1", "higher is worse", "share of capitals"

        def score(self, prompts, responses, finished):
            return [sum(c.isupper() for c in r) / max(len(r), 1) for r in responses]
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .engine.device import out_of_memory
from .errors import ParameterError, ScorerError

COST, REWARD = "higher is worse", "higher is better"


class Scorer(Protocol):
    """What the search asks of a cost or reward model.

    Attributes
    ----------
    name : str
        What records call it.
    digest : str
        Hash or version of its weights, so that a third party scores with the same.
    sign : str
        ``"higher is worse"`` for a cost, ``"higher is better"`` for a reward.
    unit : str
        What one point means, such as ``"probability"``.

    Notes
    -----
    One that carries what it has read from text to text also has ``backbone``, ``opened``,
    ``carried`` and ``afresh``, as `igcore.models.lm_scorer.LMScorer` has.
    """

    name: str
    digest: str
    sign: str
    unit: str

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> Sequence[float]:
        """Return one number per text; `finished` says whether the response has ended or is a
        prefix.
        """


def check_sign(scorer: Scorer, role: str) -> Scorer:
    """Return `scorer`, or raise ``ParameterError`` when a reward was given as a cost or the other
    way round.
    """
    if missing := [
        name for name in ("name", "digest", "sign", "unit", "score") if not hasattr(scorer, name)
    ]:
        raise ParameterError(
            f"{role} {scorer!r} has no {', '.join(missing)}; a scorer has name, digest, "
            f"sign, unit and score"
        )
    wanted = {"cost": COST, "reward": REWARD}[role]
    if scorer.sign != wanted:
        raise ParameterError(
            f"{role} {scorer.name!r} says {scorer.sign!r}; a {role} must say {wanted!r}"
        )
    return scorer


class Cached:
    """A scorer behind a cache by text, with its failures turned into NaN.

    One is made for every group of prompts and thrown away after it, so that neither a resume nor
    the order of work can change which texts share a batch, and with it the last bits of a score.

    Parameters
    ----------
    patience : int
        So many texts may fail before it is taken that all will: a search that knows only finished
        answers may ask about a single one first.
    """

    def __init__(self, scorer: Scorer, patience: int = 1):
        self.scorer, self.patience, self._asked = scorer, patience, 0
        self._known: dict[tuple[str, str, bool], float] = {}

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,), NaN where the scorer gave none that can be used; see
        `checked_score`.

        Raises
        ------
        ScorerError
            As `checked_score`, and when no text of the group so far has a usable score and at least
            `patience` were asked about.
        """
        keys = list(zip(prompts, responses, finished, strict=True))
        self._asked += len(keys)
        if new := list(dict.fromkeys(k for k in keys if k not in self._known)):
            self._known.update(
                zip(new, checked_score(self.scorer, *zip(*new, strict=True)), strict=True)
            )
            if self._asked >= self.patience and not np.isfinite(list(self._known.values())).any():
                raise ScorerError(
                    f"scorer {self.scorer.name!r} returned no finite number for any of "
                    f"{len(self._known)} texts; "
                    "it must return one finite number per text"
                )
        return np.array([self._known[k] for k in keys])


def carries(scorer: Scorer) -> bool:
    """Say whether a scorer can carry what it has read, as `igcore.models.lm_scorer.LMScorer` does."""
    return hasattr(scorer, "carried")


def open_sessions(
    scorers: Mapping[str, Scorer], prompts: Sequence[str]
) -> tuple[dict[str, Scorer], list]:
    """Let scorers that can carry what they read of one group of prompts, one session to a backbone."""
    sessions: dict[int, object] = {}
    out = dict(scorers)
    for role, scorer in scorers.items():
        if carries(scorer):
            key = id(scorer.backbone)
            sessions[key] = sessions.get(key) or scorer.opened(prompts)
            out[role] = scorer.carried(sessions[key])
    return out, list(sessions.values())


def afresh(scorer: Scorer) -> Scorer:
    """Return a scorer that has read nothing yet: what is emitted is checked without anything
    carried over from the search.
    """
    return scorer.afresh() if carries(scorer) else scorer


def checked_score(
    scorer: Scorer, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
) -> np.ndarray:
    """Score texts and fail closed: what is not a finite number comes back as NaN, which no gate
    lets through.

    Returns
    -------
    ndarray (n,) float64

    Raises
    ------
    ScorerError
        When the scorer raises, or answers with the wrong number of scores.
    """
    if not len(responses):
        return np.zeros(0)
    try:
        scores = np.asarray(scorer.score(prompts, responses, finished))
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ScorerError(
            f"scorer {scorer.name!r} failed on {len(responses)} texts with "
            f"{type(error).__name__}: {error}; no text is emitted"
        ) from error
    if scores.dtype.kind not in "fiu":
        raise ScorerError(
            f"scorer {scorer.name!r} returned {scores.ravel()[:1]} of type {scores.dtype}; "
            f"it must return numbers"
        )
    if scores.shape != (len(responses),):
        raise ScorerError(
            f"scorer {scorer.name!r} returned scores of shape {scores.shape} for "
            f"{len(responses)} texts; "
            "it must return one number per text"
        )
    return np.where(np.isfinite(scores), scores, np.nan).astype(np.float64)
