"""Non-dominated rows against brute force and by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from igcore.figures.fronts import pareto


def brute_force(points) -> list[bool]:
    """By the definition, pair by pair."""

    def dominates(a, b):
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    known = [p for p in points if not any(map(math.isnan, p))]
    return [p in known and not any(dominates(q, p) for q in known) for p in points]


def frame(points) -> pd.DataFrame:
    return pd.DataFrame(points, columns=["safety_rate", "reward_mean"], dtype=float)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("levels", [3, 1000])
def test_the_mask_is_that_of_brute_force(seed, levels):
    """Bug: rows that tie in one column or both, of which few levels give many, taken for dominated;
    NaN taken for a number.
    """
    rng = np.random.default_rng(seed)
    points = rng.integers(0, levels, (30, 2)) / levels
    points[rng.random((30, 2)) < 0.05] = math.nan
    assert pareto(frame(points)).tolist() == brute_force([tuple(p) for p in points.tolist()])


def test_rows_by_hand():
    """Bug: an equal row that makes both leave the front, and a row that is only as safe with less
    reward staying in it.
    """
    points = [
        (1.0, 0.4),
        (1.0, 0.4),
        (1.0, 0.3),
        (0.5, 0.6),
        (0.5, math.nan),
        (0.4, 0.6),
        (math.nan, 9.0),
        (0.0, math.inf),
    ]
    assert pareto(frame(points)).tolist() == [True, True, False, True, False, False, False, True]
    assert pareto(frame(points)[::-1]).tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
        True,
        True,
    ]


def test_no_rows():
    """Bug: a traceback of NumPy for a method without a grid point."""
    assert pareto(frame([])).tolist() == []
