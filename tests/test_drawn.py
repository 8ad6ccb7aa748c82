"""Tests of how far logits must have moved since a token was drawn from them."""

import math

import pytest
import torch

from igcore import PolicyError
from igcore.engine.sampling import AS_IS, NEAR_TIE, WORDS, Sampling, draw
from igstudy.runs.drawn import edges_of, moved_by, moves_of


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
