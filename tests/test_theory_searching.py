"""The tokens of a search until it has an answer: the law, the exact recursion, and completeness.

The recursion is compared with a Markov chain over the stacks of the search, token by token. The
chain has its own texts, costs and rule of the stack, and shares no line with `igstudy.theory`.
"""

import math
import random

import numpy as np
import pytest

from igstudy.theory import searching
from igstudy.theory.mdp import augment, token_mdp
from igstudy.theory.planning import violation

SPEND = 24


def random_texts(seed, depth):
    """Return prefix -> token -> (probability, cost); some texts end early."""
    rng = random.Random(seed)
    tree, prefixes = {}, [""]
    for prefix in prefixes:  # grows
        if len(prefix) == depth or (prefix and rng.random() < 0.15):
            continue
        weights = {token: rng.randint(1, 9) for token in "abc"[: rng.randint(1, 3)]}
        total = sum(weights.values())
        tree[prefix] = {a: (w / total, rng.choice([0, 0, 1, 2])) for a, w in weights.items()}
        prefixes += [prefix + token for token in weights]
    return tree


def process(tree, budget):
    table = {s + a: (cost, 0) for s, row in tree.items() for a, (_, cost) in row.items()}
    rows = {s: {a: p for a, (p, _) in row.items()} for s, row in tree.items()}
    return augment(token_mdp(table, rows), budget)


def stepped_back(stack, tries):
    """Count a failure of the last beam; stack = ((prefix, failures), ...), the root first."""
    *below, (prefix, failures) = stack
    failures += 1
    while below and failures == tries:
        *below, (prefix, failures) = below
        failures += 1
    return (*below, (prefix, failures if below else 0))  # nothing asks for those of the root


def one_token(tree, budget, step, tries, state):
    """Yield (probability, next state) of one more token; the state is None after an answer."""
    stack, text = state
    for token, (p, _) in tree[text].items():
        longer = text + token
        if sum(tree[longer[:i]][longer[i]][1] for i in range(len(longer))) > budget:
            back = stepped_back(stack, tries)
            yield p, (back, back[-1][0])
        elif longer not in tree:
            yield p, None
        elif len(longer) == len(stack[-1][0]) + step:
            yield p, ((*stack, (longer, 0)), longer)
        else:
            yield p, (stack, longer)


def chain(*search):
    """Return P(answered within t tokens), t = 0, ..., SPEND, and the mean tokens of a search."""
    moves, waiting = {}, [((("", 0),), "")]
    while waiting:
        state = waiting.pop()
        moves[state] = list(one_token(*search, state))
        waiting += [new for _, new in moves[state] if new and new not in moves]
    number = {state: i for i, state in enumerate([*moves, None])}
    matrix = np.zeros((len(number), len(number)))
    matrix[-1, -1] = 1  # an answer stays one
    for state, row in moves.items():
        for p, new in row:
            matrix[number[state], number[new]] += p
    answered = [np.linalg.matrix_power(matrix, t)[0, -1] for t in range(SPEND + 1)]
    if not matrix[:-1, -1].any():
        return answered, math.inf
    visits = np.linalg.inv(np.eye(len(moves)) - matrix[:-1, :-1])
    return answered, visits[0].sum()


def test_300_random_processes_agree_with_the_chain_of_stacks():
    """Bug: a failure that counts twice or for the wrong beam, a root that is dropped, tokens of a
    dropped block that are not counted, a bound that is too high, an answer with S = 0.
    """
    impossible, bounded = 0, 0
    for seed in range(300):
        depth, step, tries, budget = 2 + seed % 3, 1 + seed // 3 % 3, 1 + seed // 9 % 3, seed % 4
        tree = random_texts(seed, depth)
        mdp = process(tree, budget)
        answered, mean = chain(tree, budget, step, tries)
        exact = searching.answered(mdp, step, tries, SPEND)
        np.testing.assert_allclose(exact, answered, rtol=0, atol=1e-12, err_msg=f"seed {seed}")
        assert searching.expected_tokens(mdp, step, tries) == pytest.approx(mean, rel=1e-12), seed
        share = round(1 - violation(mdp, mdp.reference), 12)
        bound = searching.answered_at_least(share, depth, step, tries, SPEND)
        assert (mean == math.inf) == (share == 0), seed
        assert answered[-1] >= bound - 1e-9, seed
        impossible += share == 0
        bounded += 0 < bound < 1
    assert min(impossible, bounded) >= 30  # neither is rare


def test_by_hand_each_level_of_beams_multiplies_the_draws_by_tries():
    """Bug: a beam that is dropped one failure early or late: after "a" the last token is over
    budget, so that 4 draws of 3, 1, 2 and 1 tokens lie between two visits to the root.
    """
    tree = {"": {"a": (0.5, 0), "b": (0.5, 0)}, "a": {"a": (1, 0)}, "aa": {"a": (1, 1)}}
    mdp = process(tree, 0)
    assert searching.answered(mdp, 1, 2, 8).tolist() == [0, *[0.5] * 7, 0.75]
    assert searching.expected_tokens(mdp, 1, 2) == (0.5 * 1 + 0.5 * 7) / 0.5


def test_more_rounds_do_not_lead_out_of_a_dead_end_and_a_step_back_does():
    """Bug: an M without limit that counts as complete. One sample in two is over budget at once,
    two thirds of the others begin a text that cannot be safe.
    """
    first = {"a": (1 / 3, 0), "b": (1 / 6, 0), "c": (1 / 2, 1)}
    mdp = process({"": first, "a": {"a": (1, 1)}, "b": {"a": (1, 0)}}, 0)
    found = 1 - 1 / 4**3  # N = 2, M = 3: one of six samples is kept
    rounds = 1 + 1 / 4 + 1 / 16
    tokens = 2 * (rounds + found * (2 / 3 * 3 + 1 / 3))
    assert searching.blockwise_answered(mdp, 1, 2, 3) == pytest.approx((found / 3, tokens))
    assert searching.blockwise_answered(mdp, 1, 2) == pytest.approx((1 / 3, math.inf))
    assert searching.answered(mdp, 1, 2, 300)[-1] > 1 - 1e-9


@pytest.mark.parametrize("share", [0.1, 0.28, 0.8])
def test_the_law_is_the_limit_of_the_exact_tokens(share):
    """Bug: x of the answer in place of that of a block, or one sample in place of N."""
    length, block = 64, 16
    going = share ** (1 / length)
    row = {"a": (going, 0), "x": (1 - going, 1)}
    mdp = process({"a" * t: row for t in range(length)}, 0)
    whole = searching.expected_tokens(mdp, length, 1) / searching.rejection_tokens(length, share)
    blocks = searching.expected_tokens(mdp, block, 40)
    blocks /= searching.stepping_tokens(length, share, block)
    assert 1 < blocks <= whole * (1 + 1e-12) < 1 - math.log(share) / length
    law = searching.blockwise_tokens(length, share, block, 2)
    assert searching.blockwise_answered(mdp, block, 2)[1] == pytest.approx(law, rel=1e-12)
