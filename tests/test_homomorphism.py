"""Tests of latent optimality: exact under a homomorphism, and what goes wrong without one."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import INF, aliased_prompts, bigrams

from igstudy.theory.homomorphism import conflict, embed, latent_mdp
from igstudy.theory.instances import bigram_process
from igstudy.theory.mdp import augment, token_mdp
from igstudy.theory.planning import bellman, greedy, value_iteration, values, violation


def length_and_last(names):
    return [(len(y), y[-1:]) for y in names]


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


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.sampled_from([Fraction(1), Fraction(4, 5)]))
def test_homomorphic_latent_optimum_equals_the_token_optimum(seed, quarters, gamma):
    mdp = bigram_process(seed, 3, 4)
    labels = length_and_last(mdp.names)
    token, latent = (
        augment(m, Fraction(quarters, 4), gamma) for m in (mdp, latent_mdp(mdp, labels))
    )
    into = embed(token, labels, latent)
    for n in (Fraction(1, 3), INF):
        assert (values(token, n) == values(latent, n)[into]).all()


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
