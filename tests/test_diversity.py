"""Tests of how a retry avoids failed blocks, against enumeration of the mock policy."""

import itertools
import math
import subprocess
import sys

import pytest
from mockpolicy import EOS, LETTERS, letter_cost, probabilities

from igcore.engine.diversity import DIVERSITIES, Failures, diversity_penalty

START = (1, 2)
BLOCKS = [(EOS,)] + [
    (a, b) for a, b in itertools.product(range(1, 7), range(7))
]  # every block of two tokens


def probability(block, factors=lambda prefix: {}):
    """Probability of a block when every step is drawn from the reference times the factors,
    renormalised.
    """
    total = 1.0
    for i, token in enumerate(block):
        p = probabilities(START + block[:i])
        q = [x * factors(block[:i]).get(t, 1.0) for t, x in enumerate(p)]
        q = q if sum(q) > 0 else p
        total *= q[token] / sum(q)
    return total


def failed(blocks, parent=0):
    failures = Failures(frozenset({EOS}), None)
    for block in blocks:
        failures.add(
            parent,
            block,
            [math.log(probabilities(START + block[:i])[t]) for i, t in enumerate(block)],
        )
    return failures


def is_safe(block):
    return letter_cost("".join(LETTERS[t] for t in block if t)) == 0


@pytest.mark.parametrize("n", [1, 3, 10])
def test_sequence_draws_from_the_reference_without_the_failed_blocks(n):
    """Guards "never worse": the next block has exactly its reference probability, conditioned on
    none of the failed ones.
    """
    bad = [b for b in BLOCKS if not is_safe(b)][:n]
    avoid = DIVERSITIES["sequence"](failed(bad), 0, 0, 1)
    left = 1 - sum(probability(b) for b in bad)
    for block in BLOCKS:
        assert probability(block, avoid) == pytest.approx(
            0 if block in bad else probability(block) / left, abs=1e-12
        )
    safe = [b for b in BLOCKS if is_safe(b)]
    assert sum(probability(b, avoid) for b in safe) >= sum(probability(b) for b in safe)


def test_sequence_only_looks_at_blocks_of_the_same_parent():
    failures = failed([(1, 1)], parent=7)
    assert DIVERSITIES["sequence"](failures, 3, 0, 1)(()) == {}
    assert DIVERSITIES["sequence"](failures, 7, 0, 1)(()) != {}


def test_position_ban_spares_the_end_token_and_other_positions():
    """Guards F_i: a token is banned where it was seen, not everywhere, and a ban never takes the
    way out.
    """
    ban = DIVERSITIES["paper"](failed([(1, 2), (3, EOS)]), 0, 0, 1)
    assert ban(()) == {1: 0.0, 3: 0.0}
    assert ban((5,)) == {2: 0.0}
    assert ban((5, 5)) == {}


def test_position_ban_can_remove_the_only_safe_block():
    """Guards the warning in the documentation: "I cannot" and "I will" share their first token."""
    safe, unsafe = (5, 6), (5, 1)
    avoid = DIVERSITIES["paper"](failed([unsafe]), 0, 0, 1)
    assert probability(safe, avoid) == 0 < probability(safe)
    assert probability(safe, DIVERSITIES["sequence"](failed([unsafe]), 0, 0, 1)) > probability(safe)


def test_half_keeps_the_larger_half_of_each_parents_samples_as_they_were():
    """Guards P(fail) <= (1-p)^(N (1 + (M-1)/2)): a parent's only sample is a reference sample."""
    failures = failed([(1, 1)])
    kinds = [[DIVERSITIES["half"](failures, 0, i, n) is None for i in range(n)] for n in (1, 2, 3)]
    assert kinds == [[True], [True, False], [True, True, False]]


def test_a_finite_penalty_is_a_factor_on_the_probability():
    failures = Failures(frozenset(), 2.0)
    failures.add(0, (4,), [-1.0])
    assert DIVERSITIES["paper"](failures, 0, 0, 1)(()) == {4: pytest.approx(math.exp(-2))}


def test_diversity_needs_no_torch():
    """Guards notebooks of theory, which run where torch is not installed."""
    said = "import sys, igcore.engine.diversity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said]).returncode == 0


@pytest.mark.parametrize("n_2", [None, 2.0])
def test_the_penalty_is_a_softmax_of_shifted_logits(n_2):
    """Guards the paper's formula: softmax(W o - n_2 [F > 0]) against logits that are shifted."""
    failures = Failures(frozenset({EOS}), n_2)
    failures.add(0, (1, 2), [-1.0, -1.0])
    failures.add(5, (3, EOS), [-1.0, -1.0])  # F counts the failed blocks of all beams
    penalty = diversity_penalty(failures, 0, 0, 1)
    for prefix, seen in (((), {1, 3}), ((4,), {2})):
        p = probabilities(START + prefix)
        shift = [math.exp(-(n_2 or math.inf)) if t in seen else 1.0 for t in range(7)]
        q = [x * f for x, f in zip(p, shift, strict=True)]
        ours = [x * penalty(prefix).get(t, 1.0) for t, x in enumerate(p)]
        assert ours == pytest.approx(q)
