"""Scorers: text in, one number per text out.

A cost says how bad a response is (higher is worse), a reward how good (higher is better). A
function of a text will do::

    def shouting(text):
        return sum(c.isupper() for c in text)

An object with the members of `Scorer` can score many texts at once, and says more of itself::

    class Shouting:
        name, digest, sign, unit = "shouting", "v1", "higher is worse", "capitals"

        def score(self, prompts, responses, finished):
            return [shouting(response) for response in responses]
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, TypeGuard

from .errors import ParameterError

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
    scorer : Scorer, callable, str, mapping or list
        A text or a mapping is loaded by `igcore.load_scorer`. A list of costs is their maximum.

    Raises
    ------
    ParameterError
        For an unknown name, a function of more than two arguments, an object that is no scorer, or
        one whose sign does not fit the role: a reward given as a cost would make the search prefer
        the worst text.
    """
    if isinstance(scorer, str | Mapping):
        scorer = resolve_name("igcore.models.registry:load_scorer")(scorer)
    elif isinstance(scorer, list) and role == "cost":
        costs = [as_scorer(cost, role) for cost in scorer]
        scorer = resolve_name("igcore.models.maximum:maximum_of")(costs)
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
            "igcore.SCORERS, a mapping of a name and options, or an object with name, digest, "
            "sign, unit and score"
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


def keeps_cache(scorer: Scorer | None) -> TypeGuard[CachingScorer]:
    """Say whether a scorer keeps a KV cache."""
    return hasattr(scorer, "with_cache")


def uncached(scorer: Scorer) -> Scorer:
    """Return an uncached scorer: the same model, without any KV cache of the search."""
    return scorer.uncached() if keeps_cache(scorer) else scorer


def reads_tokens(scorer: Any) -> bool:
    """Say whether a scorer gives the cost after every token of a text in one pass."""
    return bool(getattr(scorer, "reads_tokens", False))
