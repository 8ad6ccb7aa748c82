"""Tests of weights laid out for the processor: the same products, kept between calls, never stale,
and no trace left on the model.
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from tiny import FITTING, OTHERS, tiny
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


def used(model):
    """Use a model once; return its logits, and how many copies that made."""
    with copies() as made, use_prepacked(model):
        return logits(model), made.call_count


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=IDS).logits[..., 0].sum().backward()
    optimizer.step()


def loaded(model):
    model.load_state_dict({name: 2 * x for name, x in model.state_dict().items()})


def exchanged(model):  # and where the allocator may give the first address again
    for _ in range(2):
        model.lm_head.weight.data = model.lm_head.weight.data * 3


def listed(model):
    model.model.layers[0].self_attn.names = ["one"]


def renormed(model):
    model.model.norm.variance_epsilon = 100.0


def reconfigured(model):
    model.config.output_hidden_states = True


def dropped(model):
    del model.model.layers[1]


def other(model):
    model.model.layers[0] = tiny("llama").model.layers[0]


@torch.no_grad()
def scaled(model):
    model.model.layers[0].mlp.up_proj.weight.mul_(2)


CHANGES = {
    "a training step": trained,
    "load_state_dict": loaded,
    "in place": scaled,
    "in place, behind torch's counter": lambda model: model.lm_head.weight.data.mul_(2),
    "one number of one row": lambda m: m.model.embed_tokens.weight.data[5, 0].add_(1),
    "by numpy": lambda model: model.lm_head.weight.detach().numpy().fill(0.5),
    "another storage": exchanged,
    "another type": lambda model: model.to(torch.bfloat16),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "an attribute": renormed,
    "a list": listed,
    "the configuration": reconfigured,
    "fewer layers": dropped,
    "another layer": other,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_is_that_of_the_model_as_it_is_now(change):
    """Guards against a view, copies and prompts of the weights before: LoRA merges, trainers and
    tools write to ``weight.data``, which torch does not count.
    """
    model = tiny("llama").eval()
    _, first = used(model)
    _, again = used(model)
    assert again == 0 and (first or not HAS_PRODUCT)
    view = module._KEPT[model]
    CHANGES[change](model)
    found, made = used(model)
    assert module._KEPT[model] is not view and (made or not HAS_PRODUCT)
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, model(input_ids=IDS).logits, rtol=tolerance, atol=tolerance)


def test_training_mode_is_no_change():
    """Guards the time of a model that is trained in between: a view is in evaluation mode."""
    model = tiny("llama").eval()
    used(model)
    assert used(model.train())[1] == 0 and model.training


def hooked(model):
    """A hook that reads a number which its user may change."""
    strength = [2.0]
    model.model.layers[0].register_forward_hook(lambda _, args, out: out * strength[0])
    return lambda: strength.__setitem__(0, 3.0)


def steered(model):
    layer = model.model.layers[0]
    own, strength = layer.forward, [2.0]
    layer.forward = lambda *args, **options: own(*args, **options) * strength[0]
    return lambda: strength.__setitem__(0, 3.0)


def referred(model):
    model.model.layers[0].path = [model]
    return lambda: None


@pytest.mark.parametrize("made", [hooked, steered, referred])
def test_a_model_of_which_not_all_is_known_is_not_kept(made):
    """Guards steering, whose state lies outside of the model; and a model that what is kept would
    keep in memory.
    """
    model = tiny("llama").eval()
    used(model)
    change = made(model)
    for _ in range(2):
        torch.testing.assert_close(
            used(model)[0], model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4
        )
        assert model not in module._KEPT
        change()


@pytest.mark.parametrize("made", [None, hooked, steered, referred])
def test_what_is_kept_dies_with_the_model(made):
    """Guards the user's memory: a view that refers to its model would keep both for ever."""
    model = tiny("llama").eval()
    used(model)
    if made:
        made(model)
        used(model)
    gone = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_view_that_is_in_use_is_not_found_by_another_thread():
    """Guards calls inside calls, which do not wait for their turn: two threads would set the
    attention and the hooks of one view.
    """
    model = tiny("llama")
    used(model)

    def inside():
        module._HERE.in_turn = True  # of a call whose cost calls this model
        try:
            with use_prepacked(model):
                return viewed(model)
        finally:
            module._HERE.in_turn = False

    with use_prepacked(model), ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() is not viewed(model)


def test_nothing_is_kept_after_an_error():
    """Guards a full memory, and a view that an error left in the middle of its work."""
    model = tiny("llama")
    used(model)
    with pytest.raises(KeyError), use_prepacked(model):
        raise KeyError
    assert model not in module._KEPT


def test_the_oldest_go_where_copies_are_too_large_together(monkeypatch):
    """Guards the machine's memory against the copies of many models."""
    models = [tiny("llama") for _ in range(3)]
    size = module.copied_bytes(models[0])
    monkeypatch.setattr(module, "_KEPT", weakref.WeakKeyDictionary())
    monkeypatch.setattr(module, "installed_bytes", lambda: 4 * 2 * size)
    for model in models:
        used(model)
    assert not HAS_PRODUCT or [model in module._KEPT for model in models] == [False, True, True]


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
