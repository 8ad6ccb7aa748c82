"""Tests of settings: what pydantic checks, and the one sentence that a user reads."""

import json
import re
from dataclasses import asdict, field, fields, replace
from typing import Annotated, Literal

import numpy as np
import pytest

from igcore import ParameterError, SearchConfig
from igcore.decoding import check_seed
from igcore.runs.decode_params import Settings
from igcore.settings import (
    Count,
    Discount,
    FolderName,
    InsideFolder,
    Named,
    Number,
    Options,
    Weight,
    one_of,
    settings,
)

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
    model: Named = "small"
    names: list[str] = field(default_factory=list)
    parts: dict[str, Options] = field(default_factory=dict)
    loud: bool = False
    run: FolderName = "run"
    folder: InsideFolder = "runs/x"

    def __post_init__(self):
        if self.count > 100 * self.width:
            raise ParameterError(f"count is {self.count}, too much for width {self.width}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cuont": 3}, "unknown parameter 'cuont'; did you mean 'count'[?] allowed: count, "),
        ({"width": -1}, "parameter width is -1; Input should be greater than or equal to 0"),
        ({"width": True}, "parameter width is True; Input should be a valid number"),
        ({"width": "1e-5"}, "parameter width is '1e-5'; Input should be a valid number"),
        ({"width": float("nan")}, "parameter width is nan; Input should be a finite number"),
        ({"count": 0}, "parameter count is 0; Input should be greater than or equal to 1"),
        ({"count": True}, "parameter count is True; Input should be a valid integer"),
        ({"count": 2.0}, "parameter count is 2.0; Input should be a valid integer"),
        ({"count": 10**12}, "parameter count is 1000000000000; Input .* less .* 1000000"),
        ({"width": 10**400}, f"parameter width is 1{'0' * 99}; Input should be a valid number"),
        ({"kind": "x" * 999}, f"unknown kind '{'x' * 99}; allowed: half, whole"),
        ({"share": 0}, "parameter share is 0; Input should be greater than 0"),
        ({"kind": "hal"}, "unknown kind 'hal'; did you mean 'half'[?] allowed: half, whole"),
        ({"precision": "bf"}, "parameter precision is 'bf'; Input should be 'no' or 'bf16'"),
        ({"limit": "all"}, "parameter limit is 'all'; Input should be a valid integer"),
        (
            {"threshold": "best"},
            "parameter threshold is 'best'; Input should be a valid number or Input should be 'ma",
        ),
        ({"model": 3}, "parameter model is 3; Input should be a valid string or .* dictionary"),
        ({"model": {3: 4}}, "parameter model holds 3; Input should be a valid string"),
        ({"names": "one"}, "parameter names is 'one'; Input should be a valid list"),
        ({"names": [1]}, "parameter names holds 1; Input should be a valid string"),
        ({"parts": {"a": None}}, "parameter parts holds None; Input should be a valid dictionary"),
        ({"loud": 1}, "parameter loud is 1; Input should be a valid boolean"),
        (
            {"run": "../x"},
            r"parameter run is '../x'; String should match pattern '\^\[A-Za-z0-9_-\]",
        ),
        ({"run": "x\n"}, r"parameter run is 'x.n'; String should match pattern '\^\[A-Za-z0-9_-\]"),
        ({"folder": "/x"}, "parameter folder is '/x'; give a folder inside the repository"),
        ({"count": 900}, "count is 900, too much for width 1"),
    ],
)
def test_a_bad_value_gets_one_sentence(changes, sentence):
    """Bug: pydantic's own message, which lists every type of a union and a link."""
    with pytest.raises(ParameterError) as caught:
        Sampling(**{"width": 1} | changes)
    assert re.match(sentence, str(caught.value)) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


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
    for wrong in (np.True_, True, 0.0, np.float64(1)):
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
        match="^parameter budget is missing; only you can say what is safe .igcore.suggest_budget",
    ):
        SearchConfig()


@pytest.mark.parametrize("kind", [SearchConfig, Settings])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"n_samples": 10**6},
            "parameter n_samples is 1000000; Input should be less than or equal to 100000",
        ),
        (
            {"n_samples": 8, "keep": 10**6},
            "parameter keep is 1000000; Input should be less than or equal to 100000",
        ),
        (
            {"rounds": 10**9},
            "parameter rounds is 1000000000; Input should be less than or equal to 1000000",
        ),
        (
            {"rounds": 10**6},
            "n_samples 8 x max_new_tokens 32 x rounds 1000000 are 256000000 tokens to sample for "
            "one prompt, and may be 100000000; lower one of them",
        ),
        (
            {"n_samples": 10**5, "max_new_tokens": 10**5},
            "n_samples 100000 x max_new_tokens 100000 x rounds 2 are 20000000000 tokens",
        ),
    ],
)
def test_a_search_without_end_is_refused(kind, changes, sentence):
    """Bug: a run of a million samples or a thousand million rounds started, and never ended."""
    with pytest.raises(ParameterError) as caught:
        kind(budget=1.0, **changes)
    assert str(caught.value).startswith(sentence)


def test_the_largest_search_is_allowed():
    """Guards the bound, which is on the product: one factor may be large where others are small."""
    for sizes in ((10**5, 500, 2), (100, 10**6, 1), (1, 100, 10**6)):
        names = ("n_samples", "max_new_tokens", "rounds")
        SearchConfig(budget=1.0, keep=1, **dict(zip(names, sizes, strict=True)))
