"""Settings that check themselves: a decorator, the types of their fields, one sentence an error.

A class under `settings` is a frozen dataclass that pydantic checks by name, type and range::

    @settings
    class Sampling:
        temperature: Weight = 1.0
        n_samples: Count = 8

A ``ValidationError`` becomes a ``ParameterError`` of one sentence. Rules across fields are in
``__post_init__`` and raise that error themselves.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Self, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic import WrapValidator as Wrapped

from .errors import ParameterError, shown, unknown_name

# a folder's name: no character that a path or a shell treats specially
NAME = re.compile(r"[A-Za-z0-9_-]+")
MOST = 10**6  # upper bound of every count: no larger run would end
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


# --- the decorator --------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True)
def settings(cls: type | None = None, *, kw_only: bool = False) -> Any:
    """Make a class a frozen dataclass whose fields are checked when an object is made.

    Parameters
    ----------
    kw_only : bool
        Whether all fields are given by name.

    Raises
    ------
    ParameterError
        From the class, when a field is unknown, missing, of the wrong type or out of range.
    """
    if cls is None:
        return partial(settings, kw_only=kw_only)
    checked = pydantic.dataclasses.dataclass(frozen=True, kw_only=kw_only, config=STRICT)(cls)
    build = checked.__init__

    @wraps(build)
    def init(self: Any, *values: object, **named: object) -> None:
        try:
            build(self, *plain(values), **plain(named))
        except ValidationError as error:
            raise _refusal(type(self).__pydantic_fields__, error) from None
        except RecursionError:
            raise ParameterError("a parameter is nested too deeply; give a flat one") from None

    setattr(checked, "__init__", init)  # noqa: B010, a plain assignment is no legal type
    return checked


def plain(value: Any) -> Any:
    """Return a value with numpy's numbers, alone or in lists and mappings, as those of Python."""
    if type(value) is dict:
        return {name: plain(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.item() if getattr(value, "ndim", 1) == 0 else value


def _refusal(known: dict[str, Any], error: ValidationError) -> Exception:
    """Return the ``ParameterError`` for a validation error: values, what is allowed, a remedy."""
    failures = error.errors(include_url=False)
    for failure in failures:  # first, because a misspelt name explains a missing one
        if failure["type"].startswith("unexpected_"):
            return unknown_name("parameter", failure["loc"][0], known)
    sentences = []
    for failure in failures[:10]:
        if failure["type"] == "value_error":  # from a check of ours
            cause: Exception = failure["ctx"]["error"]
            return cause
        place, *inside = failure["loc"]
        name = [*known][place] if isinstance(place, int) else place
        if failure["type"] == "missing":
            why = known[name].description
            reason = f", because {why}" if why else ""
            return ParameterError(
                f"parameter {name} is missing; it has no default{reason}, so give it a value"
            )
        # without pydantic's names for the types of a union
        path = ".".join(part for part in map(str, (name, *inside)) if NAME.fullmatch(part))[:100]
        rule = re.sub(r"^\w+ should", "it must", failure["msg"])
        sentences.append(f"parameter {path} is {shown(failure['input'])}: {rule}")
    return ParameterError("; ".join(sentences) + "; give another value")


# --- checks of one value --------------------------------------------------------------------------


def one_of(allowed: Collection[str]) -> AfterValidator:
    """Return a check for ``Annotated[str, ...]``: the value is one of the names of a table.

    The table is read when a value is checked, so it may grow. The error names the nearest name.
    """

    def check(value: str, info: ValidationInfo) -> str:
        if value not in allowed:
            raise unknown_name(str(info.field_name), value, allowed)
        return value

    return AfterValidator(check)


def _unchanged(value: object, check: pydantic.ValidatorFunctionWrapHandler) -> object:
    """Check a number and keep it as it is: a whole number would become a float."""
    # the identity of a run holds its settings, and 1 and 1.0 are written differently
    check(value)
    return value


# --- types of fields ------------------------------------------------------------------------------

Number = Annotated[float, Wrapped(_unchanged)]  # finite; a whole number stays one
Weight = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Budget = Annotated[
    Weight,
    Field(description="only you can say what is safe (igcore.suggest_budget helps to choose it)"),
]
Probability = Annotated[Number, Field(ge=0, le=1)]
Share = Annotated[Number, Field(gt=0, lt=1)]
Discount = Annotated[Number, Field(gt=0, le=1)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Rows = Annotated[int, Field(ge=1, le=10**5)]  # in memory at the same time
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # as torch takes it
Seconds = Annotated[Positive, Field(le=86400)]
# bounded, because torch ends the whole process when it cannot start its threads
Threads = Annotated[int, Field(ge=1, le=1024)]
Options = dict[str, Any]  # options by name


# --- named things ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A name with options, such as of a policy, a scorer, a prompt set or a judge.

    A user writes it as a name, or as a mapping of a ``name`` and its options; a policy in a server
    has options alone. `Named.of` reads it where it enters, `written` writes it again.
    """

    name: str
    options: Options = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, kind: str = "value") -> Self:
        """Return a user's value; raise ``ParameterError`` for anything else."""
        if isinstance(value, cls):
            return value
        given = {"name": str(value)} if isinstance(value, str | Path) else value
        if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
            options = dict(given)
            name = options.pop("name", "")
            if isinstance(name, str):
                return cls(name, options)
        text = " ".join(shown(value).split())  # that of a model has many lines
        raise ParameterError(
            f"{kind} is {text}; give a name as text, or a mapping of a name and its options"
        )

    def check_options(self, kind: str, allowed: Collection[str]) -> None:
        """Raise ``ParameterError`` for an option that is not allowed."""
        for option in self.options:
            if option not in allowed:
                raise unknown_name(f"option of {kind} {self.name!r}:", option, allowed)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: object, handler: pydantic.GetCoreSchemaHandler) -> Any:
        """Read a field of this type as `of` does."""

        def read(value: object, info: ValidationInfo) -> Named:
            return cls.of(value, f"parameter {info.field_name}")

        return handler.generate_schema(Annotated[Any, pydantic.PlainValidator(read)])


def written(value: Any) -> Any:
    """Return settings, or a part of them, as values of JSON and YAML, as in a params file."""
    if isinstance(value, Named):
        own = {"name": value.name} if value.name else {}
        return written(own | value.options) if value.options else value.name
    if is_dataclass(value):
        return {f.name: written(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {name: written(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [written(part) for part in value]
    return value
