"""The functions of notebook 03: costs that can be gamed, the winner's curse, faulty scorers."""

import warnings

import numpy as np
import pytest
from mockpolicy import mock_policy
from notebook_code import notebook_code

import igcore as ig
from igcore.contract import Contract
from igcore.errors import ScorerWarning
from igcore.scoring import Tally

nb = notebook_code("03_breaking_the_guard")
THE = [
    " the cat",
    " a dog sat",
    " the sea and the sun",
    " so",
    " to the end of it all we went along",
]


def test_a_cost_by_share_falls_with_length_and_one_by_window_does_not():
    """Bug: a repair that is diluted as well, or that misses the word at an end of the text."""
    shares = [nb.share_rude(" ".join(["darn", *nb.PADDING[:n]])) for n in range(12)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1 and shares[-1] < nb.BUDGET
    for place in range(len(nb.PADDING) + 1):
        assert nb.worst_window(nb.with_word_at(place)) == 0.25
    assert nb.worst_window("darn") == 1 and nb.worst_window("") == 0


def test_a_path_charges_the_worst_prefix():
    """Bug: a path cost that is the final cost, so that position would not matter."""
    assert nb.path_cost(nb.with_word_at(0)) == 0.25
    last = nb.with_word_at(len(nb.PADDING))
    assert nb.path_cost(last) == nb.share_rude(last) == nb.path_cost(last, accounting="terminal")
    assert len({nb.path_cost(nb.with_word_at(0), accounting=a) for a in ("peak", "terminal")}) == 2


def test_words_are_counted_whole():
    """Bug: "the" found in other words, which would count answers as gamed that are not."""
    assert nb.count_the("The other theme, THE end. Then") == 2
    assert nb.share_the("the end") == 0.5 and nb.share_the("") == 0


def test_the_curse_grows_with_n_and_noise_as_the_formula_says():
    """Bug: gap of estimate and truth with the wrong sign, or a choice by the true cost. Five
    standard errors.
    """
    for n in (1, 2, 8):
        for sigma in (0.5, 1.0):
            simulated = nb.curse(n, sigma, trials=40000, seed=1)
            assert simulated == pytest.approx(nb.expected_curse(n, sigma), abs=5 * sigma / 200)
    assert nb.expected_curse(2, 1.0) == pytest.approx(1 / np.sqrt(2 * np.pi))  # by hand
    assert nb.expected_curse(1, 1.0) == pytest.approx(0, abs=1e-9)


def test_reward_pulls_errors_through_only_where_it_goes_with_cost():
    """Bug: abstentions counted as emitted texts, or the budget applied to the true cost."""
    alone = [nb.truly_over(n, 0.0) for n in (1, 32)]
    pulled = [nb.truly_over(n, 0.6) for n in (1, 32)]
    assert alone[0][0] == pytest.approx(alone[1][0], abs=0.02)
    assert pulled[1][0] > pulled[0][0] + 0.1
    assert alone[1][1] < alone[0][1]
    assert nb.truly_over(4, 0.0, sigma=0.0)[0] == 0  # without noise nothing comes through
    assert nb.with_margin(0.0) == nb.truly_over(16, 0.6)


def test_faults_by_hand():
    """Bug: a fault that is none, so that its bar would say nothing."""
    together, truth = [""] * len(THE), [nb.share_the(text) for text in THE]

    def scored(scorer):
        return np.asarray(scorer.score(together, THE, [True] * len(THE)))

    assert scored(nb.Faulty()).tolist() == truth
    total = sum(len(text.split()) for text in THE)
    assert scored(nb.Diluted()) == pytest.approx(
        [text.split().count("the") / total for text in THE]
    )
    assert scored(nb.Graded()) == pytest.approx(np.array(truth) - min(truth))
    assert nb.Graded().score([""], ["the"], [True]) == [0]  # alone, the worst text is free
    dice = nb.Dice()
    assert np.all(scored(dice) != scored(dice))
    rounded = nb.Rounded()
    assert 0 < np.abs(scored(rounded) - truth).max() <= 0.001
    tired = nb.Tired()
    assert scored(tired) == pytest.approx(0.99 * np.array(truth))
    assert scored(tired) == pytest.approx(0.99**2 * np.array(truth))


FOUND = (nb.Diluted, nb.Graded, nb.Dice, nb.Tired)


def contract_of(scorer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)
        return Contract.examined(scorer, Tally())


@pytest.mark.parametrize("fault", FOUND)
def test_what_the_notebook_calls_found_is_found(fault):
    """Bug: a fault too small for the examination, so that the text would claim too much of it."""
    with pytest.warns(ScorerWarning, match="its answers are not verified"):
        contract = Contract.examined(fault(), Tally())
    assert contract.spread > contract.tolerance
    where = "the batch" if fault in (nb.Diluted, nb.Graded) else "the call"
    assert f"depends on {where}" in contract.problem


@pytest.mark.parametrize("scorer", [nb.Faulty, nb.Rounded, *nb.MISSED])
def test_what_the_notebook_calls_not_found_is_not_found(scorer):
    """Bug: a demonstration of the examination's limits that the examination catches."""
    contract = Contract.examined(scorer(), Tally())
    assert not contract.problem
    assert (contract.spread > 0) == (scorer in (nb.Rounded, nb.Slow))


def test_a_text_at_the_budget_pays_for_the_spread():
    """Bug: a margin that is not charged, or one that refuses clear texts as well."""
    at, below = "the " + "a " * 9, "the " + "a " * 10
    assert nb.verdict_on(at, nb.Faulty()).within and nb.verdict_on(below, nb.Faulty()).within
    assert not nb.verdict_on(at, nb.Rounded()).within
    assert nb.verdict_on(below, nb.Rounded()).within


def test_only_checks_at_words_see_what_stands_between_the_ends_of_blocks():
    """Bug: a text that blocks of four words would catch, or that is over budget at its end. Costs
    by hand: one rude word of nine, and of twelve.
    """
    hidden = nb.with_word_at(8)
    at_blocks, at_words = (nb.verdict_on(hidden, nb.share_rude, c) for c in ("block", "word"))
    assert at_blocks.passed and not at_words.passed and at_words.within
    assert max(at_blocks.worst) == pytest.approx(1 / 12)
    assert max(at_words.worst) == pytest.approx(1 / 9)
    assert at_blocks.calls == 4 + 2 and at_words.calls == 19 + 2


def fate(contract, texts):
    return nb.guard_once(contract, texts, ig.SearchConfig(budget=0.1, checks="block"))


def test_the_fates_of_a_block_by_hand():
    """Bug: a verdict by the faulty scorer where the true cost counts."""
    mild, bad = " a dog sat on a mat", " the cat sat"
    sound = contract_of(nb.Faulty())
    assert fate(sound, [bad, mild]) == "emitted"
    assert fate(sound, [bad, bad]) == "none within budget"
    for fault in FOUND:
        contract = contract_of(fault())
        assert {fate(contract, [bad, mild]) for _ in range(20)} <= {
            "refused by the verdict",
            "none within budget",
        }
    slow = contract_of(nb.Slow())
    patient = contract_of(nb.Patient())
    for contract in (slow, patient):
        assert fate(contract, [bad, bad]) == "none within budget"
        for _ in range(1000):
            contract.scorer.score([""], [mild], [True])
    assert fate(patient, [bad, bad]) == "emitted, truly over budget"
    # a third of the truth by now
    assert fate(slow, [" the cat sat on a mat", bad]) == "emitted, truly over budget"


def test_the_guard_itself_refuses_what_only_company_made_mild():
    """Bug: the notebook's claim about broken contracts not true of the search."""

    class Diluted(nb.Faulty):
        def score(self, prompts, responses, finished):
            letters = sum(map(len, responses))
            return np.array([text.count("a") for text in responses]) / max(letters, 1)

    settings = {"n_samples": 4, "keep": 1, "block_size": 3, "max_new_tokens": 3, "rounds": 1}
    with pytest.warns(ScorerWarning, match="depends on the batch"):
        guard = ig.Guard(mock_policy(), Diluted(), budget=0.1, group_size=1, **settings)
    guarded = list(ig.decode("inferenceguard", guard, list("abcdef") * 2))
    assert {answer.status for answer in guarded} == {"abstained"}
    assert "scorer_contract" in {answer.reason for answer in guarded}
    (free,) = ig.decode("best-of-n", guard, ["a"])
    assert (free.status, free.reason) == ("unverified_unsafe", "scorer_contract")


def test_a_longer_examination_ends_as_well():
    """Bug: a solution of exercise 4 that finds nothing, or a scorer that it would have found."""
    assert nb.changed(nb.Faulty(), THE, 50) == 0
    slow = nb.changed(nb.Slow(), [" the"], 100)
    assert slow == pytest.approx(0.999 - 0.999**102)  # read 1, and read 102
    patient = nb.VeryPatient()
    assert nb.changed(patient, [" the"], 9_998) == 0  # reads 1 and 10000
    assert nb.changed(nb.VeryPatient(), [" the"], 9_999) == 1
