"""Tests of the state in transformers' own cache, against one sequence read alone."""

import pytest
import torch
import transformers
from tiny import OTHERS, PROMPTS, reencode, tiny

from igcore import PolicyError
from igcore.engine.kv_cache import DynamicRows, cache_name, forward, padded
from igcore.engine.local import LocalEngine

# keys, a window of them, convolutions, recurrent states
HELD = ["llama", "mistral-window", "lfm2", "falcon_h1"]


def tensors(x):
    """Every tensor of a state, copied."""
    if isinstance(x, torch.Tensor):
        return [x.clone()]
    parts = (
        x
        if isinstance(x, list)
        else (x if isinstance(x, dict) else getattr(x, "__dict__", {})).values()
    )
    return [t for part in parts for t in tensors(part)]


def state_of(rows) -> list[torch.Tensor]:
    return tensors(rows.cache.layers) + tensors([rows.mask, rows.hidden, rows.logits, rows.past])


@pytest.mark.parametrize("name", HELD)
def test_rows_of_two_states_are_copied_and_their_sources_left_alone(name):
    """Guards retries: a step on a copy must not write into what it was copied from, in whatever a
    layer keeps.
    """
    model = tiny(name)
    root = DynamicRows.open(model, PROMPTS)
    one = (
        root.gather([(root, row) for row in (0, 1, 2)])
        .step(range(3), [1, 2, 3])
        .step(range(3), [4, 5, 6])
    )
    two = (
        root.gather([(root, row) for row in (2, 1)]).step(range(2), [7, 8]).step(range(2), [9, 10])
    )
    before = [state_of(rows) for rows in (root, one, two)]
    rows = root.gather([(two, 0), (one, 2), (one, 0), (two, 0)]).step(range(4), [11, 12, 13, 14])
    rows = rows.step([3, 1, 2], [15, 16, 17])
    expected = [
        PROMPTS[2] + [7, 9, 14, 15],
        PROMPTS[2] + [3, 6, 12, 16],
        PROMPTS[0] + [1, 4, 13, 17],
    ]
    for row, ids in enumerate(expected):
        hidden, logits = reencode(model, ids)
        assert torch.allclose(rows.logits[row], logits[-1], atol=1e-4)
        assert torch.allclose(rows.past[row], hidden[-4:], atol=1e-4)
    for old, state in zip(before, (root, one, two), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, state_of(state), strict=True))


@torch.inference_mode()
def test_the_history_of_a_window_is_what_it_still_keeps():
    """Guards slices by absolute position, which are empty or of other tokens in a cache that has
    forgotten its beginning.
    """
    model = tiny("mistral-window")
    rows = DynamicRows.open(model, PROMPTS)
    full = tiny("mistral")
    read = ([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15])
    for length, tokens in enumerate(read, start=1):
        rows = rows.step(range(3), tokens)
        history = rows.history(range(3))
        n = min(length, 3)  # a window of 4 keeps 3 for the next token
        assert history.hidden.shape[1] == length
        assert history.keys[0].shape[2] == history.values[1].shape[2] == n
    past = transformers.DynamicCache(config=full.config)
    full(torch.tensor([PROMPTS[1] + [2, 5, 8, 11, 14]]), **{cache_name(full): past})
    # of the first layer: no window before it
    assert torch.allclose(history.keys[0][1], past.layers[0].keys[0, :, -3:], atol=1e-5)


def test_the_history_names_only_layers_with_attention():
    """Guards hybrid models: a convolution keeps no keys."""
    rows = DynamicRows.open(tiny("lfm2"), PROMPTS).step(range(3), [1, 2, 3])
    history = rows.history(range(3))
    assert len(history.keys) == len(history.values) == 1 and history.keys[0].shape == (3, 2, 1, 8)


def test_a_model_that_ignores_its_past_is_refused():
    """Guards against drawing every token without its context: RWKV swallows a cache and has a state
    of another name, as Mamba had until transformers 5.23.
    """
    settings = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**settings)).eval()
    with pytest.raises(PolicyError, match="RwkvForCausalLM does not carry"):
        LocalEngine(model, {-1}).open(PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gpt2", *OTHERS])
def test_a_backbone_gives_the_hidden_states_of_the_whole_model(name):
    """Guards models without a head, as scorers have them: the same states, and no logits."""
    model = tiny(name)
    ids, mask = padded(PROMPTS, "cpu")
    inputs = dict(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    )
    hidden, logits = forward(model, **inputs, logits_to_keep=0)
    alone, none = forward(model.base_model, **inputs, logits_to_keep=0)
    assert torch.equal(hidden, alone) and logits.shape == (3, 5, 97) and none.shape == (3, 5, 0)


def test_the_hook_on_the_head_is_taken_off():
    """Guards the user's model, also when a step fails."""
    head = torch.nn.Identity()

    def fail(**_):
        raise ValueError("no")

    class Model:
        device = torch.device("cpu")
        __call__ = staticmethod(fail)
        get_output_embeddings = staticmethod(lambda: head)

    with pytest.raises(ValueError, match="no"):
        forward(Model(), input_ids=None)
    assert not head._forward_pre_hooks
