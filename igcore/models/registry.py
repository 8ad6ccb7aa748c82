"""The table of scorers: from a name and its options to a loaded cost or reward model."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from inspect import signature
from pkgutil import resolve_name
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo

from ..catalog import SCORERS, found
from ..errors import ParameterError, said, unknown_name
from ..scorers import FunctionScorer, Scorer, as_scorer
from ..settings import Named

OWN = re.compile(r"(\w+(?:\.\w+)*):\w+(?:\.\w+)*")  # module:function of a user


def named_scorer(value: Any, kind: str = "scorer") -> Named:
    """Return name and options of a scorer as a user wrote it; a list of costs is their maximum."""
    return Named.of({"name": "maximum", "costs": value} if isinstance(value, list) else value, kind)


def scorer_factory(name: str, kind: str = "scorer", role: str = "cost") -> Callable[..., Any]:
    """Return the function or class that makes the scorer of a name, with its options.

    No module of a user is imported: that happens when the scorer is made. ``ParameterError`` for a
    name that is none of `SCORERS`, and no ``module:function``.
    """
    if name in SCORERS:
        made: Callable[..., Any] = found(SCORERS[name])
        return made
    if OWN.fullmatch(name):
        return partial(own_scorer, name, role)
    raise unknown_name(kind, name, SCORERS, ", or module:function of a module of your own")


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
        own = resolve_name(name)
    except Exception as error:  # a module of a user may raise anything
        raise ParameterError(
            f"{role} {name!r} cannot be imported ({said(error):.200}); give module:function, with "
            f"the module in {os.getcwd()}, where the command runs, or installed"
        ) from None
    scorer = as_scorer(own, role)
    if isinstance(scorer, FunctionScorer):  # whose own name may be that of another module's, too
        scorer.name = name
    return scorer


def prepared(scorer: Named, kind: str = "scorer", role: str = "cost") -> Callable[[], Scorer]:
    """Return the function that loads a scorer; nothing is loaded yet.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`, and an option that is unknown, missing or wrong.
    """
    made = scorer_factory(scorer.name, kind, role)
    scorer.check_options(kind, signature(made).parameters)
    if hasattr(made, "load"):  # settings, which check themselves
        load: Callable[[], Scorer] = made(**scorer.options).load
        return load
    return partial(made, **scorer.options)


def _checked(value: Any, info: ValidationInfo) -> Named:
    """Read a scorer, and refuse an unknown one or an unknown option."""
    scorer = named_scorer(value, f"parameter {info.field_name}")
    prepared(scorer, f"{info.field_name} scorer")
    return scorer


ScorerName = Annotated[Named, PlainValidator(_checked)]  # the type of a setting


def load_scorer(scorer: str | Mapping[str, Any] | list[Any] | Named, role: str = "cost") -> Scorer:
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
    scorer = named_scorer(scorer)
    loaded = prepared(scorer, role=role)()
    known = scorer.name in SCORERS
    home = scorer_factory(scorer.name).__module__ if known else scorer.name.partition(":")[0]
    # this module is part of a run's identity
    with suppress(AttributeError):  # a user's own class may have slots
        object.__setattr__(loaded, "home", home)  # also of a frozen class
    return loaded
