"""Tests of answers as data: JSON, pickles and copies without the guard and its model."""

import copy
import json
import math
import pickle
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
from mockpolicy import LetterReward
from tiny import tiny_model, tiny_tokenizer

from igcore import Guard, ParameterError, Response


def broken_now_and_then(text: str) -> float:
    """A cost that is not finite for every second text."""
    return math.nan if len(text) % 2 else 0.25


@pytest.fixture(scope="module")
def answer() -> Response:
    tokenizer = tiny_tokenizer()
    guard = Guard(
        (tiny_model(tokenizer), tokenizer), lambda text: broken_now_and_then(text),
        LetterReward(), budget=1.0, block_size=2, max_new_tokens=8,
    )  # fmt: skip
    return guard("a bed", record=True)


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """The cost above fails on purpose."""


def test_a_dictionary_is_json_and_holds_all_but_the_guard(answer):
    """Bug: json.dumps(asdict(answer)) failed, and where it did not it wrote NaN and Infinity."""
    values = answer.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert set(values) == set(vars(answer)) - {"guard"}
    assert values["text"] == answer.text and values["tokens"] == answer.tokens
    assert values["counts"] == vars(answer.counts)
    assert len(values["candidates"]) == len(answer.candidates) > 0
    beams = [node.beam for node in answer.candidates]
    costs = [beam.cost if math.isfinite(beam.cost) else None for beam in beams]
    assert [node["beam"]["cost"] for node in values["candidates"]] == costs
    assert None in costs and 0.25 in costs


def test_numbers_of_numpy_are_numbers(answer):
    values = replace(answer, cost=np.float32(np.inf), n_tokens=np.int64(3)).to_dict()
    assert values["cost"] is None and values["n_tokens"] == 3
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    "copied",
    [
        lambda answer: pickle.loads(pickle.dumps(answer)),
        copy.deepcopy,
        lambda answer: replace(answer, text=answer.text),
    ],
    ids=["pickle", "deepcopy", "replace"],
)
def test_copies_leave_the_guard_out(answer, copied):
    """Bug: three answers of SmolLM2 took a gigabyte, since each copy held the policy; and a cost
    that is a lambda could not be pickled.
    """
    made = copied(answer)
    assert made.guard is None and answer.guard is not None
    assert repr(made) == repr(answer) and made.to_dict() == answer.to_dict()
    assert made._repr_html_() is None  # a notebook shows its repr
    with pytest.raises(
        ParameterError, match="answer is a copy, which has no guard; set answer.guard"
    ):
        made.tree()
    made.guard = answer.guard
    assert made.tree()._repr_svg_() == answer.tree()._repr_svg_()
    assert made._repr_html_() == answer._repr_html_()


def test_an_answer_is_small(answer):
    assert len(pickle.dumps(answer)) < 20_000
    assert "guard" not in asdict(answer)


def test_answers_make_a_table(answer):
    """Guards `pd.DataFrame([vars(answer)])`, as people write it."""
    table = pd.DataFrame([vars(answer), answer.to_dict()])
    assert list(table["text"]) == [answer.text] * 2
    assert "guard" in vars(answer)
