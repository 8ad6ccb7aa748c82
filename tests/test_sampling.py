"""Tests of the draw of a token: keys, uniform numbers, the tree, factors and near ties."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from igcore import PolicyError
from igcore.engine import sampling
from igcore.engine.sampling import (
    AS_IS,
    BRANCH,
    NEAR_TIE,
    WIDEST,
    WORDS,
    Sampling,
    draw,
    random_key,
    uniforms,
)
from igstudy.runs.drawn import edges_of, moved_by, moves_of

PINNED = 63581622132706026774975595776287772668
SIZES = [7, 128, 129, 2049, 49157, 70001]


def numbers(n: int, name: str = "draw") -> torch.Tensor:
    return torch.from_numpy(uniforms([random_key(0, name, 0, i, 0) for i in range(n)]))


def random_logits(n: int, size: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(n, size, generator=torch.Generator().manual_seed(size))


def path(token: int, size: int) -> list[int]:
    """The nodes on the way to a token, from the top: at each level the remainder by the number of
    nodes there.
    """
    widths = [size]
    while widths[-1] > 128:
        widths.append(math.ceil(widths[-1] / 16))
    nodes = [token]
    for width in widths[1:]:
        nodes.append(nodes[-1] % width)
    return nodes[::-1]


def slow_draw(weights: list[float], u: list[float]) -> int:
    """The tree again, one token at a time: at each level the children in order, until their share
    exceeds the level's number.
    """
    leaves = [(path(token, len(weights)), weight) for token, weight in enumerate(weights)]
    for level in range(len(leaves[0][0])):
        children: dict[int, float] = {}
        for nodes, weight in leaves:
            children[nodes[level]] = children.get(nodes[level], 0.0) + weight
        total, seen = sum(children.values()), 0.0
        for node in sorted(children):
            seen += children[node]
            if u[level] * total < seen:
                break
        leaves = [leaf for leaf in leaves if leaf[0][level] == node]
    return leaves[0][0][-1]


def test_a_key_depends_on_each_of_its_coordinates():
    """Guards against a stream of numbers, and against two coordinates running together as in (1,
    11) and (11, 1).
    """
    base = (0, "p", 1, 11, 111)
    others = [
        (1, "p", 1, 11, 111),
        (0, "q", 1, 11, 111),
        (0, "p", 11, 1, 111),
        (0, "p", 1, 111, 11),
        (0, "p", 1, 1, 1111),
    ]
    assert random_key(*base) == random_key(*base)
    assert len({random_key(*u) for u in [base, *others]}) == 6


def test_the_random_numbers_are_the_same_next_year():
    """Guards every committed result against another hash, another order of bytes or another order
    of words.
    """
    assert random_key(0, "p", 0, 0, 0) == PINNED
    words = [PINNED >> 32 * i & 0xFFFFFFFF for i in range(4)]
    assert uniforms([PINNED]).tolist() == [[(word + 0.5) / 2**32 for word in words]]


def test_uniform_numbers_are_uniform_and_independent():
    """Guards the cutting of keys into words: Kolmogorov-Smirnov, and no correlation between words
    or between keys.
    """
    u = uniforms([random_key(0, "p", 0, i, 0) for i in range(5000)])
    assert u.shape == (5000, WORDS) and kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert np.abs(np.corrcoef(u.T) - np.eye(WORDS)).max() < 0.05
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.05


def test_no_bits_give_zero_or_one():
    """Guards both ends: 0 would draw a first token without mass, and 1 a token after the last."""
    low, high = uniforms([0, 2**128 - 1])
    assert 0 < low.min() and high.max() < 1
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]] * 2)
    assert draw(logits, torch.from_numpy(np.stack([low, high])), {})[0] == [1, 2]
    rare = torch.tensor([[0.0, -20.0]])  # in float32 the share of the first would be 1
    assert draw(rare, torch.from_numpy(high[None]), {})[0] == [1]


@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_a_slow_tree(size):
    """Guards the tree: its layout, its padding, and which number decides which level. A near tie
    may go either way.
    """
    n = 200 if size < 1000 else 20 if size < 10_000 else 2
    logits, u = random_logits(n, size), numbers(n, f"slow {size}")
    tokens, _, _, near = draw(logits, u, {})
    slow = [
        slow_draw(weights, row)
        for weights, row in zip(logits.double().softmax(-1).tolist(), u.tolist(), strict=True)
    ]
    assert all(a == b or tie for a, b, tie in zip(tokens, slow, near, strict=True))
    assert sum(a == b for a, b in zip(tokens, slow, strict=True)) > 0.9 * n


@pytest.mark.parametrize("size", SIZES)
def test_tokens_follow_their_probabilities(size):
    """Guards the distribution, by chi-square on tokens, or on groups of them where they are too
    many to count.
    """
    n = min(20_000, 60_000_000 // size)
    logits = random_logits(1, size, scale=1.0)
    tokens = np.array(draw(logits.expand(n, -1), numbers(n, f"chi {size}"), {})[0])
    p = logits.double().softmax(-1)[0].numpy()
    assert tokens.min() >= 0 and tokens.max() < size
    groups = min(size, 41)
    for group in (
        np.random.default_rng(0).permutation(size) % groups,
        np.arange(size) * groups // size,
    ):
        expected = n * np.bincount(group, p)
        assert expected.min() > 5
        assert (
            chisquare(
                np.bincount(group[tokens], minlength=groups), expected * n / expected.sum()
            ).pvalue
            > 1e-3
        )


def test_the_tree_has_numbers_for_the_largest_vocabularies():
    """Guards WORDS: a vocabulary of more levels than a key has words would reuse a number."""
    assert WIDEST * BRANCH ** (WORDS - 1) > 262_144 and len(path(0, 262_145)) == WORDS


@pytest.mark.parametrize("size", [7, 2049])
def test_log_probabilities_are_those_of_each_rows_own_factors(size):
    """Guards the rows: a factor of one row must move neither the draw nor the log-probabilities of
    another.
    """
    n = 400
    logits, u = random_logits(n, size), numbers(n)
    plain, log_p, log_q, _ = draw(logits, u, {})
    assert log_p == log_q
    factors = {
        row: {plain[row]: (0.0, 0.5, 3.0)[row % 3], (plain[row] + 1) % size: 0.25}
        for row in range(0, n, 2)
    }
    tokens, log_p, log_q, _ = draw(logits, u, factors)
    assert tokens[1::2] == plain[1::2] and tokens[::2] != plain[::2]
    p = logits.double().softmax(-1).numpy()
    q = p.copy()
    for row, factor in factors.items():
        for token, f in factor.items():
            q[row, token] *= f
    q /= q.sum(1, keepdims=True)
    assert log_p == pytest.approx([math.log(p[row, t]) for row, t in enumerate(tokens)], abs=2e-5)
    assert log_q == pytest.approx([math.log(q[row, t]) for row, t in enumerate(tokens)], abs=2e-5)


def test_the_reference_is_used_when_everything_is_banned():
    """Guards against NaN probabilities, from which any token could come, and against banning too
    little in the other rows.
    """
    logits, u = torch.log(torch.tensor([[0.5, 0.5, 0.0]] * 20)), numbers(20)
    factors = {row: {0: 0.0, 1: 0.0} if row < 19 else {0: 0.0} for row in range(20)}
    tokens, log_p, log_q, near = draw(logits, u, factors)
    plain = draw(logits, u, {})
    assert (
        tokens[:19] == plain[0][:19] and set(tokens[:19]) == {0, 1} and near[:19] == plain[3][:19]
    )
    assert log_p == pytest.approx([math.log(0.5)] * 20)
    assert log_q == pytest.approx([math.log(0.5)] * 19 + [0.0])
    assert tokens[19] == 1


@pytest.mark.parametrize("size", [3, 300])
def test_a_banned_token_is_not_drawn_when_the_rest_is_tiny(size):
    """Guards against overflow and underflow: what is left over has a mass of e^-85."""
    logits = torch.full((50, size), -math.inf)
    logits[:, :3] = torch.tensor([0.0, -90.0, -85.0])
    tokens, _, log_q, _ = draw(logits, numbers(50), dict.fromkeys(range(50), {0: 0.0}))
    assert set(tokens) <= {1, 2}
    assert log_q == pytest.approx(
        [-math.log1p(math.exp(-5 if t == 2 else 5)) for t in tokens], abs=1e-2
    )


@pytest.mark.parametrize("size", [3, 128, 129, 2049])
def test_a_token_without_mass_is_never_drawn(size):
    """Guards the edges: a token of no width must lose to its neighbours, in every place of the
    tree.
    """
    logits = torch.full((400, size), -math.inf)
    logits[:, [0, size - 1]] = 0.0
    assert set(draw(logits, numbers(400), {})[0]) == {0, size - 1}
    logits[:, 0] = -math.inf
    logits[:, size // 2] = 0.0
    assert set(draw(logits, numbers(400), {})[0]) == {size // 2, size - 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("size", [7, 2049])
def test_logits_that_are_not_finite_are_refused(bad, size, monkeypatch):
    """Guards against a broken model: NaN would look like the last token, in any chunk, with factors
    or without.
    """
    monkeypatch.setattr(sampling, "CHUNK", 2 * size)
    logits = random_logits(5, size)
    logits[3, 2] = bad
    for factors in ({}, {3: {2: 0.0}}):
        with pytest.raises(PolicyError, match="not finite"):
            draw(logits, numbers(5), factors)


def test_chunks_change_nothing(monkeypatch):
    """Guards the chunks of a CPU: numbers and factors must go with their rows."""
    size, n = 2049, 23
    logits, u = random_logits(n, size), numbers(n)
    factors = {
        row: {int(t): 0.0 for t in logits[row].topk(5).indices} for row in (0, 4, 5, 13, 22)
    } | {7: {}}
    whole = draw(logits, u, factors)
    for rows in (1, 4, 22):
        monkeypatch.setattr(sampling, "CHUNK", rows * size)
        tokens, log_p, log_q, near = draw(logits, u, factors)
        assert (tokens, near) == (whole[0], whole[3])
        assert log_p == pytest.approx(whole[1], abs=1e-6)
        assert log_q == pytest.approx(whole[2], abs=1e-6)


def slow_penalised_draw(logits, u, factors):
    """What `draw` gives, with the factors multiplied in one by one into a copy."""
    reference = logits.softmax(-1)
    weights = reference.clone()
    for row, factor in factors.items():
        for token, f in factor.items():
            weights[row, token] *= torch.tensor(f)
        if not weights[row].any():
            weights[row] = reference[row]
    levels = sampling.levels_of(weights)
    tokens, near = sampling._descend(levels, u, NEAR_TIE)
    here = torch.arange(len(u)), tokens
    log_q = (weights[here] / levels[-1].sum(-1)).log()
    # without factors both are one number, whatever the other rows have
    plain = [not factors.get(row) for row in range(len(u))]
    log_q[plain] = reference[here].log()[plain]
    return tokens.tolist(), reference[here].log().tolist(), log_q.tolist(), near.tolist()


@pytest.mark.parametrize("size", [7, 97, 2049])
def test_rows_that_share_factors_are_drawn_bit_by_bit_as_if_each_had_its_own(size, monkeypatch):
    """Guards the table of factors: lines of unequal length, rows without factors, a ban of all
    tokens beside other rows, token 0, and factors above 1.
    """
    n, generator = 60, torch.Generator().manual_seed(0)
    drawn = lambda k: torch.randperm(size, generator=generator)[:k].tolist()  # noqa: E731
    shared = [
        {},
        {0: 0.0},
        dict.fromkeys(drawn(5), 0.0),
        dict.fromkeys(drawn(size), 0.0),
        dict(zip(drawn(size // 2), torch.rand(size, generator=generator).tolist(), strict=False)),
        dict.fromkeys(drawn(2), 3.0),
    ]
    for trial in range(10):
        logits = 3 * torch.randn(n, size, generator=generator)
        u = numbers(n, f"shared {trial}")
        which = torch.randint(len(shared), (n,), generator=generator).tolist()
        factors = {row: shared[k] for row, k in enumerate(which) if row % 7}
        slow = slow_penalised_draw(logits, u, factors)
        assert draw(logits, u, factors) == slow
        assert draw(logits, u, {row: dict(factor) for row, factor in factors.items()}) == slow
    monkeypatch.setattr(sampling, "CHUNK", 8 * size)
    assert draw(logits, u, factors)[0] == slow[0]


def test_a_penalty_that_rows_share_is_handled_once():
    """Bug: every row's factors were made into tensors and multiplied in row by row, so that with
    128 tokens in 512 rows a retry took six times as long as the first round.
    """
    n, size = 512, 1024
    logits, u = random_logits(n, size), numbers(n)

    class Read(dict):
        """Factors that count how often they are read."""

        times = 0

        def __iter__(self):
            Read.times += 1
            return super().__iter__()

    class Operations(TorchDispatchMode):
        """Counts the operations on tensors."""

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.count += 1
            return operation(*args, **kwargs or {})

    def operations(objects):
        shared = [Read.fromkeys(range(k, size, 8), 0.0) for k in range(objects)]
        with Operations() as mode:
            mode.count = Read.times = 0
            draw(logits, u, {row: shared[row * objects // n] for row in range(n)})
        assert Read.times == objects
        return mode.count

    assert operations(1) == operations(8)


def test_half_precision_logits_are_drawn_in_single():
    """Guards models in bfloat16, whose eight bits would merge the edges of a large vocabulary."""
    logits, u = random_logits(200, 2049).bfloat16(), numbers(200)
    assert draw(logits, u, {0: {3: 0.0}}) == draw(logits.float(), u, {0: {3: 0.0}})


def test_near_ties_of_one_level_are_exactly_those_that_a_small_change_can_turn():
    """Guards the count from both sides, with the two changes of the logits that move the edges
    around a token most.
    """
    n, size = 20_000, 50
    logits, u = random_logits(n, size), numbers(n, "ties")
    tokens, _, _, near = draw(logits, u, {})
    lower = torch.arange(size) < torch.tensor(tokens)[:, None]
    upto = torch.arange(size) <= torch.tensor(tokens)[:, None]

    def turned(e):
        moved = (
            draw(logits + torch.where(lower, e, -e), u, {})[0],
            draw(logits + torch.where(upto, -e, e), u, {})[0],
        )
        return [t not in (a, b) or a != b for t, a, b in zip(tokens, *moved, strict=True)]

    assert not any(t and not tie for t, tie in zip(turned(0.99 * NEAR_TIE), near, strict=True))
    assert not any(tie and not t for t, tie in zip(turned(1.01 * NEAR_TIE), near, strict=True))
    # a share of about 4 NEAR_TIE times the sum of F (1 - F) over 50 edges
    assert 10 < sum(near) < 100


@pytest.mark.parametrize("size", [129, 2049, 49157])
def test_a_token_that_a_small_change_turns_was_counted(size):
    """Guards every level of the tree: changes that push the edges of one level as far as they go,
    and random ones.
    """
    n = min(20_000, 40_000_000 // size)
    logits, u = random_logits(1, size), numbers(n, f"turn {size}")
    tokens, _, _, near = draw(logits.expand(n, -1), u, {})
    paths = np.array([path(token, size) for token in range(size)])
    signs = [
        np.where(paths[:, level] <= np.median(paths[:, level]), 1, -1)
        for level in range(paths.shape[1])
    ]
    signs += [np.random.default_rng(0).choice([-1, 1], size)]
    turned = 0
    for sign in [*signs, *(-s for s in signs)]:
        other = draw(
            (logits + 0.99 * NEAR_TIE * torch.from_numpy(sign)).float().expand(n, -1), u, {}
        )[0]
        assert all(tie for a, b, tie in zip(tokens, other, near, strict=True) if a != b)
        turned += sum(a != b for a, b in zip(tokens, other, strict=True))
    assert turned and sum(near) < 0.02 * n


# --- temperature, top-k and top-p -----------------------------------------------------------------

USUAL = Sampling(0.7, 0.9, 20)
SHAPES = [USUAL, Sampling(0.7), Sampling(2.0, 0.5), Sampling(1.0, 1.0, 3), Sampling(0.3, 0.95, 40)]
PENALTIES = {"none": {}, "some": {0: 0.0, 3: 0.2, 11: 0.5}}


def processed(logits: torch.Tensor, sampling: Sampling, factors=None) -> torch.Tensor:
    """Probabilities (R, V) by transformers' own processors, in double precision."""
    scores = logits.double().clone()
    for token, factor in (factors or {}).items():
        scores[:, token] += math.log(factor) if factor else -math.inf
    steps = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    for step in steps:
        scores = step(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("size", [50, 2049])
def test_frequencies_are_those_of_the_processors_of_transformers(size, penalty):
    """Guards the order (penalty, temperature, top-k, top-p): 10^5 draws, by chi-square."""
    n, factors = 100_000, PENALTIES[penalty]
    logits = random_logits(1, size)
    q = processed(logits, USUAL, factors)[0].numpy()
    counts = np.zeros(size)
    for part in range(0, n, 20_000):
        u = numbers(20_000, f"{size} {part}")
        rows = dict.fromkeys(range(20_000), factors) if factors else {}
        counts += np.bincount(draw(logits.expand(20_000, -1), u, rows, USUAL)[0], minlength=size)
    assert not counts[q == 0].any() and 1 < (q > 0).sum() <= 20
    assert chisquare(counts[q > 0], n * q[q > 0]).pvalue > 1e-3


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("size", [50, 2049])
def test_log_probabilities_are_those_of_the_reference_and_of_the_processors(
    size, penalty, sampling
):
    """Guards log_p, which stays the policy's own, and log_q, which is that of what was sampled."""
    n, factors = 300, PENALTIES[penalty]
    logits = random_logits(n, size)
    given = {row: factors for row in range(0, n, 2)} if factors else {}
    tokens, log_p, log_q, near = draw(logits, numbers(n), given, sampling)
    q = processed(logits, sampling)
    q[::2] = processed(logits[::2], sampling, factors)
    p, rows = logits.double().softmax(-1), range(n)
    assert log_p == pytest.approx(
        [math.log(p[r, t]) for r, t in zip(rows, tokens, strict=True)], abs=2e-5
    )
    known = [r for r in rows if not near[r]]
    assert len(known) > 0.8 * n
    own = [math.log(q[r, tokens[r]]) for r in known]
    assert [log_q[r] for r in known] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
def test_a_small_change_that_turns_a_shaped_token_was_counted(sampling):
    """Guards tokens against the batch: also where a change lets a token in or leaves it out, which
    moves all edges."""
    n, size = 4000, 300
    logits, u = random_logits(n, size), numbers(n, "turned")
    tokens, _, _, near = draw(logits, u, {}, sampling)
    rng, turned = torch.Generator().manual_seed(0), 0
    for _ in range(20):
        sign = 2.0 * torch.randint(0, 2, (n, size), generator=rng) - 1
        other = draw(logits + 0.99 * NEAR_TIE * sign, u, {}, sampling)[0]
        assert all(tie for a, b, tie in zip(tokens, other, near, strict=True) if a != b)
        turned += sum(a != b for a, b in zip(tokens, other, strict=True))
    assert turned and sum(near) < 0.1 * n


def test_tokens_that_tie_for_the_last_place_are_all_left_and_counted_as_near():
    """Guards half precision, where logits often tie: the order of a sort must not decide."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(400, -1)
    for shape in (Sampling(top_k=2), Sampling(top_p=0.75)):
        tokens, _, _, near = draw(logits, numbers(400), {}, shape)
        assert set(tokens) == {0, 1, 2, 3} and all(near)


@pytest.mark.parametrize("sampling", [USUAL, Sampling(0.01), Sampling(1.0, 0.3)], ids=str)
def test_a_shaped_row_without_a_token_gets_its_reference_and_a_ban_stays_one(sampling):
    """Bug: at a low temperature what a ban leaves has a mass of 0 in float32, so that the banned
    token came back."""
    logits, u = torch.tensor([[0.0, -4.0, -math.inf]] * 50), numbers(50)
    assert set(draw(logits, u, dict.fromkeys(range(50), {0: 0.0}), sampling)[0]) == {1}
    banned = dict.fromkeys(range(50), {0: 0.0, 1: 0.0})
    assert draw(logits, u, banned, sampling) == draw(logits, u, {}, sampling)


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_shaped_logits_that_are_not_finite_are_refused(sampling, bad):
    """Guards a broken model: truncation must not hide what is not a number."""
    logits = random_logits(3, 60)
    logits[1, 7] = bad
    with pytest.raises(PolicyError, match="not finite"):
        draw(logits, numbers(3), {}, sampling)


def test_a_mass_of_top_p_is_compared_in_float64():
    """Bug: .999 as a float32 is .99900001, so that a token more was left."""
    p = 0.99900001 - 5e-9  # between the two
    logits = torch.tensor([[p, 1 - p]], dtype=torch.float64).log()
    _, kept, _ = sampling.left_of(logits, 0.0, Sampling(top_p=0.999))
    assert kept.tolist() == [[True, False]]


def test_forbidden_tokens_are_no_near_ties():
    """Bug: with top-k above the tokens that a model allows, every token was a near tie."""
    logits = torch.tensor([[2.0, 0.0, -math.inf, -math.inf]])
    u = torch.full((1, WORDS), 0.3, dtype=torch.float64)
    tokens, _, _, near = draw(logits, u, {}, Sampling(top_k=3))
    assert (tokens, near) == ([0], [False])


# --- how far logits must have moved since a token was drawn from them -----------------------------


def needed(logits, tokens, u, sampling=AS_IS, moves=0.0):
    """How far logits must have moved since `u` gave these tokens."""
    most = torch.full((len(logits),), float(moves))
    edges = edges_of(logits, torch.as_tensor(tokens), most, sampling)
    return moved_by(edges, u.numpy(), sampling)


SHAPED = [Sampling(0.7), Sampling(1.3, top_p=0.9), Sampling(1.0, 0.5, 7), Sampling(0.8, top_k=5)]
DISTRIBUTIONS = [AS_IS, *SHAPED]


@pytest.mark.parametrize("sampling", DISTRIBUTIONS)
@pytest.mark.parametrize("vocabulary", [40, 300, 5000])
def test_the_edges_of_a_token_are_those_between_which_it_is_drawn(vocabulary, sampling):
    """Bug: an answer that nobody sampled fits, or a genuine one does not: what is drawn needs no
    move of the logits, and any other token needs one.
    """
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(200, vocabulary, generator=generator)
    u = torch.rand(200, WORDS, generator=generator, dtype=torch.float64)
    tokens = torch.tensor(draw(logits, u, {}, sampling)[0])
    assert needed(logits, tokens, u, sampling).max() == 0
    others = (tokens + torch.arange(1, 201) % (vocabulary - 1) + 1) % vocabulary
    others[others == tokens] -= 1
    assert needed(logits, others, u, sampling).min() > 0


@pytest.mark.parametrize("sampling", DISTRIBUTIONS)
@pytest.mark.parametrize("moved", [NEAR_TIE, 0.3])
def test_logits_that_have_moved_by_so_much_may_have_given_a_token(sampling, moved):
    """Bug: a genuine answer of another processor does not fit. The worst is two opposite moves."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(400, 300, generator=generator)
    u = torch.rand(400, WORDS, generator=generator, dtype=torch.float64)
    tokens = draw(logits, u, {}, sampling)[0]
    for _ in range(3):
        sign = torch.randint(0, 2, logits.shape, generator=generator) * 2 - 1
        assert needed(logits + moved * sign, tokens, u, sampling, moved).max() <= moved + 1e-6


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.6)])
def test_a_token_that_cannot_be_left_is_never_drawn(sampling):
    """Guards top-k and top-p: what they have left out has no edges, however wide the band."""
    logits = torch.tensor([[4.0, 3.9, 3.8, 0.0]])
    u = torch.full((1, WORDS), 0.99, dtype=torch.float64)
    assert needed(logits, [3], u, sampling, 0.5) == math.inf
    # the third is so near to the second that it may be left
    assert needed(logits, [2], u, sampling, 0.0) == math.inf
    assert needed(logits, [2], u, sampling, 0.5) == 0


def test_logits_of_a_short_type_move_with_its_precision():
    """Guards the unit of the band: logits twice as wide move twice as far."""
    logits = torch.tensor([[1.0, -1.0, 1.0, -1.0], [2.0, -2.0, 2.0, -2.0]])
    narrow, wide = moves_of(logits, torch.bfloat16).tolist()
    assert wide == pytest.approx(2 * narrow) and narrow > 0.1
    assert moves_of(logits, torch.float16)[0].item() == pytest.approx(narrow / 8)
    for lowest in (-math.inf, torch.finfo(torch.bfloat16).min):
        forbidden = torch.cat([logits, torch.full((2, 3), lowest)], dim=1)
        assert moves_of(forbidden, torch.bfloat16).tolist() == pytest.approx([narrow, wide])
    assert moves_of(torch.ones(1, 5), torch.bfloat16).tolist() == pytest.approx([NEAR_TIE])
    for dtype in (torch.float32, torch.float64):
        assert moves_of(logits, dtype).tolist() == pytest.approx([NEAR_TIE] * 2)


def test_edges_of_logits_that_are_not_finite_are_refused():
    """Guards the check of what the policy gives."""
    logits = torch.tensor([[0.0, math.nan]])
    with pytest.raises(PolicyError, match="not finite"):
        edges_of(logits, torch.tensor([0]), torch.zeros(1))
