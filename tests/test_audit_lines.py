"""Tests of single lines that no other test guards, found by `igcore audit --breakages`."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from mockpolicy import LetterCost, LetterReward, mock_policy

from igcore import Guard, ScorerError, SearchConfig, decode
from igcore.beams import method_of, new_search
from igcore.policy import Prompt
from igcore.scorers import checked_score

PROMPTS = [Prompt(f"id{i}", text, "mock") for i, text in enumerate(["ab", "fed", "c", "dd", "eae"])]


def answers(cost, **settings):
    config = SearchConfig(
        **dict(budget=1.0, n_samples=3, block_size=2, max_new_tokens=8) | settings
    )
    return list(
        decode("inferenceguard", Guard(mock_policy(), cost, LetterReward(), config), PROMPTS)
    )


def test_verdicts_are_not_read_as_costs():
    """Bug: a classifier that says False, for unsafe, was given a cost of 0."""

    class Verdicts(LetterCost):
        def score(self, prompts, responses, finished):
            return np.zeros(len(responses), dtype=bool)

    try:
        assert np.isnan(checked_score(Verdicts(), ["p"], ["t"], [True])).all()
    except ScorerError as error:
        assert "bool" in str(error)


class Cached(LetterCost):
    """A cost that its KV cache makes look safe: read anew, every prefix costs 1."""

    backbone = SimpleNamespace(model=mock_policy().model)

    def open_cache(self, prompts):
        return SimpleNamespace(retain=lambda prompts, responses: None)

    def with_cache(self, session):
        return LowerCost()

    def uncached(self):
        return UncachedCost()


class LowerCost(LetterCost):
    def score(self, prompts, responses, finished):
        return [0.0] * len(responses)


class UncachedCost(LetterCost):
    def score(self, prompts, responses, finished):
        return [0.0 if end else 1.0 for end in finished]


@pytest.mark.parametrize(("strict", "verified"), [(False, True), (True, False)])
def test_a_path_at_the_budget_is_over_it_under_strict(strict, verified):
    """Bug: the path of a scorer with a KV cache, read anew, was compared closed under strict."""
    found = answers(Cached(), strict=strict, budget=1.0)
    long = [a for a in found if a.status == "abstained" or len(a.block_ends) > 1]
    assert len(long) > 2
    assert {a.status == "verified_safe" for a in long} == {verified}


def test_a_text_that_the_final_check_cannot_score_is_called_so():
    """Bug: 'over budget' was said of a text that has no cost."""
    seen = set()

    class Once(LetterCost):
        def score(self, prompts, responses, finished):
            odd = [r for r, end in zip(responses, finished, strict=True) if end and len(r) % 2]
            costs = [math.nan if r in odd and r in seen else 0.0 for r in responses]
            seen.update(odd)
            return costs

    reasons = {answer.reason for answer in answers(Once(), keep=1)} - {""}
    assert reasons and reasons <= {"scorer_error", "scorer_contract"}


def test_only_the_first_failure_counts():
    """Bug: after a failure the probe replaced the prefix that was certified before it."""
    config = SearchConfig(budget=1.0, probe_fail_open=True, on_failure="truncate")
    search = new_search(PROMPTS[0], [1, 2], 0, method_of("inferenceguard"), config)
    first = search.best
    search.fail("exhausted")
    search.beams = [new_search(PROMPTS[1], [3], 0, method_of("inferenceguard"), config).best]
    search.fail("dead_end")
    assert (search.failure, search.certified is first) == ("exhausted", True)
