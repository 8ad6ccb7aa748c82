"""Scorers: text in, one number per text out.

A cost says how bad a response is (higher is worse), a reward how good (higher is better). A
function of a text will do::

    def shouting(text):
        return sum(c.isupper() for c in text) / max(len(text), 1)

An object with the members of `Scorer` can score many texts at once, and says more of itself::

    class Shouting:
        name, digest, sign, unit = "shouting", "v1", "higher is worse", "share of capitals"

        def score(self, prompts, responses, finished):
            return [shouting(response) for response in responses]
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, TypeGuard

import numpy as np

from .errors import ParameterError, ScorerError

COST, REWARD = "higher is worse", "higher is better"
SIGNS = {"cost": COST, "reward": REWARD}
TextFunction = Callable[[str], float] | Callable[[str, str], float]


class Scores(Protocol):
    """What gives one number per text."""

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> Any:
        """Return one number per text.

        `finished` says whether a response is complete; if not, it is a prefix.
        """


class Scorer(Scores, Protocol):
    """What the search needs of a cost or reward model: its scores, and what they are.

    Attributes
    ----------
    name : str
        Its name in records.
    digest : str
        Hash or version of its weights, so that others can score with the same.
    sign : str
        ``"higher is worse"`` for a cost, ``"higher is better"`` for a reward.
    unit : str
        What one point means, such as ``"probability"``.
    """

    name: str
    digest: str
    sign: str
    unit: str


class CachingScorer(Scorer, Protocol):
    """A scorer that keeps a KV cache, as `igcore.models.lm_scorer.LMScorer` does.

    Attributes
    ----------
    backbone
        The language model that reads. Two scorers of one backbone share a cache.
    """

    backbone: Any

    def open_cache(self, prompts: Sequence[str]) -> Any:
        """Return a new KV cache that has read the prompts."""

    def with_cache(self, session: Any) -> Scorer:
        """Return the scorer that reads through a KV cache."""

    def uncached(self) -> Scorer:
        """Return the scorer without a KV cache."""


@dataclass
class FunctionScorer:
    """A function of the response, or of the prompt and the response, as a scorer.

    Attributes
    ----------
    digest : str
        The sha256 of the function's source. What the function calls or reads is not in it.
    with_prompt : bool
        Whether it takes the prompt as well, first.
    """

    function: Callable[..., float]
    name: str
    digest: str
    sign: str
    with_prompt: bool
    unit: str = "as the function returns it"

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """Return one number per response."""
        if self.with_prompt:
            return [self.function(p, r) for p, r in zip(prompts, responses, strict=True)]
        return [self.function(response) for response in responses]


def as_scorer(scorer: Any, role: str) -> Scorer:
    """Return the scorer for a role, ``cost`` or ``reward``.

    Parameters
    ----------
    scorer : Scorer, callable or str
        A text is loaded by `igcore.load_scorer`.

    Raises
    ------
    ParameterError
        For an unknown name, a function of more than two arguments, an object that is no scorer, or
        one whose sign does not fit the role: a reward given as a cost would make the search prefer
        the worst text.
    """
    if isinstance(scorer, str):
        scorer = resolve_name("igcore.models.registry:load_scorer")(scorer)
    elif callable(scorer) and not hasattr(scorer, "score"):
        return of_function(scorer, role)
    checked: Scorer = check_sign(scorer, role)
    return checked


def check_sign(scorer: Any, role: str) -> Any:
    """Return `scorer`, or raise ``ParameterError`` when it is no scorer for its role."""
    members = ("name", "digest", "sign", "unit", "score")
    missing = [name for name in members if not hasattr(scorer, name)]
    if missing:
        raise ParameterError(
            f"{role} {scorer!r} has no {', '.join(missing)}; give a function of a text, a name of "
            "igcore.SCORERS, or an object with name, digest, sign, unit and score"
        )
    if scorer.sign != SIGNS[role]:
        raise ParameterError(
            f"{role} {scorer.name!r} says {scorer.sign!r}; a {role} must say {SIGNS[role]!r}"
        )
    return scorer


def of_function(function: Callable[..., float], role: str) -> FunctionScorer:
    """Return a function of one text (the response) or two (prompt, response) as a scorer."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a few built-in functions have no signature
        parameters = []
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(required) > 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise ParameterError(
            f"{role} {name} takes {len(required)} arguments; give a function of the response, or "
            "of the prompt and the response"
        )
    try:
        source = inspect.getsource(function if hasattr(function, "__code__") else type(function))
    except (OSError, TypeError):  # typed at a prompt, or built in: its name is all there is
        source = name
    digest = hashlib.sha256(source.encode()).hexdigest()
    return FunctionScorer(function, name, digest, SIGNS[role], with_prompt=len(required) == 2)


class Cached:
    """A scorer with a cache by text; its failures become NaN.

    Every group of prompts has a new one. A longer life would let a resume, or the order of work,
    change which texts share a batch, and with it the last bits of a score.

    Parameters
    ----------
    patience : int
        Number of texts that may all fail before the scorer counts as broken. A search that scores
        finished answers only may have a single text at first.
    """

    def __init__(self, scorer: Scorer, patience: int = 1):
        self.scorer, self.patience, self._asked = scorer, patience, 0
        self._known: dict[tuple[str, str, bool], float] = {}

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,), NaN where the scorer gave no finite number.

        Raises
        ------
        ScorerError
            As `checked_score`, and when at least `patience` texts were scored and none of them has
            a finite number.
        """
        # `finished` is in the key: a scorer may treat a complete answer and a prefix differently
        keys = list(zip(prompts, responses, finished, strict=True))
        self._asked += len(keys)
        # each new text once, in the order given: the composition of a batch must not vary
        if new := list(dict.fromkeys(k for k in keys if k not in self._known)):
            self._known.update(
                zip(new, checked_score(self.scorer, *zip(*new, strict=True)), strict=True)
            )
            # better one error than a group of prompts that all abstain for the wrong reason
            if self._asked >= self.patience and not np.isfinite(list(self._known.values())).any():
                raise ScorerError(
                    f"scorer {self.scorer.name!r} returned no finite number for any of "
                    f"{len(self._known)} texts; it must return one finite number per text"
                )
        return np.array([self._known[k] for k in keys])


def keeps_cache(scorer: Scorer | None) -> TypeGuard[CachingScorer]:
    """Say whether a scorer keeps a KV cache."""
    return hasattr(scorer, "with_cache")


def uncached(scorer: Scorer) -> Scorer:
    """Return an uncached scorer: the same model, without any KV cache of the search."""
    return scorer.uncached() if keeps_cache(scorer) else scorer


class Scoring:
    """The scorers of one batch of prompts: during the search, and for what is reported.

    Parameters
    ----------
    cost : Scorer
    reward : Scorer or None
        None: rewards are the policy's own likelihoods, which the search knows.
    prompts : sequence of str
    patience : int
        See `Cached`.

    Attributes
    ----------
    search : dict of str to Cached
        By role, ``cost`` and ``reward``: with a KV cache where a scorer offers one. Two scorers of
        one backbone share it.
    reported : dict of str to Cached
        The same for the reported metrics of an answer, without a KV cache, so that anybody can
        recompute them.
    final_cost : Scorer
        The uncached cost model of the final check.
    path_cost : Cached or None
        Scores the path to an answer again; None where the search used no KV cache.
    """

    def __init__(self, cost: Scorer, reward: Scorer | None, prompts: Sequence[str], patience: int):
        # no cache by text either: the final check must not repeat a stored mistake
        self.final_cost = uncached(cost)
        self.search, self.reported = {}, {}
        self.sessions: dict[int, Any] = {}  # KV caches by backbone
        for role, scorer in (("cost", cost), ("reward", reward)):
            if scorer is None:
                continue
            if not keeps_cache(scorer):  # one cache by text serves search and report
                self.search[role] = self.reported[role] = Cached(scorer, patience)
                continue
            backbone = id(scorer.backbone)
            if backbone not in self.sessions:
                self.sessions[backbone] = scorer.open_cache(prompts)
            with_cache = scorer.with_cache(self.sessions[backbone])
            self.search[role] = Cached(with_cache, patience)
            self.reported[role] = Cached(uncached(scorer), patience)
        # the path needs a second look only where the search saw it through a KV cache
        carries_cost = self.reported["cost"] is not self.search["cost"]
        self.path_cost = self.reported["cost"] if carries_cost else None

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Keep the KV cache of these texts, and free the rest."""
        for session in self.sessions.values():
            session.retain(prompts, responses)


def checked_score(
    scorer: Scorer, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
) -> np.ndarray:
    """Score texts and fail closed: what is not a finite number becomes NaN, which is never safe.

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

        if out_of_memory(error):  # not the scorer's fault: the caller tries a smaller batch
            raise
        raise ScorerError(
            f"scorer {scorer.name!r} failed on {len(responses)} texts with {type(error).__name__}: "
            f"{error}; no text is emitted"
        ) from error
    if scores.dtype.kind not in "fiu":  # labels or booleans would convert without a word
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
