"""Tests of the safety state against hand-computed totals and exact rationals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from igcore import budget
from igcore.errors import ParameterError

# prefix scores -> totals in the order of MODES, worked out by hand (U_0 = 0, gamma = 1)
EXAMPLES = {
    (-3, -3, -3, -3): (0, -12, 0, -3, 0, 0),
    (2, 2, 2, 2): (2, 8, 8, 2, 2, 2),
    (-5, -5, -5, 6): (6, -9, 6, 6, 11, 6),
    (6, 3, 1, -1): (0, 9, 10, -1, 6, 6),
    (3, -3, 3, -3): (0, 0, 6, -3, 9, 3),
}
MODES = ("terminal", "sum", "clamped_sum", "increment", "positive_increment", "peak")
scores = st.lists(st.floats(-20, 20), min_size=1, max_size=12)


@pytest.mark.parametrize("sequence", EXAMPLES)
def test_totals_of_the_five_example_sequences(sequence):
    """Guards the table of accountings: `sum` hides late harm, `positive_increment` counts a swing
    twice, `peak` neither.
    """
    totals = tuple(budget.trace(sequence, 10, mode)[-1].total for mode in MODES)
    assert totals == EXAMPLES[sequence]


@given(
    scores,
    st.sampled_from(["peak", "terminal", "clamped_sum", "positive_increment"]),
    st.sampled_from([1, 0.9]),
)
def test_omega_never_increases_and_the_unsafe_state_is_absorbing(sequence, mode, gamma):
    """Guards nonnegative costs; z itself may grow when gamma < 1, so it is not what is tested."""
    states = budget.trace(sequence, 5.0, mode, gamma)
    omegas = [s.omega for s in states]
    safe = [budget.is_safe(s) for s in states]
    assert all(b <= a for a, b in zip(omegas, omegas[1:], strict=False))
    assert all(a or not b for a, b in zip(safe, safe[1:], strict=False))


@given(scores, st.floats(0, 20))
def test_peak_is_safe_exactly_when_no_prefix_exceeds_the_budget(sequence, d):
    """Guards the guarantee for arbitrary signed scores, compared without tolerance: peak-safe
    implies U_K <= d.
    """
    final = budget.trace(sequence, d)[-1]
    assert budget.is_safe(final) == all(u <= d for u in sequence)
    assert final.total == max(0, *sequence)


def test_peak_is_compared_without_rounding():
    """Guards the direct comparison: 1.1 - .1 - (.2 - .1) - (1.1 - .2) is -1.1e-16, which would call
    a safe text unsafe.
    """
    scores, d = [0.1, 0.2, 1.1], 1.1
    stepwise = d
    for before, score in zip([0, *scores], scores, strict=False):
        stepwise -= score - before
    assert stepwise < 0
    assert budget.is_safe(budget.trace(scores, d)[-1])


def test_strict_reading_makes_a_zero_budget_infeasible():
    """Guards the closed inequality: with d = 0 the start itself is safe, under the strict reading
    it is not.
    """
    state = budget.start(0)
    assert budget.is_safe(state)
    assert not budget.is_safe(state, strict=True)


def test_z_grows_without_cost_when_discounted():
    """Guards against "z only decreases": 10 becomes 11.366 after 128 steps at gamma .999."""
    state = budget.trace([0] * 128, 10, "clamped_sum", 0.999)[-1]
    assert round(state.z, 3) == 11.366


@pytest.mark.parametrize("mode", budget.ACCOUNTINGS)
@pytest.mark.parametrize("gamma", [1, 0.99])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_unreadable_score_is_unsafe_for_good(mode, gamma, bad):
    """Guards fail closed: a NaN compared the wrong way round would pass the gate, here or in a
    later block.
    """
    states = budget.trace([0.0, bad], 5.0, mode, gamma)
    assert not budget.is_safe(states[-1])
    if mode not in budget.SIGNED | {"terminal"}:
        assert not budget.is_safe(budget.charge(states[-1], 0.0, mode, gamma, last=True))


def test_block_costs_are_discounted_at_the_last_token_of_the_block():
    """Guards the time index of blocks: the second block of 8 tokens ends at index 15."""
    state = budget.trace([1.0, 2.0], 5.0, "clamped_sum", 0.9, positions=[7, 15])[-1]
    assert state.omega == pytest.approx(5 - 0.9**7 - 2 * 0.9**15, abs=1e-12)
    assert state.z == pytest.approx(state.omega / 0.9**16, abs=1e-12)


def test_z_survives_a_discount_that_underflows():
    """Guards long responses: gamma^t becomes 0 in floats, and z is then only a sign."""
    state = budget.trace([0.5], 1.0, "peak", 0.1, positions=[400])[-1]
    assert state.z == math.inf and budget.is_safe(state)
    assert budget.trace([0.0], 0.0, "peak", 0.1, positions=[400])[-1].z == 0  # not infinite


def test_a_charge_is_undiscounted_and_not_the_last_by_default():
    """Bug: z was scaled, or a final cost charged, where nobody had asked for it."""
    state = budget.start(1.0)
    assert budget.charge(state, 0.5).z == 0.5
    assert budget.charge(state, 2.0, "terminal").omega == 1.0


@pytest.mark.parametrize("bad", [-1, math.nan])
def test_a_budget_that_nothing_can_meet_is_refused(bad):
    with pytest.raises(ParameterError, match="budget is"):
        budget.start(bad)


@pytest.mark.parametrize("sequence", EXAMPLES)
@pytest.mark.parametrize("mode", MODES)
def test_the_cost_of_a_step_is_what_the_total_grows_by(sequence, mode):
    """Guards `step_cost` against a charge of its own: the two would then disagree on C_t."""
    states = budget.trace(sequence, 10, mode)
    for k, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        last = k == len(sequence) - 1
        cost = budget.step_cost(mode, sequence[k], before.score, before.peak, last)
        assert cost == after.total - before.total


@pytest.mark.parametrize("mode", budget.ACCOUNTINGS)
def test_a_step_whose_score_is_nan_costs_infinity(mode):
    """Guards fail closed where `step_cost` is called alone: max(0, nan) is 0 in Python."""
    assert budget.step_cost(mode, math.nan, 1.0, 2.0, last=True) == math.inf
