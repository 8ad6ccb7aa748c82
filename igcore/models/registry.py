"""The table of scorers: from a name and its options to a loaded cost or reward model."""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

from ..beams import imported
from ..errors import ParameterError, unknown_name
from ..scorers import Scorer

# name -> what makes the scorer, or where it is: a module is imported when one of its scorers is
# asked for
SCORERS: dict[str, str | Callable[..., Scorer]] = {
    "offensive-language": "igcore.models.embedded:OffensiveLanguage",
    "minilm-relevance": "igcore.models.embedded:MiniLMRelevance",
    "jigsaw-toxicity": "igcore.models.jigsaw:JigsawToxicity",
    "llama-7b-rm": "igcore.models.llama:llama_7b_rm",
    "beaver-7b-cost": "igcore.models.beaver:beaver_7b_cost",
    "qrm-llama-3.1-8b-reward": "igcore.models.qrm:qrm_reward",
    "qrm-llama-3.1-8b-cost": "igcore.models.qrm:qrm_cost",
    "classifier": "igcore.models.classifier:classifier",
    "guard": "igcore.models.guard:guard",
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
    if isinstance(value, str):
        return value, {}
    options = dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ParameterError(
            f"{kind} {dict(value)!r} has no name; give it as name, with its options beside it"
        )
    for option in options:
        if option not in allowed:
            raise unknown_name(f"option of {kind} {name!r}:", option, allowed)
    return name, options


def maker(name: str) -> Callable[..., Scorer]:
    """Return the function or class that makes the scorer of a name.

    ``ParameterError`` when `SCORERS` has no such name.
    """
    made = _registered(name)
    if not isinstance(made, str):
        return made
    return imported(made)


def home_of(name: str) -> str | None:
    """Return the module that makes the scorer of a name.

    None for a scorer that a script or notebook has registered itself. Imports nothing.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`.
    """
    made = _registered(name)
    module = made.partition(":")[0] if isinstance(made, str) else made.__module__
    return None if module == "__main__" else module


def _registered(name: str) -> str | Callable[..., Scorer]:
    """Return the entry of `SCORERS` for a name, or raise ``ParameterError``."""
    if name not in SCORERS:
        raise unknown_name("scorer", name, SCORERS)
    return SCORERS[name]


def check_scorer(scorer: str | Mapping, kind: str = "scorer") -> tuple[str, dict]:
    """Return name and options of a scorer.

    ``ParameterError`` for a name that `SCORERS` does not have, an option that the scorer does not
    have, or one that it needs and is not given.
    """
    name = scorer if isinstance(scorer, str) else scorer.get("name")
    if isinstance(name, str) and name not in SCORERS:
        raise unknown_name(kind, name, SCORERS)
    options = signature(maker(name)).parameters if name in SCORERS else {}
    name, given = named(scorer, kind, options)
    if missing := [
        option for option, p in options.items() if p.default is p.empty and option not in given
    ]:
        raise ParameterError(
            f"{kind} {name!r} needs {', '.join(missing)}; give them beside its name: {{name: "
            f"{name}, ...}}"
        )
    return name, given


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
        When its files cannot be fetched or are damaged.
    """
    name, options = check_scorer(scorer)
    loaded = maker(name)(**options)
    # this module is part of a run's identity; __setattr__ of object also works on a frozen class
    object.__setattr__(loaded, "home", home_of(name))
    return loaded
