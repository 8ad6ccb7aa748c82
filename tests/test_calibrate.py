"""Certificates of a critic's threshold: by hand, against scipy, and in simulation of many
calibrations.
"""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from igcore.errors import ParameterError
from igcore.report.certificate import METHODS
from igcore.report.certify import (
    conformal_risk_control,
    learn_then_test,
    p_value,
    simultaneous_conformal,
    smallest_n,
)

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
        self.any_loss = (accepted & self.unsafe).any(axis=2).T  # (prompts, T): monotone

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
    assert [smallest_n(alpha) for alpha in (0.05, 0.1, 0.3, 0.01)] == [19, 9, 3, 99]


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
    assert (found.alpha, found.delta, found.n_prompts, found.method) == (
        0.1,
        0.1,
        100,
        "learn-then-test",
    )


def test_a_threshold_passes_at_delta_exactly():
    """Guards the closed inequality p <= delta, on which the smallest n rests."""
    p = p_value(5, 100, 0.1)
    assert learn_then_test([0.5], column(5, 100)[:, None], 0.1, p).threshold == 0.5
    assert (
        learn_then_test([0.5], column(5, 100)[:, None], 0.1, np.nextafter(p, 0)).threshold is None
    )
    assert learn_then_test([0.5], np.zeros((45, 1)), 0.05, 0.1).threshold == 0.5


def test_no_threshold_accepted_means_always_abstain():
    """Guards fail-open: the most conservative threshold must not be deployed only because it is the
    first.
    """
    found = learn_then_test([0.9, 0.1], np.ones((50, 2)), 0.1, 0.1)
    assert found.threshold is None
    assert len(found.table) == 1
    assert "abstain on every prompt" in found.bound
    assert "none, always abstain" in str(found)


def test_losses_are_evaluated_only_as_far_as_the_tests_go():
    """Guards the cost: each threshold re-runs a search, and none may run after the failure or
    before its turn.
    """
    asked = []

    def loss(threshold):
        asked.append(threshold)
        return column({0.9: 0, 0.6: 2, 0.3: 50, 0.1: 0}[threshold], 100)

    lazy = learn_then_test([0.9, 0.6, 0.3, 0.1], loss, 0.1, 0.1)
    assert asked == [0.9, 0.6, 0.3]
    eager = learn_then_test(
        [0.9, 0.6, 0.3, 0.1], np.stack([column(k, 100) for k in (0, 2, 50, 0)], axis=1), 0.1, 0.1
    )
    assert lazy == eager
    with pytest.raises(ParameterError, match="too few"):
        learn_then_test(
            [0.9, 0.6], lambda threshold: asked.append(threshold) or column(0, 5), 0.1, 0.1
        )
    assert len(asked) == 4  # found out at the first threshold


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


# --- simultaneous conformal -----------------------------------------------------------------------


def test_simultaneous_conformal_by_hand():
    """Guards the rank and who counts: S = .5, -inf (no unsafe), .9, .2; at alpha = .25 the 4th
    smallest of 4, at .4 the 3rd.
    """
    scores = [
        [0.5, 0.3, 0.99],
        [0.8, 0.95],
        [0.9, 0.1],
        [0.2],
    ]  # prompts may have different numbers of candidates
    unsafe = [[1, 1, 0], [0, 0], [1, 0], [1]]
    found = simultaneous_conformal(scores, unsafe, 0.25)
    assert found.threshold == 0.9
    assert found.table == (
        {"threshold": 0.9, "rank": 4, "prompts_with_unsafe": 3, "of_these_above": 0},
    )
    found = simultaneous_conformal(scores, unsafe, 0.4)
    assert found.threshold == 0.5
    assert found.table[0]["rank"] == 3
    assert found.table[0]["of_these_above"] == 1
    assert found.delta is None


def test_the_rank_does_not_hang_on_the_last_bit_of_alpha():
    """Guards ceil((n + 1)(1 - alpha)): in floats 100 * .29 is below 29 and 10 * (1 - .1) may be
    above 9.
    """
    for percent in range(1, 100):
        scores = np.arange(1, 100)[:, None]
        found = simultaneous_conformal(scores, np.ones((99, 1)), percent / 100)
        assert found.table[0]["rank"] == found.threshold == 100 - percent


def test_without_an_unsafe_candidate_everything_is_accepted():
    """Guards the empty maximum: S is -inf, which JSON cannot hold as a number."""
    found = simultaneous_conformal(np.full((30, 4), 0.5), np.zeros((30, 4)), 0.1)
    assert found.threshold == -math.inf
    read = json.loads(json.dumps(found.asdict(), allow_nan=False))
    assert float(read["threshold"]) == float(read["table"][0]["threshold"]) == -math.inf
    assert (
        simultaneous_conformal([[]] * 30, [[]] * 30, 0.1).threshold == -math.inf
    )  # nothing to accept


def test_simultaneous_conformal_covers_any_choice_among_the_candidates(population):
    """Guards the coverage over 500 calibrations of 50 prompts: between 1 - alpha and 1 - alpha + 1
    / (n + 1).

    The choice is the worst possible: an unsafe candidate whenever one is accepted. The control
    ranks single candidates, as if a search drew at random. Scores rounded to one digit (ties) must
    be covered too.
    """
    trials, n = 500, 50
    for f1 in (population.f1, population.f1.round(1)):
        worst = np.where(population.unsafe, f1, -np.inf).max(axis=1)
        risks = [
            (
                worst > simultaneous_conformal(f1[drawn], population.unsafe[drawn], ALPHA).threshold
            ).mean()
            for drawn in population.draws(trials, n, seed=3)
        ]
        error = 3 * np.std(risks) / math.sqrt(trials)
        assert np.mean(risks) <= ALPHA + error
        assert np.mean(np.array(risks) > ALPHA) > 0.1  # of one calibration nothing is promised
        if f1 is population.f1:
            assert np.mean(risks) >= ALPHA - 1 / (n + 1) - error
            single = np.quantile(np.where(population.unsafe, f1, -np.inf), 1 - ALPHA)
            assert (worst > single).mean() > 2 * ALPHA


# --- conformal risk control -----------------------------------------------------------------------


def test_conformal_risk_control_by_hand():
    """Guards the correction: 0, 4 and 5 losses of 49 are .02, .10 and .12 after it, and the closed
    inequality takes .10.
    """
    losses = np.stack([column(k, 49) for k in (0, 4, 5)], axis=1)
    found = conformal_risk_control([0.9, 0.5, 0.1], losses, 0.1)
    assert found.threshold == 0.5
    assert [row["corrected_risk"] for row in found.table] == pytest.approx([0.02, 0.10, 0.12])
    assert [row["risk"] for row in found.table] == pytest.approx([0, 4 / 49, 5 / 49])
    assert [row["accepted"] for row in found.table] == [True, True, False]
    assert found.delta is None
    halves = conformal_risk_control(
        [0.9, 0.5], np.tile([0, 0.5], (49, 1)), 0.1
    )  # shares, not only 0 and 1
    assert halves.threshold == 0.9
    assert conformal_risk_control([0.9], np.ones((49, 1)), 0.1).threshold is None


def test_conformal_risk_control_bounds_the_mean_but_not_the_tail(population):
    """Guards the words of the certificate: the mean risk keeps alpha, single calibrations often do
    not; Learn-then-Test does.
    """
    risk, trials = population.any_loss.mean(axis=0), 1000
    at = {t: r for t, r in zip(GRID, risk, strict=True)} | {None: 0.0}
    risks = {"crc": [], "ltt": []}
    for drawn in population.draws(trials, 100, seed=4):
        losses = population.any_loss[drawn]
        risks["crc"].append(at[conformal_risk_control(GRID, losses, ALPHA).threshold])
        risks["ltt"].append(at[learn_then_test(GRID, losses, ALPHA, DELTA).threshold])
    assert np.mean(risks["crc"]) <= ALPHA + 3 * np.std(risks["crc"]) / math.sqrt(trials)
    assert np.mean(np.array(risks["crc"]) > ALPHA) > 2 * DELTA
    assert within(np.mean(np.array(risks["ltt"]) > ALPHA), DELTA, trials)


# --- the certificate ------------------------------------------------------------------------------


LOSSES = np.stack([column(k, 100) for k in (0, 4, 50)], axis=1)
CERTIFICATES = [
    learn_then_test([0.9, 0.5, 0.1], LOSSES, 0.1, 0.1),
    simultaneous_conformal(np.linspace(0, 1, 100)[:, None], np.ones((100, 1)), 0.1),
    conformal_risk_control([0.9, 0.5, 0.1], LOSSES, 0.1),
]


@pytest.mark.parametrize("certificate", CERTIFICATES, ids=lambda c: c.method)
def test_a_certificate_prints_its_terms_and_is_plain_json(certificate):
    """Guards a threshold that travels without what it rests on, and a run folder that cannot be
    written.
    """
    text = str(certificate)
    assert certificate._repr_markdown_() == text
    for words in (
        "exchangeable",
        "N samples, M rounds, K beams",
        "temperature",
        "scorer",
        "reference policy",
        "disjoint",
    ):
        assert words in text
    for part in (
        certificate.loss,
        certificate.bound,
        *certificate.assumptions,
        certificate.method,
        "alpha 0.1",
    ):
        assert part in text
    assert text.count("\n| ") == len(certificate.table) + 2
    assert str(certificate.threshold) in text  # in full: a threshold rounded down accepts more
    fields = certificate.asdict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert (fields["threshold"], fields["n_prompts"], len(fields["table"])) == (
        certificate.threshold,
        100,
        len(certificate.table),
    )
    with pytest.raises(AttributeError):
        certificate.threshold = 0.0


def test_each_promise_says_what_it_is_not():
    """Guards three certificates that sound alike: only one holds for this calibration, and its loss
    knows no gate.
    """
    ltt, simultaneous, crc = CERTIFICATES
    assert "With probability at least 0.9 over the draw of the calibration prompts" in ltt.bound
    assert "critic alone lets through is unsafe by its terminal cost" in ltt.loss
    assert "abstaining is 0" in ltt.loss
    assert "final gate was off" in str(ltt)
    assert "any candidate" in simultaneous.loss
    assert "whatever rule" in simultaneous.bound
    assert "do not depend on the threshold" in str(simultaneous)
    assert "on average over calibrations" in crc.bound
    assert "monotone" in str(crc)
    assert {c.method for c in (ltt, simultaneous, crc)} == set(METHODS)
    assert all(
        "for one calibration" in c.bound or "single calibration" in c.bound
        for c in (simultaneous, crc)
    )


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
        (
            lambda: learn_then_test([0.9, 0.1], GOOD + 0.5, 0.1, 0.1),
            "a loss at threshold 0.9 is 0.5; give 0 or 1",
        ),
        (
            lambda: learn_then_test([0.9, 0.1], GOOD + NAN, 0.1, 0.1),
            "a loss at threshold 0.9 is nan",
        ),
        (
            lambda: learn_then_test([0.9], lambda t: GOOD, 0.1, 0.1),
            r"at threshold 0.9 have shape \(50, 2\)",
        ),
        (
            lambda: learn_then_test([0.9, 0.5], lambda t: GOOD[: int(t * 50), 0], 0.1, 0.1),
            r"at threshold 0.5 .*\(25,\).*\(45,\)",
        ),
        (
            lambda: simultaneous_conformal(GOOD[:8], GOOD[:8], 0.1),
            "8 calibration .* too few: alpha 0.1 needs at least 9,",
        ),
        (lambda: simultaneous_conformal(GOOD, GOOD[:30], 0.1), "of 50 prompts and unsafe of 30"),
        (
            lambda: simultaneous_conformal(GOOD, GOOD[:, :1], 0.1),
            "prompt 0 has 2 scores and 1 verdicts",
        ),
        (
            lambda: simultaneous_conformal(GOOD + NAN, GOOD, 0.1),
            "prompt 0 has a critic score that is NaN",
        ),
        (
            lambda: simultaneous_conformal(GOOD, GOOD + 0.3, 0.1),
            "a verdict of prompt 0 is 0.3; give 0 or 1",
        ),
        (lambda: conformal_risk_control([0.9, 0.1], GOOD[:8], 0.1), "needs at least 9,"),
        (
            lambda: conformal_risk_control([0.9, 0.1], GOOD + 2, 0.1),
            r"a loss is 2; every loss must lie in \[0, 1\]",
        ),
        (lambda: conformal_risk_control([0.9, 0.1], GOOD - 1, 0.1), "a loss is -1"),
        (lambda: conformal_risk_control([0.9, 0.1], GOOD + NAN, 0.1), "a loss is nan"),
        (lambda: conformal_risk_control([0.9], GOOD, 0.1), r"shape \(50, 2\)"),
        (
            lambda: conformal_risk_control([0.9, 0.1], np.tile([1, 0], (50, 1)), 0.1),
            "loss of prompt 0 falls from 1 to 0 as the threshold falls to 0.1; .* learn_then_test",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(call, sentence):
    with pytest.raises(ParameterError, match=sentence):
        call()


def test_monotone_is_asked_of_every_prompt():
    """Guards a check of the mean only: two prompts whose losses cross leave the mean flat."""
    losses = np.zeros((50, 2))
    losses[3], losses[7] = (1, 0), (0, 1)
    with pytest.raises(ParameterError, match="prompt 3 falls"):
        conformal_risk_control([0.9, 0.1], losses, 0.1)


def test_calibration_needs_no_torch():
    """Guards a reader of certificates against a gigabyte of dependencies."""
    code = "import sys, igcore.report.certify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
