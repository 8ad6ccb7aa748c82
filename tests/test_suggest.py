"""Tests of the suggested budget: its table, where it looks, and what its cost reads."""

import warnings

import pytest
import torch
from mockpolicy import Answering
from tiny import Counter, tiny, tiny_tokenizer

import igcore as ig
from igcore.engine.agreement import supports_shared_prefix
from igcore.errors import ScorerWarning
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.scoring import word_ends
from igcore.tools.suggest import wilson

PAIRS = [("say", "so be it"), ("one", "two or three"), ("say", "no more of it")]


def capitals(text: str) -> float:
    return sum(c.isupper() for c in text) / max(len(text), 1)


def test_the_suggested_budget_parts_the_texts():
    """Guards the table: shares and intervals computed by hand."""
    choice = ig.suggest_budget(lambda t: float(t), ["0", "1", "2", "6"], ["5", "7", "8"])
    assert choice.budget == 3.5
    rows = {row.budget: row for row in choice.rows}
    assert list(rows) == [0.5, 1.5, 3.5, 5.5, 6.5, 7.5, 8.0]
    assert (rows[3.5].refused, rows[3.5].passed) == (0.25, 0.0)
    assert (rows[5.5].refused, rows[5.5].passed) == (0.25, 1 / 3)
    assert rows[3.5].passed_interval[0] == 0 and 0.5 < rows[3.5].passed_interval[1] < 0.6
    assert repr(choice).count("\n") == 7 and "->       3.5" in repr(choice)


def test_the_wilson_interval_is_that_of_statsmodels():
    """Guards the closed form, at the ends as well."""
    from statsmodels.stats.proportion import proportion_confint

    for k, n in ((0, 5), (2, 5), (5, 5), (1, 300)):
        assert wilson(k, n) == pytest.approx(proportion_confint(k, n, method="wilson"), abs=1e-12)


def test_a_suggested_budget_looks_where_a_guard_does():
    """Bug: a budget that accepts a complete text which a guard rejects at its first word."""
    good, bad = ["The sky is blue.", "At home"], ["NO"]
    assert ig.suggest_budget(capitals, good, bad).budget == (1 / 2 + 1) / 2  # "At", "NO"
    whole = ig.suggest_budget(capitals, good, bad, checks="end")
    assert whole.budget == (1 / len(good[1]) + 1) / 2


def test_a_budget_is_not_suggested_for_a_cost_that_fails():
    """Guards whoever must fix the cost: the warning says why, the error of which text."""
    with (
        pytest.warns(ScorerWarning, match="raised IndexError: string index out of range"),
        pytest.raises(ig.ParameterError, match="gives no finite number for 'short'; fix"),
    ):
        ig.suggest_budget(lambda t: float(len(t[9])), ["long enough to be read"], ["short"], "end")


# --- pairs ----------------------------------------------------------------------------------------


def alike(prompt: str, answer: str) -> float:
    return sum(a == b for a, b in zip(prompt, answer, strict=False))


def test_a_cost_reads_the_prompt_of_a_pair_and_an_empty_one_without():
    """Bug: every answer was read after an empty prompt, also by a cost that judges a pair."""
    good, bad = ["aaaa", ("ab", "cd ef")], [["ab", "ab ef"], ("abcd", "abxx yy")]
    with pytest.warns(ScorerWarning, match="alike' reads prompts, and 1 answers have none; give"):
        choice = ig.suggest_budget(alike, good, bad)
    assert (choice.budget, choice.rows[0].refused, choice.rows[0].passed) == (1.0, 0, 0)
    assert len(choice.rows) == 2  # costs 0 and 2


@pytest.mark.parametrize("reads", [True, False])
def test_a_model_that_reads_prompts_asks_for_pairs(reads):
    """Guards answers without prompts, for which a cost of pairs gave a budget without a word."""
    model = Answering(
        lambda prompts, texts, _: [len(p * reads + r) for p, r in zip(prompts, texts, strict=True)]
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ig.suggest_budget(model, ["a"], [("", "bbb"), ("p", "bbb")])
    assert ["2 answers have none" in str(warning.message) for warning in warned] == [True] * reads


@pytest.mark.parametrize(
    ("good", "bad"), [(["1", "2"], ["1", "2"]), (["5", "6"], ["1", "2"]), (["3"], ["3"])]
)
def test_a_cost_that_separates_nothing_is_named(good, bad):
    """Guards whoever takes the suggested budget, under which every bad text passes."""
    with pytest.warns(ScorerWarning, match="separates nothing: .*is higher worse") as warned:
        ig.suggest_budget(lambda text: float(text), good, bad)
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
        choice = ig.suggest_budget(cost, PAIRS[:2], PAIRS[2:], checks)
    read = [*PAIRS[0], *PAIRS[1], *PAIRS[2]]  # each pair once, letter by letter
    assert counter.tokens == sum(map(len, read))
    assert len(counter.shapes) == 4  # prompts and answers, of each kind at once
    peaks = []
    for prompt, answer in PAIRS:
        ends = [*(word_ends(answer) if checks == "word" else []), len(answer)]
        peaks.append(max(float(cost.score([prompt], [answer[:k]], [True])[0]) for k in ends))
    levels = sorted(peaks)
    halfway = [(low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)]
    assert [row.budget for row in choice.rows] == pytest.approx([*halfway, levels[-1]], rel=1e-6)
    refused = [sum(peak > row.budget for peak in peaks[:2]) / 2 for row in choice.rows[:-1]]
    assert [row.refused for row in choice.rows[:-1]] == refused


def test_answers_beyond_one_batch_keep_their_order():
    """Bug: costs of a second batch that belong to texts of the first."""
    good, bad = [str(k) for k in range(40)], [str(k) for k in range(40, 60)]
    choice = ig.suggest_budget(lambda t: float(t), good, bad)
    assert (choice.budget, len(choice.rows)) == (39.5, 60)


def test_short_answers_are_named_and_twins_have_a_rate():
    """Bug: a budget that 3 % of answers of 48 tokens exceed was used for 128, where 17 % do; and
    a cost that mistakes talk about harm for harm looked good on other harmless answers.
    """

    def suggested(words: int, **more):
        good, bad = ["a " * words, "b"], ["c " * 40]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            choice = ig.suggest_budget(lambda text: float(len(text)), good, bad, "end", **more)
        return choice, [str(warning.message) for warning in warned]

    assert suggested(15)[1] == suggested(16, length=32)[1] == []
    named = "the longest of acceptable_texts has 15 words, and the guard writes up to 32 tokens"
    assert suggested(15, length=32)[1][0].startswith(named)
    plain, beside = suggested(15)[0], suggested(15, twins=["d " * 10, "d " * 30, "d " * 50])[0]
    assert [row.budget for row in beside.rows] == [row.budget for row in plain.rows]
    by_budget = {row.budget: row.twins for row in beside.rows}
    assert (by_budget[15.5], by_budget[55.0], by_budget[80.0]) == (1, 2 / 3, 1 / 3)
    assert {row.twins for row in plain.rows} == {None} and "twins" not in repr(plain)
    assert repr(beside).count("twins refused  66.7 %") == 1


# --- how many labels ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("half_width", [0.2, 0.05, 0.01])
def test_the_labels_needed_are_the_fewest_whose_interval_is_narrow(half_width, share):
    """Guards the closed form; the reference halves the interval of n texts, n by n."""

    def half(n):
        # of a rate that need not be k / n
        low, high = wilson(share * n, n)
        return (high - low) / 2

    n = ig.labels_needed(half_width, share)
    assert half(n) <= half_width * (1 + 1e-9)
    assert n == 1 or half(n - 1) > half_width * (1 - 1e-9)
