"""Tests of exact solutions: Bellman equation, value iteration, truncation, almost sure safety, n*
against bisection, and the outcomes of a process.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from fractions import Fraction as F

import numpy as np
import pytest
import theory
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import (
    INF,
    bigrams,
    language_model,
    leaves,
    path,
    policies,
    random_table,
    random_tree,
)

from igcore import budget
from igcore.errors import ParameterError
from igstudy.theory.instances import budget_between, outcomes
from igstudy.theory.mdp import augment, token_mdp
from igstudy.theory.planning import (
    abstention_bound,
    bellman,
    greedy,
    n_star,
    occupancy,
    trajectories,
    value_iteration,
    values,
    violation,
)

seeds = st.integers(0, 10**6)
quick = settings(max_examples=30, deadline=None)
NS = [0, Fraction(1, 10), Fraction(1, 2), 1, 3, 30, INF]


# --- repairs 1 and 2: Lemma 3(c), Theorem 1(a) ----------------------------------------------------


def test_repair_1_a_finite_minimum_is_continuous_and_an_infinite_one_is_not():
    """Guards Lemma 3(c): v_n(a) = 1{a <= n}; over 8 actions the minimum reaches 1, over more than n
    it stays 0 for each n.
    """
    assert [values(theory.step_actions(n, 8))[0] for n in range(10)] == [0] * 7 + [1] * 3
    assert all(values(theory.step_actions(n, n + 2))[0] == 0 for n in (1, 10, 300))


def test_repair_2_infinity_is_a_fixed_point_too_and_iteration_from_zero_finds_the_minimal_one():
    """Guards Theorem 1(a) at n = infinity: u = infinity solves u = T u, so the solution is not
    unique; V^{*,inf} is the least.
    """
    model = language_model()
    u = np.full(len(model.best), INF)
    assert (bellman(model.augmented, u, INF) == u).all()
    np.testing.assert_allclose(
        value_iteration(model.augmented, INF, 8)[-1], model.best, rtol=0, atol=1e-12
    )


def test_repair_2_for_finite_n_the_bounded_solution_is_unique():
    """Guards Theorem 1(a) for finite n: from any bounded start T^h u comes within gamma^h ||u - V||
    of the same V.
    """
    model = language_model()
    best = values(model.augmented, 0.3)
    u = np.random.default_rng(0).uniform(-50, 50, len(best))
    gap = abs(u - best).max()
    for h in range(1, 41):
        u = bellman(model.augmented, u, 0.3)
        assert abs(u - best).max() <= 0.95**h * gap + 1e-9


# --- check (1): value iteration -------------------------------------------------------------------


def test_check_1_value_iteration_rises_with_the_closed_form_error():
    """Guards the operator: v_0 = 0 rises and the sup error is gamma^h n / (1 - gamma), here with n
    well above n*.
    """
    model, n, gamma = language_model(), 2.0, 0.95
    best = values(model.augmented, n)
    iterates = value_iteration(model.augmented, n, 60)
    assert (np.diff(iterates, axis=0) >= -1e-12).all()
    errors = abs(iterates - best).max(axis=1)
    np.testing.assert_allclose(errors, gamma ** np.arange(61) * n / (1 - gamma), rtol=0, atol=1e-9)


def test_check_1_residual_and_exact_root():
    """Guards backward induction: it solves v = T v, equals the minimum over all leaves, and T + 1
    sweeps reach the root's value.
    """
    model, n = language_model(), 2.0
    best = values(model.augmented, n)
    assert abs(bellman(model.augmented, best, n) - best).max() < 1e-12
    by_hand = model.found.task[model.found.cost <= model.budget].min()
    assert best[0] == pytest.approx(by_hand, abs=1e-12)
    assert value_iteration(model.augmented, n, 7)[-1][0] == pytest.approx(best[0], abs=1e-12)


def test_check_1_just_above_n_star_seven_sweeps_are_not_enough():
    """Guards "well above n*": with n just above it the unsafe states are still underestimated after
    T + 1 sweeps.
    """
    mdp, d = theory.small_n()
    augmented = replace(augment(mdp, d), gamma=Fraction(1, 2))
    n = Fraction(61, 100)  # n* = .6: n / (1 - gamma) is discounted once
    assert values(augmented, n)[0] == Fraction(3, 5)
    assert value_iteration(augmented, n, 2)[-1][0] == n / 2 < Fraction(3, 5)


def test_without_discount_n_is_charged_once():
    """Guards the other reading: gamma = 1 would give an infinite sum."""
    augmented = augment(theory.infeasible_start()[0], 2)
    assert values(augmented, 7)[0] == 7
    assert value_iteration(augmented, 7, 3)[:, 1].tolist() == [0, 7, 7, 7]


def test_the_penalty_is_discounted_to_the_time_of_the_violation():
    """Guards gamma^t: a text that breaks the budget with its third token costs gamma^3 n / (1 -
    gamma).
    """
    mdp = token_mdp({"a": (0, 0), "aa": (0, 0), "aaa": (9, 0)}, gamma=Fraction(1, 2))
    assert values(augment(mdp, 1), 1)[0] == Fraction(1, 8) * 2


@quick
@given(seeds, st.integers(0, 6))
def test_values_rise_with_n_at_every_state(seed, d):
    """Guards Theorem 1(b): V^{*,n} never falls in n, at any state, and its limit is V^{*,inf}."""
    augmented = augment(random_tree(seed, Fraction(9, 10)), d)
    rows = [values(augmented, n) for n in NS]
    assert all((b >= a).all() for a, b in zip(rows, rows[1:], strict=False))
    feasible = rows[-1] < INF
    assert (rows[-2][feasible] == rows[-1][feasible]).all()


# --- repair 5: Theorem 2 --------------------------------------------------------------------------


@quick
@given(seeds, st.integers(0, 8))
def test_repair_5_the_augmented_optimum_never_violates_when_it_is_finite(seed, d):
    """Guards Theorem 2 restated: finite iff some trajectory keeps the budget; then P(violation) = 0
    and the task cost is least.
    """
    table, mdp = random_table(seed), random_tree(seed)
    augmented = augment(mdp, d)
    best = values(augmented)
    safe = [sum(path(table, y)[1]) for y in leaves(table) if sum(path(table, y)[0]) <= d]
    assert (best[0] < INF) == bool(safe)
    if safe:
        policy = greedy(augmented, best)
        assert violation(augmented, policy) == 0
        assert values(augmented, policy=policy)[0] == min(safe)


def test_repair_5_each_policy_has_its_own_cost_if_almost_surely_safe_and_infinity_if_not():
    """Guards J^inf(pi) for all 27 deterministic policies of a tree and for their mixtures with the
    reference.
    """
    augmented = augment(random_tree(5, vocabulary=3, horizon=2), 3)
    free = augment(random_tree(5, vocabulary=3, horizon=2), 100)
    count = 0
    for policy in policies(free):
        for mixed in (policy, (policy + free.reference) / 2):
            count += 1
            here = mixed[augmented.origin]
            safe = violation(augmented, here) == 0
            assert values(augmented, policy=here)[0] == (
                values(free, policy=mixed)[0] if safe else INF
            )
    assert count == 2 * 27


def test_greedy_policies_attain_the_value_and_break_ties_by_the_first_action():
    model = language_model()
    policy = greedy(model.augmented, model.best)
    assert (policy.sum(axis=1) == model.augmented.allowed.any(axis=1)).all()
    attained = values(model.augmented, policy=policy)
    np.testing.assert_allclose(
        attained[model.feasible], model.best[model.feasible], rtol=0, atol=1e-12
    )
    mdp, d = theory.infeasible_start()
    augmented = augment(mdp, d)
    assert greedy(augmented, values(augmented))[0].tolist() == [1, 0]


def test_a_greedy_policy_acts_where_every_action_is_unsafe():
    """Bug: the first action was taken where all are infinite, allowed or not, so that a policy
    without an action broke the budget with probability 0.
    """
    table = {"a": (0, 0), "b": (0, 0), "bb": (3, 0), "bc": (4, 0)}  # b ends nowhere safe, and no ba
    augmented = augment(token_mdp(table), 2)
    policy = greedy(augmented, values(augmented))
    assert (policy.sum(axis=1) == augmented.allowed.any(axis=1)).all()
    policy[0] = [0, 1, 0]
    assert violation(augmented, policy) == 1


# --- the law of a trajectory ----------------------------------------------------------------------


def test_the_law_of_the_trajectory_is_the_product_of_conditionals():
    """Guards `occupancy` on the language model: chain rule along every text, and total mass one."""
    model = language_model()
    mass = occupancy(model.mdp, model.mdp.reference)
    index = {y: s for s, y in enumerate(model.mdp.names)}
    for s in range(0, 6826, 97):
        y = model.mdp.names[s]
        chain = np.prod([model.mdp.reference[index[y[:i]], token] for i, token in enumerate(y)])
        assert mass[s] == pytest.approx(chain, abs=1e-15)
    ends = ~model.mdp.allowed.any(axis=1)
    assert mass[ends].sum() == pytest.approx(1, abs=1e-12)
    unsafe = sum(
        mass[index[y]]
        for y, cost in zip(model.found.names, model.found.cost, strict=True)
        if cost > model.budget
    )
    assert violation(model.augmented, model.augmented.reference) == pytest.approx(unsafe, abs=1e-12)


def test_expected_task_cost_is_the_mean_over_trajectories():
    """Guards policy evaluation against a sum over all texts of probability times discounted task
    cost.
    """
    model = language_model()
    mass = occupancy(model.mdp, model.mdp.reference)
    by_hand = sum(mass[t.leaf] * t.task for t in trajectories(model.mdp))
    assert values(model.mdp, policy=model.mdp.reference)[0] == pytest.approx(by_hand, abs=1e-12)
    t = next(t for t in trajectories(model.mdp) if len(model.mdp.names[t.leaf]) == 3)
    assert t.steps == 3
    *before, last = model.mdp.names[t.leaf]
    paid = model.mdp.task[model.mdp.names.index(tuple(before)), last]
    assert t.task == pytest.approx(0.95**2 * paid, abs=1e-15) and paid > 0  # at time 2


def test_nature_moves_at_chance_states_whatever_the_policy_says():
    """Guards chance: its probabilities average, they are not minimised over."""
    mdp, d = theory.chance_cost()
    augmented = augment(mdp, d)
    foolish = np.zeros(augmented.child.shape, dtype=int)
    foolish[:, 0] = 1  # nature always takes the free branch, if it were asked
    assert occupancy(augmented, foolish)[1:3].tolist() == [Fraction(1, 2), Fraction(1, 2)]
    assert greedy(augmented, values(augmented))[0].tolist() == augmented.reference[0].tolist()
    assert values(augmented)[0] == Fraction(3, 5)
    with pytest.raises(ParameterError, match="nature moves"):
        list(trajectories(augmented))


def test_an_impossible_branch_of_infinite_cost_counts_nothing():
    """Guards 0 times infinity, which is NaN in floats and would spoil every expectation."""
    augmented = augment(theory.boundary(), 0)
    policy = np.zeros(augmented.child.shape, dtype=int)
    policy[0, 1] = 1
    assert values(augmented, policy=policy)[0] == Fraction(9, 10)


def test_latent_tables_with_several_parents_keep_their_mass():
    """Guards `np.add.at` against buffered addition: a state with many parents must collect all of
    them.
    """
    latent = bigrams().latent
    mass = occupancy(latent, latent.reference)
    ends = ~latent.allowed.any(axis=1)
    assert mass[ends].sum() == 1


# --- the bound on abstention, against enumeration of every draw -----------------------------------


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


# --- conditions of the theorems, as notebook 10 shows them ----------------------------------------


def test_row_nonnegative_costs():
    """Guards C >= 0: (+3, -2) keeps to d = 2 but is rejected; (-5, +6) lets a cost of 6 pass.
    Clamping and peak mend the second.
    """
    rejected, banked = (augment(*theory.signed_cost(name)) for name in theory.CREDIT)
    assert values(rejected)[0] == INF and sum(theory.CREDIT["false rejection"]) <= 2
    assert values(banked)[0] == 0 and max(theory.CREDIT["credit banking"]) > 2
    for accounting in ("clamped_sum", "peak"):
        mended = augment(*theory.signed_cost("credit banking"), accounting=accounting)
        assert values(mended)[0] == INF
    states = budget.trace(theory.CREDIT["false rejection"], 2, "sum")
    assert [budget.is_safe(s) for s in states] == [True, False, True]  # not absorbing either


@pytest.mark.parametrize("tilt", [Fraction(k, 8) for k in range(9)])
def test_row_homomorphism(tilt):
    """Guards the homomorphism: whatever a policy of phi does, randomised or not, it violates on
    half of the prompts.
    """
    mdp, d = theory.aliased_prompts()
    augmented = augment(mdp, d)
    tilted = np.array([0, 0, tilt, 1 - tilt], dtype=object)
    policy = np.where([[len(y) == 1] for y, _ in augmented.names], tilted, 0)
    assert violation(augmented, policy) == Fraction(1, 2)
    assert violation(augmented, greedy(augmented, values(augmented))) == 0


# --- check (2): n* --------------------------------------------------------------------------------


def n_star_by_bisection(mdp, high=1e3, steps=60):
    """The least n with V^{*,n} = V^{*,inf} at the start: the slow way."""
    low, best = 0.0, values(mdp)[0]
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if values(mdp, middle)[0] >= best - 1e-13 else (middle, high)
    return high


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
