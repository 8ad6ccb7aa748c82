"""Tests of notebook 01: its own Algorithm 1 and Best-of-N give the tokens of the package."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from notebook_code import notebook_code

import igcore as ig
from igcore.budget import charge, start
from igcore.contract import Contract
from igcore.engine.sampling import random_key

book = notebook_code("01_the_algorithm")
PROMPT = "3165"


class Above4:
    name, digest, sign, unit = "above 4", "v1", "higher is worse", "share"

    def score(self, prompts, responses, finished):
        return [book.share_above_4(text) for text in responses]


class Fours:
    name, digest, sign, unit = "fours", "v1", "higher is better", "digits"

    def score(self, prompts, responses, finished):
        return [book.fours(text) for text in responses]


class Spaced:
    """A tokenizer of the digits that writes a space for every 8, so that texts have words."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **options):
        return self.tokenizer(*args, **options)

    def decode(self, *args, **options):
        return self.tokenizer.decode(*args, **options).replace("8", " ")


@cache
def digits():
    return book.digit_policy()


def guard(**changes):
    settings = dict(
        budget=0.3, n_samples=3, keep=2, block_size=4, max_new_tokens=12, rounds=2,
        diversity="paper",
    )  # fmt: skip
    return ig.Guard(digits(), cost=Above4(), reward=Fours(), **settings | changes)


def keys_of(name, n, length):
    return [[random_key(0, name, 0, i, t) for t in range(length)] for i in range(n)]


def candidate(tokens=(), z=1.0, reward=0.0):
    return book.Candidate(
        list(tokens), start(z) if z >= 0 else charge(start(0.0), -z), reward=reward
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": 0.2, "rounds": 3},
        {"n_samples": 5, "keep": 3},  # samples that no even split gives
        {"keep": 1, "block_size": 5},  # a shorter last block
        {"accounting": "terminal", "block_size": 3},
        {"gamma_safety": 0.9, "accounting": "clamped_sum", "budget": 0.6},
    ],
)
def test_the_notebook_finds_the_tokens_of_the_package(changes):
    """Guards both against each other: keys, splits, ties, penalties, charges and the final check
    were each written twice.
    """
    counts = book.compare(PROMPT, guard(**changes), range(8))
    assert counts["same"] + counts["near_ties"] >= 8


def test_the_notebook_finds_the_tokens_of_the_package_at_the_ends_of_words():
    """Bug: words of earlier blocks charged again or not at all, so that both would agree only while
    nobody looks inside a block.
    """
    policy = digits()
    spaced = replace(policy, tokenizer=Spaced(policy.tokenizer))
    at_blocks = replace(guard(checks="block", budget=0.4), policy=spaced)
    at_words = replace(at_blocks, config=replace(at_blocks.config, checks="word"))
    counts = book.compare(PROMPT, at_words, range(20))
    assert counts["same"] == 20 and counts["retried"] > 0
    found = [
        [book.algorithm_1(PROMPT, g, seed) for seed in range(20)] for g in (at_words, at_blocks)
    ]
    assert found[0] != found[1]


def test_a_block_is_charged_for_the_worst_of_its_checks():
    """Worked by hand: of the words of " 5 1 11" after "1", " 5" is the worst. Bug: a NaN that a
    later number hides.
    """
    at_words = guard(checks="word")
    assert book.worst_cost(at_words, "", "1", "1 5 1 11", False) == pytest.approx(1 / 3)
    assert book.worst_cost(at_words, "", "1 5", "1 5 1 11", False) == pytest.approx(1 / 5)
    assert book.worst_cost(guard(checks="block"), "", "1", "1 5 1 11", True) == 1 / 8
    failing = replace(at_words, cost=FailsOn5())
    assert math.isnan(book.worst_cost(failing, "", "1", "1 5 1 11", False))


class FailsOn5(Above4):
    def score(self, prompts, responses, finished):
        return [math.nan if text.endswith("5") else 0.0 for text in responses]


def test_the_comparison_meets_retries_and_abstentions():
    """Guards against a comparison in which nothing happens."""
    counts = book.compare(PROMPT, guard(budget=0.2), range(15))
    assert counts["retried"] > 0 and counts["abstained"] > 0 and counts["same"] == 15


@pytest.mark.parametrize("changes", [{"rounds": 3}, {"budget": 0.2, "rounds": 3}])
def test_the_solution_of_whole_blocks_is_the_packages_sequence_diversity(changes):
    """Bug: factors of another parent's blocks, and one block that failed twice counted twice."""
    counts = book.compare(
        PROMPT, guard(diversity="sequence", **changes), range(15), avoid=book.by_sequence
    )
    assert counts["same"] == 15 and counts["retried"] > 0


def test_the_solution_of_three_lines_is_the_lagrangian_baseline():
    counts = book.compare(
        PROMPT, guard(budget=1.0), range(8), "beam-lagrangian", choose=book.lagrangian
    )
    assert counts["same"] == 8


def test_best_of_n_by_hand_is_the_packages():
    """Bug: keys of another position or sample, and a tie that goes to the later answer."""
    toy = guard()
    for seed in range(8):
        (theirs,) = ig.decode("best-of-n", toy, [PROMPT], seed=seed)
        assert book.best_of_n(PROMPT, toy, seed)[0].tokens == theirs.tokens


def test_a_sample_depends_on_its_key_alone():
    """Bug: a row that has ended shifts the rows after it, or goes on itself."""
    keys = keys_of("p", 12, 16)
    together, chances = book.sample(digits(), [3, 1], [candidate()] * 12, keys)
    ended = [block for block in together if 0 in block]
    assert ended and all(block.index(0) == len(block) - 1 for block in ended)
    for row, block, chance in zip(keys, together, chances, strict=True):
        alone, _ = book.sample(digits(), [3, 1], [candidate()], [row])
        assert alone == [block]
        assert len(chance) == len(block) and all(0 < p <= 1 for p in chance)


def test_the_probabilities_are_those_of_the_model():
    """Bug: probabilities after the factors, which make whole-block diversity count a ban twice."""
    (block,), (chances,) = book.sample(
        digits(), [3, 1], [candidate()], keys_of("q", 1, 3), lambda parent, prefix: {4: 0.0, 5: 0.5}
    )
    with torch.inference_mode():
        rows = digits().model(torch.tensor([[3, 1, *block]])).logits[0].softmax(-1)
    expected = [float(rows[1 + t, token]) for t, token in enumerate(block)]
    assert 4 not in block and chances == pytest.approx(expected, rel=1e-4)


def test_the_ban_by_position_spares_end_tokens():
    failed = [(None, [5, 6, 0], None), (None, [7], None)]
    assert book.by_position(failed, {0}, None, []) == {5: 0.0, 7: 0.0}
    assert book.by_position(failed, {0}, None, [5]) == {6: 0.0}
    assert book.by_position(failed, {0}, None, [5, 6]) == {}


def test_the_ban_of_whole_blocks_leaves_what_they_have_not_used():
    """Worked by hand: after 5 the failed blocks have used 1/2 and 1/4 of it; the block of another
    parent and a repeated block change nothing.
    """
    mine, other = candidate(), candidate()
    failed = [
        (mine, [5, 6], [0.2, 0.5]),
        (mine, [5, 7], [0.2, 0.25]),
        (mine, [5, 6], [0.2, 0.5]),
        (other, [8, 1], [0.1, 0.1]),
    ]
    assert book.by_sequence(failed, {0}, mine, []) == pytest.approx({5: 0.25})
    assert book.by_sequence(failed, {0}, mine, [5]) == pytest.approx({6: 0.0, 7: 0.0})
    assert book.by_sequence(failed, {0}, mine, [8]) == {}


def test_the_best_within_budget_go_on_and_ties_keep_their_order():
    """Bug: an unsafe candidate of high reward among the kept ones."""
    a, b, c, d = (
        candidate(z=z, reward=r) for z, r in [(0.1, 1.0), (-0.1, 9.0), (0.0, 2.0), (0.1, 1.0)]
    )
    config = SimpleNamespace(keep=2)
    assert book.within_budget([a, b, c, d], config) == [c, a]
    assert book.within_budget([b], config) == []


@pytest.mark.parametrize("last", [0.31, math.nan, math.inf])
def test_nothing_is_returned_that_fails_the_final_check(last):
    """Bug: a last line that forgets the exact text, or lets a score pass that cannot be read."""

    class Turning(Above4):
        """Finds a whole answer bad when it is asked about it again."""

        known, turned = frozenset(), False

        def score(self, prompts, responses, finished):
            self.turned |= finished[-1] and responses[-1] in self.known
            self.known |= {responses[-1]} if finished[-1] else set()
            return [last if self.turned else 0.0 for _ in responses]

    toy, turning = guard(checks="block", n_samples=1, keep=1), Turning()
    # not examined: the notebook's own check is what is tested
    contracts = {**toy.contracts, "cost": Contract(turning)}
    assert book.algorithm_1(PROMPT, toy) is not None
    assert book.algorithm_1(PROMPT, replace(toy, cost=turning, contracts=contracts)) is None
    assert turning.turned
