"""The table of scorers: from a name and its options to a loaded cost or reward model."""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from pkgutil import resolve_name
from typing import Any

from ..errors import ParameterError, unknown_name
from ..scorers import Scorer

# name -> what makes the scorer, or where it is: a module is imported when one of its scorers is
# used
SCORERS: dict[str, str | Callable[..., Scorer]] = {
    "offensive-language": "igcore.models.embedded:OffensiveLanguage",
    "minilm-relevance": "igcore.models.embedded:MiniLMRelevance",
    "jigsaw-toxicity": "igcore.models.jigsaw:JigsawToxicity",
    "llama-7b-rm": "igcore.models.llama:LlamaReward",
    "beaver-7b-cost": "igcore.models.beaver:BeaverCost",
    "qrm-llama-3.1-8b-reward": "igcore.models.qrm:QRMReward",
    "qrm-llama-3.1-8b-cost": "igcore.models.qrm:QRMCost",
    "classifier": "igcore.models.classifier:Classifier",
    "guard": "igcore.models.guard:GenerativeGuard",
    "stream-guard": "igcore.models.stream:StreamGuard",
    "endpoint": "igcore.models.endpoint:Endpoint",
    "maximum": "igcore.models.maximum:Maximum",
}


def named(
    value: str | Mapping[str, Any], kind: str, allowed: Iterable[str]
) -> tuple[str, dict[str, Any]]:
    """Return a name and the options beside it: ``beaver`` is short for ``{"name": "beaver"}``.

    Parameters
    ----------
    kind : str
        What the name stands for, such as ``"policy"``.
    allowed : iterable of str
        Every option there is.

    Raises
    ------
    ParameterError
        When there is no name, or for an unknown option.
    """
    options = {"name": value} if isinstance(value, str) else dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ParameterError(f"{kind} {dict(value)!r} has no name; give it as name")
    for option in options:
        if option not in allowed:
            raise unknown_name(f"option of {kind} {name!r}:", option, allowed)
    return name, options


def maker(name: str, kind: str = "scorer") -> Callable[..., Scorer]:
    """Return the function or class that makes the scorer of a name, with its options.

    ``ParameterError`` when `SCORERS` has no such name.
    """
    if name not in SCORERS:
        raise unknown_name(kind, name, SCORERS)
    made = SCORERS[name]
    return resolve_name(made) if isinstance(made, str) else made


def home_of(name: str) -> str | None:
    """Return the module that makes the scorer of a known name, without importing it.

    None for a scorer that a script or notebook has registered itself.
    """
    made = SCORERS[name]
    module = made.partition(":")[0] if isinstance(made, str) else made.__module__
    return None if module == "__main__" else module


def scored_by(scorer: str | Mapping) -> str | dict:
    """Return a scorer without the options that say only where and how its model is reached."""
    if isinstance(scorer, str):
        return scorer
    way = getattr(maker(scorer["name"]), "REACHED_BY", ())
    kept = {name: value for name, value in scorer.items() if name not in way}
    if "costs" in kept:  # of a maximum
        kept["costs"] = [scored_by(cost) for cost in kept["costs"]]
    return kept


def check_scorer(scorer: str | Mapping, kind: str = "scorer") -> tuple[str, dict]:
    """Return name and options of a scorer; nothing is loaded.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`, and an option that is unknown, missing or wrong.
    """
    name, options = named(scorer, kind, scorer)
    made = maker(name, kind)
    named(scorer, kind, signature(made).parameters)
    if hasattr(made, "load"):  # settings, which check themselves
        made(**options)
    return name, options


def load_scorer(scorer: str | Mapping) -> Scorer:
    """Load a scorer by name.

    Parameters
    ----------
    scorer : str or mapping
        A key of `SCORERS`; a mapping gives options beside its ``name``, which are the parameters of
        what `SCORERS` holds there.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`, or an option that it does not have.
    AssetError
        When its files cannot be downloaded or are damaged.
    """
    name, options = check_scorer(scorer)
    loaded = maker(name)(**options)
    if hasattr(loaded, "load"):
        loaded = loaded.load()
    getattr(loaded, "digest", "")  # now: a function may hold what its calls change
    # this module is part of a run's identity; __setattr__ of object also works on a frozen class
    object.__setattr__(loaded, "home", home_of(name))
    return loaded
