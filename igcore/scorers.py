"""Scorers: text in, one number per text out. Knows nothing of policies, budgets or search.

A cost says how bad a response is (higher is worse), a reward how good (higher is better). A scorer
is any object with the members of `Scorer`; this is a whole one::

    class Shouting:
        name, digest, sign, unit = "shouting", "v1", "higher is worse", "share of capitals"

        def score(self, prompts, responses, finished):
            return [sum(c.isupper() for c in r) / max(len(r), 1) for r in responses]
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

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
            f"{role} {scorer!r} has no {', '.join(missing)}; a scorer has name, digest, sign, unit "
            "and score"
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
                    f"{len(self._known)} texts; it must return one finite number per text"
                )
        return np.array([self._known[k] for k in keys])


def carries(scorer: Scorer) -> bool:
    """Say whether a scorer keeps a KV cache, as `igcore.models.lm_scorer.LMScorer` does."""
    return hasattr(scorer, "carried")


def afresh(scorer: Scorer) -> Scorer:
    """Return a scorer that has read nothing yet: what is emitted is checked without anything
    carried over from the search.
    """
    return scorer.afresh() if carries(scorer) else scorer


class Scoring:
    """The scorers of one batch of prompts: during the search, and for what is reported.

    Parameters
    ----------
    cost, reward : Scorer
    prompts : sequence of str
    patience : int
        See `Cached`.

    Attributes
    ----------
    search : dict of str to Cached
        By role, ``cost`` and ``reward``: carrying the KV cache of what they have read where a
        scorer offers that. Two scorers of one backbone share it.
    reported : dict of str to Cached
        The same for the metrics of an answer, which anybody can recompute: nothing of it is
        carried.
    final_cost : Scorer
        The cost model of the final check, past every cache.
    path_cost : Cached or None
        Reads the path to an answer again; None where the search has carried nothing.
    """

    def __init__(self, cost: Scorer, reward: Scorer, prompts: Sequence[str], patience: int):
        self.final_cost = afresh(cost)
        self.search, self.reported = {}, {}
        self.sessions: dict[int, object] = {}  # by backbone
        for role, scorer in (("cost", cost), ("reward", reward)):
            if not carries(scorer):
                self.search[role] = self.reported[role] = Cached(scorer, patience)
                continue
            backbone = id(scorer.backbone)
            if backbone not in self.sessions:
                self.sessions[backbone] = scorer.opened(prompts)
            carried = scorer.carried(self.sessions[backbone])
            self.search[role] = Cached(carried, patience)
            self.reported[role] = Cached(afresh(scorer), patience)
        carries_cost = self.reported["cost"] is not self.search["cost"]
        self.path_cost = self.reported["cost"] if carries_cost else None

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Keep what was read of these texts, and free the rest."""
        for session in self.sessions.values():
            session.retain(prompts, responses)


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
        from .engine.device import out_of_memory  # here: it needs torch, and a function does not

        if out_of_memory(error):
            raise
        raise ScorerError(
            f"scorer {scorer.name!r} failed on {len(responses)} texts with {type(error).__name__}: "
            f"{error}; no text is emitted"
        ) from error
    if scores.dtype.kind not in "fiu":
        raise ScorerError(
            f"scorer {scorer.name!r} returned {scores.ravel()[:1]} of type {scores.dtype}; it must "
            "return numbers"
        )
    if scores.shape != (len(responses),):
        raise ScorerError(
            f"scorer {scorer.name!r} returned scores of shape {scores.shape} for {len(responses)} "
            "texts; it must return one number per text"
        )
    return np.where(np.isfinite(scores), scores, np.nan).astype(np.float64)
