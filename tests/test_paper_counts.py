"""Tests of the counts behind percentages, by hand and in slow ways."""

from fractions import Fraction as F

import numpy as np
import pytest
from scipy.stats import binomtest

from igstudy.paper import counts


def slow(percentage, n):
    """Whether some k/n prints so, rounded and cut off, in exact rationals."""
    unit = F(1, 10 ** len(percentage.partition(".")[2]))
    values = [F(100 * k, n) for k in range(n + 1)]
    return any(abs(v - F(percentage)) <= unit / 2 for v in values), any(
        0 <= v - F(percentage) < unit for v in values
    )


@pytest.mark.parametrize(
    "percentage",
    ["94.46", "98.15", "29.47", "94.3", "81", "12", "13", "100", "0", "0.01", "99.99", "62.50"],
)
def test_fits_agrees_with_trying_every_k(percentage):
    """Bug: a nearest k that is one off, a k above n, or halves (12.5 of eight) that go one way
    only.
    """
    rounded, cut = counts.fitting_counts(percentage, 60)
    assert [(r, c) for r, c in zip(rounded.tolist(), cut.tolist(), strict=True)] == [
        slow(percentage, n) for n in range(1, 61)
    ]


def test_hand_worked_percentages_at_759():
    """94.07 is 714/759; 745/759 = 98.1555... prints 98.15 only if cut off; 29.47 lies between
    223/759 and 224/759.
    """
    at = {
        p: tuple(bool(each[758]) for each in counts.fitting_counts(p, 759))
        for p in ("94.07", "98.15", "29.47")
    }
    assert at == {"94.07": (True, True), "98.15": (False, True), "29.47": (False, False)}


def test_percentages_that_only_759_fits():
    """94.07 is 714 of 759, 86.56 is 657, and so on; printed by trying every k of every n, no other
    n up to 1000 has all six.
    """
    safe = [714, 731, 657, 688, 735, 747]
    percentages = [f"{100 * k / 759:.2f}" for k in safe]
    fitting = [
        n
        for n in range(1, 1001)
        if {f"{100 * k / n:.2f}" for k in range(n + 1)} >= set(percentages)
    ]
    found = counts.implied(percentages, 1000)
    assert fitting == [759] and found["common"] == found["n"] == 759 and found["fits"] == 6


def test_chance_implies_nothing():
    """Bug: the best of thousands of denominators taken for a finding."""
    spread = np.random.default_rng(0).integers(0, 10_001, 40) / 100
    found = counts.implied([f"{p:.2f}" for p in spread], 1000)
    assert not found["implied"] and found["p"] > 0.05
    # whole numbers fit nearly everything
    assert not counts.implied(["81", "48", "96"], 1000)["implied"]


def test_a_small_chance_keeps_its_digits():
    """Bug: one minus a sum near one, which is 0 where many percentages fit."""
    percentages = [f"{100 * k / 300:.2f}" for k in range(1, 300, 7)]
    found = counts.implied(percentages, 1000)
    # all of them fit 300, each by chance in 3 of 100 cases, and 1000 denominators are tried
    assert found["n"] == 300 and found["p"] == pytest.approx(1000 * 0.03 ** len(percentages))


@pytest.mark.parametrize(
    ("safe", "others", "n"), [(5, 3, 6), (4, 4, 6), (6, 2, 6), (3, 1, 4), (0, 2, 5)]
)
def test_mcnemar_bounds_are_those_of_all_pairings(safe, others, n):
    """Against every number of prompts that are safe under both."""
    values = []
    for both in range(max(0, safe + others - n), min(safe, others) + 1):
        b, c = safe - both, others - both
        values.append(binomtest(b, b + c).pvalue if b + c else 1.0)
    assert counts.mcnemar_bounds(safe, others, n) == pytest.approx((min(values), max(values)))


def test_the_main_gap_stands_under_every_pairing():
    """717 and 669 of 759: between 2^-47 and 3.6e-5."""
    best, worst = counts.mcnemar_bounds(717, 669, 759)
    assert best == pytest.approx(2.0**-47) and worst == pytest.approx(3.57e-5, rel=0.01)
