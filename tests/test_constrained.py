"""Tests of the Lagrangian, the constraint in expectation and n*, against hand computation, grids of
lambda and bisection.
"""

from fractions import Fraction

import counterexamples
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import (
    INF,
    language_model,
    leaves,
    notebook,
    path,
    random_table,
    random_tree,
    small_models,
)

from igcore.errors import ParameterError
from igstudy.theory.mdp import augment
from igstudy.theory.planning import greedy, n_star, values, violation

Outcomes, outcomes = notebook.Outcomes, notebook.outcomes
best_safe, expectation_optimum = notebook.best_safe, notebook.expectation_optimum
lagrangian, multipliers = notebook.lagrangian, notebook.multipliers
seeds = st.integers(0, 10**6)
quick = settings(max_examples=25, deadline=None)


def corners_of(points):
    """The trajectories that some lambda > 0 alone picks, by rising cost: the lower left hull."""
    intervals = [multipliers(points, i) for i in range(len(points.task))]
    wide = [i for i, found in enumerate(intervals) if found and found[0] < found[1]]
    of_place = {(points.cost[i], points.task[i]): i for i in reversed(wide)}
    return [of_place[place] for place in sorted(of_place)]


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
    """Guards V^{*,n} = V^{*,inf} above n*(s) at every state from which a safe text exists, and <
    below it.
    """
    model = language_model()
    stars = {s: n_star(model.augmented, s) for s in model.feasible}
    uniform = max(stars.values())
    above, below = (values(model.augmented, factor * uniform) for factor in (1.01, 0.99))
    np.testing.assert_allclose(
        above[model.feasible], model.best[model.feasible], rtol=0, atol=1e-12
    )
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
    mdp, d = counterexamples.infeasible_start()
    assert n_star(augment(mdp, d)) == INF
    mdp, d = counterexamples.chance_cost()
    with pytest.raises(ParameterError, match="nature moves"):
        n_star(augment(mdp, d))


# --- check (4): the Lagrangian gap ----------------------------------------------------------------


def test_check_4_the_lagrangian_example_to_the_digit():
    """Guards the example of the notebook: B = .6 without violation, 2/3 A + 1/3 C in expectation,
    no lambda picks B.
    """
    mdp, d = counterexamples.lagrangian_gap()
    found = outcomes(mdp)
    assert list(zip(*found, strict=True)) == [("A", 0, 3), ("B", Fraction(3, 5), 2), ("C", 1, 0)]
    augmented = augment(mdp, d)
    assert values(augmented)[0] == Fraction(3, 5)
    assert violation(augmented, greedy(augmented, values(augmented))) == 0
    mixture = expectation_optimum(found, d)
    np.testing.assert_allclose(mixture, [2 / 3, 0, 1 / 3], rtol=0, atol=1e-12)
    assert mixture @ found.cost.astype(float) == pytest.approx(2, abs=1e-12)
    assert mixture[found.cost > d].sum() == pytest.approx(2 / 3, abs=1e-12)
    assert [multipliers(found, i) for i in range(3)] == [
        (0, Fraction(1, 3)),
        None,
        (Fraction(1, 3), INF),
    ]
    assert {lagrangian(found, Fraction(k, 100)) for k in range(1001)} == {0, 2}
    assert corners_of(found) == [2, 0]


def test_check_4_on_the_language_model_the_three_optima_differ():
    """Guards the instance of the notebook: no lambda picks its safe optimum, and the optimum in
    expectation violates.
    """
    model = language_model()
    assert multipliers(model.found, best_safe(model.found, model.budget)) is None
    mixture = expectation_optimum(model.found, model.budget)
    assert mixture[model.found.cost > model.budget].sum() == pytest.approx(0.742171, abs=1e-6)
    assert mixture @ model.found.cost == pytest.approx(model.budget, abs=1e-9)
    assert mixture @ model.found.task < model.best[0]


def test_check_4_on_random_language_models_no_lambda_works_in_some_and_an_oracle_in_the_others():
    """Guards the claim "sometimes no lambda", not more: 7 of 60; elsewhere the middle of the
    interval picks the optimum.
    """
    without = 0
    for model in small_models():
        chosen = best_safe(model.found, model.budget)
        interval = multipliers(model.found, chosen)
        without += interval is None
        if interval:
            middle = interval[0] + 1 if interval[1] == INF else sum(interval) / 2
            assert lagrangian(model.found, middle) == chosen
    assert without == 7


def test_check_4_one_lambda_for_twelve_prompts_pays_more_task_cost_once_it_is_safe():
    """Guards "no fixed lambda": the least lambda of a grid that is safe for 12 prompts costs more
    than the augmented optimum.
    """
    models = small_models()[:12]
    grid = [0, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20]
    rows = []
    for multiplier in grid:
        picks = [(m, lagrangian(m.found, multiplier)) for m in models]
        task = np.mean([m.found.task[i] for m, i in picks])
        rows.append(
            {"task": task, "violation": np.mean([m.found.cost[i] > m.budget for m, i in picks])}
        )
    augmented = np.mean([m.found.task[best_safe(m.found, m.budget)] for m in models])
    tasks, broken = ([row[key] for row in rows] for key in ("task", "violation"))
    assert tasks == sorted(tasks) and broken == sorted(broken, reverse=True)
    assert broken[0] > 0 == broken[-1]
    assert tasks[broken.index(0)] > augmented > tasks[0]
    by_hand = [
        min(range(len(m.found.task)), key=lambda i, m=m: m.found.task[i] + 2.5 * m.found.cost[i])
        for m in models
    ]
    assert rows[5]["task"] == pytest.approx(
        np.mean([m.found.task[i] for m, i in zip(models, by_hand, strict=True)])
    )
    assert rows[5]["violation"] == np.mean(
        [m.found.cost[i] > m.budget for m, i in zip(models, by_hand, strict=True)]
    )


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


@quick
@given(seeds)
def test_multipliers_agree_with_a_grid_of_lambda(seed):
    """Guards the intervals: choices with one of positive length lie where the grid finds them."""
    found = outcomes(random_tree(seed))
    corners = corners_of(found)
    grid = [Fraction(k, 97) for k in range(1, 1000, 7)]
    assert {lagrangian(found, x) for x in grid} <= set(range(len(found.task)))
    points = {(found.task[i], found.cost[i]) for i in corners}
    assert {(found.task[i], found.cost[i]) for i in (lagrangian(found, x) for x in grid)} <= points
    for i in corners:
        low, high = multipliers(found, i)
        middle = low + 1 if high == INF else (low + high) / 2
        assert found.task[i] + middle * found.cost[i] == min(found.task + middle * found.cost)


@quick
@given(seeds, st.integers(0, 6))
def test_the_expectation_optimum_lies_on_the_hull_and_below_the_safe_optimum(seed, d):
    """Guards the linear program by interpolating the convex hull by hand."""
    found = outcomes(random_tree(seed))
    if min(found.cost) > d:
        with pytest.raises(ValueError, match="raise the budget"):
            expectation_optimum(found, d)
        return
    mixture = expectation_optimum(found, d)
    corners = corners_of(found)
    line = np.interp(d, found.cost[corners].astype(float), found.task[corners].astype(float))
    assert mixture @ found.task.astype(float) == pytest.approx(line, abs=1e-9)
    assert line <= found.task[best_safe(found, d)] + 1e-12


def test_a_point_on_an_edge_of_the_hull_is_no_corner():
    """Guards corners: of three points on a line the middle one is never the only choice."""
    found = Outcomes(("a", "b", "c", "d"), np.array([2, 1, 0, 1]), np.array([0, 1, 2, 2]))
    assert corners_of(found) == [0, 2]
    assert multipliers(found, 1) == (1, 1)


def test_ties_go_to_the_lower_cost_and_what_no_lambda_picks_is_none():
    found = Outcomes(("a", "b"), np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    assert lagrangian(found, 1) == 0
    assert lagrangian(Outcomes(("b", "a"), found.task[::-1], found.cost[::-1]), 1) == 1
    assert multipliers(Outcomes(("a", "b"), np.array([1.0, 0.0]), np.array([0.0, 0.0])), 0) is None


def test_the_budget_lies_between_two_totals():
    """Guards against a budget equal to a total, which rounding would decide."""
    cost = np.array([3.0, 1.0, 2.0, 2.0, 5.0])
    assert [notebook.budget_between(cost, share) for share in (0, 0.4, 0.8, 1)] == [
        1.5,
        2.5,
        4.0,
        4.0,
    ]
