"""Tests of views: a call leaves no trace in the model that its user goes on using, beside calls in
other threads, too.
"""

import copy
import functools
import multiprocessing
import os
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from tiny import tiny as tiny_family
from tiny import tiny_model, tiny_tokenizer
from transformers.models.mistral.modeling_mistral import MistralAttention

import igcore as ig
from igcore.engine.prepack import turn, viewed
from igcore.engine.view import view_of
from igstudy.training.latents import encode

# this version of peft uses an older name of transformers
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
TOKENIZER = tiny_tokenizer()
SETTINGS = dict(block_size=3, max_new_tokens=6)
BEAMS = dict(method="inferenceguard", n_samples=3, keep=2)
IDS = torch.tensor([[5, 7, 11, 13]])
PROMPTS = [f"Case {i}" + " and more" * (i % 4) for i in range(12)]


def vowels(text):
    return sum(letter in "aeiou" for letter in text)


def model_of(name="llama"):
    model = tiny_model(TOKENIZER)
    if name != "llama":
        model = tiny_family(name, vocab_size=len(TOKENIZER), max_position_embeddings=128)
    return model


def guard_of(model, cost=vowels, **more):
    return ig.Guard((model, TOKENIZER), cost=cost, **(dict(budget=1) | SETTINGS | more))


def tokens(answers):
    return [(answer.status, answer.tokens) for answer in answers]


def trace(model):
    """What a user may see of a model: modules, attributes, hooks, modes, weights and settings."""
    seen = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, dict):  # accelerate makes new placeholders, on no device
                value = [(k, getattr(v, "is_meta", False) or id(v)) for k, v in value.items()]
            elif hasattr(value, "to_dict"):
                value = id(value), repr(vars(value))
            elif not isinstance(value, bool | int | float | str | None):
                value = id(value)
            seen[name, key] = value
    return seen


# --- threads --------------------------------------------------------------------------------------


def offloaded():
    return cpu_offload(model_of(), execution_device=torch.device("cpu"))


def adapted():
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(model_of(), config)
    model.add_adapter("other", config)
    return model.eval()


def windowed():
    return model_of("mistral-window")


@pytest.mark.parametrize("repetition", range(int(os.environ.get("REPETITIONS", "1"))))
@pytest.mark.parametrize("made", [model_of, model_of, windowed, offloaded, adapted])
def test_calls_in_threads_answer_as_one_after_the_other(made, repetition):
    """Bug: two threads restored each other's attention, all calls raised, and the user's own model
    raised until the process ended.
    """
    model = made()
    guards = guard_of(model), guard_of(model, budget=3, seed=1, **BEAMS)
    ids = TOKENIZER(PROMPTS[0], return_tensors="pt")["input_ids"]

    def generated(_=None):
        return model.generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist()

    def answered(i):
        return guards[i % 2](PROMPTS[i % 12])

    before, n = trace(model), range(24)
    expected, expected_ids = tokens(map(answered, n)), generated()
    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(1) as beside:
        own = beside.map(generated, n)
        assert tokens(pool.map(answered, n)) == expected
        assert all(found == expected_ids for found in own)
    assert trace(model) == before
    assert generated() == expected_ids and answered(1).tokens == expected[1][1]


def test_a_tokenizer_that_others_use_truncates_no_prompt():
    """Bug: padding and truncation are set in the tokenizer itself, so a pipeline of the user's in
    another thread cut the prompts of a guard, and lost its own padding.
    """
    guard, prompts = guard_of(model_of()), [f"{prompt}, and so on" for prompt in PROMPTS]
    expected, own, done = tokens(map(guard, prompts)), [], threading.Event()

    def pipeline():
        while not done.is_set():
            own.append(TOKENIZER(["a", "bbb"], padding=True, truncation=True, max_length=4))
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(pipeline)
        try:
            assert tokens(map(guard, prompts)) == expected
        finally:
            done.set()
        running.result()
    assert own and all(len(ids) == 3 for batch in own for ids in batch["input_ids"])


def test_calls_of_one_model_take_turns():
    """Guards memory: eight threads would keep the caches and copies of eight searches."""
    model, at_once, running = model_of(), [], []

    def enter(*_):
        running.append(1)
        at_once.append(len(running))
        time.sleep(0.001)

    def leave(*_):
        running.pop()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(guard_of(model), PROMPTS[:4]))
    assert max(at_once) == 1


def test_a_guard_inside_a_cost_does_not_wait_for_itself():
    """Bug: a lock of the model that the call itself holds would never be free."""
    inner = guard_of(model_of())
    outer = guard_of(inner.policy.model, cost=lambda text: inner("Say").cost, budget=9)
    assert outer("Hello").status == "verified_safe"


def test_two_models_that_call_each_other_from_two_threads_do_not_wait_for_ever():
    """Bug: each thread holds the turn of one model and waits for that of the other."""
    one, two = model_of(), model_of("mistral-window")
    inner = [guard_of(one), guard_of(two)]
    calling = [
        guard_of(one, cost=lambda text: inner[1]("Say").cost, budget=9),
        guard_of(two, cost=lambda text: inner[0]("Say").cost, budget=9),
    ]
    threads = [threading.Thread(target=guard, args=("Hello",), daemon=True) for guard in calling]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_process_that_is_forked_during_an_answer_answers():
    """Bug: it waited for ever for the turn of a thread that it does not have."""
    guard = guard_of(model_of())
    expected, taken, done = guard("Hello").tokens, threading.Event(), threading.Event()

    def answer():
        torch.set_num_threads(1)  # those of the parent are not in the child
        sys.exit(guard("Hello").tokens != expected)

    def hold():
        with turn(guard.policy.model):
            taken.set()
            done.wait(60)

    child = multiprocessing.get_context("fork").Process(target=answer)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        taken.wait(60)
        child.start()
        child.join(30)
        child.kill()
        done.set()
    assert child.exitcode == 0


# --- the model and what its user does with it -----------------------------------------------------


def test_nothing_of_the_model_differs_during_a_call():
    """Bug: attention, products and mode of the user's own model were changed while it decoded."""
    model = model_of().train()
    before, seen = trace(model), []
    guard_of(model, keep_shown=True)("Hello", on_block=lambda *_: seen.append(trace(model)))
    assert seen and all(during == before for during in [*seen, trace(model)])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_nothing_of_the_model_differs_after_an_error(error):
    """Guards the next call: what stops a call must not leave a part of it behind."""
    model = model_of()
    guard, before = guard_of(model), trace(model)
    expected = guard("Hello").tokens

    def stop(*_):
        raise error

    handle = model.model.layers[1].register_forward_hook(stop)
    with pytest.raises(error):
        guard("Hello")
    handle.remove()
    assert trace(model) == before and guard("Hello").tokens == expected


def test_training_mode_does_not_reach_the_samples():
    """Bug: a trainer set the model to training, and dropout decided tokens without a word."""
    model = tiny_family("llama", vocab_size=len(TOKENIZER), attention_dropout=0.9)
    guard = guard_of(model.eval())
    expected = guard("Hello").tokens
    assert guard_of(model.train())("Hello").tokens == guard("Hello").tokens == expected
    assert all(module.training for module in model.modules())


def test_what_the_user_changes_is_seen():
    """Guards views that outlive a call: types, sizes and adapters would be those of before."""
    model = adapted()
    before = viewed(model).model(input_ids=IDS).logits
    model.set_adapter("other")
    switched = viewed(model).model(input_ids=IDS).logits
    assert not torch.allclose(switched, before)
    torch.testing.assert_close(switched, model(input_ids=IDS).logits)
    model = model_of()
    guard = guard_of(model)
    guard("Hello")
    assert guard.policy.model.to(torch.bfloat16).dtype == torch.bfloat16
    assert guard("Hello").status in ("verified_safe", "abstained")
    model.resize_token_embeddings(len(TOKENIZER) + 8)
    assert viewed(model).model(input_ids=IDS).logits.shape[-1] == len(TOKENIZER) + 8


def test_a_hook_that_is_set_between_calls_is_seen():
    """Guards steering: what was kept of the model has no such hook."""

    def double(_, args, out):
        return out * 2

    answers = []
    for early in (True, False):
        model = model_of()
        guard = guard_of(model, budget=99)
        if not early:
            guard("Hello")
        handle = model.model.layers[0].register_forward_hook(double)
        answers.append(guard("Hello"))
    assert answers[0].tokens == answers[1].tokens and answers[0].reward == answers[1].reward
    handle.remove()
    assert guard("Hello").reward != answers[1].reward


def stronger(forward):
    return lambda *args, **options: (forward(*args, **options)[0] * 2, None)


class Steered(MistralAttention):
    """Attention that reads a token otherwise where the text goes on behind it."""

    def forward(self, *args, **options):
        states, _ = super().forward(*args, **options)
        return torch.cat([states[:, :-1], states[:, -1:] * 2], dim=1), None


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda layers: layers.__setitem__(0, tiny_family("qwen2").model.layers[0]), False),
        (
            lambda layers: setattr(
                layers[0].self_attn, "forward", stronger(layers[0].self_attn.forward)
            ),
            False,
        ),
        (lambda layers: setattr(layers[0].self_attn.config, "sliding_window", 3), False),
        (lambda layers: setattr(layers[0].self_attn, "is_causal", False), True),
        (lambda layers: setattr(layers[0].self_attn, "__class__", Steered), True),
    ],
)
def test_the_cache_is_chosen_again_for_a_model_that_computes_otherwise(change, refused):
    """Bug: a foreign error, or in silence the likelihoods of another model."""
    model, prompt = model_of("mistral"), "Hello, you"
    guard = guard_of(model, budget=99)
    guard(prompt)
    change(model.model.layers)
    if refused:
        with pytest.raises(ig.PolicyError, match="other probabilities where the text goes on"):
            guard(prompt)
        return
    answer, known = guard(prompt), TOKENIZER(prompt)["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([known + answer.tokens]), use_cache=False).logits[0]
    own = logits[len(known) - 1 : -1].log_softmax(-1)
    own = own.gather(1, torch.tensor(answer.tokens)[:, None]).mean().item()
    assert answer.reward == pytest.approx(own, abs=1e-4)


def test_guards_can_be_copied_and_pickled():
    """Guards servers that start workers: a lock inside a guard could not be pickled."""
    guard = guard_of(model_of())
    expected = guard("Hello").tokens
    for other in (copy.copy(guard), copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        assert other("Hello").tokens == expected


# --- views ----------------------------------------------------------------------------------------


def test_a_view_shares_weights_and_writes_to_its_own_buffers():
    """Guards memory; and models whose rotary frequencies follow the longest text."""
    model = model_of()
    view = view_of(model)
    pairs = zip(view.named_parameters(), model.named_parameters(), strict=True)
    assert all(mine is theirs for (_, mine), (_, theirs) in pairs)
    before = model.model.rotary_emb.inv_freq
    view.model.rotary_emb.register_buffer("inv_freq", before * 2, persistent=False)
    assert model.model.rotary_emb.inv_freq is before
    assert view.config is view.model.config is view.model.layers[0].self_attn.config
    assert view.config is not model.config


def test_a_view_runs_the_hooks_of_its_user():
    """Guards steering by hooks: the guard decodes the model as its user has changed it."""
    model = model_of()
    model.model.layers[0].register_forward_hook(lambda _, args, out: out * 2)
    torch.testing.assert_close(view_of(model)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def doubled(forward):
    def run(*args, **options):
        out = forward(*args, **options)
        out.logits = out.logits * 2
        return out

    return run


@pytest.mark.parametrize("where", ["root", "layer"])
def test_a_forward_of_the_users_own_is_run(where):
    """Guards wrapped models: the function calls the model itself, whatever the view has."""
    model = model_of()
    if where == "root":
        model.forward = doubled(model.forward)
    else:
        layer = model.model.layers[1]
        own = layer.forward
        layer.forward = lambda *args, **options: own(*args, **options) * 2
    expected = model(input_ids=IDS).logits
    before = trace(model)
    torch.testing.assert_close(view_of(model)(input_ids=IDS).logits, expected)
    guard = guard_of(model)
    answers = tokens(map(guard, PROMPTS[:3]))
    with ThreadPoolExecutor(3) as pool:
        assert tokens(pool.map(guard, PROMPTS[:3])) == answers
    assert trace(model) == before
    with pytest.raises(ig.PolicyError, match=r"call model.eval\(\) first"):
        guard_of(model.train())("Hello")


def test_no_critic_reads_a_model_that_runs_a_function_of_the_users_own():
    """Guards the user's own calls: the hooks of a critic stop a forward pass."""
    model = model_of()
    model.forward = doubled(model.forward)
    with pytest.raises(ig.PolicyError, match="no critic can read it"):
        encode(model, [[1, 2]], [[3]])


def test_methods_and_partial_functions_are_those_of_the_view():
    """Guards libraries that replace ``forward`` by a bound method: the old model would run."""
    model = model_of().train()
    model.forward = functools.partial(type(model).forward, model)
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward
    view = view_of(model)
    assert view.forward.args == (view,) and view.model.layers[0].mlp.forward.__self__ is not mlp
    assert not any(module.training for module in view.modules())
    torch.testing.assert_close(view(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_decodes_as_itself(whole):
    """Bug: compiling a model whose layers igcore had patched ended in an InductorError."""
    model = model_of()
    expected = guard_of(model)("Hello").tokens
    compiled = torch.compile(model, backend="eager")
    if not whole:
        compiled = model
        model.forward = torch.compile(model.forward, backend="eager")
    assert guard_of(compiled)("Hello").tokens == expected


def test_weights_on_a_disk_are_loaded_into_the_view(tmp_path):
    """Guards offloaded models: what a call loads must be freed, and not seen by another thread."""
    expected = guard_of(model_of())("Hello").tokens
    model = offloaded()
    before = trace(model)
    assert guard_of(model)("Hello").tokens == expected and trace(model) == before
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_policy_that_is_replaced_has_another_model():
    """Guards the turn and the view of another model with equal settings."""
    guard = guard_of(model_of())
    other = replace(guard, policy=replace(guard.policy, model=model_of("mistral-window")))
    assert other("Hello").tokens != guard("Hello").tokens
