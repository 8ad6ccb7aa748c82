"""Tests of the decoding state, on the mock model (exact) and on a tiny random Llama (float32)."""

import math
from collections import Counter

import pytest
import torch
from mockpolicy import EOS, MockModel, probabilities
from transformers import LlamaConfig, LlamaForCausalLM

from igcore.engine import NEAR_TIE, Engine, draw, uniform

TINY = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)
PROMPTS = [[5, 9, 11], [7], [3, 3, 8, 20, 41]]


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY).eval()


def numbers(n: int, length: int, name: str = "p") -> list[list[float]]:
    return [[uniform(0, name, 0, i, t) for t in range(length)] for i in range(n)]


@torch.inference_mode()
def reencode(model, ids):
    """The slow reference: one sequence, no padding, no cache."""
    return model(torch.tensor([ids])).logits[0, -1]


def test_uniform_depends_on_each_of_its_coordinates():
    """Guards against a stream of numbers, and against two coordinates running together as in (1, 11) and (11, 1)."""
    base = (0, "p", 1, 11, 111)
    others = [(1, "p", 1, 11, 111), (0, "q", 1, 11, 111), (0, "p", 11, 1, 111), (0, "p", 1, 111, 11), (0, "p", 1, 1, 1111)]
    assert uniform(*base) == uniform(*base)
    assert len({uniform(*u) for u in [base, *others]}) == 6


def test_uniforms_are_uniform():
    """Guards the scaling to [0, 1): a Kolmogorov-Smirnov distance above .02 for 10,000 has odds below 1e-3."""
    u = sorted(uniform(0, "p", 0, i, t) for i in range(100) for t in range(100))
    assert 0 <= u[0] and u[-1] < 1
    assert max(abs(x - k / len(u)) for k, x in enumerate(u)) < 0.02


def test_draw_is_the_inverse_cdf():
    """Guards the side of the edge: a uniform of exactly 0 takes the first token with mass, never a banned one."""
    logits = torch.log(torch.tensor([[0.0, 0.25, 0.5, 0.25]] * 4))
    tokens, log_p, log_q, near = draw(logits, torch.tensor([0.0, 0.2, 0.5, 0.9999999], dtype=torch.float64), {})
    assert tokens == [1, 1, 2, 3]
    assert log_p == log_q == pytest.approx([math.log(p) for p in (0.25, 0.25, 0.5, 0.25)])
    assert near == [True, False, False, True]


def test_draw_multiplies_probabilities_and_renormalises():
    """Guards the penalty: factor 0 bans, factor 1/2 halves, and log_q is normalised over what is left."""
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
    tokens, log_p, log_q, _ = draw(logits, torch.tensor([0.4], dtype=torch.float64), {0: {0: 0.0, 1: 0.5}})
    assert tokens == [2]  # .15 / .65 = .23 < .4
    assert log_p == pytest.approx([math.log(0.5)])
    assert log_q == pytest.approx([math.log(0.5 / 0.65)])


def test_draw_uses_the_reference_when_everything_is_banned():
    """Guards against NaN probabilities, from which any token could come."""
    logits = torch.log(torch.tensor([[0.5, 0.5]]))
    tokens, _, log_q, _ = draw(logits, torch.tensor([0.7], dtype=torch.float64), {0: {0: 0.0, 1: 0.0}})
    assert tokens == [1]
    assert log_q == pytest.approx([math.log(0.5)])


def test_near_ties_are_counted_on_both_sides_of_an_edge():
    logits = torch.log(torch.tensor([[0.5, 0.5]] * 3))
    u = torch.tensor([0.5 - NEAR_TIE / 2, 0.5 + NEAR_TIE / 2, 0.5 + 2 * NEAR_TIE], dtype=torch.float64)
    assert draw(logits, u, {})[3] == [True, True, False]


def test_tokens_follow_the_policy():
    """Guards the sampler as a whole against the mock's own probabilities: chi-square over seven tokens, odds below 1e-4."""
    engine = Engine(MockModel(), {EOS})
    engine.open([[1, 2]])
    n = 4000
    block = engine.sample_block([0] * n, numbers(n, 1))
    counts = Counter(t for (t,) in block.tokens)
    expected = [n * p for p in probabilities((1, 2))]
    assert sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected)) < 27.9


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
    engine = Engine(MockModel(lambda prefix: [9.0] + [0.0] * 6), {EOS})
    engine.open([[1]])
    block = engine.sample_block([0], [[0.5]])
    assert block.ended == [True] and block.tokens == [[EOS]]
    with pytest.raises(KeyError, match="have no state"):
        engine.select([0])
    engine = Engine(MockModel(), {EOS})
    engine.open([[1]])
    engine.sample_block([0, 0], [[0.9], [0.8]])
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
    """Guards padding and the uniform's coordinates; float32 sums may differ, so a near tie may part the ways from there on."""
    engine = Engine(tiny, {-1})
    engine.open(PROMPTS)
    together = engine.sample_block([0, 1, 2], [numbers(1, 12, str(i))[0] for i in range(3)])
    for i, prompt in enumerate(PROMPTS):
        engine.open([prompt])
        alone = engine.sample_block([0], numbers(1, 12, str(i)))
        assert alone.tokens[0] == together.tokens[i] or together.near_ties[i] > 0
    assert sum(together.near_ties) < 12
