"""The functions of notebook 02: ledgers of prefix scores, chances of finding nothing, and weights
against a budget.
"""

import itertools
import math

import numpy as np
import pytest
from mockpolicy import LetterCost, LetterReward, mock_policy
from notebook_code import notebook_code

import igcore as ig
from igcore.budget import ACCOUNTINGS, SIGNED, trace
from igstudy.theory.planning import abstention_bound

nb = notebook_code("02_the_budget")


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_a_ledger_is_what_the_guard_charges(accounting):
    """Bug: a notebook that teaches another peak or another last step than `igcore.budget.trace`."""
    for scores in itertools.product((-2, 0, 1, 3), repeat=4):
        costs = nb.ledger(scores, accounting)
        totals = [state.total for state in trace(scores, 5, accounting)]
        assert list(itertools.accumulate(costs, initial=0)) == totals
        assert accounting in SIGNED or min(costs) >= 0


def test_the_scores_of_section_1_by_hand():
    """Bug: a row of scores that no longer shows what the text says of it."""
    totals = {name: sum(nb.ledger(nb.SCORES, name)) for name in ACCOUNTINGS}
    assert totals == {
        "peak": 4,
        "terminal": 3,
        "sum": 11,
        "clamped_sum": 13,
        "increment": 3,
        "positive_increment": 9,
    }
    left = 5 - np.cumsum(nb.ledger(nb.SCORES, "sum"))
    assert left[2] < 0 <= left[3]  # broken, and repaid


def test_prefixes_end_with_words():
    """Bug: a score of half a word, or without the last word."""
    seen = []

    class Reader:
        def score(self, prompts, responses, finished):
            seen.extend(responses)
            assert len(prompts) == len(responses) == len(finished)
            return [len(text) for text in responses]

    scores = nb.prefix_scores(" one two\n three", Reader())
    assert seen == [" one", " one two", " one two\n three"]
    assert scores.tolist() == [4, 8, 15]


def test_the_chance_of_none_within_is_that_of_all_subsets():
    """Bug: samples drawn with replacement; a cost equal to the budget taken for over it."""
    costs, n = [0.1, 0.2, 0.2, 0.3, 0.4], 2
    for budget in (0.05, 0.2, 0.3, 0.4):
        subsets = list(itertools.combinations(costs, n))
        expected = np.mean([min(subset) > budget for subset in subsets])
        assert nb.none_within(costs, budget, n) == pytest.approx(expected)


def test_the_chance_of_none_within_is_unbiased():
    """Bug: a prediction that is too high on average, as the share plugged into the bound is."""
    p, m, n = 0.3, 6, 3
    binomial = [math.comb(m, k) * p**k * (1 - p) ** (m - k) for k in range(m + 1)]
    rows = [[0.0] * k + [1.0] * (m - k) for k in range(m + 1)]
    mean = sum(w * nb.none_within(row, 0.5, n) for w, row in zip(binomial, rows, strict=True))
    plugged = sum(w * abstention_bound([k / m], n) for k, w in enumerate(binomial))
    assert mean == pytest.approx(abstention_bound([p], n)) and plugged > mean


def test_one_run_under_budget_0_tells_abstention_under_every_budget():
    """Bug: the comparison of section 4 wrong about the guard that it stands for."""
    prompts = ["abc", "de", "f", "ba", "cc", "fade"]
    shape = {"n_samples": 2, "rounds": 2, "keep": 1, "block_size": 2, "max_new_tokens": 2}

    def answers(budget):
        guard = ig.Guard(mock_policy(), LetterCost(), budget=budget, diversity="none", **shape)
        return list(ig.decode("inferenceguard", guard, prompts, seed=3, record=True))

    class Dear(LetterCost):
        def score(self, *texts):
            return np.asarray(super().score(*texts)) + 1  # so that nothing is within budget 0

    guard = ig.Guard(mock_policy(), Dear(), budget=0.0, diversity="none", **shape)
    runs = list(ig.decode("inferenceguard", guard, prompts, seed=3, record=True))
    lowest = [min(node.cost for node in answer.candidates) - 1 for answer in runs]
    assert all(len(answer.candidates) == 4 for answer in runs)
    fates = set()
    for budget in (0.0, *lowest):
        real = [answer.status == "abstained" for answer in answers(budget)]
        assert real == [low > budget + 1e-9 for low in lowest]
        fates |= set(real)
    assert fates == {True, False}


def test_choices_on_recorded_samples_are_those_of_the_methods():
    """Bug: a replay by other rules than best-of-n-lagrangian and best-of-n-augmented."""
    prompts, shape = ["abc", "de", "f", "ba"], {"n_samples": 6, "max_new_tokens": 4}
    for weight in (0.0, 0.7, 5.0):
        guard = ig.Guard(
            mock_policy(), LetterCost(), LetterReward(), budget=0.4, lagrange_multiplier=weight,
            block_size=4, **shape,
        )  # fmt: skip
        lagrangian = list(ig.decode("best-of-n-lagrangian", guard, prompts))
        augmented = list(ig.decode("best-of-n-augmented", guard, prompts))
        rewards, costs = np.moveaxis(np.array([answer.finals for answer in lagrangian]), -1, 0)
        chosen = nb.lagrangian_choice(rewards, costs, weight)
        assert nb.taken(costs, chosen) == pytest.approx([a.cost for a in lagrangian])
        chosen = nb.budget_choice(rewards, costs, 0.4)
        for row, (choice, answer) in enumerate(zip(chosen, augmented, strict=True)):
            if choice < 0:
                assert answer.status == "unverified_unsafe"
            else:
                assert rewards[row, choice] == pytest.approx(answer.reward)


def test_the_smallest_weight_is_the_first_that_keeps_the_budget():
    """Bug: a tuned weight that still breaks the budget, or a larger one than needed."""
    rewards, costs = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[0.3, 0.1], [0.2, 0.1]])
    weight = nb.smallest_weight(rewards, costs, 0.15, (0, 4, 5.5, 11, 20))
    assert weight == 11
    assert nb.smallest_weight(rewards, costs, 0.15, (0, 4)) == math.inf
    assert nb.smallest_weight(rewards, costs, 0.3, (0, 4)) == 0


def test_samples_needed_is_the_least_number():
    """Bug: rounded down, one sample too few."""
    for p, delta in itertools.product((0.01, 0.3, 0.5), (0.1, 0.001)):
        n = nb.samples_needed(p, delta)
        assert abstention_bound([p], n) <= delta < abstention_bound([p], n - 1)
