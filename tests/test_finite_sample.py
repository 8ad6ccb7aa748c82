"""Tests of myopia, support, finite samples and retries, against enumeration of every draw."""

import itertools
import math
from fractions import Fraction as F

import counterexamples
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import INF, language_model, notebook, small_models

from igstudy.theory.mdp import augment
from igstudy.theory.planning import abstention_bound, values, violation

myopic_search = notebook.myopic_search
retry_mass, two_round_failure = notebook.retry_mass, notebook.two_round_failure
BLOCKS = {(1,): F(1, 2), (2,): F(3, 10), (3,): F(1, 5)}


def test_check_6_keep_one_dies_where_a_viability_filter_never_does():
    """Guards myopia on 60 instances: all continuations drawn, E_inter with keep 1 fails in 10, keep
    4 in 2, the filter in none.
    """
    failed = {"keep 1": 0, "keep 4": 0, "filter": 0}
    for model in small_models():
        failed["keep 1"] += myopic_search(model.augmented, model.partial) is None
        failed["keep 4"] += myopic_search(model.augmented, model.partial, keep=4) is None
        failed["filter"] += myopic_search(model.augmented, model.partial, viable=True) is None
        assert values(model.augmented)[0] < INF
    assert failed == {"keep 1": 10, "keep 4": 2, "filter": 0}


def test_search_ends_in_a_safe_text_and_with_all_beams_in_the_best():
    """Guards the loop: finished beams are carried, and keeping everything finds the optimum by
    partial score.
    """
    model = small_models()[0]
    mdp = model.augmented
    ends = np.flatnonzero(mdp.safe & ~mdp.allowed.any(axis=1))
    best = ends[model.partial[ends].argmin()]
    assert myopic_search(mdp, model.partial, keep=10**6) == best
    assert myopic_search(mdp, model.partial, keep=3) in ends


def test_an_unsafe_or_hopeless_prompt_gives_nothing():
    strict = augment(counterexamples.boundary(), 0, strict=True)
    assert myopic_search(strict, np.zeros(len(strict.child))) is None
    hopeless = augment(*counterexamples.infeasible_start())
    assert myopic_search(hopeless, np.zeros(3), viable=True) is None


def test_top_p_keeps_the_fewest_likely_tokens():
    """Guards support: the token that crosses p is kept, the next is not, and the order of columns
    does not matter.
    """
    rows = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0, 0, 0]])
    np.testing.assert_allclose(
        notebook.top_p(rows, 0.6),
        [[0.625, 0.375, 0], [0, 0.625, 0.375], [0, 0, 0]],
        rtol=0,
        atol=1e-15,
    )
    assert (notebook.top_p(rows, 0.4) == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]).all()
    assert (notebook.top_p(rows, 1.0) == rows).all()


# --- finite samples -------------------------------------------------------------------------------


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
    if rounds == 2 and n_samples == 1:
        assert two_round_failure(blocks, safe, "none") == failed


def test_several_blocks_are_bounded_by_the_sum_over_blocks():
    """Guards the union bound: three blocks with independent masses fail with 1 - prod(1 - q), never
    above the sum.
    """
    masses = [F(1, 2), F(1, 3), F(9, 10)]
    exact = 1 - math.prod(1 - (1 - p) ** 6 for p in masses)
    assert exact < abstention_bound(masses, 3, 2) == sum((1 - p) ** 6 for p in masses) < 2 * exact
    assert abstention_bound([0, 0], 5, 5) == 1


def test_the_table_of_samples_needed():
    """Guards the numbers of the notebook for B = 4, and that one sample fewer is not enough."""
    table = {
        p: [notebook.samples_needed(p, 4, delta) for delta in (0.05, 0.01, 0.001)]
        for p in (0.5, 0.1, 0.01)
    }
    assert table == {0.5: [7, 9, 12], 0.1: [42, 57, 79], 0.01: [437, 597, 826]}
    for p, row in table.items():
        for delta, draws in zip((0.05, 0.01, 0.001), row, strict=True):
            assert abstention_bound([p] * 4, draws) <= delta < abstention_bound([p] * 4, draws - 1)
    assert notebook.samples_needed(0.99, 1, 0.5) == 1
    assert 0.0231 < notebook.mass_covered(128 * 2, 4, 0.01) <= 0.0232


# --- diversity ------------------------------------------------------------------------------------


def test_the_ban_by_position_helps_and_hurts():
    """Guards the formula, safe mass not banned / (1 - banned mass): .15 becomes 1, but .3 becomes 0
    for a shared first token.
    """
    assert retry_mass({(1,): F(17, 20), (2,): F(3, 20)}, {(2,)}, [(1,)], "paper") == 1
    assert retry_mass(BLOCKS, {(2,)}, [(1,)], "paper") == pytest.approx(0.3 / (1 - 0.5), abs=1e-15)
    shared = {
        (1, 1): F(1, 2),
        (1, 2): F(3, 10),
        (2, 1): F(1, 5),
    }  # "I will", "I cannot", another start
    assert retry_mass(shared, {(1, 2)}, [(1, 1)], "none") == F(3, 10)
    assert (
        retry_mass(shared, {(1, 2)}, [(1, 1)], "paper") == 0
    )  # its first token is banned: from .3 to nothing
    assert retry_mass(shared, {(1, 2)}, [(1, 1)], "sequence") == pytest.approx(
        F(3, 10) / (1 - F(1, 2)), abs=1e-12
    )


def test_when_everything_is_banned_the_reference_is_used():
    assert retry_mass(BLOCKS, {(2,)}, [(1,), (2,), (3,)], "paper") == F(3, 10)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_sequence_divides_by_what_is_left_and_is_never_worse(seed, count):
    """Guards sampling without replacement on random two-token blocks, exactly p / (1 - m)."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 20, 6)
    names = itertools.product(range(2), range(3))
    blocks = {y: F(int(w), int(weights.sum())) for y, w in zip(names, weights, strict=True)}
    order = [list(blocks)[i] for i in rng.permutation(6)]
    failed, safe = order[:count], set(order[count : count + 2])
    p, m = sum(blocks[y] for y in safe), sum(blocks[y] for y in failed)
    assert retry_mass(blocks, safe, failed, "sequence") == pytest.approx(
        float(p / (1 - m)), abs=1e-12
    )
    assert p / (1 - m) >= p


def test_two_rounds_by_enumeration_and_the_bound_of_half():
    """Guards the retries: `paper` can be better or worse than no ban, and half of the samples from
    the reference keep a bound.
    """
    shared = {(1, 1): F(1, 2), (1, 2): F(3, 10), (2, 1): F(1, 5)}
    by_ban = {y: two_round_failure(shared, {(1, 2)}, y) for y in ("none", "paper", "sequence")}
    assert by_ban["none"] == F(7, 10) ** 2
    assert (
        by_ban["paper"] == F(1, 2) > F(49, 100)
    )  # after (1, 1) the way is closed; after (2, 1) only (1, 2) is left
    assert by_ban["sequence"] == pytest.approx(
        float(F(1, 2) * (1 - F(3, 5)) + F(1, 5) * (1 - F(3, 8))), abs=1e-12
    )
    assert two_round_failure({(1,): F(17, 20), (2,): F(3, 20)}, {(2,)}, "paper") == 0
    for n_samples, rounds in ((2, 2), (4, 3)):
        assert notebook.half_bound(F(1, 2), n_samples, rounds) == F(1, 2) ** (
            n_samples + n_samples * (rounds - 1) // 2
        )


def drawn(blocks, prefix, factors):
    """Return the law of a block whose tokens are drawn one by one, each from the reference times
    `factors`: the slow way.
    """
    heads = sorted(
        {y[len(prefix)] for y in blocks if y[: len(prefix)] == prefix and len(y) > len(prefix)}
    )
    if not heads:
        return {prefix: 1.0}
    weights = {
        t: sum(p for y, p in blocks.items() if y[: len(prefix) + 1] == (*prefix, t)) for t in heads
    }
    weighted = {t: w * factors(prefix, t) for t, w in weights.items()}
    total = sum(weighted.values())
    weighted, total = (weighted, total) if total > 1e-12 else (weights, sum(weights.values()))
    laws = [
        (weighted[t] / total, drawn(blocks, (*prefix, t), factors))
        for t in heads
        if weighted[t] > 0
    ]
    return {y: share * p for share, law in laws for y, p in law.items()}


def second_law(blocks, first, diversity):
    """Return the law of the second block after the failed block `first`, from the words of the
    three rules.
    """
    if diversity == "none":
        return blocks
    if diversity == "sequence":  # the reference given that it is not the failed block
        left = {y: p for y, p in blocks.items() if y != first}
        return {y: p / sum(left.values()) for y, p in left.items()}
    return drawn(blocks, (), lambda prefix, t: first[len(prefix)] != t)


@pytest.mark.parametrize("diversity", ["none", "paper", "sequence"])
def test_two_rounds_equal_the_enumeration_of_every_draw_of_both(diversity):
    """Guards the exact failure against laws written from the words of the rules."""
    rng = np.random.default_rng(5)
    for _ in range(9):
        names = [(0, 0), (0, 1), (1, 0), (1, 1)]
        blocks = dict(zip(names, rng.dirichlet(np.ones(4)).tolist(), strict=True))
        safe = {names[i] for i in rng.permutation(4)[: rng.integers(1, 3)]}
        failure = 0.0
        for first in blocks.keys() - safe:
            law = second_law(blocks, first, diversity)
            failure += blocks[first] * sum(p for y, p in law.items() if y not in safe)
        found = two_round_failure(blocks, safe, diversity)
        assert found == pytest.approx(failure, abs=1e-9)


def test_the_language_model_has_blocks_whose_safe_mass_can_be_read_off():
    """Guards the meaning of p_b: one minus the reference's probability to break the budget is what
    one full-length block has.
    """
    model = language_model()
    p = 1 - violation(model.augmented, model.augmented.reference)
    draws = notebook.samples_needed(p, 1, 0.01)
    assert abstention_bound([p], draws) <= 0.01 < abstention_bound([p], draws - 1)
