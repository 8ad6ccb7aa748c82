"""Tests of the bound on abstention, against enumeration of every draw."""

import itertools
import math
from fractions import Fraction as F

from hypothesis import given, settings
from hypothesis import strategies as st

from igstudy.theory.planning import abstention_bound


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.data(),
)
def test_one_block_failure_probability_is_exact(weights, n_samples, rounds, data):
    """Guards the equality for one block and rounds without penalty: every draw of N M samples is
    enumerated.
    """
    blocks = {(i,): F(w, sum(weights)) for i, w in enumerate(weights)}
    safe = {y for y in blocks if data.draw(st.booleans())}
    draws = itertools.product(blocks, repeat=n_samples * rounds)
    failed = sum(math.prod(blocks[y] for y in draw) for draw in draws if not safe & set(draw))
    p = sum(blocks[y] for y in safe)
    assert abstention_bound([p], n_samples, rounds) == failed == (1 - p) ** (n_samples * rounds)


def test_several_blocks_are_bounded_by_the_sum_over_blocks():
    """Guards the union bound: three blocks with independent masses fail with 1 - prod(1 - q), never
    above the sum.
    """
    masses = [F(1, 2), F(1, 3), F(9, 10)]
    exact = 1 - math.prod(1 - (1 - p) ** 6 for p in masses)
    assert exact < abstention_bound(masses, 3, 2) == sum((1 - p) ** 6 for p in masses) < 2 * exact
    assert abstention_bound([0, 0], 5, 5) == 1
