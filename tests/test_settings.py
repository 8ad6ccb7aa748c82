"""Tests of settings: what pydantic checks, and the one sentence that a user reads."""

import json
from dataclasses import asdict, field, fields, replace
from functools import reduce
from typing import Annotated, Literal

import numpy as np
import pytest

from igcore import ParameterError, SearchConfig
from igcore.settings import (
    Count,
    Discount,
    Named,
    Number,
    Options,
    Weight,
    one_of,
    settings,
    written,
)
from igcore.setup import check_seed
from igstudy.settings import FolderName, InsideFolder

TABLE = {"half": 1, "whole": 2}


@settings
class Sampling:
    width: Weight
    count: Count = 8
    share: Discount = 1.0
    kind: Annotated[str, one_of(TABLE)] = "half"
    precision: Literal["no", "bf16"] = "no"
    limit: Count | None = None
    threshold: Number | Literal["matched"] = "matched"
    model: Named = Named("small")
    names: list[str] = field(default_factory=list)
    parts: dict[str, Options] = field(default_factory=dict)
    loud: bool = False
    run: FolderName = "run"
    folder: InsideFolder = "runs/x"

    def __post_init__(self):
        if self.count > 100 * self.width:
            raise ParameterError(f"count is {self.count}, too much for width {self.width}")


def nested(levels):
    return reduce(lambda value, _: [value], range(levels), [])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cuont": 3}, "unknown parameter 'cuont'; did you mean 'count'? allowed: count, "),
        ({"width": -1}, "parameter width is -1: it must be greater than or equal to 0"),
        ({"width": "1e-5"}, "parameter width is '1e-5': it must be a valid number"),
        ({"width": float("nan")}, "parameter width is nan: it must be a finite number"),
        ({"width": 10**400}, f"parameter width is 1{'0' * 99}: it must be a valid number"),
        ({"count": True}, "parameter count is True: it must be a valid integer"),
        ({"count": 0, "share": 2},
         "parameter count is 0: it must be greater than or equal to 1; parameter share is "
         "2: it must be less than or equal to 1"),
        ({"threshold": "best"},
         "parameter threshold is 'best': it must be a valid number; parameter threshold is "
         "'best': it must be 'matched'"),
        ({"kind": "hal"}, "unknown kind 'hal'; did you mean 'half'? allowed: half, whole"),
        ({"kind": "x" * 999}, f"unknown kind '{'x' * 99}; allowed: half, whole"),
        ({"precision": "bf"}, "parameter precision is 'bf': it must be 'no' or 'bf16'"),
        ({"model": 3}, "parameter model is 3; give a name as text, or a mapping of a name and its"),
        ({"model": {3: 4}}, "parameter model is {3: 4}; give a name as text"),
        ({"names": [1]}, "parameter names.0 is 1: it must be a valid string"),
        ({"parts": {"a": None}}, "parameter parts.a is None: it must be a valid dictionary"),
        ({"run": "../x"}, "parameter run is '../x': it must match pattern '^[A-Za-z"),
        ({"folder": "/x"}, "parameter folder is '/x'; give a folder inside the repository"),
        ({"count": 900}, "count is 900, too much for width 1"),
        # RecursionError, ValueError, and a megabyte of sentences
        ({"parts": nested(2000)}, "a parameter is nested too deeply; give a flat one"),
        ({"model": nested(300)}, "parameter model is [[[[[[[...]]]]]]]; give a name as text"),
        ({"count": 16**5000}, "parameter count is a huge number: it must be less than"),
        ({"kind": "y" * 10**7}, f"unknown kind '{'y' * 99}; allowed: half, whole"),
    ],
)  # fmt: skip
def test_a_bad_value_gets_one_sentence(changes, sentence):
    """Bug: pydantic's own message, which has many lines and a link."""
    with pytest.raises(ParameterError) as caught:
        Sampling(**{"width": 1} | changes)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_many_bad_values_are_some_sentences():
    """Guards a reader's screen, and the memory of a message."""
    with pytest.raises(ParameterError) as caught:
        Sampling(1, names=[0] * 1000)
    assert str(caught.value).count("must be a valid string") == 10


def test_values_without_names_are_checked_too():
    """Bug: pydantic knows such a value by its place, and the sentence would call it 1."""
    assert Sampling(2, 3) == Sampling(count=3, width=2)
    with pytest.raises(ParameterError, match="parameter count is 'x'"):
        Sampling(2, "x")
    with pytest.raises(ParameterError, match="unknown parameter 13; allowed: count, "):
        Sampling(*range(14))


def test_a_missing_value_is_named_and_a_misspelt_name_explains_it():
    """Bug: a complaint about a missing name, where a misspelling stands beside it."""
    with pytest.raises(ParameterError, match="parameter width is missing; it has no default"):
        Sampling()
    with pytest.raises(ParameterError, match="unknown parameter 'widht'; did you mean 'width'"):
        Sampling(widht=2)


def test_numbers_stay_as_they_are():
    """Bug: a budget of 1 that becomes 1.0, so that a finished run is no longer recognised."""
    assert repr(Sampling(1).width) == "1" and repr(Sampling(1, threshold=2).threshold) == "2"


def test_numbers_of_numpy_are_numbers():
    """Bug: a budget of `numpy.quantile` decoded a group of prompts, and could not be written."""
    made = Sampling(np.int64(1), np.int32(3), limit=np.uint8(2), parts={"a": {"b": [np.int64(4)]}})
    assert json.loads(json.dumps(asdict(made))) == asdict(made)
    assert made == Sampling(1, 3, limit=2, parts={"a": {"b": [4]}})
    assert type(Sampling(np.quantile([1.0, 2.0], 0.5)).width) is float
    assert check_seed(np.int64(7)) == 7 and type(check_seed(np.uint8(7))) is int
    for wrong in (np.True_, np.float64(2), np.array([2])):
        with pytest.raises(ParameterError, match="parameter count is"):
            Sampling(1, wrong)
    for wrong in (np.True_, True, "0", 0.0, np.float64(1)):
        with pytest.raises(ParameterError, match="seed is .*; it must be a whole number"):
            check_seed(wrong)


def test_settings_are_plain_dataclasses():
    """Guards resuming: the fields of a run are compared, in their order, as a mapping."""
    one = Sampling(1, model={"name": "small"})
    assert replace(one, count=3) == Sampling(1, 3, model={"name": "small"})
    assert list(asdict(one)) == [f.name for f in fields(Sampling)]
    assert hash(SearchConfig(0.2)) == hash(SearchConfig(budget=0.2))
    with pytest.raises(AttributeError):
        one.count = 4
    with pytest.raises(ParameterError, match="parameter count is 0"):
        replace(one, count=0)


def test_a_budget_has_no_default():
    """Guards the user's decision about what is safe."""
    with pytest.raises(
        ParameterError,
        match="^parameter budget is missing; it has no default, because only you can say what is "
        r"safe \(igcore.suggest_budget helps to choose it\), so give it a value$",
    ):
        SearchConfig()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("a", Named("a")),
        ({"name": "a", "costs": ["b", {"name": "c"}]}, Named("a", {"costs": ["b", {"name": "c"}]})),
        ({"server": "here"}, Named("", {"server": "here"})),  # a policy in a server has no name
    ],
)
def test_a_named_thing_is_written_as_it_was_given(value, named):
    """Guards resuming, which compares params.json."""
    assert Sampling(1, model=value).model == Named.of(named) == named
    assert written(Sampling(1, model=value)) == asdict(Sampling(1)) | {"model": value}


# --- settings of the search -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0}, "temperature is 0, but the search samples and is never greedy; give"),
        ({"temperature": -1.0}, "temperature is -1.0, but the search samples"),
        ({"temperature": 9.0}, "temperature is 9.0, .* from 0.01, which is all but greedy, to 5"),
        ({"top_p": 0}, "top_p is 0: it must be greater than 0"),
        ({"top_p": 1.5}, "top_p is 1.5: it must be less than or equal to 1"),
        ({"top_k": 0}, "top_k is 0: it must be greater than or equal to 1"),
        ({"top_k": -1}, "top_k is -1: it must be greater than or equal to 1"),
        ({"sampling": "greedy"}, "sampling is 'greedy': it must be 'checkpoint'"),
        ({"sampling": "checkpoint", "top_k": 1}, "'checkpoint', which takes temperature, .*leave"),
    ],
)
def test_sampling_that_cannot_be_gets_one_sentence(given, message):
    with pytest.raises(ParameterError, match=message) as caught:
        SearchConfig(budget=1.0, **given)
    assert "\n" not in str(caught.value)
