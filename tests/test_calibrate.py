"""Certificates of a critic's threshold: by hand, against scipy, and in simulation of many
calibrations.
"""

import math

import numpy as np
import pytest
from scipy import stats

from igcore.errors import ParameterError
from igcore.report.certify import ASSUMPTIONS, LOSS, learn_then_test, p_value, smallest_n

ALPHA, DELTA = 0.1, 0.1
GRID = np.linspace(0.98, 0.02, 25)


def column(losses: int, n: int) -> np.ndarray:
    return np.arange(n) < losses


def within(share: float, bound: float, trials: int) -> bool:
    """Say whether a share of trials is below the bound up to three standard errors: wrong by luck
    once in 700.
    """
    return share <= bound + 3 * math.sqrt(bound * (1 - bound) / trials)


# --- a population of prompts with N candidates each -----------------------------------------------


class Population:
    """Prompts with 8 candidates: f1 is a noisy critic, and an unsafe candidate earns more reward
    (so the search seeks it out).
    """

    def __init__(self, prompts: int = 4000, n: int = 8, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.unsafe = rng.random((prompts, n)) < rng.beta(0.5, 1.5, (prompts, 1))  # (prompts, n)
        self.f1 = 1 / (
            1 + np.exp(rng.normal(0, 1.2, (prompts, n)) + np.where(self.unsafe, 1.7, -1.7))
        )
        self.reward = rng.normal(0, 1, (prompts, n)) + self.unsafe
        accepted = self.f1 > GRID[:, None, None]  # (T, prompts, n)
        best = np.where(accepted, self.reward, -np.inf).argmax(axis=2)[..., None]
        chosen = np.take_along_axis(accepted & self.unsafe, best, axis=2)
        self.search_loss = chosen[
            ..., 0
        ].T  # (prompts, T): best of the accepted is unsafe; abstention is 0

    def draws(self, trials: int, n: int, seed: int):
        """Yield the prompts of one calibration after another, drawn independently, so that the
        population's mean is the risk.
        """
        rng = np.random.default_rng(seed)
        for _ in range(trials):
            yield rng.integers(len(self.unsafe), size=n)


@pytest.fixture(scope="module")
def population() -> Population:
    return Population()


# --- how many prompts -----------------------------------------------------------------------------


def test_smallest_n_is_the_least_with_a_certificate():
    """Guards the printed figures, and that one prompt fewer really could accept nothing."""
    levels = {
        (0.05, 0.1): 45,
        (0.01, 0.05): 299,
        (0.001, 0.05): 2995,
        (0.5, 0.25): 2,
        (0.9, 0.5): 1,
        (0.1, 0.95): 1,
    }
    assert {pair: smallest_n(*pair) for pair in levels} == levels
    for (alpha, delta), n in levels.items():
        assert n == max(1, math.ceil(round(math.log(delta) / math.log(1 - alpha), 9)))
        assert p_value(0, n, alpha) <= delta < p_value(0, n - 1, alpha) or n == 1


def test_p_values_are_those_of_the_exact_binomial_test():
    """Guards the tail: P(Bin < losses) or the upper tail would accept risks above alpha."""
    for n, alpha in ((1, 0.3), (45, 0.05), (299, 0.01), (500, 0.05)):
        for losses in {0, 1, n // 20, n // 4, n}:
            assert p_value(losses, n, alpha) == pytest.approx(
                stats.binomtest(losses, n, alpha, "less").pvalue, rel=1e-9, abs=1e-300
            )


# --- Learn-then-Test ------------------------------------------------------------------------------


def test_learn_then_test_by_hand():
    """Guards the sequence: it ends at the first failure, though a later threshold would pass, and
    deploys the last accepted.
    """
    losses = np.stack([column(k, 100) for k in (0, 4, 5, 20, 0)], axis=1)
    # P(Bin(100, .1) <= 4) = .0237, <= 5: .0576, <= 20: .999
    found = learn_then_test([0.9, 0.7, 0.5, 0.3, 0.1], losses, 0.1, 0.1)
    assert found.threshold == 0.5
    assert [row["losses"] for row in found.table] == [0, 4, 5, 20]
    assert [row["accepted"] for row in found.table] == [True, True, True, False]
    assert [row["risk"] for row in found.table] == [0, 0.04, 0.05, 0.2]
    assert [round(row["p"], 4) for row in found.table] == [0.0, 0.0237, 0.0576, 0.9992]
    assert learn_then_test([0.9, 0.7, 0.5, 0.3, 0.1], losses, 0.1, 0.05).threshold == 0.7
    assert (found.alpha, found.delta, found.n_prompts) == (0.1, 0.1, 100)


def test_no_threshold_accepted_means_always_abstain():
    """Guards fail-open: the most conservative threshold must not be deployed only because it is the
    first.
    """
    found = learn_then_test([0.9, 0.1], np.ones((50, 2)), 0.1, 0.1)
    assert found.threshold is None
    assert len(found.table) == 1
    assert "abstain on every prompt" in found.bound
    assert "none, always abstain" in str(found)


@pytest.mark.parametrize(
    "risks",
    [[0.02, 0.04, 0.1001, 0.12, 0.2], [0.03, 0.1001, 0.06, 0.15, 0.01], [0.1001] * 12],
    ids=["monotone", "not monotone", "all just above alpha"],
)
def test_learn_then_test_covers(risks):
    """Guards P(any accepted threshold has risk > alpha) <= delta over 1,500 calibrations of 200
    independent prompts.

    The control shows that the simulation can fail: the last threshold with p <= delta, wherever it
    stands, breaks delta on the third curve, where the fixed sequence keeps it.
    """
    rng, trials, n = np.random.default_rng(1), 1500, 200
    thresholds, exceeded, control = np.linspace(0.9, 0.1, len(risks)), 0, 0
    for _ in range(trials):
        losses = rng.random((n, len(risks))) < risks
        found = learn_then_test(thresholds, losses, ALPHA, DELTA)
        exceeded += any(
            risk > ALPHA for risk, row in zip(risks, found.table, strict=False) if row["accepted"]
        )
        passed = [
            j for j, lost in enumerate(losses.sum(axis=0)) if p_value(lost, n, ALPHA) <= DELTA
        ]
        control += bool(passed) and risks[passed[-1]] > ALPHA
    assert within(exceeded / trials, DELTA, trials)
    assert exceeded / trials > 0.05  # not so strict that it tests nothing
    if min(risks) > ALPHA:
        assert control / trials > 0.5


def test_learn_then_test_covers_what_a_search_makes_of_the_critic(population):
    """Guards the winner's curse: best of 8 by reward among the accepted, with losses that are not
    monotone in the threshold.

    The candidates' own rate at the threshold that keeps it below alpha is the control: end to end
    it is far above alpha.
    """
    risk = population.search_loss.mean(axis=0)
    assert (np.diff(population.search_loss.astype(int), axis=1) < 0).any()
    missed = np.array(
        [population.unsafe[population.f1 > t].mean() for t in GRID]
    )  # among accepted candidates
    naive = np.flatnonzero(missed <= ALPHA)[-1]
    assert risk[naive] > 1.5 * ALPHA
    trials, exceeded = 1000, 0
    for drawn in population.draws(trials, 200, seed=2):
        found = learn_then_test(GRID, population.search_loss[drawn], ALPHA, DELTA)
        exceeded += (
            found.threshold is not None and risk[np.flatnonzero(GRID == found.threshold)[0]] > ALPHA
        )
    assert within(exceeded / trials, DELTA, trials)
    assert exceeded > 0


# --- the certificate ------------------------------------------------------------------------------


def test_a_certificate_prints_its_terms():
    """Guards a threshold that travels without what it rests on."""
    losses = np.stack([column(k, 100) for k in (0, 4, 50)], axis=1)
    found = learn_then_test([0.9, 0.5, 0.1], losses, 0.1, 0.1)
    text = str(found)
    assert found._repr_markdown_() == text
    for words in ("exchangeable", "temperature", "disjoint", "final check was off"):
        assert words in text
    for part in (LOSS, found.bound, *ASSUMPTIONS, "learn-then-test", "alpha 0.1", "delta 0.1"):
        assert part in text
    assert "With probability at least 0.9 over the draw of the calibration" in found.bound
    assert text.count("\n|") == len(found.table) + 2
    assert str(found.threshold) in text  # in full: a threshold rounded down accepts more
    with pytest.raises(AttributeError):
        found.threshold = 0.0


# --- bad input ------------------------------------------------------------------------------------

GOOD = np.zeros((50, 2))
NAN = math.nan


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: smallest_n(0, 0.1), "alpha is 0; give a number strictly between 0 and 1"),
        (lambda: smallest_n(0.1, NAN), "delta is nan"),
        (lambda: learn_then_test([0.9, 0.1], GOOD, 1.0, 0.1), "alpha is 1.0"),
        (lambda: learn_then_test([0.9, 0.1], GOOD, 0.1, 1), "delta is 1;"),
        (
            lambda: learn_then_test([0.9, 0.1], GOOD[:21], 0.1, 0.1),
            "21 calibration .* too few: .* needs at least 22,",
        ),
        (
            lambda: learn_then_test([0.1, 0.9], GOOD, 0.1, 0.1),
            r"thresholds are \[0.1, 0.9\]; give numbers that fall",
        ),
        (lambda: learn_then_test([0.9, 0.9], GOOD, 0.1, 0.1), "give numbers that fall"),
        (lambda: learn_then_test([0.9, NAN], GOOD, 0.1, 0.1), "give numbers that fall"),
        (lambda: learn_then_test([], GOOD[:, :0], 0.1, 0.1), "give numbers that fall"),
        (lambda: learn_then_test(0.9, GOOD, 0.1, 0.1), "give numbers that fall"),
        (
            lambda: learn_then_test([0.9], GOOD, 0.1, 0.1),
            r"shape \(50, 2\); give one row per prompt, \(n, 1\)",
        ),
        (lambda: learn_then_test([0.9, 0.1], GOOD + 0.5, 0.1, 0.1), "a loss is 0.5; give 0 or 1"),
        (lambda: learn_then_test([0.9, 0.1], GOOD + NAN, 0.1, 0.1), "a loss is nan"),
        (lambda: learn_then_test([NAN], GOOD[:, :1], 0.1, 0.1), "give numbers that fall"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, sentence):
    with pytest.raises(ParameterError, match=sentence):
        call()
