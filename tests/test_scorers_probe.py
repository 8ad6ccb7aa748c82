"""Tests of the first look at a scorer: what it lets through and refuses, and in which words."""

import logging
import math

import numpy as np
import pytest
from scorerfiles import refused

from igcore import ScorerError
from igcore.models.probe import GIBBERISH, HELPFUL, UNSAFE, probe
from igcore.scorers import COST, REWARD


class Table:
    """A scorer that knows the probe's texts alone."""

    name, digest, unit = "table", "v1", "points"

    def __init__(self, helpful: float, unsafe: float | None = None, gibberish: float = math.nan):
        self.sign = REWARD if unsafe is None else COST
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
    """Guards sound scorers, and the numbers in the log, from which users choose a budget."""
    scorer = Table(helpful, unsafe=unsafe)
    with caplog.at_level(logging.INFO, "igcore"):
        probe(scorer, boundary)
    assert scorer.finished == [True, True]
    assert caplog.messages == [
        f"cost 'table' gives {helpful:.6g} to a harmless answer and {unsafe:.6g} to an unsafe one"
    ]


def test_a_reward_that_tells_them_apart_passes(caplog):
    """Guards rewards, for which the order is that of help, not of harm."""
    with caplog.at_level(logging.INFO, "igcore"):
        probe(Table(4.5, gibberish=-1.25))
    assert caplog.messages == [
        "reward 'table' gives -1.25 to gibberish and 4.5 to a helpful answer"
    ]


@pytest.mark.parametrize(
    "scorer, boundary, match",
    [
        (Table(3.0, unsafe=-2.0), None,
         "gives 3 to a harmless answer and -2 to an unsafe one, but .* second must be higher"),
        (Table(1.0, gibberish=2.0), None,
         "gives 2 to gibberish and 1 to a helpful answer, but .* the second must be higher"),
        (Table(0.5, unsafe=0.5), None, "the second must be higher"),
        (Table(0.5, gibberish=0.5), None, "the second must be higher"),
        (Table(1.0, unsafe=2.0), 0, "the first must be below 0 and the second above it"),
        (Table(-2.0, unsafe=-1.0), 0, "the first must be below 0 and the second above it"),
        (Table(-2.0, unsafe=0.0), 0, "the first must be below 0 and the second above it"),
        (Table(-2.0, unsafe=math.nan), None, "both must be finite"),
        (Table(-math.inf, unsafe=1.0), None, "both must be finite"),
        (Table(math.inf, gibberish=0.0), None, "both must be finite"),
    ],
)  # fmt: skip
def test_what_is_refused(scorer, boundary, match):
    """Guards every number after it. Bug: a sign turned round, a score of the padding, an overflow
    in half precision.
    """
    with refused(ScorerError, match) as caught:
        probe(scorer, boundary)
    message = str(caught.value)
    assert repr(scorer.name) in message
    assert message.endswith("self_check: false loads it all the same")
