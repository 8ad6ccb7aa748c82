"""Tests of n* against bisection, of the closed inequality, and of the outcomes of a process."""

from fractions import Fraction

import numpy as np
import pytest
import theory
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import INF, language_model, leaves, path, random_table, random_tree

from igcore.errors import ParameterError
from igstudy.theory.instances import budget_between, outcomes
from igstudy.theory.mdp import augment
from igstudy.theory.planning import greedy, n_star, values, violation

seeds = st.integers(0, 10**6)
quick = settings(max_examples=25, deadline=None)


def n_star_by_bisection(mdp, high=1e3, steps=60):
    """The least n with V^{*,n} = V^{*,inf} at the start: the slow way."""
    low, best = 0.0, values(mdp)[0]
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if values(mdp, middle)[0] >= best - 1e-13 else (middle, high)
    return high


# --- check (2): n* --------------------------------------------------------------------------------


def test_check_2_the_formula_equals_bisection_and_decides_violation():
    """Guards n* at the root: .99 n* violates, 1.01 n* does not, and bisection finds the same
    number.
    """
    model = language_model()
    n = n_star(model.augmented)
    assert n > 0
    assert n == pytest.approx(n_star_by_bisection(model.augmented), rel=1e-6)
    for factor, broken in ((0.99, 1), (1.01, 0)):
        assert (
            violation(model.augmented, greedy(model.augmented, values(model.augmented, factor * n)))
            == broken
        )


def test_check_2_above_the_uniform_n_star_every_state_has_its_limit_value():
    """Guards V^{*,n} = V^{*,inf} above n*(s) at states from which a safe text exists, and < below
    it.
    """
    model = language_model()
    some = model.feasible[::10]
    stars = {s: n_star(model.augmented, s) for s in some}
    uniform = max(stars.values())
    above, below = (values(model.augmented, factor * uniform) for factor in (1.01, 0.99))
    np.testing.assert_allclose(above[some], model.best[some], rtol=0, atol=1e-12)
    assert below[max(stars, key=stars.get)] < model.best[max(stars, key=stars.get)] - 1e-6


@quick
@given(seeds, st.integers(0, 6), st.sampled_from([Fraction(1), Fraction(9, 10)]))
def test_the_limit_is_reached_exactly_at_n_star(seed, d, gamma):
    """Guards the formula in rationals: equality from n* on, strictly below before, violation never
    above.
    """
    augmented = augment(random_tree(seed, gamma), d)
    best = values(augmented)
    for s in np.flatnonzero(best < INF):
        star = n_star(augmented, s)
        assert values(augmented, star)[s] == best[s]
        above = values(augmented, star + Fraction(1, 1000))
        assert above[s] == best[s]
        # the policy is safe from s on, or its value there would be infinite
        assert values(augmented, policy=greedy(augmented, above))[s] == best[s]
        if star > 0:
            assert values(augmented, star * Fraction(999, 1000))[s] < best[s]


def test_no_n_is_enough_where_nothing_is_safe():
    mdp, d = theory.infeasible_start()
    assert n_star(augment(mdp, d)) == INF
    mdp, d = theory.chance_cost()
    with pytest.raises(ParameterError, match="nature moves"):
        n_star(augment(mdp, d))


def test_check_7_the_strict_rule_loses_instances_and_optima():
    """Guards the closed inequality: of 150 integer instances, strict makes some infeasible and
    loses the optimum of others.
    """
    feasible = infeasible = lost = 0
    for seed in range(150):
        table, d = random_table(seed), seed % 4
        closed, strict = (
            values(augment(random_tree(seed), d, strict=reading))[0] for reading in (False, True)
        )
        totals = [tuple(map(sum, path(table, y))) for y in leaves(table)]
        assert closed == min([task for cost, task in totals if cost <= d], default=INF)
        assert strict == min([task for cost, task in totals if cost < d], default=INF)
        feasible += closed < INF
        infeasible += closed < INF == strict
        lost += closed < strict < INF
    assert (feasible, infeasible, lost) == (116, 37, 21)


# --- points ---------------------------------------------------------------------------------------


@quick
@given(seeds)
def test_outcomes_are_the_sums_along_every_text(seed):
    table = random_table(seed)
    found = outcomes(random_tree(seed))
    by_hand = {y: tuple(map(sum, path(table, y))) for y in leaves(table)}
    assert {y: (cost, task) for y, task, cost in zip(*found, strict=True)} == by_hand


def test_the_budget_lies_between_two_totals():
    """Guards against a budget equal to a total, which rounding would decide."""
    cost = np.array([3.0, 1.0, 2.0, 2.0, 5.0])
    budgets = [budget_between(cost, share) for share in (0, 0.4, 0.8, 1)]
    assert budgets == [1.5, 2.5, 4.0, 4.0]
