"""Tests of weights laid out for the processor: the same products, never stale, and no trace left on
the model.
"""

from unittest import mock

import pytest
import torch
from tinymodels import FITTING, OTHERS, tiny
from torch import nn

from igcore.engine import prepack as module
from igcore.engine.kv_cache import forward
from igcore.engine.prepack import use_prepacked, viewed

IDS = torch.tensor([[5, 7, 11, 13]])
HAS_PRODUCT = torch.backends.mkldnn.is_available()


def logits(model):
    return forward(model, input_ids=IDS, logits_to_keep=0)[1]


def copies():
    """Count the copies made."""
    return mock.patch.object(module, "_product", wraps=module._product)


@pytest.mark.parametrize("name", FITTING | OTHERS)
def test_logits_are_those_of_the_model_up_to_rounding(name):
    model = tiny(name)
    plain = logits(model)
    with copies() as made, use_prepacked(model):
        found = logits(model)
    assert not HAS_PRODUCT or made.call_count >= sum(type(m) is nn.Linear for m in model.modules())
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_weights_changed_between_searches_are_seen():
    """Guards against a copy that outlives its search: the reference policy would be the one before
    the last training step.
    """
    model = tiny("llama")
    with use_prepacked(model):
        before = logits(model)
    with torch.no_grad():
        model.lm_head.weight.data.neg_()
    with use_prepacked(model):
        assert torch.allclose(logits(model), -before)


def test_searches_that_overlap_share_one_copy():
    """Guards memory, and the second search against losing its copies when the first one ends."""
    model = tiny("llama")
    with use_prepacked(model):
        with copies() as made, use_prepacked(model):
            logits(model)
        assert made.call_count == 0
        model.lm_head.weight.data.zero_()
        assert not HAS_PRODUCT or logits(model).any()  # the copy is still read
    assert not logits(model).any()


def test_the_model_is_as_it_was_afterwards():
    """Guards the caller's model, also where a forward pass fails."""
    model = tiny("llama")
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    with use_prepacked(model):
        logits(model)
        with pytest.raises(IndexError):
            forward(model, input_ids=IDS + 10**6, logits_to_keep=0)
        assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert model not in module._HERE.views


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    """Guards models whose layers were wrapped (offloading, adapters): their weights may not be
    where they seem.
    """
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x + 1
    layer.eval()
    with use_prepacked(layer):
        assert viewed(layer).model(torch.zeros(1, 2)).tolist() == [[1, 1]]
    assert layer(torch.zeros(1, 2)).tolist() == [[1, 1]]


class Own(torch.Tensor):
    """A weight with a product of its own, as a quantised one has."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return args[0] + 1
        return super().__torch_function__(function, types, args, kwargs)


def test_a_weight_with_a_product_of_its_own_is_not_copied():
    """Bug: every search of a model that torchao had quantised failed on a CPU."""
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Own))
    with copies() as made, use_prepacked(layer.eval()):
        found = viewed(layer).model(torch.zeros(1, 2))
    assert made.call_count == 0 and found.tolist() == [[1, 1]]


def test_a_caller_may_cast_by_itself():
    """Bug: inside `torch.autocast` oneDNN refused the copies, or the KV cache another type."""
    model = tiny("llama")
    with use_prepacked(model):
        plain = logits(model)
        with torch.autocast("cpu", torch.bfloat16):
            found = logits(model)
    assert torch.equal(found, plain)


def test_copies_that_do_not_fit_are_not_made(monkeypatch):
    """Guards the machine's memory; the rule must not look at what is free, or a resumed run would
    sum in another order.
    """
    model = tiny("llama")
    size = sum(m.weight.nbytes for m in model.modules() if type(m) is nn.Linear)
    monkeypatch.setattr(module, "installed_bytes", lambda: 4 * size - 4)
    with copies() as made, use_prepacked(model):
        logits(model)
    assert made.call_count == 0
    assert module.missing_bytes(model) == 0


def test_the_bytes_planned_for_are_those_of_the_copies():
    model = tiny("llama")
    size = sum(m.weight.nbytes for m in model.modules() if type(m) is nn.Linear) * HAS_PRODUCT
    assert module.missing_bytes(model, tiny("llama")) == 2 * size
    with use_prepacked(model):
        assert module.missing_bytes(model) == 0


def test_copies_of_one_model_are_freed_when_those_of_the_next_cannot_be_made(monkeypatch):
    """Guards against weights of an earlier search: memory ran out, the search was tried again, and
    the copies stayed.
    """
    models = [tiny("llama"), tiny("llama")]
    layers = module._layers

    calls = []

    def fail(view):
        calls.append(view)
        if len(calls) == 2:
            raise MemoryError
        return layers(view)

    monkeypatch.setattr(module, "_layers", fail)
    with pytest.raises(MemoryError), use_prepacked(*models):
        pass
    assert len(calls) == 2 and not any(model in module._HERE.views for model in models)


@pytest.mark.parametrize(
    "broken",
    [mock.Mock(side_effect=RuntimeError("no kernel")), lambda weight, bias: lambda x: x[:, :5]],
)
def test_a_build_without_the_product_does_without(monkeypatch, broken):
    """Guards other builds of torch: an operator that is missing, or that means something else, must
    not decide a token.
    """
    monkeypatch.setattr(module, "_product", broken)
    module._multiplies.cache_clear()
    try:
        model = tiny("llama")
        plain = logits(model)
        with use_prepacked(model):
            assert torch.equal(logits(model), plain)
    finally:
        module._multiplies.cache_clear()
