"""Tests of RE-Control: its value network, the training of it, and steering, on tiny random models
that speak seven letters.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mockpolicy import EOS, LetterCost, LetterReward, mock_policy
from tiny import PROMPTS, letters, numbers, reencode, tiny, untrained
from tiny import value_network as network
from torch.nn.functional import gelu

from igcore import Guard, ParameterError, PolicyError, Prompt, decode
from igcore.engine.local import LocalEngine
from igcore.engine.sampling import NEAR_TIE
from igstudy.baselines.re_control import SteeredEngine, load_value
from igstudy.baselines.value_training import ValueConfig, of_first, train_value, value_source
from igstudy.runs.critic_params import RolloutConfig
from igstudy.runs.decode_params import Settings
from igstudy.runs.rollout_run import roll_out
from igstudy.training import loop
from igstudy.training.rollouts import Rollout

SCORERS = {"cost": LetterCost(), "reward": LetterReward()}
TEXTS = [Prompt(f"{i:02d}", text, "mock") for i, text in enumerate("ab fed c dd eae fcb a".split())]
CONFIG = Settings(
    budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=8, group_size=3, value_steps=5
)
METHODS = ["re-control", "re-control-lagrangian"]


def speaking(name, dtype=torch.float32, **more):
    """A tiny model; where its head has a bias, one that counts."""
    model = tiny(name, dtype, **more)
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        bias.data.normal_()
    return model


def states(model):
    """The state of an engine after prompts: its o_t and logits are inference tensors."""
    engine = LocalEngine(model, {-1})
    engine.open([[token % model.config.vocab_size for token in prompt] for prompt in PROMPTS])
    return engine.rows


def decoded(method, policy=None, value=None, prompts=TEXTS, **changes):
    config = replace(CONFIG, **changes)
    guard = Guard(policy or letters(), **SCORERS, config=config, critic=value or network())
    return list(decode(method, guard, prompts))


def tokens(responses):
    return [(r.prompt_id, r.tokens) for r in responses]


# --- steering -------------------------------------------------------------------------------------


def literal(made, hidden, multiplier, steps, size):
    """Climb from one o_t (H,) as the paper has it, with V written out and torch's own optimiser."""
    h = torch.nn.Parameter(hidden.clone())
    optimizer = torch.optim.SGD([h], lr=size, maximize=True)
    layers = [made.layers[i] for i in (0, 3, 6)]
    for _ in range(steps):
        optimizer.zero_grad()
        x = h
        for i, layer in enumerate(layers):
            x = layer.weight @ x + layer.bias
            x = gelu(x) if i < 2 else x
        reward, cost = x[0] * made.scale[0] + made.centre[0], x[1] * made.scale[1] + made.centre[1]
        (reward - multiplier * cost).backward()
        optimizer.step()
    return h.detach()


@pytest.mark.parametrize("outer", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])
def test_steering_is_the_gradient_ascent_of_the_paper(name, outer):
    """Bug: a sign, a lambda on the wrong output, rows that share a gradient, a head's bias added
    twice, autograd switched off.
    """
    model = speaking(name)
    made = network(replace(letters(), model=model))
    settings = replace(CONFIG, value_steps=7, value_step_size=0.2, lagrange_multiplier=1.5)
    rows = states(model)
    with outer():
        found = made.steering(model, settings)(rows.hidden, rows.logits)
    for i in range(len(PROMPTS)):
        h = literal(made, rows.hidden[i], 1.5, 7, 0.2)
        with torch.no_grad():
            assert torch.allclose(found[i], model.get_output_embeddings()(h), atol=1e-4)
        assert (h - rows.hidden[i]).norm() > 0.1 and (found[i] - rows.logits[i]).abs().max() > 0.05


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{"value_steps": 0}, {"value_step_size": 0.0}])
def test_without_steps_it_is_the_base_method(method, cache, changes):
    """Bug: another random number or another length for steered methods, or logits that are not the
    reference's bit for bit.
    """
    policy = replace(letters(), cache=cache)
    ours, base = decoded(method, policy, **changes), decoded("base", policy)
    assert tokens(ours) == tokens(base)
    assert [r.trace[0]["kl"] for r in ours] == pytest.approx([0.0] * len(TEXTS), abs=1e-6)


def test_the_vanilla_method_is_the_lagrangian_one_at_zero():
    """Bug: a vanilla method that minds the cost, or a Lagrangian one that does not."""
    vanilla = tokens(decoded("re-control", lagrange_multiplier=7.0))
    assert vanilla == tokens(decoded("re-control-lagrangian", lagrange_multiplier=0.0))
    assert vanilla != tokens(decoded("re-control-lagrangian", lagrange_multiplier=7.0))
    assert vanilla != tokens(decoded("base"))


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_keys_and_values_are_those_of_the_tokens(cache):
    """Bug: a steered hidden state that is carried on: the next token would not be read as any
    other.
    """
    model, keys = tiny("llama"), numbers(3, 5)
    made = network(replace(letters(), model=model))
    steering = made.steering(model, replace(CONFIG, value_steps=5, value_step_size=0.5))
    engine = SteeredEngine(model, {-1}, cache)
    engine.steering = steering
    engine.open(PROMPTS)
    block = engine.sample_block([0, 1, 2], keys)
    plain = LocalEngine(model, {-1}, cache)
    plain.open(PROMPTS)
    assert plain.sample_block([0, 1, 2], keys).tokens != block.tokens
    rows = plain.rows.gather([(plain.rows, row) for row in range(3)], reserve=5)
    for step in range(5):
        rows = rows.step(range(3), [row[step] for row in block.tokens])
    ours, theirs = engine.history([0, 1, 2]), rows.history([0, 1, 2])
    for name in ("keys", "values"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True)
        )
    assert torch.equal(ours.hidden, theirs.hidden)
    engine.select([0, 1, 2])
    assert torch.equal(engine.rows.logits, rows.logits)


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_alone_or_in_a_group_has_the_same_answer(method, cache):
    """Bug: a gradient, a check or a padding that mixes rows."""
    policy = replace(letters(), cache=cache)
    alone, together = (decoded(method, policy, group_size=n) for n in (1, 7))
    assert [a.tokens for a in alone] == [b.tokens for b in together]
    settings, rows = replace(CONFIG, value_steps=30), states(policy.model)
    steer = network().steering(policy.model, settings)
    whole = steer(rows.hidden, rows.logits)
    apart = torch.cat([steer(rows.hidden[i : i + 1], rows.logits[i : i + 1]) for i in range(3)])
    assert (whole - apart).abs().max() < NEAR_TIE


def test_steering_leaves_no_gradients_and_no_random_numbers_behind():
    """Bug: a graph kept from token to token, weights whose gradients grow, or o_t of the engine
    changed in place.
    """
    model, made = letters().model, network()
    rows, state = states(model), torch.get_rng_state()
    before = rows.hidden.clone()
    found = made.steering(model, CONFIG)(rows.hidden, rows.logits)
    assert not found.requires_grad and all(p.grad is None for p in made.parameters())
    assert torch.equal(rows.hidden, before) and torch.equal(torch.get_rng_state(), state)


def test_a_policy_in_half_precision_is_steered_in_float32():
    """Bug: a change of the logits that bfloat16 rounds away, since logits near ten lie sixteenths
    apart.
    """
    model = tiny("llama", torch.bfloat16)
    made, rows = network(replace(letters(), model=model)), states(model)
    found = made.steering(model, replace(CONFIG, value_steps=1, value_step_size=1e-3))(
        rows.hidden, rows.logits
    )
    moved = (found - rows.logits.float()).abs()
    assert found.dtype == torch.float32 and 0 < moved[moved > 0].min() < 1e-3


def test_a_step_too_large_is_one_sentence():
    """Bug: tokens drawn from NaN, or an error that blames the policy."""
    sentence = (
        r"5 steps of value_step_size 1e\+38 took a hidden state beyond all finite numbers; "
        r"lower value_step_size"
    )
    with pytest.raises(PolicyError, match=sentence):
        decoded("re-control", value=network(wide=1e4), value_step_size=1e38)


@pytest.mark.parametrize(
    ("name", "more"),
    [("gemma2", {"final_logit_softcapping": 5.0}), ("granite", {"logits_scaling": 8.0})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_change_the_heads_product_are_refused(name, more, dtype):
    """Bug: W (h - o_t) added to logits that are no product of W."""
    model = tiny(name, dtype, **more)
    with pytest.raises(
        PolicyError, match="scales or caps the product of its head and the hidden state"
    ):
        network(replace(letters(), model=model)).steering(model, CONFIG)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "granite", "olmo2", "gemma2-full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_whose_logits_are_the_heads_product_are_not_refused(name, dtype):
    """Bug: a tolerance that takes rounding, or a bias of the head, for another product."""
    more = {"final_logit_softcapping": None} if name.startswith("gemma2") else {}
    model = speaking(name, dtype, **more)
    assert network(replace(letters(), model=model)).steering(model, CONFIG)


# --- training -------------------------------------------------------------------------------------

LEARNT = ValueConfig(width=16, epochs=3, batch_size=16, lr=1e-2, validation=0.2, dropout=0.0)


def rollout(prompt, words, reward, cost, ended=False):
    words, costs = [*words, EOS] if ended else words, [cost]
    return Rollout(prompt, prompt, words, ended, costs, costs, reward, 8, 8)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    prompts = [Prompt(f"{i:02d}", "abcdef"[i % 6] + "abcdef"[i // 6], "mock") for i in range(30)]
    config = RolloutConfig(n_rollouts=8, max_new_tokens=8, block_size=4)
    return roll_out(
        letters(), prompts, config, **SCORERS, folder=tmp_path_factory.mktemp("rollouts")
    )


def trained(rollouts, folder, **changes):
    return train_value(letters(), rollouts, replace(LEARNT, **changes), folder, **SCORERS)


def test_a_network_learns_what_the_responses_end_with(rollouts, tmp_path):
    """Bug: anywhere between the letters and the outputs. o_t of a random model knows the last
    letters, which decide the reward.
    """
    value = trained(rollouts, tmp_path / "v", width=64, epochs=20, lr=3e-3, patience=20)
    whole = [r for r in rollouts if len(r.words) == 8]
    x = value_source(letters(), whole, 1).take(range(len(whole)))
    with torch.no_grad():
        last = value(x.hidden)[:, -1]  # (N, 2)
    ends = torch.tensor([[r.reward, r.costs[-1]] for r in whole])
    reward, cost = (torch.corrcoef(torch.stack([last[:, i], ends[:, i]]))[0, 1] for i in (0, 1))
    assert reward > 0.6 and cost > 0.2
    rewards = torch.tensor([r.reward for r in loop.split_by_prompt(rollouts, 0.2)[0]])
    assert value.centre[0] == pytest.approx(rewards.mean().item(), abs=1e-5)
    assert value.scale[0] == pytest.approx(rewards.std().item(), abs=1e-5)
    assert not value.training and not any(p.requires_grad for p in value.parameters())
    first, last = value.about["history"][0], value.about["history"][-1]
    assert {"learn_loss", "learn_reward", "learn_cost", "check_loss"} < first.keys()
    assert last["learn_loss"] < first["learn_loss"]
    assert first["learn_loss"] == pytest.approx(first["learn_reward"] + first["learn_cost"])


def test_outputs_are_in_units_of_reward_and_cost():
    """Bug: a lambda that weighs standard deviations, and expectations around zero."""
    made = network()
    made.layers[-1].weight.data.zero_(), made.layers[-1].bias.data.copy_(torch.tensor([1.0, -2.0]))
    with torch.no_grad():
        assert made(torch.randn(2, 32)).tolist() == [pytest.approx([0.3 + 0.5, 2.0 - 2 * 1.5])] * 2
        assert made.value(torch.randn(2, 32), 10.0).tolist() == pytest.approx([0.8 + 10.0] * 2)


def test_every_prefix_is_a_row_the_bare_prompt_first():
    """Bug: no row for the o_t that decides the first token, where steering begins, or one that the
    prompt's padding shifts.
    """
    policy = letters()
    model, encode = policy.model, policy.encode
    made = [
        rollout("ab", [2, 3, 4], 1.0, 0.0),
        rollout("fed", [5], 1.0, 0.0, ended=True),
        rollout("ab", [], 1.0, 0.0, ended=True),
    ]
    for memory in (0, 1):
        x = value_source(policy, made, memory).take([0, 1, 2])
        assert x.mask.sum(1).tolist() == [4, 2, 1]
        for i, r in enumerate(made):
            want = reencode(model, encode(r.prompt) + r.words)[0][len(encode(r.prompt)) - 1 :]
            assert torch.allclose(x.hidden[i][x.mask[i]], want, atol=1e-4)


def test_a_limit_takes_whole_prompts_in_the_order_of_their_ids(rollouts):
    """Bug: the first lines instead of the first prompts, so that a prompt loses rollouts and the
    order of a file decides.
    """
    ids = sorted({r.prompt_id for r in rollouts})
    assert of_first(rollouts, None) == rollouts
    assert {r.prompt_id for r in of_first(rollouts[::-1], 2)} == set(ids[:2])
    assert of_first(rollouts, 2) == [r for r in rollouts if r.prompt_id in ids[:2]]


def test_a_prompt_of_one_token_has_no_row_of_its_own(tmp_path):
    """Bug: an empty prompt, which no model can read. What is left without any row is not learnt
    from.
    """
    policy = replace(letters(), tokenizer=mock_policy().tokenizer)
    made = [
        rollout("a", [2, 3], 1.0, 0.0),
        rollout("a", [], 9.0, 0.0, ended=True),
        rollout("bc", [], 2.0, 1.0, ended=True),
    ]
    assert value_source(policy, made[:1], 1).responses == [[2, 3]]
    value = train_value(policy, made * 4, replace(LEARNT, validation=0.5), tmp_path, **SCORERS)
    assert value.about["n_rollouts"] == 8 and value.about["n_prompts"] == 2


def test_outcomes_that_failed_are_left_out(rollouts, tmp_path):
    """Bug: one NaN, which would end all training, or which takes the other outcome of its rollout
    with it.
    """
    some = [replace(r, reward=math.nan) if i % 5 == 0 else r for i, r in enumerate(rollouts)]
    value = trained(some, tmp_path / "v", epochs=1)
    history = value.about["history"][0]
    assert all(math.isfinite(x) for x in history.values())


# --- files, and what it is given to ---------------------------------------------------------------


def test_a_saved_network_is_the_same(tmp_path):
    """Bug: units that are not saved, or a network that still has dropout."""
    made = network()
    made.about = {"train_s": 1.5}
    loop.save_network(made, tmp_path, "value")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["value.json", "value.safetensors"]
    back = load_value(tmp_path, policy=letters(), **SCORERS)
    assert back.spec == made.spec and back.about == made.about and not back.training
    x = torch.randn(3, 32)
    assert torch.equal(made.ascend(x, CONFIG), back.ascend(x, CONFIG))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: None,
         "' needs a value network; train one with notebook 20 and give it to Guard as critic="),
        (untrained,
         "' needs a value network, but critic= gives it a critic; give it a value network"),
        (lambda: network(policy="other"), "the value network was trained for policy 'other'"),
        (lambda: network(max_new_tokens=32),
         "trained for max_new_tokens 32, but .* runs with 8; set max_new_tokens to 32"),
    ],
)  # fmt: skip
def test_a_steered_method_without_its_network_is_refused(method, given, sentence):
    """Bug: an error from deep inside the search, or a critic's verdict that is climbed."""
    with pytest.raises(ParameterError, match=sentence):
        decode(method, Guard(letters(), **SCORERS, config=CONFIG, critic=given()), TEXTS)


@pytest.mark.parametrize("method", [*METHODS, "inferenceguard-mix"])
def test_a_network_is_refused_for_samples_that_it_was_not_trained_on(method):
    """Bug: a chance to end safely, learned at temperature 1, trusted at another."""
    critic = untrained() if method == "inferenceguard-mix" else network()
    guard = Guard(letters(), **SCORERS, config=replace(CONFIG, top_p=0.9), critic=critic)
    with pytest.raises(ParameterError, match="trained on samples of the policy itself, .* top_p"):
        decode(method, guard, TEXTS)


def test_a_critics_method_refuses_a_network():
    with pytest.raises(
        ParameterError,
        match="'inferenceguard-critic' needs a critic, but critic= gives it a value network",
    ):
        decode(
            "inferenceguard-critic",
            Guard(letters(), **SCORERS, config=CONFIG, critic=network()),
            TEXTS,
        )


def test_any_object_that_steers_will_do():
    """Bug: decode asking for more than `steering`: a user's own value network has no spec."""
    shift = SimpleNamespace(
        steering=lambda model, settings: (
            lambda hidden, logits: logits + torch.tensor([0, 99.0, 0, 0, 0, 0, 0])
        )
    )
    assert {t for r in decoded("re-control", value=shift) for t in r.tokens} == {1}


def test_steering_raises_the_value():
    """Bug: descent. With a large lambda the expected cost must fall, whatever becomes of the
    reward.
    """
    hidden = states(letters().model).hidden.clone()
    made = network()
    for multiplier in (0.0, 2.0, 100.0):
        settings = replace(
            CONFIG,
            value_steps=10,
            value_step_size=0.3 / (1 + multiplier),
            lagrange_multiplier=multiplier,
        )
        h = made.ascend(hidden, settings)
        assert (made.value(h, multiplier) > made.value(hidden, multiplier) + 0.01).all()
        if multiplier != 2.0:
            better = (made(h) - made(hidden))[:, int(multiplier > 0)] * (-1 if multiplier else 1)
            assert (better > 0).all()
