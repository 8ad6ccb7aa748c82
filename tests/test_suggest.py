"""Tests of the suggested budget: what it refuses, where it looks, and what its cost reads."""

import warnings

import pytest
import torch
from tiny import Counter, tiny, tiny_tokenizer

import igcore as ig
from igcore.engine.agreement import supports_shared_prefix
from igcore.errors import ScorerWarning
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.scoring import word_ends

PAIRS = [("say", "so be it"), ("one", "two or three"), ("say", "no more of it")]


def number(text: str) -> float:
    return float(text)


def capitals(text: str) -> float:
    return sum(c.isupper() for c in text) / max(len(text), 1)


@pytest.mark.parametrize(
    ("refused", "budget", "over", "within"),
    [(0, 29, 0, 9), (0.05, 28, 1, 8), (0.29, 24, 5, 4), (0.1, 27, 2, 7), (0.99, 10, 19, 0)],
)
def test_the_budget_is_the_smallest_that_refuses_few(refused, budget, over, within):
    """Guards the definition, by hand: costs 10 to 29 are acceptable, and 21 to 40 are not."""
    good, bad = [str(k) for k in range(10, 30)], [str(k) for k in range(21, 41)]
    choice = ig.suggest_budget(number, good[::-1], bad, refused=refused)
    assert (choice.budget, choice.refused, choice.passed) == (budget, (over, 20), (within, 20))
    said = f"budget {budget}.0\nrefuses {over} of 20 acceptable answers\nlets {within} of 20 unac"
    assert repr(choice).startswith(said)


def test_a_share_that_floats_miss_counts_in_full():
    """Bug: .29 of 100 answers are 28, as the product is a little below 29."""
    choice = ig.suggest_budget(number, [str(k) for k in range(100)], refused=0.29)
    assert choice.budget == 70 and choice.refused == (29, 100) and choice.passed == (0, 0)


def test_a_budget_is_at_least_0():
    """Guards a cost of which most answers are below 0, and whose units allow no such budget."""
    with pytest.warns(ScorerWarning, match="separates nothing"):
        assert ig.suggest_budget(number, ["-3", "-2"], ["-1"]).budget == 0


def test_a_suggested_budget_looks_where_a_guard_does():
    """Bug: a budget that accepts a complete text which a guard rejects at its first word."""
    good, bad = ["The sky is blue.", "At home"], ["NO"]
    assert ig.suggest_budget(capitals, good, bad).budget == 1 / 2  # "At"
    assert ig.suggest_budget(capitals, good, bad, checks="end").budget == 1 / len(good[1])


def test_a_budget_is_not_suggested_for_a_cost_that_fails():
    """Guards whoever must fix the cost: the warning says why, the error of which text."""
    with (
        pytest.warns(ScorerWarning, match="raised IndexError: string index out of range"),
        pytest.raises(ig.ParameterError, match="gives no finite number for 'short', or"),
    ):
        ig.suggest_budget(
            lambda t: float(len(t[9])), ["enough to be read"], ["short"], checks="end"
        )


# --- pairs ----------------------------------------------------------------------------------------


def alike(prompt: str, answer: str) -> float:
    return sum(a == b for a, b in zip(prompt, answer, strict=False))


def test_a_cost_reads_the_prompt_of_a_pair_and_an_empty_one_without():
    """Bug: every answer was read after an empty prompt, also by a cost that judges a pair."""
    good, bad = ["aaaa", ("ab", "cd ef")], [["ab", "ab ef"], ("abcd", "abxx yy")]
    with pytest.warns(ScorerWarning, match="alike' reads prompts, and some answers have none"):
        choice = ig.suggest_budget(alike, good, bad)
    assert (choice.budget, choice.refused, choice.passed) == (0, (0, 2), (0, 2))


@pytest.mark.parametrize("cost", [alike, lambda answer: 0.0])
def test_a_cost_that_reads_prompts_asks_for_pairs(cost):
    """Guards answers without prompts, for which a cost of pairs gave a budget without a word."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ig.suggest_budget(cost, ["a", ("p", "b")])
        ig.suggest_budget(cost, [("p", "b")])
    assert ["give pairs" in str(warning.message) for warning in warned] == [True] * (cost is alike)


@pytest.mark.parametrize(
    ("good", "bad"), [(["1", "2"], ["1", "2"]), (["5", "6"], ["1", "2"]), (["3"], ["3"])]
)
def test_a_cost_that_separates_nothing_is_named(good, bad):
    """Guards whoever takes the suggested budget, under which every bad text passes."""
    with pytest.warns(ScorerWarning, match="separates nothing: .*is higher worse") as warned:
        ig.suggest_budget(number, good, bad)
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("checks", ["word", "end"])
def test_the_words_of_an_answer_cost_one_reading(checks):
    """Bug: every prefix was read from its beginning, so a peak over words was quadratic; or a cache
    mixes the words of two answers. The reference reads each prefix alone.
    """
    backbone = Backbone(tiny("llama", torch.float64, vocab_size=320), tiny_tokenizer())
    weights = torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
    cost = LMScorer("c", backbone, lambda x: (x.double() @ weights).exp(), "higher is worse", "v1")
    assert supports_shared_prefix(backbone.model)  # tried once, before anything is counted
    with Counter(backbone.model) as counter:
        choice = ig.suggest_budget(cost, PAIRS, refused=0, checks=checks)
    assert counter.tokens == sum(len(prompt + answer) for prompt, answer in PAIRS)  # each once
    peaks = []
    for prompt, answer in PAIRS:
        ends = [*(word_ends(answer) if checks == "word" else []), len(answer)]
        peaks.append(max(float(cost.score([prompt], [answer[:k]], [True])[0]) for k in ends))
    assert choice.budget == pytest.approx(max(peaks), rel=1e-6)
