"""Settings that check themselves: a decorator, the types of their fields, one sentence an error.

A class under `settings` is a frozen dataclass that pydantic checks by name, type and range::

    @settings
    class Sampling:
        temperature: Weight = 1.0
        n_samples: Count = 8

What pydantic refuses becomes a ``ParameterError``. Rules across fields stand in ``__post_init__``
and raise that error themselves.
"""

import math
import re
from collections.abc import Collection
from functools import partial, wraps
from pathlib import PurePath
from typing import Annotated, Any, dataclass_transform, get_args

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic import WrapValidator as Wrapped

from .errors import MissingParameter, ParameterError, unknown_name

# a folder's name: no character that a path or a shell treats specially
NAME = re.compile(r"[A-Za-z0-9_-]+")
NUMBER = re.compile(r"\s*[-+]?[\d_]*\.?\d+\.?(e[-+]?\d+)?\s*", re.IGNORECASE)  # as text
MOST = 10**6  # of anything that is counted: no run with more would end
MOST_TOKENS = 10**8  # that a search may sample for one prompt
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
ALLOWED = {  # pydantic's name of an error -> what the value must be
    "int_type": "a whole number",
    "float_type": "a number",
    "float_range": "a number between -1.7e308 and 1.7e308",  # ours, for a whole number beyond
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "finite_number": "finite",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "too_short": "of length {min_length} or more",
}


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
    def init(self: Any, *values: Any, **named: Any) -> None:
        values, named = plain(values), plain(named)
        try:
            build(self, *values, **named)
        except ValidationError as error:
            known = type(self).__pydantic_fields__
            by_name = dict(zip(known, values, strict=False)) | named
            raise _refusal(known, by_name, error) from None

    setattr(checked, "__init__", init)  # noqa: B010, a plain assignment is no legal type
    return checked


def plain(value: Any) -> Any:
    """Return a value with numpy's numbers, alone or in lists and mappings, as those of Python."""
    if type(value) is dict:
        return {name: plain(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.item() if getattr(value, "ndim", 1) == 0 else value


def _refusal(known: dict[str, Any], values: dict[str, Any], error: ValidationError) -> Exception:
    """Return the error to raise for what pydantic refuses: about one field, in one sentence."""
    failures = error.errors(include_url=False)
    for failure in failures:  # first, because a misspelt name explains a missing one
        if failure["type"].startswith("unexpected_"):
            return unknown_name("parameter", failure["loc"][0], known)
    for failure in failures:
        if failure["type"] == "value_error":  # from a check of ours
            cause: Exception = failure["ctx"]["error"]
            return cause
    place = failures[0]["loc"][0]
    name = list(known)[place] if isinstance(place, int) else place
    if failures[0]["type"] == "missing":
        why = known[name].description
        reason = f", because {why}" if why else ""
        return MissingParameter(
            f"parameter {name} is missing; it has no default{reason}, so give it a value"
        )
    of_field = [failure for failure in failures if failure["loc"][0] == place]
    allowed = get_args(known[name].annotation)
    if len(of_field) == 1 and of_field[0]["type"] == "literal_error":
        names = [part for kind in allowed for part in get_args(kind) or (kind,)]
        return unknown_name(name, values[name], [part for part in names if isinstance(part, str)])
    return _wrong_value(name, values[name], of_field, type(None) in allowed)


def _wrong_value(name: str, value: Any, failures: list[Any], nothing: bool) -> ParameterError:
    """Return the error for a wrong type or range; the types of a union fail one by one.

    `nothing` says whether the parameter may be left out as None.
    """
    verb = "is"
    # a value inside a list or mapping is named itself
    inside = [failure for failure in failures if failure["input"] is not value]
    if inside:
        verb, nothing = "holds", False
        failures = [failure for failure in inside if failure["loc"] == inside[0]["loc"]]
    phrases = []
    for failure in failures:
        kind = failure["type"]
        if kind == "float_type" and type(failure["input"]) is int:
            kind = "float_range"
        phrase = ALLOWED.get(kind, failure["msg"])
        phrases.append(phrase.format(**failure.get("ctx", {})))
    if nothing and failures[0]["type"].endswith("_type"):
        phrases.append("nothing")
    allowed = " or ".join(dict.fromkeys(phrases))
    wrong = failures[0]["input"]
    # the commonest mistake gets its remedy: YAML reads 1e-5 as text
    if "a number" in phrases and NUMBER.fullmatch(str(wrong)):
        allowed += ", with a point and without quotes, such as 1.0e-5"
    return ParameterError(f"parameter {name} {verb} {wrong!r:.100}; it must be {allowed}")


# --- checks of one value --------------------------------------------------------------------------


def check_name(kind: str, value: Any) -> None:
    """Raise ``ParameterError`` unless a value can name the folder of a run, see `NAME`.

    Parameters
    ----------
    kind : str
        What the value is, such as ``"parameter run"``.
    """
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ParameterError(
            f"{kind} is {value!r}, which cannot name a folder; give text of the letters a to z and "
            "A to Z, digits, _ and - alone"
        )


def check_shard(shard: int, n_shards: int) -> None:
    """Raise ``ParameterError`` unless the number of a shard, from 0, is below that of all."""
    if shard >= n_shards:
        raise ParameterError(
            f"shard is {shard}; with n_shards {n_shards} it must be below that, because shards "
            "count from 0"
        )


def one_of(allowed: Collection[str]) -> AfterValidator:
    """Return a check for ``Annotated[str, ...]``: the value is one of the names of a table.

    The table is read when a value is checked, so it may grow. The error names the nearest name.
    """

    def check(value: str, info: ValidationInfo) -> str:
        if value not in allowed:
            raise unknown_name(str(info.field_name), value, allowed)
        return value

    return AfterValidator(check)


def _check_folder_name(value: str, info: ValidationInfo) -> str:
    """Refuse a text that cannot name a folder."""
    check_name(f"parameter {info.field_name}", value)
    return value


def _check_inside(folder: str, info: ValidationInfo) -> str:
    """Refuse a folder outside the repository."""
    # the folder is written to, so a parameter file of somebody else must not lead outside
    path = PurePath(folder)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in folder:
        raise ParameterError(
            f"parameter {info.field_name} is {folder!r}; give a folder inside the repository, seen "
            "from its root and without .., such as runs/mine/figures"
        )
    return folder


def _check_work(rounds: int, info: ValidationInfo) -> int:
    """Refuse a search that would sample more than `MOST_TOKENS` for one prompt."""
    names = ("n_samples", "max_new_tokens")  # one that was refused is not among the data
    sizes = {name: info.data.get(name, 1) for name in names} | {"rounds": rounds}
    tokens = math.prod(sizes.values())
    if tokens > MOST_TOKENS:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ParameterError(
            f"{product} are {tokens} tokens to sample for one prompt, and may be {MOST_TOKENS}; "
            "lower one of them"
        )
    return rounds


def _unchanged(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
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
Rows = Annotated[int, Field(ge=1, le=10**5)]  # that are in memory at the same time
# the product of three settings is bounded, so it is checked where a default stands, too
Rounds = Annotated[Count, AfterValidator(_check_work), Field(validate_default=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # as torch takes it
Seconds = Annotated[Positive, Field(le=86400)]
# bounded, because torch ends the whole process when it cannot start its threads
Threads = Annotated[int, Field(ge=1, le=1024)]
Options = dict[str, Any]  # options by name
Named = str | Options  # a name, or a mapping of a name and options
FolderName = Annotated[str, AfterValidator(_check_folder_name)]
InsideFolder = Annotated[str, AfterValidator(_check_inside)]  # seen from the repository's root


def name_of(named: Named) -> str:
    """Return the name that is given, with options or without."""
    name: str = named if isinstance(named, str) else named["name"]
    return name
