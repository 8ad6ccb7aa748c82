"""Tests of how a retry avoids failed blocks, against enumeration of the mock policy."""

import itertools
import math
import random
import subprocess
import sys

import pytest
from mockpolicy import EOS, LETTERS, letter_cost, probabilities

from igcore.engine.diversity import DIVERSITIES, Failures, diversity_penalty

START = (1, 2)
BLOCKS = [(EOS,)] + [
    (a, b) for a, b in itertools.product(range(1, 7), range(7))
]  # every block of two tokens


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
    assert DIVERSITIES["sequence"](failures, 3, 0, 1).at(()) == {}
    assert DIVERSITIES["sequence"](failures, 7, 0, 1).at(()) != {}


def test_position_ban_spares_the_end_token_and_other_positions():
    """Guards F_i: a token is banned where it was seen, not everywhere, and a ban never takes the
    way out.
    """
    ban = DIVERSITIES["paper"](failed([(1, 2), (3, EOS)]), 0, 0, 1)
    assert ban.at(()) == {1: 0.0, 3: 0.0}
    assert ban.at((5,)) == {2: 0.0}
    assert ban.at((5, 5)) == {}


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
    assert DIVERSITIES["paper"](failures, 0, 0, 1).at(()) == {4: pytest.approx(math.exp(-2))}


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
        ours = [x * penalty.at(prefix).get(t, 1.0) for t, x in enumerate(p)]
        assert ours == pytest.approx(q)


def slow_factors(diversity, blocks, ends, n_2, parent, sample, n_samples, prefix):
    """The factors after one prefix of one sample as a dictionary, from all failed blocks anew."""
    if diversity == "none" or diversity == "half" and sample < (n_samples + 1) // 2:
        return {}
    if diversity != "sequence":
        seen = {tokens[len(prefix)] for _, tokens, _ in blocks if len(tokens) > len(prefix)}
        return dict.fromkeys(seen - ends, 0.0 if n_2 is None else math.exp(-n_2))
    own = [(tokens, log_p) for owner, tokens, log_p in blocks if owner == parent]

    def chances(start):
        """Token after `start` -> its probability, as the first failed block had it."""
        n, found = len(start), {}
        for tokens, log_p in own:
            if tokens[:n] == start and len(tokens) > n:
                found.setdefault(tokens[n], math.exp(log_p[n]))
        return found

    def used(start):
        below = chances(start)
        return min(1.0, sum(p * used((*start, t)) for t, p in below.items())) if below else 1.0

    return {token: 1 - used((*prefix, token)) for token in chances(prefix)}


@pytest.mark.parametrize("n_2", [None, 0.0, 1.5])
@pytest.mark.parametrize("diversity", DIVERSITIES)
def test_factors_are_those_of_a_dictionary_for_each_sample_and_prefix(diversity, n_2):
    """Guards a penalty that samples share: another round's, parent's or position's factors, and
    the last bit of a sum.
    """
    rng, ends = random.Random(0), frozenset({0, 4})
    for _ in range(20):
        failures, blocks = Failures(ends, n_2), []
        for _round in range(3):
            for _ in range(6):
                tokens = tuple(rng.choices(range(6), k=rng.randint(1, 4)))
                blocks.append((rng.randrange(3), tokens, [math.log(rng.random()) for _ in tokens]))
                failures.add(*blocks[-1])
            for parent, sample in itertools.product(range(3), range(3)):
                penalty = DIVERSITIES[diversity](failures, parent, sample, 3)
                for length in range(6):
                    prefix = tuple(rng.choices(range(6), k=length))
                    prefix = rng.choice([prefix, rng.choice(blocks)[1][:length]])
                    slow = slow_factors(diversity, blocks, ends, n_2, parent, sample, 3, prefix)
                    assert (penalty.at(list(prefix)) if penalty else {}) == slow


def test_samples_share_one_penalty_until_the_next_failure():
    """Guards the cost of a retry, and a retry with the penalty of the round before."""
    failures = failed([(1, 1), (2, 3)])
    paper, half = (DIVERSITIES[d](failures, 0, 1, 2) for d in ("paper", "half"))
    assert paper is half is DIVERSITIES["paper"](failures, 9, 0, 5)
    assert paper.at([5]) is paper.at([6])
    first, second = (DIVERSITIES["sequence"](failures, p, 0, 1) for p in (0, 9))
    assert first is DIVERSITIES["sequence"](failures, 0, 4, 5) and first is not second
    assert first.at([1]) is first.at([1]) != {}
    failures.add(0, (1, 4), [-1.0, -1.0])
    assert DIVERSITIES["paper"](failures, 0, 0, 1).at([5]) == {1: 0.0, 3: 0.0, 4: 0.0}
    assert paper.at([5]) == {1: 0.0, 3: 0.0} and 4 not in first.at([1])  # these never change


@pytest.mark.parametrize("diversity", ["paper", "sequence"])
def test_a_digest_tells_penalties_apart_by_their_factors(diversity):
    """Guards samples that are found again by it: another token, position, parent or strength must
    change it, and another object or process must not.
    """

    def digest(*blocks, n_2=1.0, scale=-0.5):
        failures = Failures(frozenset({EOS}), n_2)
        for block in blocks:
            failures.add(0, block, [scale * token for token in block])
        return DIVERSITIES[diversity](failures, 0, 0, 1).digest

    assert digest((1, 2), (3, 4)) == digest((1, 2), (3, 4))
    others = [(), [(1, 2)], [(1, 2), (3, 5)], [(1, 2), (4, 3)], [(1,), (3, 4)], [(1, 2), (3, 4, 5)]]
    found = {digest(*blocks) for blocks in (*others, [(1, 2), (3, 4)])}
    assert len(found) == 7 and all(len(digest) == 32 for digest in found)
    if diversity == "paper":
        assert digest((1, 2), (3, 4)) == digest((3, 2), (1, 4)) != digest((1, 2), (3, 4), n_2=2.0)
    else:
        assert digest((1, 2), (3, 4)) != digest((3, 2), (1, 4))
        # the nodes have the same factors, in other places of the tree
        trees = [(1, 5), (2,), (1, 5, 6)], [(1,), (2,), (1, 5), (2, 6)]
        assert digest(*trees[0], scale=0.0) != digest(*trees[1], scale=0.0)


def test_a_block_may_be_longer_than_pythons_stack():
    """Bug: the shares were summed by recursion, which a block of 500 tokens broke."""
    n, failures = 3000, Failures(frozenset(), None)
    failures.add(0, [1] * n, [-0.1] * n)
    penalty = DIVERSITIES["sequence"](failures, 0, 0, 1)
    assert penalty.at([1] * (n - 1)) == {1: 0.0} and 0 < penalty.at([1] * (n - 9))[1] < 1
    assert penalty.digest
