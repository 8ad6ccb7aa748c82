"""Tests of what a critic reads: one forward pass, the slow way token by token, and the engine must
agree.
"""

import pytest
import torch
from tiny import LAYER, PROMPTS, RESPONSES, Counter, numbers, read, tiny
from transformers import DynamicCache

from igcore import ParameterError
from igcore.critic.latent import FEATURES, latents, shape_of
from igcore.engine.agreement import cache_for
from igcore.engine.kv_cache import cache_name
from igcore.engine.local import LocalEngine
from igstudy.training.latents import GIB, Source, single, together


@torch.inference_mode()
def token_by_token(model, prompt, response, layer=LAYER, keys=True):
    """The slow reference: encode every prefix alone, without padding, and read its last token."""
    out = {"hidden": [], "middle": [], "keys": [], "values": []}
    for n in range(1, len(response) + 1):
        seen, cache = {}, DynamicCache(config=model.config)

        def at_head(_, args, seen=seen):
            seen["hidden"] = args[0]

        def at_layer(_, args, out, seen=seen):
            seen["middle"] = out[0] if isinstance(out, tuple) else out

        hooks = [
            model.get_output_embeddings().register_forward_pre_hook(at_head),
            model.get_decoder().layers[layer].register_forward_hook(at_layer),
        ]
        ids = torch.tensor([prompt + response[:n]])
        model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
        [hook.remove() for hook in hooks]
        for name, states in seen.items():
            out[name].append(states[0, -1])
        for name in ("keys", "values") if keys else ():
            out[name].append(torch.stack([getattr(x, name)[0, :, -1] for x in cache.layers]))
    # (n, H), (n, layers, heads, head_dim)
    return {name: torch.stack(rows) for name, rows in out.items() if rows}


def of_layers(want):
    """Keys and values of a token in each layer, (n, layers, kv_width)."""
    return torch.cat([want["keys"].flatten(2), want["values"].flatten(2)], dim=-1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2-full"])
def test_one_forward_pass_gives_what_every_prefix_alone_gives(name):
    """Guards padding on both sides, positions and the place of the hooks: any slip moves a feature
    by far more than 1e-4.
    """
    model = tiny(name)
    both = read(model, PROMPTS, RESPONSES, "ho")
    middle = read(model, PROMPTS, RESPONSES, "m", LAYER)
    mask = [[True] * 4, [True] + [False] * 3, [True] * 3 + [False]]
    assert both.mask.tolist() == middle.mask.tolist() == mask
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        want, n = token_by_token(model, prompt, response), len(response)
        torch.testing.assert_close(both.hidden[row, :n], want["hidden"], atol=1e-4, rtol=0)
        torch.testing.assert_close(middle.middle[row, :n], want["middle"], atol=1e-4, rtol=0)
        torch.testing.assert_close(both.kv[row, :n], of_layers(want), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mistral-window", "lfm2", "falcon_h1"])
def test_models_with_another_state(name):
    """Guards windows, convolutions and state spaces, which cannot go on from a prompt's state with
    several tokens at once.
    """
    model = tiny(name)
    hidden = read(model, PROMPTS, RESPONSES, "o").hidden
    middle = read(model, PROMPTS, RESPONSES, "m", LAYER).middle
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        want, n = token_by_token(model, prompt, response, keys=False), len(response)
        torch.testing.assert_close(hidden[row, :n], want["hidden"], atol=1e-4, rtol=0)
        torch.testing.assert_close(middle[row, :n], want["middle"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_features_of_training_are_those_of_the_search(cache, dtype):
    """Guards the critic against being asked about states it was not trained on: selection,
    positions, another attention path.
    """
    model = tiny("llama", dtype)
    engine = LocalEngine(model, {-1}, cache, watch=LAYER)
    engine.open(PROMPTS)
    first = engine.sample_block([0, 0, 1, 2], numbers(4, 3))
    engine.select([3, 1])
    second = engine.sample_block([1, 0, 1], numbers(3, 2, "then"))
    states = engine.history([2, 0, 1])
    found, watched = latents(states, "ho"), latents(states, "m")
    # prompt, candidate of the first block, of the second
    owners = [(0, 1, 2), (0, 1, 0), (2, 3, 1)]
    prompts = [PROMPTS[p] for p, _, _ in owners]
    responses = [first.tokens[a] + second.tokens[b] for _, a, b in owners]
    want = read(model, prompts, responses, "ho")
    middle = read(model, prompts, responses, "m", LAYER)
    assert found.mask.tolist() == watched.mask.tolist() == want.mask.tolist()
    pairs = [(found.hidden, want.hidden), (watched.middle, middle.middle), (found.kv, want.kv)]
    for ours, theirs in pairs:
        # as much as any two attention paths differ
        scale = 1e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps ** 0.75
        assert (ours - theirs).abs().max() <= scale * theirs.abs().max()


def test_layers_above_the_middle_one_are_not_run():
    """Guards the time of training, of which features are most; and hooks left behind, which would
    stop the policy for ever.
    """
    model, ran = tiny("llama"), set()
    cache_for(model)  # tried once, before anything is counted
    counters = [
        layer.register_forward_hook(lambda *_, i=i: ran.add(i))
        for i, layer in enumerate(model.get_decoder().layers)
    ]
    read(model, PROMPTS, RESPONSES, "m", 0)
    assert ran == {0}
    [counter.remove() for counter in counters]
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, 97)


def test_a_prompt_is_encoded_once_for_all_its_responses():
    """Guards the time of training: five responses to a long prompt must not cost five prompts."""
    model = tiny("llama")
    cache_for(model)  # tried once, before anything is counted
    with Counter(model) as count:
        read(model, [PROMPTS[2], PROMPTS[0], PROMPTS[2], PROMPTS[2]], [[1, 2]] * 4)
    assert count.tokens == 2 * 5 + 4 * 2  # two prompts padded to five tokens, four responses of two


def test_only_what_is_read_is_kept():
    """Guards memory: keys and values of all layers are some hundred times the rest."""
    model = tiny("llama")
    for features in FEATURES:
        found = read(model, PROMPTS, RESPONSES, features, 0)
        assert bool(found.hidden.numel()) == ("o" in features)
        assert bool(found.middle.numel()) == ("m" in features)
        assert bool(found.kv.numel()) == ("h" in features)
        assert bool(found.prompt.numel()) == ("x" in features)


@pytest.mark.parametrize("features", FEATURES)
def test_held_in_memory_or_made_again_is_the_same(features):
    """Guards the order of held rows (they are encoded by length) and the padding between batches of
    different lengths.
    """
    model = tiny("llama")
    prompts, responses = PROMPTS * 15, [r + [5] * (i % 4) for i, r in enumerate(RESPONSES * 15)]
    held, made = (Source(model, prompts, responses, features, 0, gb) for gb in (1.0, 0.0))
    assert held.held and not made.held
    index = [40, 3, 17, 3]
    # prompts are padded on either side
    ours, theirs = (together(single(source.take(index))) for source in (held, made))
    assert ours.mask.tolist() == theirs.mask.tolist()
    assert ours.mask.sum(1).tolist() == [len(responses[i]) for i in index]
    torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-4, rtol=1e-4)


def test_a_prompt_is_held_once_for_all_its_responses():
    """Bug: keys and values of the prompt in memory for each of its responses, so that a critic that
    reads them did not fit and was encoded again in every epoch.
    """
    model, prompt = tiny("llama"), PROMPTS[0]
    responses = [[1, 2, 3], [4], [2, 2]]
    source = Source(model, [prompt] * 3, responses, "xho", None, 1.0)
    assert len({x.prompt.data_ptr() for x in source.held.values()}) == 1
    one = Source(model, [prompt], [[1, 2, 3]], "xho", None, 1.0).held[0]
    of_response, of_prompt = (sum(x.nbytes for x in part) for part in (one[:4], one[4:]))
    enough = 3 * of_response + of_prompt  # bytes
    for limit, fits in ((enough, True), (enough - 1, False)):
        assert bool(Source(model, [prompt] * 3, responses, "xho", None, limit / GIB).held) == fits


def test_rows_of_one_class_train():
    """Guards against inference tensors, which autograd refuses to save."""
    x = read(tiny("llama"), PROMPTS, RESPONSES, "o")
    torch.nn.Linear(32, 1)(x.hidden).sum().backward()


def test_shapes_are_those_of_the_latents():
    """Guards against sizes taken from a config, which not all families write alike."""
    assert shape_of(tiny("llama")) == {"n_layers": 2, "kv_width": 2 * 2 * 8, "hidden": 32}
    assert shape_of(tiny("gpt2")) == {"n_layers": 2, "kv_width": 2 * 32, "hidden": 32}
    assert shape_of(tiny("lfm2"))["n_layers"] == 1  # the other layer is a convolution


@pytest.mark.parametrize(
    "name, responses, features, layer, sentence",
    [
        ("llama", RESPONSES, "m", 2, "layer is 2; features 'm' need one of the 2 layers"),
        ("llama", RESPONSES, "m", None, "layer is None"),
        ("gpt2", RESPONSES, "m", 0, "one of the 0 layers of GPT2LMHeadModel"),
        ("mistral-window", RESPONSES, "ho", 0, "choose features 'o' or 'm'"),
    ],
)
def test_bad_input_is_one_sentence(name, responses, features, layer, sentence):
    with pytest.raises(ParameterError, match=sentence):
        read(tiny(name), PROMPTS, responses, features, layer)
