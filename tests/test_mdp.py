"""Tests of token MDPs and their augmentation, against recursion over the table and sums written
out; and of latent optimality.
"""

import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import (
    INF,
    aliased_prompts,
    bigrams,
    language_model,
    random_tree,
)

from igcore import budget
from igcore.errors import ParameterError
from igstudy.theory.homomorphism import conflict, latent_mdp
from igstudy.theory.instances import bigram_process, random_process
from igstudy.theory.mdp import MDP, augment, token_mdp, truncated_cost
from igstudy.theory.planning import bellman, greedy, value_iteration, values, violation

AB = {"a": (0, 0), "b": (1, 0.5)}


# --- check (5): identities of the safety state in exact rationals ---------------------------------


def test_check_5_z_identities_are_exact_and_the_sum_from_one_is_wrong():
    """Guards the paper's index slip: 40 trials of 40 steps; z_t = omega_{t-1} / gamma^t holds for
    the sum from k = 0 only.
    """
    rng = np.random.default_rng(0)
    wrong = first_costs = 0
    for _ in range(40):
        gamma, d = Fraction(int(rng.integers(50, 101)), 100), Fraction(int(rng.integers(1, 50)), 4)
        costs = [Fraction(int(c), 4) for c in rng.integers(0, 5, 40) * rng.integers(0, 2, 40)]
        states = budget.trace(costs, d, "sum", gamma)
        for t, state in enumerate(states):
            assert (
                state.z * gamma**t
                == d - sum(gamma**k * c for k, c in enumerate(costs[:t]))
                == state.omega
            )
        wrong += states[-1].omega != d - sum(gamma**k * c for k, c in enumerate(costs) if k >= 1)
        first_costs += costs[0] != 0  # the term that the sum from 1 leaves out
    assert wrong == first_costs > 10


@settings(max_examples=40, deadline=None)
@given(st.lists(st.fractions(-5, 5), min_size=1, max_size=10), st.fractions(0, 5))
def test_peak_is_nonnegative_telescopes_and_implies_the_final_check(scores, d):
    """Guards the accounting of signed scores on a tree: totals are running peaks, whatever the
    signs.
    """
    table = {tuple(range(i + 1)): (u, Fraction(0)) for i, u in enumerate(scores)}
    totals = augment(token_mdp(table, signed=True), INF, accounting="peak").total.tolist()
    assert totals == [max(0, *scores[:t]) if t else 0 for t in range(len(scores) + 1)]
    assert all(b >= a for a, b in zip(totals, totals[1:], strict=False))
    augmented = augment(token_mdp(table, signed=True), d, accounting="peak")
    assert augmented.safe.all() == all(u <= d for u in scores)
    assert not augmented.safe.all() or scores[-1] <= d


# --- the tree and its augmentation ----------------------------------------------------------------


def test_repair_4_z_is_a_function_of_the_prefix_in_the_token_mdp():
    """Guards "z is redundant": with an infinite budget each prefix has one z; the latent MDP needs
    several for one state.
    """
    tree = random_tree(1)
    augmented = augment(tree, 100)
    assert augmented.origin.tolist() == list(range(len(tree.child)))
    latent = bigrams().latent
    assert len(latent.child) > len(set(latent.origin.tolist()))


def test_repair_4_one_critic_that_serves_many_budgets_needs_z():
    """Guards the second use of z: at the same prompt the best first token depends on the budget."""
    mdp = token_mdp({"a": (Fraction(1), Fraction(0)), "b": (Fraction(0), Fraction(1))})
    assert [values(augment(mdp, d))[0] for d in (0, 1)] == [1, 0]


def test_the_language_model_has_6826_prefixes():
    """Guards the enumeration of the notebook: 5 tokens, one ends the text, horizon 6."""
    model = language_model()
    assert len(model.mdp.child) == 6826
    assert len(model.found.task) == 1365 + 4**6
    assert 0 < (model.found.cost <= model.budget).mean() < 0.5
    assert model.budget not in model.found.cost
    for s in np.random.default_rng(0).choice(len(model.mdp.child), 50):
        y = model.mdp.names[s]
        assert all(
            model.mdp.names[model.mdp.child[s, a]] == (*y, a)
            for a in range(5)
            if model.mdp.allowed[s, a]
        )


def test_states_reached_at_two_times_still_come_after_their_parents():
    """Guards the order of augmented states: state 3 is met at time 1, before the state 2 that leads
    to it too.
    """
    child = np.array([[3, 1], [2, -1], [3, -1], [4, -1], [-1, -1]])
    costs = np.array([[0, 0], [0, 0], [1, 0], [2, 0], [0, 0]])
    uniform = (child >= 0) / np.maximum(1, (child >= 0).sum(axis=1, keepdims=True))
    tables = {
        "child": child,
        "cost": costs,
        "task": np.arange(10.0).reshape(5, 2),
        "reference": uniform,
    }
    nowhere, everywhere = np.zeros(5, dtype=bool), np.ones(5, dtype=bool)
    mdp = MDP(**tables, chance=nowhere, safe=everywhere, names=tuple("abcde"))
    augmented = augment(mdp, 2)
    assert augmented.names == (
        ("a", 2),
        ("b", 2),
        ("c", 2),
        ("d", 2),
        ("d", 1),
        ("e", 0),
        ("e", -1),
    )
    assert augmented.child.tolist() == [
        [3, 1], [2, -1], [4, -1], [5, -1], [6, -1], [-1, -1], [-1, -1],
    ]  # fmt: skip
    assert values(augmented).tolist() == [6, INF, INF, 6, INF, 0, INF]


def test_peak_is_discounted_at_the_step_that_raises_it():
    """Guards the increments of the peak: with a safety discount they are charged one by one, not as
    a total.
    """
    table = {"a": (1, 0.0), "ab": (-2, 0.0), "abc": (4, 0.0)}
    z = augment(
        token_mdp(table, signed=True), 5, gamma=Fraction(1, 2), accounting="peak"
    ).z.tolist()
    assert z == [5, (5 - 1) * 2, (5 - 1) * 4, (5 - 1 - Fraction(3, 4)) * 8]


def test_strict_and_unchecked_readings_change_only_their_states():
    """Guards both switches: strict moves z = 0 to unsafe; without the last check terminal states
    count as safe.
    """
    table = {
        "a": (Fraction(1), Fraction(0)),
        "b": (Fraction(2), Fraction(0)),
        "aa": (Fraction(9), Fraction(0)),
    }
    readings = {"closed": {}, "strict": {"strict": True}, "unchecked": {"check_last": False}}
    safe = {
        name: augment(token_mdp(table), 2, **reading).safe.tolist()
        for name, reading in readings.items()
    }
    assert safe == {
        "closed": [True, True, True, False],
        "strict": [True, True, False, False],
        "unchecked": [True] * 4,
    }


def test_the_truncated_cost_is_n_where_no_budget_is_left_and_the_task_cost_elsewhere():
    """Guards equation 6: n at safe states would make every text as bad as an unsafe one."""
    table = {"a": (Fraction(1), Fraction(1, 3)), "b": (Fraction(3), Fraction(0))}
    augmented = augment(token_mdp(table), 2)
    start, unsafe = 0, int(np.flatnonzero(~augmented.safe)[0])
    for n in (Fraction(7, 2), INF):
        cost = truncated_cost(augmented, n)
        assert cost[start].tolist() == [Fraction(1, 3), 0]
        assert cost[unsafe].tolist() == [n, n]
    plain = token_mdp(table)
    assert (truncated_cost(plain, INF) == plain.task).all()


def test_terminal_accounting_charges_the_last_score_only():
    """Guards `last`: a terminal state must be charged as the end of its text, an inner one must
    not.
    """
    table = {"a": (5, 0.0), "ab": (1, 0.0)}
    assert augment(token_mdp(table, signed=True), 2, accounting="terminal").total.tolist() == [
        0,
        0,
        1,
    ]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: token_mdp(AB, {"": {"a": 0.5, "b": 0.4}}), "do not sum to 1"),
        (lambda: token_mdp(AB, {"": {"a": 1.5, "b": -0.5}}), "give each state numbers >= 0"),
        (lambda: token_mdp(AB, {"": {"a": 0.5, "b": math.nan}}), "do not sum to 1"),
        (lambda: token_mdp({"a": (-1, 0)}), "a safety cost is -1"),
        (lambda: token_mdp(AB, gamma=0), "gamma is 0; it must lie in (0, 1]"),
        (lambda: augment(token_mdp(AB), 1, gamma=math.nan), "gamma is nan"),
        (lambda: augment(token_mdp(AB), -1), "budget is -1"),
        (lambda: augment(token_mdp(AB), 1, accounting="peek"), "did you mean 'peak'"),
        (lambda: token_mdp({"ab": (0, 0)}), "prefix 'ab' has no parent"),
    ],
)
def test_bad_input_is_named_in_one_sentence(make, message):
    """Guards the reader: the value that is wrong and what is allowed."""
    with pytest.raises(ParameterError, match=re.escape(message)) as error:
        make()
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)


# --- random instances are normalised, seeded and what they say ------------------------------------


def test_the_random_process_is_an_honest_language_model():
    """Guards the instance: probabilities, scores with a sign, and a task cost of finished texts
    alone.
    """
    mdp = language_model().mdp
    index = {y: s for s, y in enumerate(mdp.names)}
    inner = mdp.allowed.any(axis=1)
    assert (mdp.reference[inner] > 0).all()
    np.testing.assert_allclose(mdp.reference[inner].sum(axis=1), 1, rtol=0, atol=1e-12)
    assert (mdp.cost[mdp.allowed] < 0).any() and mdp.signed
    y = index[3, 1, 4]
    assert 0 < mdp.task[y, 0] < 1 and (mdp.task[y, 1:] == 0).all()
    assert (mdp.task[index[3, 1, 4, 2, 1]] > 0).all()
    again = random_process(15, 5, 6, gamma=0.95)
    assert (again.cost == mdp.cost).all() and (again.reference == mdp.reference).all()


def test_the_bigram_instance_depends_on_time_and_bigram_only():
    """Guards exactness and the ends: quarters and twelfths as rationals, task cost at the end of a
    text only.
    """
    mdp = bigram_process(2, 3, 3)
    index = {y: s for s, y in enumerate(mdp.names)}
    assert all(
        isinstance(x, Fraction) and 0 <= 4 * x <= 4 and (4 * x).denominator == 1
        for x in mdp.cost[mdp.allowed]
    )
    assert (mdp.cost[index[1, 2]] == mdp.cost[index[2, 2]]).all()
    assert (mdp.task[index[1, 2]] == mdp.task[index[2, 2]]).all()
    assert (mdp.task[index[(1,)], 1:] == 0).all() and (mdp.task[0, 1:] == 0).all()
    assert mdp.task[0, 0] >= 1  # an empty answer is two tokens short: 12 twelfths at least
    assert mdp.cost[mdp.allowed].max() > 0


# --- latent optimality: exact under a homomorphism, and what goes wrong without one ---------------


def test_repair_3_the_operators_commute_with_phi():
    """Guards T(v o phi) = (T v) o phi for arbitrary v on the latent states, in rationals; phi is
    many-to-one.
    """
    pair = bigrams()
    rng = np.random.default_rng(0)
    for n in (Fraction(1, 2), Fraction(7)):
        v = np.array([Fraction(int(x), 7) for x in rng.integers(-20, 20, len(pair.latent.child))])
        assert (
            bellman(pair.augmented, v[pair.into], n) == bellman(pair.latent, v, n)[pair.into]
        ).all()


def test_check_3_latent_values_equal_token_values_at_every_augmented_prefix():
    """Guards Theorem 1(c) for the right reason: exact equality at 4,216 prefixes though there are
    fewer latent states.
    """
    pair = bigrams()
    assert len(pair.into) == 4216 > len(pair.latent.child) == len(set(pair.into))
    for n in (Fraction(1, 10), Fraction(1, 2), 3, INF):
        assert (values(pair.augmented, n) == values(pair.latent, n)[pair.into]).all()
    one, two = (value_iteration(mdp, Fraction(1, 2), 8) for mdp in (pair.augmented, pair.latent))
    assert (one == two[:, pair.into]).all()
    policy = greedy(pair.latent, values(pair.latent))[pair.into]
    assert values(pair.augmented, policy=policy)[0] == values(pair.augmented)[0] < INF
    assert violation(pair.augmented, policy) == 0


def test_the_check_finds_what_a_lossy_map_merges():
    """Guards the check: the last token alone forgets the time; the identity is always a
    homomorphism.
    """
    mdp = bigrams().mdp
    assert conflict(mdp, bigrams().labels) is None
    assert conflict(mdp, mdp.names) is None
    one, two = conflict(mdp, [y[-1:] for y in mdp.names])
    assert mdp.names[one][-1:] == mdp.names[two][-1:]
    assert len(mdp.names[one]) != len(mdp.names[two])
    with pytest.raises(ValueError, match="phi merges"):
        latent_mdp(mdp, [y[-1:] for y in mdp.names])


@pytest.mark.parametrize("table", ["child", "cost", "task", "reference", "chance"])
def test_the_check_looks_at_everything_that_an_action_does(table):
    """Guards each part of the definition: one changed entry of a table breaks it."""
    mdp = aliased_prompts()[0]
    labels = [len(y) if len(y) < 2 else y[-1] for y in mdp.names]
    alike = replace(mdp, cost=np.where(mdp.child >= 0, mdp.child * 0, 0))
    assert conflict(alike, labels) is None
    changed = getattr(alike, table).copy()
    if table == "child":
        changed[2, 2:] = changed[2, :1:-1]
    elif table == "chance":
        changed[1] = True
    elif table == "reference":
        changed[1] = changed[1, ::-1]
        alike = replace(alike, chance=np.array([True] * 3 + [False] * 4))
        changed[1] = [0, 0, Fraction(1, 4), Fraction(3, 4)]
    else:
        changed[2, 2] = 5
    assert conflict(replace(alike, **{table: changed}), labels) == (1, 2)


def test_states_of_different_depth_may_be_merged():
    """Guards the numbering of latent states: children come after their parents even when "a" and
    "ba" become one end.
    """
    mdp = token_mdp({"a": (0, 1), "b": (0, 0), "ba": (0, 0)})
    latent = latent_mdp(mdp, ["start", "end", "middle", "end"])
    assert latent.names == ("start", "middle", "end")
    assert latent.child.tolist() == [[2, 1], [2, -1], [-1, -1]]
    assert values(latent).tolist() == [0, 0, 0]
