"""Load a cost or reward model by its name and options."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from pkgutil import resolve_name
from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo

from ..catalog import SCORERS, found
from ..errors import ParameterError, one_line, unknown_name
from ..scorers import FunctionScorer, Scorer, TextFunction, check_sign, of_function
from ..settings import Named, settings
from .maximum import MaximumScorer, maximum_of

ScorerLike = Scorer | TextFunction | str | Mapping[str, Any] | Named
CostLike = ScorerLike | list[ScorerLike]
OWN = re.compile(r"(\w+(?:\.\w+)*):\w+(?:\.\w+)*")  # a user's module:function
ELSEWHERE = (
    ", or module:function of a module of your own; offensive-language and minilm-relevance come "
    "with igstudy"
)


def named_scorer(value: object, kind: str = "scorer") -> Named:
    """Parse a user's scorer into name and options; a list of costs becomes their maximum."""
    return Named.of({"name": "maximum", "costs": value} if isinstance(value, list) else value, kind)


def scorer_factory(name: str, kind: str = "scorer", role: str = "cost") -> Callable[..., Any]:
    """Return the function or class that makes a scorer, by the scorer's name.

    A user's module is not imported before the scorer is made. Raise ``ParameterError`` for a name
    that is neither in `SCORERS` nor ``module:function``.
    """
    if name not in SCORERS and OWN.fullmatch(name):
        return partial(own_scorer, name, role)
    if name not in SCORERS:
        raise unknown_name(kind, name, SCORERS, ELSEWHERE)
    return found(SCORERS[name])


def own_scorer(name: str, role: str) -> Scorer:
    """Import a user's function or object ``module:name`` as the scorer for a role.

    Raises
    ------
    ParameterError
        When it cannot be imported, or is no scorer for the role.
    """
    # a program's path begins with the program's own folder
    missing = {os.getcwd()} - {*sys.path}
    try:
        with first_on_path(*missing):
            own = resolve_name(name)
    except Exception as error:  # a user's module may raise anything
        raise ParameterError(
            f"{role} {name!r} cannot be imported ({one_line(error):.200}); give module:function, "
            f"with the module in {os.getcwd()}, where the command runs, or installed"
        ) from None
    scorer = as_scorer(own, role)
    if isinstance(scorer, FunctionScorer):  # functions in two modules may have one name
        scorer.name = name
    return scorer


@contextmanager
def first_on_path(*folders: str) -> Iterator[None]:
    """Have Python search folders for modules before all others, inside the block alone."""
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with suppress(ValueError):  # a module may have removed it
                sys.path.remove(folder)


def prepared(scorer: Named, kind: str = "scorer", role: str = "cost") -> Callable[[], Scorer]:
    """Check a scorer's name and options, and return the function that loads it.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`, and an option that is unknown, missing or wrong.
    """
    made = scorer_factory(scorer.name, kind, role)
    scorer.check_options(kind, signature(made).parameters)
    if hasattr(made, "load"):  # a class of settings, which checks its options
        load: Callable[[], Scorer] = made(**scorer.options).load
        return load
    return partial(made, **scorer.options)


def _checked(value: object, info: ValidationInfo) -> Named:
    """Parse a scorer; refuse unknown names and options."""
    scorer = named_scorer(value, f"parameter {info.field_name}")
    prepared(scorer, f"{info.field_name} scorer")
    return scorer


ScorerName = Annotated[Named, PlainValidator(_checked)]  # the type of a setting


def load_scorer(scorer: str | Mapping[str, Any] | list[Any] | Named, role: str = "cost") -> Scorer:
    """Load a scorer by name.

    Parameters
    ----------
    scorer : str, mapping or list
        A key of `SCORERS`, or ``module:function`` in the current folder or an installed module: a
        function, or an object as in `igcore.scorers`. A mapping has a ``name`` and options, the
        parameters of the entry in `SCORERS`. A list of costs is their maximum.
    role : str
        Role of a plain function: ``cost`` or ``reward``.

    Raises
    ------
    ParameterError
        For a name that is not in `SCORERS`, an unknown option, or a function that cannot be
        imported.
    AssetError
        When its files cannot be downloaded or are damaged.
    """
    scorer = named_scorer(scorer)
    loaded = prepared(scorer, role=role)()
    known = scorer.name in SCORERS
    home = scorer_factory(scorer.name).__module__ if known else scorer.name.partition(":")[0]
    # the module is part of a run's identity
    with suppress(AttributeError):  # a user's own class may have slots
        object.__setattr__(loaded, "home", home)  # the class may be frozen
    return loaded


def as_scorer(scorer: Any, role: str) -> Scorer:
    """Return the scorer for a role, ``cost`` or ``reward``.

    Parameters
    ----------
    scorer : Scorer, callable, str, mapping or list
        A text or a mapping is loaded by `igcore.load_scorer`. A list of costs is their maximum.

    Raises
    ------
    ParameterError
        For an unknown name, a function whose arguments say too little, an object that is no scorer,
        or one whose sign does not fit the role: a reward given as a cost would make the search
        prefer the worst text.
    """
    if isinstance(scorer, str | Mapping | Named):
        scorer = load_scorer(scorer, role)
    elif isinstance(scorer, list) and role == "cost":
        scorer = maximum_of([as_scorer(cost, role) for cost in scorer])
    elif callable(scorer) and (isinstance(scorer, type) or not hasattr(scorer, "score")):
        scorer = of_function(scorer, role)
    return check_sign(scorer, role)


@settings(kw_only=True)
class Maximum:
    """The maximum of costs, higher is worse.

    The numbers are not rescaled, so give costs of one scale, such as guards, which all return logit
    gaps.

    Attributes
    ----------
    costs : list of str or dict
        At least two, see `igcore.load_scorer`.
    """

    costs: Annotated[list[ScorerName], Field(min_length=2)]

    def load(self) -> MaximumScorer:
        """Return the scorer."""
        return maximum_of([load_scorer(cost) for cost in self.costs])
