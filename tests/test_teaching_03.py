"""The functions of notebook 03: costs that can be gamed, the winner's curse, faulty scorers."""

import numpy as np
import pytest
from mockpolicy import mock_policy
from notebook_code import notebook_code

import igcore as ig

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
    tired = nb.Tired()
    assert scored(tired) == pytest.approx(0.99 * np.array(truth))
    assert scored(tired) == pytest.approx(0.99**2 * np.array(truth))


def test_spreads_tell_a_sound_scorer_from_each_fault():
    """Bug: scores put back in the wrong order, which would accuse a sound scorer."""
    assert set(nb.spreads(nb.Faulty(), THE).values()) == {0}
    faulty = {fault.name: nb.spreads(fault(), THE) for fault in (nb.Diluted, nb.Graded)}
    for spread in faulty.values():
        assert spread["repeated"] == 0 < spread["in company"] and spread["reordered"] == 0
    for fault in (nb.Dice, nb.Tired):
        assert min(nb.spreads(fault(), THE).values()) > 0


def fate(scorer, texts, monkeypatch):
    monkeypatch.setattr(nb, "prompts", [ig.Prompt("0", "x", "")], raising=False)
    return nb.guard_once(scorer, texts, ig.SearchConfig(budget=0.1))


def test_the_fates_of_a_block_by_hand(monkeypatch):
    """Bug: a verdict by the faulty scorer where the true cost counts."""
    mild, bad = " a dog sat on a mat", " the cat sat"
    long = " and so we went on and on until it was dark and cold and late"
    assert fate(nb.Faulty(), [bad, mild], monkeypatch) == "emitted"
    assert fate(nb.Faulty(), [bad, bad], monkeypatch) == "none within budget"
    assert fate(nb.Diluted(), [bad, long], monkeypatch) == "refused by the final check"
    assert fate(nb.Graded(), [bad, bad], monkeypatch) == "emitted, truly over budget"
    assert set(nb.COLOURS) >= {fate(nb.Dice(seed), [bad, mild], monkeypatch) for seed in range(50)}


def test_the_guard_itself_refuses_what_only_company_made_mild():
    """Bug: the notebook's claim about the final check not true of the search."""

    def share_a(text):
        return text.count("a") / max(len(text), 1)

    class Diluted(nb.Faulty):
        def score(self, prompts, responses, finished):
            letters = sum(map(len, responses))
            return np.array([text.count("a") for text in responses]) / max(letters, 1)

    settings = {"n_samples": 4, "keep": 1, "block_size": 3, "max_new_tokens": 3, "rounds": 1}
    guard = ig.Guard(mock_policy(), Diluted(), budget=0.1, group_size=1, **settings)
    answers = list(ig.decode("inferenceguard", guard, list("abcdef") * 4))
    reasons = [answer.reason for answer in answers if answer.status == "abstained"]
    assert "final_check" in reasons
    verified = [answer for answer in answers if answer.status == "verified_safe"]
    assert verified and all(share_a(answer.text) <= 0.1 for answer in verified)


def test_a_patient_scorer_passes_any_test_that_ends():
    """Bug: a solution of exercise 4 that the test would have found."""
    patient = nb.Patient()
    assert set(nb.spreads(patient, THE).values()) == {0}
    for _ in range(300):
        patient.score([""] * len(THE), THE, [True] * len(THE))
    assert patient.score([""], ["the end"], [True])[0] == 0
