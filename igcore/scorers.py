"""Scorers: text in, one number per text out.

A cost says how bad a response is (higher is worse), a reward how good (higher is better). A
function of a text will do::

    def shouting(text):
        return sum(c.isupper() for c in text)

An object with the members of `Scorer` scores many texts at once and names its unit and version::

    class Shouting:
        name, digest, sign, unit = "shouting", "v1", "higher is worse", "capitals"

        def score(self, prompts, responses, finished):
            return [shouting(response) for response in responses]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any, Protocol, TypeGuard

from .errors import ParameterError

COST, REWARD = "higher is worse", "higher is better"
SIGNS = {"cost": COST, "reward": REWARD}
# names of a function's parameters that are given a text even where they have a default
CERTAIN = ("prompt", "question", "response", "answer", "completion", "text")
# text -> the names that mean it and nothing else; message or content may mean either
NAMES = {
    "prompt": ("prompt", "question", "input", "query", "instruction", "request", "user"),
    "response": (
        *CERTAIN[2:], "output", "reply", "generation", "prediction", "candidate", "assistant",
    ),
}  # fmt: skip
ROLE_OF = {name: role for role, names in NAMES.items() for name in names}
Texts = Sequence[str]  # of one call: prompts, or a response to each
TextFunction = Callable[[str], float] | Callable[[str, str], float]


class Scores(Protocol):
    """Anything that gives one number per text."""

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> Iterable[float]:
        """Return one number per text.

        `finished` says whether a response is complete; if not, it is a prefix.
        """


class Scorer(Scores, Protocol):
    """A cost or reward model: its scores with name, version, sign and unit."""

    @property
    def name(self) -> str:
        """Its name in records."""

    @property
    def digest(self) -> str:
        """Hash or version of its weights, so that others can score with the same."""

    @property
    def sign(self) -> str:
        """``"higher is worse"`` for a cost, ``"higher is better"`` for a reward."""

    @property
    def unit(self) -> str:
        """What one point means, such as ``"probability"``."""


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
    takes : dict of str to str
        Name of each parameter -> ``prompt``, ``response`` or ``finished``.
    by_place : bool
        True if its parameters have no names, as in a function of C.
    digest : str
        Names the function in records; empty if nothing does.
    """

    function: Callable[..., float]
    name: str
    sign: str
    takes: Mapping[str, str]
    by_place: bool = False
    unit: str = "as the function returns it"
    digest: str = ""

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> list[float]:
        """Return the function's value for each response."""
        return [self._asked(*text) for text in zip(prompts, responses, finished, strict=True)]

    @property
    def reads_prompts(self) -> bool:
        """True if one of its parameters takes the prompt."""
        return "prompt" in self.takes.values()

    def _asked(self, prompt: str, response: str, finished: bool) -> float:
        values = {"prompt": prompt, "response": response, "finished": finished}
        given = {name: values[role] for name, role in self.takes.items()}
        return self.function(*given.values()) if self.by_place else self.function(**given)


def check_sign(scorer: Scorer, role: str) -> Scorer:
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
            f"{role} {scorer.name!r} has sign {scorer.sign!r}; a {role} must have {SIGNS[role]!r}"
        )
    return scorer


def of_function(function: Callable[..., float], role: str, digest: str = "") -> FunctionScorer:
    """Return a function as a scorer.

    Arguments are given by their names, see `NAMES`, or by the last word of their names, as in
    ``llm_output``. A single argument of another name is the response.

    Parameters
    ----------
    digest : str
        Names the function in records; by default its own ``digest``.

    Raises
    ------
    ParameterError
        For anything but a function of one text, and for parameters that do not name their text.
    """
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if isinstance(function, type):
        raise ParameterError(f"{role} {name} is a class; make an instance of it, such as {name}()")
    settled = function.keywords if isinstance(function, partial) else {}
    several = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    known = signature(function).parameters.values()
    single = [p for p in known if p.name not in settled and p.kind not in several]
    if not single and any(p.kind is Parameter.VAR_POSITIONAL for p in known):  # a plain wrapper
        single = [Parameter("response", Parameter.POSITIONAL_ONLY)]
    takes = _roles(single, f"{role} {name}")
    by_place = any(p.kind is Parameter.POSITIONAL_ONLY for p in single)
    digest = digest or getattr(function, "digest", "")
    digest = digest if isinstance(digest, str) else ""
    return FunctionScorer(function, name, SIGNS[role], takes, by_place, digest=digest)


def _roles(parameters: Sequence[Parameter], what: str) -> dict[str, str]:
    """Return the parameters to pass: name -> ``prompt`` or ``response``.

    Raises
    ------
    ParameterError
        When their names do not tell which text each one takes.
    """
    named = {p.name: _role_of(p.name) for p in parameters}
    needed = [p.name for p in parameters if p.default is p.empty or p.name in CERTAIN]
    needed = needed or [name for name in named if named[name]] or list(named)[:1]
    roles = {name: named[name] for name in needed}
    # a single one of another name is the response, where no default is
    if len(needed) == 1 and "response" not in named.values():
        words = needed[0].lower().split("_")
        is_other = "prompt" in map(ROLE_OF.get, words) or words[-1].removesuffix("s") in ROLE_OF
        if not is_other or list(named) == ["input"]:  # the input of the function
            roles = {needed[0]: "response"}
    if sorted(roles.values()) not in (["prompt", "response"], ["response"]):
        raise ParameterError(
            f"{what} takes ({', '.join(needed)}), which does not say what it is to be given; name "
            "its arguments response, or prompt and response, or give an object whose "
            "score(prompts, responses, finished) returns a list"
        )
    return roles


def _role_of(name: str) -> str:
    """Return the text that the last word of a name means, or nothing."""
    *before, last = name.lower().split("_")
    if last == "text":  # the text of a prompt is the prompt
        last = next((word for word in before if word in ROLE_OF), last)
    return ROLE_OF.get(last, "")


def keeps_cache(scorer: Scorer | None) -> TypeGuard[CachingScorer]:
    """True if a scorer keeps a KV cache."""
    return hasattr(scorer, "with_cache")


def uncached(scorer: Scorer) -> Scorer:
    """Return an uncached scorer: the same model, without any KV cache of the search."""
    return scorer.uncached() if keeps_cache(scorer) else scorer


class Sessions:
    """The KV caches of several scorers, by backbone."""

    def __init__(self, scorers: Sequence[Scorer], prompts: Sequence[str]):
        self.caches: dict[int, Any] = {}
        for scorer in filter(keeps_cache, scorers):
            if id(scorer.backbone) not in self.caches:
                self.caches[id(scorer.backbone)] = scorer.open_cache(prompts)

    def of(self, scorer: Scorer) -> Scorer:
        """Return the scorer with its cache, if it keeps one."""
        if not keeps_cache(scorer):
            return scorer
        return scorer.with_cache(self.caches[id(scorer.backbone)])

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Evict everything except the caches of these texts."""
        for cache in self.caches.values():
            cache.retain(prompts, responses)


def reads_prompts(scorer: Scorer) -> bool:
    """True unless a scorer says by its attribute `reads_prompts` that it reads answers alone."""
    return bool(getattr(scorer, "reads_prompts", True))


def reads_tokens(scorer: Scorer) -> bool:
    """True if a scorer gives the cost after every token of a text in one pass."""
    return bool(getattr(scorer, "reads_tokens", False))


def readers_of(*scorers: Scorer | None) -> set[Any]:
    """Return the language models behind the scorers that keep a KV cache."""
    parts: list[Scorer | None] = []
    for scorer in scorers:
        parts += getattr(scorer, "parts", [scorer])  # a maximum of several costs has parts
    # a set: scorers may share a backbone, which takes memory once
    return {part.backbone.model for part in parts if keeps_cache(part)}
