"""What notebook 10 says of the conditions of the theorems, beyond the numbers that it prints."""

from fractions import Fraction

import counterexamples
import numpy as np
import pytest
from theory import INF

from igcore import budget
from igstudy.theory.mdp import augment
from igstudy.theory.planning import greedy, values, violation


def test_row_nonnegative_costs():
    """Guards C >= 0: (+3, -2) keeps to d = 2 but is rejected; (-5, +6) lets a cost of 6 pass.
    Clamping and peak mend the second.
    """
    rejected, banked = (
        augment(*counterexamples.signed_cost(name)) for name in counterexamples.CREDIT
    )
    assert values(rejected)[0] == INF and sum(counterexamples.CREDIT["false rejection"]) <= 2
    assert values(banked)[0] == 0 and max(counterexamples.CREDIT["credit banking"]) > 2
    for accounting in ("clamped_sum", "peak"):
        mended = augment(*counterexamples.signed_cost("credit banking"), accounting=accounting)
        assert values(mended)[0] == INF
    states = budget.trace(counterexamples.CREDIT["false rejection"], 2, "sum")
    assert [budget.is_safe(s) for s in states] == [True, False, True]  # not absorbing either


@pytest.mark.parametrize("tilt", [Fraction(k, 8) for k in range(9)])
def test_row_homomorphism(tilt):
    """Guards the homomorphism: whatever a policy of phi does, randomised or not, it violates on
    half of the prompts.
    """
    mdp, d = counterexamples.aliased_prompts()
    augmented = augment(mdp, d)
    tilted = np.array([0, 0, tilt, 1 - tilt], dtype=object)
    policy = np.where([[len(y) == 1] for y, _ in augmented.names], tilted, 0)
    assert violation(augmented, policy) == Fraction(1, 2)
    assert violation(augmented, greedy(augmented, values(augmented))) == 0
