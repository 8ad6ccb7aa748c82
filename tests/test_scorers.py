"""Tests of the scorer protocol and of what stands between a scorer and the search."""

import math

import numpy as np
import pytest
from mockpolicy import LetterCost

from igcore import ParameterError, ScorerError, load_scorer
from igcore.scorers import Cached, checked_score


class Shouting:
    """The ten-line scorer of the documentation."""

    name, digest, sign, unit = "shouting", "v1", "higher is worse", "share of capitals"

    def score(self, prompts, responses, finished):
        return [sum(c.isupper() for c in r) / max(len(r), 1) for r in responses]


def test_a_newcomers_scorer_works_as_it_is():
    assert checked_score(Shouting(), ["p", "p"], ["Ab", "ab"], [True, False]).tolist() == [0.5, 0.0]


def test_the_cache_asks_each_text_once_and_tells_prompts_and_prefixes_apart():
    """Guards the key: a reward depends on the prompt, and a scorer may treat a finished text otherwise."""
    cost = LetterCost()
    cached = Cached(cost)
    assert cached.score(["p", "q", "p"], ["ab", "ab", "ab"], [False] * 3).tolist() == [2, 2, 2]
    assert cost.texts == 2
    cached.score(["p"], ["ab"], [False]), cached.score(["p"], ["ab"], [True])
    assert cost.texts == 3


def test_what_is_not_finite_becomes_nan():
    """Guards -inf, which would otherwise be the safest score of all."""

    class Odd(LetterCost):
        def score(self, prompts, responses, finished):
            return [1.0, math.inf, -math.inf, math.nan]

    assert np.array_equal(checked_score(Odd(), [""] * 4, list("abcd"), [True] * 4), [1, np.nan, np.nan, np.nan], equal_nan=True)


def test_the_error_of_a_scorer_keeps_its_cause():
    class Broken(LetterCost):
        def score(self, prompts, responses, finished):
            raise RuntimeError("out of memory")

    with pytest.raises(ScorerError, match="'letters' failed on 1 texts with RuntimeError: out of memory") as error:
        checked_score(Broken(), [""], ["a"], [True])
    assert isinstance(error.value.__cause__, RuntimeError)


def test_unknown_scorer_names_the_nearest():
    with pytest.raises(ParameterError, match="unknown scorer 'minilm'; did you mean 'minilm-relevance'"):
        load_scorer("minilm")


@pytest.mark.parametrize("name", ["offensive-language", "minilm-relevance", "jigsaw-toxicity"])  # nothing is downloaded for these
def test_named_scorers_say_what_they_are(name):
    scorer = load_scorer(name)
    assert scorer.name == name and scorer.sign in ("higher is worse", "higher is better") and scorer.unit
    assert len(scorer.digest) == 64
