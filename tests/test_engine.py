"""Tests of the decoding state, on the mock model (exact) and on a tiny random Llama (float32)."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from mockpolicy import EOS, MockModel, probabilities
from scipy.stats import chisquare, kstest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from igcore.engine import NEAR_TIE, Engine, _exponential, draw, exponentials, random_key

TINY = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)
PINNED = [0.20624426, 2.2046015, 2.6316619, 2.2002091, 0.19033268]
PROMPTS = [[5, 9, 11], [7], [3, 3, 8, 20, 41]]


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY).eval()


def numbers(n: int, length: int, name: str = "p") -> list[list[int]]:
    return [[random_key(0, name, 0, i, step) for step in range(length)] for i in range(n)]


@torch.inference_mode()
def reencode(model, ids):
    """The slow reference: one sequence, no padding, no cache."""
    return model(torch.tensor([ids])).logits[0, -1]


def test_a_key_depends_on_each_of_its_coordinates():
    """Guards against a stream of numbers, and against two coordinates running together as in (1, 11) and (11, 1)."""
    base = (0, "p", 1, 11, 111)
    others = [(1, "p", 1, 11, 111), (0, "q", 1, 11, 111), (0, "p", 11, 1, 111), (0, "p", 1, 111, 11), (0, "p", 1, 1, 1111)]
    assert random_key(*base) == random_key(*base)
    assert len({random_key(*u) for u in [base, *others]}) == 6


def test_the_random_numbers_are_the_same_next_year():
    """Guards every committed result against a library that changes its streams."""
    first = exponentials([random_key(0, "p", 0, 0, 0)], 5)[0]
    assert first == pytest.approx(PINNED, rel=1e-6)


def test_exponentials_are_exponential_and_independent():
    """Guards the transformation of the bits: Kolmogorov-Smirnov, and no correlation between rows or neighbours."""
    e = exponentials([random_key(0, "p", 0, i, 0) for i in range(40)], 501).astype(float)
    assert kstest(e.ravel(), "expon").pvalue > 1e-3
    assert (e > 0).all() and np.isfinite(e).all()
    assert abs(np.corrcoef(e[:, :-1].ravel(), e[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(e[:-1].ravel(), e[1:].ravel())[0, 1]) < 0.03


def test_no_bits_give_an_arrival_at_zero_or_never():
    """Guards both ends: a time of 0 would let a banned token win 0 / 0, and rounding up to w = 1 would warn."""
    ends = _exponential(np.array([0, 1, 2**31, 2**32 - 1], dtype="u4"))
    assert ends == pytest.approx([2**-33, 1.5 * 2**-32, math.log(2), 24 * math.log(2)], rel=1e-6)


def keys(n):
    return [random_key(0, "draw", 0, i, 0) for i in range(n)]


def test_draw_follows_the_factors():
    """Guards the penalty: factor 0 bans, factor 1/2 halves, and log_q is normalised over what is left."""
    n, p = 6000, [0.2, 0.3, 0.4, 0.1]
    logits = torch.tensor(p).log().repeat(n, 1)
    tokens, log_p, log_q, _ = draw(logits, keys(n), {row: {0: 0.0, 1: 0.5} for row in range(n)})
    expected = np.array([0, 0.15, 0.4, 0.1]) / 0.65
    assert 0 not in tokens
    assert chisquare(np.bincount(tokens, minlength=4)[1:], n * expected[1:]).pvalue > 1e-3
    assert log_p == pytest.approx([math.log(p[t]) for t in tokens], rel=1e-5)
    assert log_q == pytest.approx([math.log(expected[t]) for t in tokens], rel=1e-5)


def test_draw_uses_the_reference_when_everything_is_banned():
    """Guards against NaN probabilities, from which any token could come."""
    logits = torch.log(torch.tensor([[0.5, 0.5]] * 20))
    tokens, _, log_q, _ = draw(logits, keys(20), dict.fromkeys(range(20), {0: 0.0, 1: 0.0}))
    assert set(tokens) == {0, 1} and log_q == pytest.approx([math.log(0.5)] * 20)
    assert tokens == draw(logits, keys(20), {})[0]


def test_a_banned_token_is_not_drawn_when_the_rest_is_tiny():
    """Guards against overflow: with e^-100 left over every arrival would be infinite, and the banned token the first."""
    logits = torch.tensor([[0.0, -90.0, -85.0]] * 50)
    tokens, _, log_q, _ = draw(logits, keys(50), dict.fromkeys(range(50), {0: 0.0}))
    assert 0 not in tokens and all(math.isfinite(x) for x in log_q)


def test_a_token_without_mass_is_never_drawn():
    logits = torch.tensor([[0.0, -math.inf, 0.0]] * 200)
    assert set(draw(logits, keys(200), {})[0]) == {0, 2}


def test_near_ties_are_those_that_a_small_change_of_the_logits_can_turn():
    """Guards the count: every token that changes under noise of the size of float32 errors was counted, and few were."""
    torch.manual_seed(0)
    logits = torch.randn(4000, 50)
    tokens, _, _, near = draw(logits, keys(4000), {})
    shifted = draw(logits + NEAR_TIE / 4 * torch.randn(4000, 50).sign(), keys(4000), {})[0]
    assert all(n for a, b, n in zip(tokens, shifted, near, strict=True) if a != b)
    assert 0 < sum(near) < 10


def test_tokens_follow_the_policy():
    """Guards the sampler as a whole against the mock's own probabilities, by chi-square."""
    engine = Engine(MockModel(), {EOS})
    engine.open([[1, 2]])
    n = 4000
    block = engine.sample_block([0] * n, numbers(n, 1))
    counts = Counter(t for (t,) in block.tokens)
    expected = [n * p for p in probabilities((1, 2))]
    assert chisquare([counts[t] for t in range(7)], expected).pvalue > 1e-3


def test_logits_after_selection_and_expansion_equal_reencoding(tiny):
    """Guards left padding, positions, gather and stacking: any slip moves the logits by far more than 1e-4."""
    engine = Engine(tiny, {-1})
    engine.open(PROMPTS)
    first = engine.sample_block([0, 0, 1, 1, 2, 2], numbers(6, 4))
    engine.rollback(keep=[1, 2, 5])
    second = engine.sample_block([1, 2], numbers(2, 4, "retry"))
    engine.select([5, 7, 1, 6])  # out of order, over both rounds
    sequences = [
        PROMPTS[2] + first.tokens[5],
        PROMPTS[2] + second.tokens[1],
        PROMPTS[0] + first.tokens[1],
        PROMPTS[1] + second.tokens[0],
    ]
    third = engine.sample_block([3, 0, 0, 2, 1], numbers(5, 3, "third"))
    engine.select(range(5))
    sequences = [sequences[i] + t for i, t in zip([3, 0, 0, 2, 1], third.tokens, strict=True)]
    for row, ids in enumerate(sequences):
        assert torch.allclose(engine.rows.logits[row], reencode(tiny, ids), atol=1e-4)


def test_learned_positions_count_without_the_padding():
    """Guards position_ids: rotary positions only feel differences, so that a shift by the padding would stay unseen."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    engine = Engine(model, {-1})
    engine.open(PROMPTS)
    block = engine.sample_block([0, 1, 2], numbers(3, 4))
    engine.select([0, 1, 2])
    for row, prompt in enumerate(PROMPTS):
        assert torch.allclose(engine.rows.logits[row], reencode(model, prompt + block.tokens[row]), atol=1e-4)


def test_every_end_token_ends():
    """Guards checkpoints with several end tokens, of which configurations often name only one."""
    engine = Engine(MockModel(), {EOS, 3, 5})
    engine.open([[1]])
    block = engine.sample_block([0] * 60, numbers(60, 3))
    assert {tokens[-1] for tokens, ended in zip(block.tokens, block.ended, strict=True) if ended} == {EOS, 3, 5}
    assert not any({EOS, 3, 5} & set(tokens[:-1]) for tokens in block.tokens)


@torch.inference_mode()
def test_hidden_state_is_the_input_of_the_head(tiny):
    """Guards o_t: the state after the final norm, at the last token."""
    engine = Engine(tiny, {-1})
    engine.open(PROMPTS)
    for row, ids in enumerate(PROMPTS):
        assert torch.allclose(engine.rows.hidden[row], tiny.model(torch.tensor([ids])).last_hidden_state[0, -1], atol=1e-5)


def test_rollback_is_bit_equal(tiny):
    """Guards the state at the block's start: a retry with the same numbers must repeat the same tokens and logits."""
    engine = Engine(tiny, {-1})
    engine.open(PROMPTS)
    before = [layer.keys.clone() for layer in engine.rows.cache.layers]
    first = engine.sample_block([0, 1, 2], numbers(3, 5))
    engine.rollback(keep=[0, 1, 2])
    second = engine.sample_block([0, 1, 2], numbers(3, 5))
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, engine.rows.cache.layers, strict=True))
    assert first.tokens == second.tokens and first.log_p == second.log_p
    engine.select([0, 1, 2, 3, 4, 5])
    assert torch.equal(engine.rows.logits[:3], engine.rows.logits[3:])


def test_candidates_that_ended_or_were_freed_cannot_be_selected():
    engine = Engine(MockModel(lambda prefix: [99.0] + [0.0] * 6), {EOS})
    engine.open([[1]])
    block = engine.sample_block([0], numbers(1, 1))
    assert block.ended == [True] and block.tokens == [[EOS]]
    with pytest.raises(KeyError, match="have no state"):
        engine.select([0])
    engine = Engine(MockModel(), {EOS})
    engine.open([[1]])
    assert engine.sample_block([0, 0], numbers(2, 1)).ended == [False, False]
    engine.rollback(keep=[1])
    with pytest.raises(KeyError, match=r"\[0\]"):
        engine.select([0])


def test_a_row_stops_at_its_end_token_and_costs_nothing_afterwards():
    """Guards EOS: the token is kept, nothing follows it, and no step of an ended row is computed."""
    model = MockModel()
    engine = Engine(model, {EOS})
    engine.open([[1], [2, 3]])
    block = engine.sample_block([0] * 20 + [1] * 20, numbers(40, 6))
    assert 0 < sum(block.ended) < 40
    for tokens, ended in zip(block.tokens, block.ended, strict=True):
        assert ended == (tokens[-1] == EOS)
        assert EOS not in tokens[:-1]
        assert len(tokens) == 6 or ended
    drawn = sum(len(tokens) - ended for tokens, ended in zip(block.tokens, block.ended, strict=True))
    assert model.tokens_forwarded == 3 + drawn  # the prompts once, and every live token once


def test_tokens_do_not_depend_on_the_batch_up_to_counted_near_ties(tiny):
    """Guards padding and the coordinates of the keys; float32 sums differ, so only a near tie may part the ways."""
    engine = Engine(tiny, {-1})
    engine.open(PROMPTS)
    together = engine.sample_block([0, 1, 2], [numbers(1, 40, str(i))[0] for i in range(3)])
    for i, prompt in enumerate(PROMPTS):
        engine.open([prompt])
        alone = engine.sample_block([0], numbers(1, 40, str(i)))
        assert alone.tokens[0] == together.tokens[i] or together.near_ties[i] > 0
    assert sum(together.near_ties) < 3
