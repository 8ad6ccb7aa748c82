"""Every row of the table of conditions: the theorem holds with it and fails without it."""

from fractions import Fraction

import counterexamples
import numpy as np
import pytest
from theory import INF, notebook, policies

from igcore import budget
from igcore.theory.mdp import augment
from igcore.theory.planning import greedy, n_star, values, violation


def optimum(mdp, d, n=INF, **reading):
    """First letter of the greedy policy, its value and its probability of violation."""
    augmented = augment(mdp, d, **reading)
    best = values(augmented, n)
    policy = greedy(augmented, best)
    return (
        augmented.names[augmented.child[0, policy[0].argmax()]][0],
        best[0],
        violation(augmented, policy),
    )


def test_row_feasible_start():
    """Guards the finite value: all trajectories cost 3 or 4, d = 2, and every policy ties at
    infinity.
    """
    mdp, d = counterexamples.infeasible_start()
    augmented = augment(mdp, d)
    assert [
        values(augmented, policy=p[augmented.origin])[0] for p in policies(augment(mdp, INF))
    ] == [INF, INF]
    assert values(augment(mdp, 3))[0] == 0


def test_row_n_above_n_star():
    """Guards n > n*: .5 picks the unsafe text, .6 ties, .7 is safe."""
    mdp, d = counterexamples.small_n()
    assert n_star(augment(mdp, d)) == Fraction(3, 5)
    assert optimum(mdp, d, Fraction(1, 2)) == ("a", Fraction(1, 2), 1)
    assert optimum(mdp, d, Fraction(7, 10)) == ("b", Fraction(3, 5), 0)
    augmented = augment(mdp, d)
    tie = Fraction(6, 10)
    assert {
        values(augmented, tie, p[augmented.origin])[0] for p in policies(augment(mdp, INF))
    } == {values(augmented, tie)[0]}


def test_row_task_cost_below_n():
    """Guards C_task < n: with n = 5 a safe text of reward -7 scores worse than an unsafe one."""
    mdp, d = counterexamples.high_task_cost()
    assert optimum(mdp, d, 5) == ("u", 5, 1)
    assert optimum(mdp, d, 8) == optimum(mdp, d) == ("s", 7, 0)


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
        assert (
            values(augment(*counterexamples.signed_cost("credit banking"), accounting=accounting))[
                0
            ]
            == INF
        )
    states = budget.trace(counterexamples.CREDIT["false rejection"], 2, "sum")
    assert [budget.is_safe(s) for s in states] == [True, False, True]  # not absorbing either


def test_row_closed_inequality():
    """Guards the closed inequality: at d = 1 strict gives up task .1 for .9, at d = 0 nothing is
    left.
    """
    mdp = counterexamples.boundary()
    assert optimum(mdp, 1) == ("a", Fraction(1, 10), 0)
    assert optimum(mdp, 1, strict=True) == ("b", Fraction(9, 10), 0)
    assert values(augment(mdp, 0))[0] == Fraction(9, 10)
    assert values(augment(mdp, 0, strict=True))[0] == INF
    assert augment(mdp, 0, strict=True).safe.tolist() == [
        False
    ]  # infeasible before the first token


def test_row_check_after_the_last_action():
    """Guards the last check: with costs (0, 0, 9) the unsafe text is "optimal" when z is looked at
    before actions only.
    """
    mdp, d = counterexamples.late_cost()
    assert optimum(mdp, d) == ("b", 1, 0)
    first, value, _ = optimum(mdp, d, check_last=False)
    assert (first, value) == ("a", 0)
    assert mdp.cost[mdp.allowed].max() == 9 > d


@pytest.mark.parametrize("keep", [1, 2])
def test_row_viability(keep):
    """Guards viability: with all continuations drawn, E_inter with keep 1 takes "a" and dies; a
    second beam or the filter helps.
    """
    mdp, d = counterexamples.dead_end()
    augmented = augment(mdp, d)
    partial = np.array([0 if y[:1] == "a" else 1 for y, _ in augmented.names])
    end = notebook.myopic_search(augmented, partial, keep)
    assert (augmented.names[end][0] if end is not None else None) == (None if keep == 1 else "bx")
    assert augmented.names[notebook.myopic_search(augmented, partial, keep, viable=True)][0] == "bx"
    assert optimum(mdp, d)[1:] == (1, 0)
    assert [z for y, z in augmented.names if y == "a"] == [1]


def test_row_reference_support():
    """Guards support: the optimum has no violation, sampling the reference cut to top-p .95 never
    finds it.
    """
    mdp, d = counterexamples.unsupported()
    augmented = augment(mdp, d)
    assert optimum(mdp, d)[2] == 0
    assert violation(augmented, augmented.reference) == Fraction(96, 100)
    assert violation(augmented, notebook.top_p(augmented.reference, 0.95)) == pytest.approx(
        1, abs=1e-15
    )


@pytest.mark.parametrize("tilt", [Fraction(k, 8) for k in range(9)])
def test_row_homomorphism(tilt):
    """Guards the homomorphism: whatever a policy of phi does, randomised or not, it violates on
    half of the prompts.
    """
    mdp, d = counterexamples.aliased_prompts()
    augmented = augment(mdp, d)
    policy = np.where(
        [[len(y) == 1] for y, _ in augmented.names],
        np.array([0, 0, tilt, 1 - tilt], dtype=object),
        0,
    )
    assert violation(augmented, policy) == Fraction(1, 2)
    assert optimum(mdp, d)[1:] == (0, 0)
