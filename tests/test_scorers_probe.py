"""Tests of the first look at a scorer: what it lets through and refuses, and in which words."""

import logging
import math

import numpy as np
import pytest
from scorerfiles import assert_one_sentence

from igcore import ScorerError
from igcore.models.probe import GIBBERISH, HELPFUL, PAIRS, UNSAFE, probe


class Table:
    """A scorer that knows the probe's texts alone."""

    name, digest, sign, unit = "table", "v1", "", "points"

    def __init__(self, helpful: float, unsafe: float = math.nan, gibberish: float = math.nan):
        self.known = {HELPFUL: helpful, UNSAFE: unsafe, GIBBERISH: gibberish}
        self.finished = []

    def score(self, prompts, responses, finished):
        self.finished.extend(finished)
        return np.array([self.known[text] for text in zip(prompts, responses, strict=True)])


@pytest.mark.parametrize(
    "helpful, unsafe, boundary",
    [(-2.0, 3.0, 0), (-2.0, 3.0, None), (0.2, 0.7, None), (0.2, 0.7, 0.5)],
)
def test_a_cost_that_tells_them_apart_passes(caplog, helpful, unsafe, boundary):
    """Guards sound scorers, and the numbers in the log, which say on which scale a budget is to be
    chosen.
    """
    scorer = Table(helpful, unsafe=unsafe)
    with caplog.at_level(logging.INFO, "igcore"):
        probe(scorer, "cost", boundary)
    assert scorer.finished == [True, True]
    assert caplog.messages == [
        f"cost 'table' gives {helpful:.6g} to a harmless answer and {unsafe:.6g} to an unsafe one"
    ]


def test_a_reward_that_tells_them_apart_passes(caplog):
    """Guards rewards, for which the order is that of help, not of harm."""
    with caplog.at_level(logging.INFO, "igcore"):
        probe(Table(4.5, gibberish=-1.25), "reward")
    assert caplog.messages == [
        "reward 'table' gives -1.25 to gibberish and 4.5 to a helpful answer"
    ]


@pytest.mark.parametrize(
    "role, scorer, boundary, match",
    [
        (
            "cost",
            Table(3.0, unsafe=-2.0),
            None,
            "gives 3 to a harmless answer and -2 to an unsafe one, but the second must be higher",
        ),
        (
            "reward",
            Table(1.0, gibberish=2.0),
            None,
            "gives 2 to gibberish and 1 to a helpful answer, but the second must be higher",
        ),
        ("cost", Table(0.5, unsafe=0.5), None, "does not depend on the text"),
        ("reward", Table(0.5, gibberish=0.5), None, "does not depend on the text"),
        ("cost", Table(1.0, unsafe=2.0), 0, "the first must be below 0 and the second above it"),
        ("cost", Table(-2.0, unsafe=-1.0), 0, "the first must be below 0 and the second above it"),
        ("cost", Table(-2.0, unsafe=0.0), 0, "the first must be below 0 and the second above it"),
        ("cost", Table(-2.0), None, "both must be finite"),
        ("cost", Table(-math.inf, unsafe=1.0), None, "both must be finite"),
        ("reward", Table(math.inf, gibberish=0.0), None, "both must be finite"),
    ],
)
def test_what_is_refused(role, scorer, boundary, match):
    """Guards every number after it. Bug: a sign turned round, a score of the padding, an overflow
    in half precision.
    """
    with pytest.raises(ScorerError, match=match) as caught:
        probe(scorer, role, boundary)
    message = str(caught.value)
    assert_one_sentence(message)
    assert repr(scorer.name) in message and message.endswith(
        "self_check: false goes on all the same"
    )


def test_both_texts_of_a_pair_differ_in_length():
    """Guards the padding: texts of one length would need none, and a score at the wrong place would
    pass.
    """
    for pair in PAIRS.values():
        first, second = pair.values()
        assert len("".join(first)) != len("".join(second))
