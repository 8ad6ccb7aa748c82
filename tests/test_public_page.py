"""Tests of the public page: a guard of one's own, in the fewest words."""

import math
import re
import warnings
from functools import cache
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from mockpolicy import LetterReward
from tiny import tiny_model, tiny_tokenizer

import igcore as ig
from igcore.contract import TEXTS
from igcore.errors import ScorerWarning
from igcore.models.registry import as_scorer
from igcore.prompt import Chat, as_prompt

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SMALL = {"block_size": 2, "max_new_tokens": 6}


def capitals(text: str) -> float:
    return sum(c.isupper() for c in text) / max(len(text), 1)


@cache
def pair(chat=True):
    """A tiny random model with its tokenizer, which may have a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML if chat else None
    return tiny_model(tokenizer), tokenizer


def a_guard(cost=capitals, chat=True, **more):
    settings = {name: more.pop(name) for name in ("budget", "failure_rate") if name in more}
    config = ig.SearchConfig(**({"budget": 0.3} | settings | SMALL))
    return ig.Guard(pair(chat), cost=cost, config=config, **more)


def test_a_function_a_chat_and_no_reward_are_enough(tmp_path):
    """Guards the front door: a folder, a function, a budget, a call."""
    model, tokenizer = pair()
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    guard = ig.Guard(str(tmp_path), cost=capitals, budget=0.5)
    answer = guard([{"role": "user", "content": "Tell me of the sea."}])
    assert answer.status == "verified_safe" and answer.cost <= 0.5
    assert answer.z_trace[-1] >= 0
    assert answer.cost == capitals(answer.text)


def test_the_reward_without_a_reward_model_is_the_likelihood_of_the_tokens():
    """Guards the ranking: the reward is the mean log-probability under the model itself, read
    once more by a plain forward pass.
    """
    guard = a_guard(budget=1.0)
    answer = guard("The sea")
    ids = guard.policy.encode("The sea")
    logits = guard.policy.model(torch.tensor([ids + answer.tokens])).logits[0, len(ids) - 1 : -1]
    log_p = logits.log_softmax(-1)[range(len(answer.tokens)), answer.tokens]
    assert answer.reward == pytest.approx(log_p.mean().item(), abs=1e-5)
    best = next(ig.decode("best-of-n", guard, ["The sea"]))
    assert best.reward == max(reward for reward, _ in best.finals)


def test_a_refusal_has_no_likelihood():
    """Guards the mean of the rewards: the policy did not write the refusal."""
    answer = a_guard(lambda text: float(len(text) > 0 and text[0] != "I"), budget=0.0)("The sea")
    if answer.status == "abstained":
        assert answer.reward is None


def test_a_function_is_recorded_by_its_name():
    """Guards provenance: what a function holds is a matter of runs, see `igstudy.sources`."""
    first = as_scorer(capitals, "cost")
    assert (first.name, first.digest) == ("capitals", "")
    assert (first.sign, as_scorer(capitals, "reward").sign) == (
        "higher is worse",
        "higher is better",
    )


def test_one_chat_message_reads_as_its_text_does():
    """Guards that a chat of one message is the prompt that `decode` knows by its text."""
    guard = a_guard()
    chat = [{"role": "user", "content": "The sea"}]
    by_chat, by_text = guard(chat), guard("The sea")
    assert by_chat.prompt_id != "" and by_chat.prompt_id == by_text.prompt_id
    plain = Chat(by_chat.prompt_id, "The sea", "user", (("user", "The sea"),))
    assert as_prompt(chat) == plain
    longer = as_prompt([{"role": "system", "content": "Be brief."}, *chat])
    assert longer.text == "system: Be brief.\nuser: The sea" and longer.id != plain.id
    written = "<system>Be brief.<user>The sea<a>"
    ids = guard.policy.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert guard.policy.ids_of(longer) == ids


def test_map_answers_as_single_calls_do_and_in_order(capsys):
    """Guards that batches change nothing."""
    guard = a_guard(seed=3)
    texts = ["The sea", "The sky", "A tree"]
    assert [a.text for a in guard.map(texts)] == [guard(text).text for text in texts]
    assert guard.map(texts, seed=4)[0].text == guard("The sea", seed=4).text


MISUSES = {
    "no budget": (lambda: ig.Guard(pair(), cost=capitals),
        "^parameter budget is missing; it has no default, because only you"),
    "settings beside a config": (
        lambda: ig.Guard(pair(), cost=capitals, config=ig.SearchConfig(1.0), keep=1),
        "^Guard has keep beside config;",
    ),
    "config is a mapping": (lambda: ig.Guard(pair(), cost=capitals, config={"budget": 1.0}),
        r"^config is a dict; write SearchConfig\(\*\*config\)"),
    "no folder": (lambda: ig.Guard("./nomodel", capitals, budget=1), "^there is no folder ./nomod"),
    "no folder at home": (lambda: ig.Guard("~/x", capitals, budget=1), "^there is no folder ~/x"),
    "a name without owner": (lambda: ig.Guard("gpt2", capitals, budget=1),
        "owner/name on the hub, such as openai-community/gpt2"),
    "a pipeline": (lambda: ig.Guard(SimpleNamespace(model=1, tokenizer=2), capitals, budget=1),
        r"^policy is a pipeline; give \(pipe.model, pipe.tokenizer\)"),
    "no cost": (lambda: ig.Guard(pair(), budget=1.0), "^cost is missing; give a function"),
    "cost is a number": (lambda: a_guard(0.5), "^cost 0.5 has no name, .* give a function"),
    "a reward as cost": (lambda: a_guard(LetterReward()), "^cost 'vowels' has sign 'higher is"),
    "unknown method": (lambda: a_guard(method="best-of-m"), "did you mean 'best-of-n'"),
    "no critic": (lambda: a_guard(method="inferenceguard-mix")("a"), "needs a reward"),
    "unknown policy": (lambda: ig.Guard("smollm", capitals, budget=1.0), "unknown policy 'smollm'"),
    "a model alone": (lambda: ig.Guard(pair()[0], capitals, budget=1.0),
        r"type LlamaForCausalLM; give .* \(model, tokenizer\)"),
    "prompt is a number": (lambda: a_guard()(3), "^prompt is 3; give a text, or chat messages"),
    "prompts are one chat": (lambda: a_guard().map([{"role": "user", "content": "a"}]),
        r"^prompt is {'role'.*; give a text, or chat messages as a list, \[message\]"),
    "prompts are rows": (
        lambda: a_guard().map([{"prompt": "a", "label": 1}, {"prompt": "b", "label": 0}]),
        r"^prompts\[0\]: prompt is {'prompt'.* or of a data set the texts, ds\[\"prompt\"\]",
    ),
    "prompts are a table": (lambda: a_guard().map(pd.DataFrame({"prompt": ["a", "b"]})),
        r"^prompts is prompt 0 a.*; give a list of prompts.* ds\[\"prompt\"\]"),
    "half an emoji": (lambda: a_guard()("a \ud83d"), r"^prompt is 'a \\ud83d', which holds half"),
    "half an emoji of many prompts": (lambda: a_guard().map(["a", "b", "\udca9 c"]),
        r"^prompts\[2\]: prompt is '\\udca9 c', which holds half a character; write"),
    "half an emoji in a chat": (lambda: a_guard()([{"role": "user", "content": "\ud83d"}]),
        "^prompt is .* half a character"),
    "half an emoji in a Prompt": (lambda: ig.Prompt("1", "\ud83d", "mine"),
        "^prompt is .* half a character"),
    "an empty prompt among others": (lambda: a_guard().map(["a", " "]),
        r"^prompts\[1\]: prompt ' ' is empty"),
    "a message without a role": (lambda: a_guard()([{"content": "a"}]), "cannot be read; give"),
    "an unknown role": (lambda: a_guard()([{"role": "human", "content": "a"}]),
        "these roles: system, user, assistant"),
    "the assistant speaks last": (lambda: a_guard()([{"role": "assistant", "content": "a"}]),
        "^the last message is the assistant's; end with the user's"),
    "no chat template": (lambda: a_guard(chat=False)([{"role": "user", "content": "a"}]),
        "has no chat template, .* give the prompt as a text"),
    "a cost of lists": (lambda: a_guard(lambda prompts, completions: []), "returns a list$"),
    "seed is a float": (lambda: a_guard(seed=0.5), "^seed is 0.5; it must be a whole number"),
    "another model": (
        lambda: pair(False)[0].generate(
            torch.tensor([[5]]), custom_generate=a_guard(), max_new_tokens=4
        ),
        "made for another model",
    ),
    "a critic that is a text": (lambda: a_guard(critic="runs/critic"),
        "^critic is 'runs/critic'; give a network that notebook 20 has trained, or an object"),
    "the guard before the method": (lambda: list(ig.decode(a_guard(), "best-of-n", ["a"])),
        r"^decode was given \(Guard, str, ...\); give decode\(method, guard, prompts\)"),
    "the prompts before the guard": (  # bug: a bare AttributeError, and so for a model
        lambda: list(ig.decode("best-of-n", ["a"], a_guard())),
        r"^decode was given \(str, list, ...\); give decode\(method, guard, prompts\)",
    ),
    "a model in place of the guard": (lambda: list(ig.decode("base", pair()[0], ["a"])),
        r"^decode was given \(str, LlamaForCausalLM, ...\); give decode\(method, guard"),
    "a list of prompts without map": (  # bug: the remedy was a mapping of role and content alone
        lambda: a_guard()(["a", "b"]),
        "^chat message 'a' cannot be read; .*; or give a list of prompts to guard.map$",
    ),
    "no acceptable text": (lambda: ig.suggest_budget(capitals, [], ["A"]),
        "^acceptable is empty; give at least one answer"),
    "texts are a number": (lambda: ig.suggest_budget(capitals, 3, ["A"]),
        r"^acceptable is 3; give a list of texts or of pairs \(prompt, answer\)"),
    "a judged text has three parts": (
        lambda: ig.suggest_budget(capitals, ["a", ("a", "b", "c")], ["A"]),
        r"^acceptable is \['a', \('a', 'b', 'c'\)\]; give a list of texts or of pairs \(prompt",
    ),
    "a judged text without an answer": (lambda: ig.suggest_budget(capitals, ["a"], [("A", None)]),
        r"^unacceptable is \[\('A', None\)\]; give a list of texts or of pairs"),
    "a share in per cent": (lambda: ig.suggest_budget(capitals, ["a"], refused=5),
        "^refused is 5; give a share from 0 to below 1"),
    "checks that it has not": (lambda: ig.suggest_budget(capitals, ["a"], ["A"], checks="block"),
        "^unknown checks 'block'; .*allowed: end, word"),
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_gets_one_sentence(misuse):
    """Guards the person who tries it: one line of our own error, never a bare Python one."""
    call, sentence = MISUSES[misuse]
    with pytest.raises(ig.IgcoreError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def failing(cost):
    guard = a_guard(cost)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        answer = guard("a")
    assert all(w.category is ScorerWarning for w in seen)
    return answer, [str(w.message) for w in seen]


def only_on_known(wrong):
    """Return a cost that answers the fixed texts of an examination, and fails on all others."""
    return lambda t: 0.0 if t in TEXTS[1:] else wrong(t)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda t: "bad", r"returned 'bad' \(str\), which is no number; return a .*; the text"),
        (lambda t: None, r"returned None \(NoneType\), which is no number; return a .*; the text"),
        (lambda t: t[99], "raised IndexError: string index out of range; the text counts"),
        (lambda t: math.nan, None),
    ],
    ids=["text", "nothing", "raises", "NaN"],
)
def test_a_cost_that_fails_abstains_and_says_why(wrong, sentence):
    """Guards the person who tries it, and everybody else from the text: a cost that cannot be read
    is not a low one, and the warning is one line that names the cost and the reason.
    """
    answer, messages = failing(only_on_known(wrong))
    assert (answer.text, answer.status, answer.reason) == (None, "abstained", "scorer_error")
    assert bool(messages) == bool(sentence)
    for message in messages:
        assert re.search(sentence, message) and "\n" not in message and len(message) < 400
