"""Tests of how a retry avoids failed blocks, against enumeration of the mock policy."""

import math
import random
import subprocess
import sys

import pytest
from mockpolicy import EOS, probabilities

from igcore.engine.diversity import DIVERSITIES, Failures, diversity_penalty

START = (1, 2)


def probability(block, penalty=None):
    """Probability of a block when every step is drawn from the reference times the factors,
    renormalised.
    """
    total = 1.0
    for i, token in enumerate(block):
        p = probabilities(START + block[:i])
        factors = penalty.at(block[:i]) if penalty else {}
        q = [x * factors.get(t, 1.0) for t, x in enumerate(p)]
        q = q if sum(q) > 0 else p
        total *= q[token] / sum(q)
    return total


def failed(blocks):
    failures = Failures(frozenset({EOS}), None)
    for block in blocks:
        failures.add(block)
    return failures


def test_position_ban_spares_the_end_token_and_other_positions():
    """Guards F_i: a token is banned where it was seen, not everywhere, and a ban never takes the
    way out.
    """
    ban = DIVERSITIES["paper"](failed([(1, 2), (3, EOS)]), 0, 1)
    assert ban.at(()) == {1: 0.0, 3: 0.0}
    assert ban.at((5,)) == {2: 0.0}
    assert ban.at((5, 5)) == {}


def test_position_ban_can_remove_the_only_safe_block():
    """Guards the warning in the documentation: "I cannot" and "I will" share their first token."""
    safe, unsafe = (5, 6), (5, 1)
    avoid = DIVERSITIES["paper"](failed([unsafe]), 0, 1)
    assert probability(safe, avoid) == 0 < probability(safe)


def test_half_keeps_the_larger_half_of_each_parents_samples_as_they_were():
    """Guards P(fail) <= (1-p)^(N (1 + (M-1)/2)): a parent's only sample is a reference sample."""
    failures = failed([(1, 1)])
    kinds = [[DIVERSITIES["half"](failures, i, n) is None for i in range(n)] for n in (1, 2, 3)]
    assert kinds == [[True], [True, False], [True, True, False]]


def test_a_finite_penalty_is_a_factor_on_the_probability():
    failures = Failures(frozenset(), 2.0)
    failures.add((4,))
    assert DIVERSITIES["paper"](failures, 0, 1).at(()) == {4: pytest.approx(math.exp(-2))}


def test_diversity_needs_no_torch():
    """Guards notebooks of theory, which run where torch is not installed."""
    said = "import sys, igcore.engine.diversity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said]).returncode == 0


@pytest.mark.parametrize("n_2", [None, 2.0])
def test_the_penalty_is_a_softmax_of_shifted_logits(n_2):
    """Guards the paper's formula: softmax(W o - n_2 [F > 0]) against logits that are shifted."""
    failures = Failures(frozenset({EOS}), n_2)
    failures.add((1, 2))
    failures.add((3, EOS))
    penalty = diversity_penalty(failures, 0, 1)
    for prefix, seen in (((), {1, 3}), ((4,), {2})):
        p = probabilities(START + prefix)
        shift = [math.exp(-(n_2 or math.inf)) if t in seen else 1.0 for t in range(7)]
        q = [x * f for x, f in zip(p, shift, strict=True)]
        ours = [x * penalty.at(prefix).get(t, 1.0) for t, x in enumerate(p)]
        assert ours == pytest.approx(q)


def slow_factors(diversity, blocks, ends, n_2, sample, n_samples, prefix):
    """The factors after one prefix of one sample as a dictionary, from all failed blocks anew."""
    if diversity == "none" or diversity == "half" and sample < (n_samples + 1) // 2:
        return {}
    seen = {tokens[len(prefix)] for tokens in blocks if len(tokens) > len(prefix)}
    return dict.fromkeys(seen - ends, 0.0 if n_2 is None else math.exp(-n_2))


@pytest.mark.parametrize("n_2", [None, 0.0, 1.5])
@pytest.mark.parametrize("diversity", DIVERSITIES)
def test_factors_are_those_of_a_dictionary_for_each_sample_and_prefix(diversity, n_2):
    """Guards a penalty that samples share: another round's or position's factors."""
    rng, ends = random.Random(0), frozenset({0, 4})
    for _ in range(20):
        failures, blocks = Failures(ends, n_2), []
        for _round in range(3):
            for _ in range(6):
                blocks.append(tuple(rng.choices(range(6), k=rng.randint(1, 4))))
                failures.add(blocks[-1])
            for sample in range(3):
                penalty = DIVERSITIES[diversity](failures, sample, 3)
                for length in range(6):
                    prefix = tuple(rng.choices(range(6), k=length))
                    prefix = rng.choice([prefix, rng.choice(blocks)[:length]])
                    slow = slow_factors(diversity, blocks, ends, n_2, sample, 3, prefix)
                    assert (penalty.at(list(prefix)) if penalty else {}) == slow


def test_samples_share_one_penalty_until_the_next_failure():
    """Guards the cost of a retry, and a retry with the penalty of the round before."""
    failures = failed([(1, 1), (2, 3)])
    paper, half = (DIVERSITIES[d](failures, 1, 2) for d in ("paper", "half"))
    assert paper is half is DIVERSITIES["paper"](failures, 0, 5)
    assert paper.at([5]) is paper.at([6])
    failures.add((1, 4))
    assert DIVERSITIES["paper"](failures, 0, 1).at([5]) == {1: 0.0, 3: 0.0, 4: 0.0}
    assert paper.at([5]) == {1: 0.0, 3: 0.0}  # it never changes
