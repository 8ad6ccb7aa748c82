"""The table of scorers: from a name and its options to a loaded cost or reward model."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from inspect import signature
from pkgutil import resolve_name
from typing import Any

from ..errors import ParameterError, unknown_name
from ..scorers import FunctionScorer, Scorer, as_scorer

# name -> what makes the scorer, or where it is: a module is imported when one of its scorers is
# used
SCORERS: dict[str, str | Callable[..., Scorer]] = {
    "offensive-language": "igcore.models.embedded:OffensiveLanguage",
    "minilm-relevance": "igcore.models.embedded:MiniLMRelevance",
    "jigsaw-toxicity": "igcore.models.jigsaw:JigsawToxicity",
    "llama-7b-rm": "igcore.models.paper:LlamaReward",
    "beaver-7b-cost": "igcore.models.paper:BeaverCost",
    "qrm-llama-3.1-8b-reward": "igcore.models.paper:QRMReward",
    "qrm-llama-3.1-8b-cost": "igcore.models.paper:QRMCost",
    "classifier": "igcore.models.classifier:Classifier",
    "guard": "igcore.models.guard:GenerativeGuard",
    "stream-guard": "igcore.models.stream:StreamGuard",
    "endpoint": "igcore.serve.endpoint:Endpoint",
    "maximum": "igcore.models.maximum:Maximum",
}
OWN = re.compile(r"(\w+(?:\.\w+)*):\w+(?:\.\w+)*")  # module:function of a user


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


def maker(name: str, kind: str = "scorer", role: str = "cost") -> Callable[..., Scorer]:
    """Return the function or class that makes the scorer of a name, with its options.

    No module of a user is imported: that happens when the scorer is made. ``ParameterError`` for a
    name that is none of `SCORERS`, and no ``module:function``.
    """
    if name not in SCORERS and OWN.fullmatch(name):
        return partial(own_scorer, name, role)
    if name not in SCORERS:
        raise unknown_name(kind, name, SCORERS, ", or module:function of a module of your own")
    made = SCORERS[name]
    return resolve_name(made) if isinstance(made, str) else made


def own_scorer(name: str, role: str) -> Scorer:
    """Return the function or object ``module:name`` of a user as the scorer for a role.

    Raises
    ------
    ParameterError
        When it cannot be imported, or is no scorer for the role.
    """
    if os.getcwd() not in sys.path:  # a program's path begins where the program lies
        sys.path.insert(0, os.getcwd())
    try:
        found = resolve_name(name)
    except Exception as error:  # a module of a user may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ParameterError(
            f"{role} {name!r} cannot be imported ({reason}); give module:function, with the module "
            f"in {os.getcwd()}, where the command runs, or installed"
        ) from None
    scorer = as_scorer(found, role)
    if isinstance(scorer, FunctionScorer):  # whose own name may be that of another module's, too
        scorer.name = name
    return scorer


def home_of(name: str) -> str | None:
    """Return the module that makes the scorer of a known name, without importing it.

    None for a scorer that a script or notebook has registered itself.
    """
    made = SCORERS.get(name, name)
    module = made.partition(":")[0] if isinstance(made, str) else made.__module__
    return None if module == "__main__" else module


def as_named(scorer: Any) -> Any:
    """Return a list of costs as the mapping that names their maximum; else what is given."""
    return {"name": "maximum", "costs": scorer} if isinstance(scorer, list) else scorer


def scored_by(scorer: str | Mapping | None) -> str | dict | None:
    """Return a scorer without the options that say only where and how its model is reached."""
    if scorer is None or isinstance(scorer, str):
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


def load_scorer(scorer: str | Mapping | list, role: str = "cost") -> Scorer:
    """Load a scorer by name.

    Parameters
    ----------
    scorer : str, mapping or list
        A key of `SCORERS`, or ``module:function`` of a module in the current folder or an installed
        one: a function, or an object as in `igcore.scorers`. A mapping gives options beside its
        ``name``, which are the parameters of what `SCORERS` holds there. A list of costs is their
        maximum.
    role : str
        What a function is, which says nothing of itself: ``cost`` or ``reward``.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`, an option that it does not have, or a function that
        cannot be imported.
    AssetError
        When its files cannot be downloaded or are damaged.
    """
    scorer = as_named(scorer)
    name, options = check_scorer(scorer)
    loaded = maker(name, role=role)(**options)
    if hasattr(loaded, "load"):
        loaded = loaded.load()
    getattr(loaded, "digest", "")  # now: a function may hold what its calls change
    # this module is part of a run's identity, and a panel writes the name into a params file
    with suppress(AttributeError):  # a user's own class may have slots
        object.__setattr__(loaded, "home", home_of(name))  # also of a frozen class
        object.__setattr__(loaded, "loaded_as", scorer)
    return loaded
