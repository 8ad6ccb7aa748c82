"""Tests of the critic's network and of its files."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import LAYER, PROMPTS, RESPONSES, numbers, read, tiny

from igcore import ParameterError, RunError
from igcore.critic.latent import FEATURES, latents, shape_of
from igcore.critic.network import Critic, Spec, load_critic
from igcore.engine.kv_cache import History
from igcore.engine.local import LocalEngine
from igcore.policy import Policy
from igstudy.runs.networks import ShuffledCritic
from igstudy.training.latents import encode, single, together
from igstudy.training.loop import save_network

NAMES = dict(
    policy="tiny", policy_digest="t1", cost="letters", cost_digest="c1", reward="vowels",
    reward_digest="r1",
)  # fmt: skip
ABOUT = dict(
    accounting="terminal", checks="block", gamma_safety=1.0, budget=0.5, budget_high=2.0,
    gamma_task=0.999, max_new_tokens=4,
)  # fmt: skip
LLAMA_7B = dict(n_layers=32, kv_width=2 * 4096, hidden=4096)
SMOLLM = dict(n_layers=30, kv_width=2 * 3 * 64, hidden=576)
Z = [0.5, -1.0, 2.0]


def spec(features="ho", use_z=True, width=8, **shape):
    shape = shape or shape_of(tiny("llama"))
    return Spec(
        **NAMES,
        **ABOUT,
        **shape,
        features=features,
        layer=LAYER if features == "m" else None,
        use_z=use_z,
        width=width,
    )


def critic(features="ho", **more):
    torch.manual_seed(1)
    return Critic(spec(features, **more)).eval()


def seen(features="ho", responses=RESPONSES):
    return read(tiny("llama"), PROMPTS, responses, features, LAYER)


def states(features="ho"):
    """The states that a search would hand over."""
    return encode(tiny("llama"), PROMPTS, RESPONSES, features, LAYER)


def test_size_at_the_papers_model():
    """Guards the paper's 0.7B parameters, counted without memory, and a size that trains in minutes
    on the embedded model.
    """
    with torch.device("meta"):
        assert Critic(spec("ho", width=4096, **LLAMA_7B)).parameter_count == 740_384_770
        assert Critic(spec("ho", width=64, **SMOLLM)).parameter_count < 400_000
        assert Critic(spec("m", width=64, **SMOLLM)).parameter_count < 50_000


@torch.inference_mode()
@pytest.mark.parametrize("features", FEATURES)
def test_a_prefix_is_judged_as_if_it_were_alone(features):
    """Guards causality: a critic that sees the rest of a response in training says nothing in a
    search.
    """
    net, z = critic(features), torch.tensor([[0.3, 0.2, 0.1, -0.4]])
    whole = net(seen(features), z.expand(3, -1))
    for row, response in enumerate(RESPONSES):
        for n in range(1, len(response) + 1):
            alone = net(
                read(tiny("llama"), [PROMPTS[row]], [response[:n]], features, LAYER), z[:, :n]
            )
            for ours, theirs in zip(alone, whole, strict=True):
                torch.testing.assert_close(ours[0, -1], theirs[row, n - 1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("features", FEATURES)
def test_padding_has_no_influence(features):
    """Guards against what stands in the padding, even NaN, reaching a token by a sum, a maximum or
    a weight of 0.
    """
    net, z, spoilt = critic(features), torch.zeros(3, 4), states(features)
    x = latents(spoilt, features)
    gap = ~x.mask[..., None]
    for name in ("hidden", "middle"):
        if getattr(spoilt, name) is not None:
            setattr(spoilt, name, getattr(spoilt, name).masked_fill(gap, torch.nan))
    spoilt.keys = [keys.masked_fill(gap[:, None], torch.nan) for keys in spoilt.keys]
    spoilt.values = [values.masked_fill(gap[:, None], torch.nan) for values in spoilt.values]
    for ours, theirs in zip(net(latents(spoilt, features), z), net(x, z), strict=True):
        assert torch.equal(ours[x.mask], theirs[x.mask])


@torch.inference_mode()
def test_mean_over_layers_may_come_before_the_linear_map():
    """Guards the shortcut that halves the cost of attention over layers: it must be the attention,
    averaged.
    """
    net = critic("h").pool.over_layers
    x = torch.randn(2, 3, 5, net.out.out_features)
    every = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
    torch.testing.assert_close(net.out(net.mix(x, x).mean(2)), net(x, x, every).mean(2))


@torch.inference_mode()
def test_layers_count_one_by_one():
    """Guards the attention over layers: a critic of their mean alone would not notice what one
    gains and another loses.
    """
    net, x, z = critic("h"), seen("h"), torch.zeros(3, 4)
    before = net(x, z)[0]
    half = x.kv.shape[-1] // 2  # the keys come first
    x.kv[:, :, 0, half:] += 3
    x.kv[:, :, 1, half:] -= 3
    assert (net(x, z)[0] - before).abs()[x.mask].min() > 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("features", ["xh", "xho"])
def test_the_prompt_is_read_where_the_features_say_so(features):
    """Guards h_t as it is printed: every token sees the whole prompt, and none of its padding."""
    net, x = critic(features), seen(features)
    z = torch.zeros(3, 4)
    before = net(x, z)[0]
    assert x.prompt_mask.sum(1).tolist() == list(map(len, PROMPTS))
    for i, own in enumerate(single(x)):  # alone, without padding
        n = len(own.mask)
        alone = net(together([own]), z[:1, :n])[0]
        torch.testing.assert_close(alone[0], before[i, :n], atol=1e-5, rtol=0)
    x.prompt[0, x.prompt_mask[0]] += torch.arange(x.prompt.shape[-1]) % 3
    moved = (net(x, z)[0] - before).abs()
    assert moved[0, x.mask[0]].min() > 1e-5 and moved[1:].max() == 0


@torch.inference_mode()
@pytest.mark.parametrize("features", FEATURES)
def test_the_last_prefix_of_rows_of_any_length(features):
    """Guards which position is judged: of ragged rows not the last column."""
    net, x = critic(features), seen(features)
    logit, f2 = net(x, torch.tensor(Z)[:, None].expand(-1, 4))
    last = (torch.arange(3), x.mask.sum(1) - 1)
    ours = net.judge(states(features), Z)
    assert torch.equal(ours[0], logit[last].sigmoid()) and torch.equal(ours[1], f2[last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_what_the_engine_hands_over_is_judged_like_finished_text(cache, features, dtype):
    """Guards the search: same prefix, same judgement, up to rounding; and float32 whatever the
    policy's type.
    """
    model, net = tiny("llama", dtype), critic(features)
    engine = LocalEngine(model, {-1}, cache, watch=LAYER)
    engine.open(PROMPTS)
    block = engine.sample_block([0, 1, 2], numbers(3, 4))
    engine.rollback([0, 1, 2])
    ours = net.judge(engine.history([0, 1, 2]), Z)
    theirs = net.judge(encode(model, PROMPTS, block.tokens, features, LAYER), Z)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("features", FEATURES)
def test_nan_is_handed_through_and_stays_in_its_row(features):
    """Guards failing closed: a hidden state that cannot be read must not become a probability."""
    net, x = critic(features), states(features)
    prompts = [*x.prompts.keys, *x.prompts.values] if "x" in features else []
    for broken in (x.hidden, x.middle, *x.keys, *x.values, *prompts):
        if broken is not None:
            broken[1] = torch.nan
    for judged in net.judge(x, Z):
        assert judged.isnan().tolist() == [False, True, False]
    empty = History(torch.tensor([[False]]), torch.zeros(1, 1, 32))
    assert torch.stack(critic("o").judge(empty, [0.0])).isnan().all()


def given(**changes):
    """A policy and scorers by name and hash, as `load_critic` sees them."""
    parts = {
        role: SimpleNamespace(name=NAMES[role], digest=NAMES[f"{role}_digest"])
        for role in ("cost", "reward")
    }
    own = NAMES["policy"], tiny("llama"), None
    parts["policy"] = Policy(*own, digest=NAMES["policy_digest"])
    for name, value in changes.items():
        role, attribute = name.split("_")
        setattr(parts[role], attribute, value)
    return parts


@pytest.mark.parametrize("features", FEATURES)
def test_a_saved_critic_is_the_same(tmp_path, features):
    """Guards the files: weights, the units of z and f2, and what it is; nothing is pickled."""
    net, x = critic(features), states(features)
    net.centre.copy_(torch.tensor([0.5, -0.3])), net.scale.copy_(torch.tensor([2.0, 0.1]))
    net.about = {"train_s": 1.5}
    save_network(net, tmp_path, "critic")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic.json", "critic.safetensors"]
    back = load_critic(tmp_path, **given())
    assert back.spec == net.spec and back.about == net.about and not back.training
    assert all(torch.equal(a, b) for a, b in zip(net.judge(x, Z), back.judge(x, Z), strict=True))
    assert json.loads((tmp_path / "critic.json").read_text())["parameters"] == net.parameter_count


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(policy_name="other"), "for policy 'tiny' of hash 't1', not for 'other' of hash 't1'"),
        (dict(cost_digest="c2"), "for cost 'letters' of hash 'c1', not for 'letters' of hash 'c2'"),
        (dict(reward_name="other"), "for reward 'vowels'"),
        (dict(policy_model=tiny("llama", hidden_size=64, head_dim=8)),
         "with hidden 32, but that of policy 'tiny' has 64"),
        (dict(policy_model=tiny("llama", num_key_value_heads=1)),
         "with kv_width 32, but .* has 16"),
    ],
)  # fmt: skip
def test_a_critic_of_something_else_is_refused_by_name(tmp_path, changes, sentence):
    """Guards against a critic that answers with numbers for a model whose states it never saw."""
    save_network(critic(), tmp_path, "critic")
    with pytest.raises(ParameterError, match=sentence):
        load_critic(tmp_path, **given(**changes))


def test_damaged_files_are_refused(tmp_path):
    """Guards against a broken download or a half-written file: neither may load as a critic."""
    with pytest.raises(RunError, match="no critic can be read from"):
        load_critic(tmp_path, **given())
    save_network(critic(), tmp_path, "critic")
    weights, about = tmp_path / "critic.safetensors", tmp_path / "critic.json"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(RunError, match="is damaged: its sha256"):
        load_critic(tmp_path, **given())
    about.write_text(about.read_text()[:40])
    with pytest.raises(RunError, match="no critic can be read from"):
        load_critic(tmp_path, **given())


# --- the control ----------------------------------------------------------------------------------


def dealt(f1, f2=None, owners=None, tokens=None):
    """Return what is dealt out of these verdicts, as a list of pairs."""
    pairs = list(zip(f1, [-x for x in f1] if f2 is None else f2, strict=True))
    critic = SimpleNamespace(spec=None, watch=None, reads_keys=False, judge=None)
    tokens = [[i] for i in range(len(pairs))] if tokens is None else tokens
    return ShuffledCritic(critic).deal(pairs, owners or ["one"] * len(pairs), tokens)


@pytest.mark.parametrize("features", FEATURES)
def test_the_control_stands_where_the_critic_stands(features):
    """Guards a control that is refused, or whose states the engine does not keep: it must pass for
    the critic everywhere else.
    """
    net, x = critic(features), states(features)
    control = ShuffledCritic(net)
    assert (control.spec, control.watch, control.reads_keys) == (
        net.spec,
        net.watch,
        net.reads_keys,
    )
    ours, theirs = (torch.stack(judge(x, Z)) for judge in (control.judge, net.judge))
    assert torch.equal(ours, theirs)


def test_verdicts_are_dealt_out_whole_and_the_same_again():
    """Guards f1 and f2 dealt out apart, a verdict given twice, an order that changes from call to
    call, and no dealing at all.
    """
    f1, f2 = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)).tolist()
    pairs = list(zip(f1, f2, strict=True))
    found = dealt(f1, f2)
    assert sorted(found) == sorted(pairs)
    assert sum(a == b for a, b in zip(found, pairs, strict=True)) < 8
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert dealt(f1, f2) == found
    torch.set_rng_state(state)
    assert dealt([0.5]) == [(0.5, -0.5)] and dealt([]) == []


def test_the_control_depends_neither_on_the_batch_nor_on_last_digits():
    """Bug: verdicts were dealt out among all prompts of a batch, in an order that a last digit of a
    float decided: another group size or another processor gave other answers.
    """
    rng = torch.Generator().manual_seed(2)
    f1 = torch.rand(6, generator=rng).tolist()
    tokens = [[3, 1], [3, 2], [4, 4], [5, 0], [0, 5], [2, 2]]
    together = dealt(f1, owners=list("ababab"), tokens=tokens)
    for owner, own in (("a", [0, 2, 4]), ("b", [1, 3, 5])):
        alone = dealt([f1[i] for i in own], owners=[owner] * 3, tokens=[tokens[i] for i in own])
        assert alone == [together[i] for i in own]
    moved = [x * (1 + 1e-6) for x in f1]
    order = [f1.index(pair[0]) for pair in together]
    assert order == [moved.index(x) for x, _ in dealt(moved, owners=list("ababab"), tokens=tokens)]


def test_a_verdict_that_is_lost_stays_lost():
    """Guards failing closed: one NaN goes in and one comes out, with its own f2."""
    found = dealt([0.1, math.nan, 0.3], [1.0, 2.0, 3.0])
    assert [f2 for f1, f2 in found if math.isnan(f1)] == [2.0]
    assert sorted(f2 for _, f2 in found) == [1.0, 2.0, 3.0]
