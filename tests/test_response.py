"""Tests of answers as data: JSON, pickles and copies without the guard and its model; and of what
an answer is: without its reasoning, and without what follows a stop string.
"""

import copy
import json
import math
import pickle
import warnings
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
from mockpolicy import LETTERS, LetterCost, LetterReward, mock_policy
from tiny import tiny_model, tiny_tokenizer

import igcore as ig
from igcore import Guard, ParameterError, Response
from igcore.errors import ScorerWarning
from igcore.methods import method_of
from igcore.policy import Policy
from igcore.prompt import as_prompt, role_and_content
from igstudy.runs.records import record


def broken_now_and_then(text: str) -> float:
    """A cost that is not finite for every second text."""
    return math.nan if len(text) % 2 else 0.25


@pytest.fixture(scope="module")
def answer() -> Response:
    tokenizer = tiny_tokenizer()
    guard = Guard(
        (tiny_model(tokenizer), tokenizer), lambda text: broken_now_and_then(text),
        LetterReward(), budget=1.0, block_size=2, max_new_tokens=8,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)  # the cost above fails on purpose
        return guard("a bed", record=True)


def test_a_dictionary_is_json_and_holds_all_but_the_guard(answer):
    """Bug: json.dumps(asdict(answer)) failed, and where it did not it wrote NaN and Infinity."""
    values = answer.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert set(values) == set(vars(answer)) - {"guard"}
    assert values["text"] == answer.text and values["tokens"] == answer.tokens
    assert values["counts"] == vars(answer.counts)
    assert len(values["candidates"]) == len(answer.candidates) > 0
    beams = [node.beam for node in answer.candidates]
    costs = [beam.cost if math.isfinite(beam.cost) else None for beam in beams]
    assert [node["beam"]["cost"] for node in values["candidates"]] == costs
    assert None in costs and 0.25 in costs


def test_numbers_of_numpy_are_numbers(answer):
    values = replace(answer, cost=np.float32(np.inf), n_tokens=np.int64(3)).to_dict()
    assert values["cost"] is None and values["n_tokens"] == 3
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    "copied",
    [
        lambda answer: pickle.loads(pickle.dumps(answer)),
        copy.deepcopy,
        lambda answer: replace(answer, text=answer.text),
    ],
    ids=["pickle", "deepcopy", "replace"],
)
def test_copies_leave_the_guard_out(answer, copied):
    """Bug: three answers of SmolLM2 took a gigabyte, since each copy held the policy; and a cost
    that is a lambda could not be pickled.
    """
    made = copied(answer)
    assert made.guard is None and answer.guard is not None
    assert repr(made) == repr(answer) and made.to_dict() == answer.to_dict()
    assert made._repr_html_() is None  # a notebook shows its repr
    with pytest.raises(
        ParameterError, match="answer is a copy, which has no guard; set answer.guard"
    ):
        made.tree()
    made.guard = answer.guard
    assert made.tree()._repr_svg_() == answer.tree()._repr_svg_()
    assert made._repr_html_() == answer._repr_html_()


def test_an_answer_is_small(answer):
    assert len(pickle.dumps(answer)) < 20_000
    assert "guard" not in asdict(answer)


def test_answers_make_a_table(answer):
    """Guards `pd.DataFrame([vars(answer)])`, as people write it."""
    table = pd.DataFrame([vars(answer), answer.to_dict()])
    assert list(table["text"]) == [answer.text] * 2
    assert "guard" in vars(answer)


# --- an answer without its reasoning --------------------------------------------------------------

MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "[THINK]", "[/THINK]"]
SMALL = {"budget": 1e9, "block_size": 4, "max_new_tokens": 12}


def reasoner():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>"])
    return Policy("p", None, tokenizer)


@pytest.mark.parametrize(
    ("prompt", "response", "reasoning", "answer"),
    [
        ("Hi", "Hello </think", "", "Hello </think"),
        ("Hi", "<think>bad</think>\n\nHello", "<think>bad</think>\n\n", "Hello"),
        ("Hi<think>\n", "bad</think>Hello", "bad</think>", "Hello"),
        ("Hi<think>\n", "bad", "bad", ""),
        ("Hi", "<think>bad", "<think>bad", ""),
        ("Hi", "[THINK]bad[/THINK]Hello", "bad", "Hello"),
        ("Hi", "[THINK]ba", "ba", ""),
        ("Hi", "a</think>b</think>c", "a</think>b</think>", "c"),
        (
            "Hi",
            "<|channel|>analysis<|message|>bad<|end|><|start|>assistant<|channel|>final<|message|>Hello",
            "analysisbadassistantfinal",
            "Hello",
        ),
    ],
)
def test_reasoning_is_told_from_the_answer(prompt, response, reasoning, answer):
    """Bug: `analysisUser wants badassistantfinalHello`: reasoning shown as the answer, and no mark
    left to cut it off.
    """
    policy = reasoner()
    ids, tokens = (policy.tokenizer(text)["input_ids"] for text in (prompt, response))
    text = policy.text(tokens)
    assert policy.reasoning_in(ids, tokens, text) == reasoning
    assert text == reasoning + answer


def test_reasoning_is_judged_and_recorded_but_is_no_answer(monkeypatch):
    """Bug: reasoning that no cost has read, or a record whose text is not what was judged."""
    monkeypatch.setattr(Policy, "reasoning_in", lambda self, prompt, tokens, text: text[:2])
    cost = LetterCost()
    guard = ig.Guard(mock_policy(), cost, **SMALL)
    answer = guard("ab")
    assert answer.judged == answer.reasoning + answer.text and len(answer.reasoning) == 2
    heard = [text for call in cost.asked for _, text, _ in call]
    assert heard[-1].startswith(answer.reasoning) and answer.judged in heard
    assert record(answer, "backtracking", guard, 0)["response"] == answer.judged
    assert f"{answer.reasoning}</i>{answer.text[:1]}" in answer._repr_html_()


# --- stop strings ---------------------------------------------------------------------------------

METHODS = {"inferenceguard": {"n_samples": 1, "keep": 1, "rounds": 1}}
METHODS |= {"backtracking": {}, "rejection": {}}


def one_sample(method, stop=(), **more):
    """Return a guard of one sample for an answer, which no cost influences."""
    settings = SMALL | METHODS[method] | more
    return ig.Guard(mock_policy(), LetterCost(), method=method, stop=list(stop), **settings)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [["a"], ["bc", "e"], ["ab", "cd", "de", "ff"], ["zzz"]])
def test_an_answer_ends_before_the_first_stop_string(stop, method):
    """Bug: few-shot prompts of base models ran on into the next question."""
    prompts, stopped = ["ab", "fed", "c", "abc", "dd", "ea"], one_sample(method, stop)
    for plain, answer in zip(one_sample(method).map(prompts), stopped.map(prompts), strict=True):
        ends = [plain.text.index(text) for text in stop if text in plain.text]
        assert answer.text == plain.text[: min(ends, default=len(plain.text))]
        assert answer.finished and answer.status == "verified_safe"
        assert answer.cost == pytest.approx(LetterCost().score([""], [answer.text], [True])[0])
        assert max([0, *answer.block_ends]) == len(answer.text) == answer.grid_ends[-1]
        short = {"max_new_tokens": answer.n_tokens, "block_size": 1}
        alone = one_sample(method, **short)(answer.prompt)
        assert answer.reward == pytest.approx(alone.reward)


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_may_begin_inside_a_token_and_in_an_earlier_block(method):
    """Bug: letters before the stop string that went with its token; a string over two blocks."""

    class Words(type(mock_policy().tokenizer)):
        def decode(self, tokens, **how):
            return "".join(f"{LETTERS[t]}." for t in tokens if t)

    plain, cut = mock_policy(), []
    plain.tokenizer = Words()
    settings = SMALL | METHODS[method] | {"method": method, "block_size": 1}
    guard = ig.Guard(plain, len, **settings)
    for prompt in ("ab", "fed", "c", "abc"):
        whole = guard(prompt)
        stop = whole.text[3:6]  # "." of one block and the next token
        answer = ig.Guard(plain, len, stop=[stop], **settings)(prompt)
        cut.append(answer.text == whole.text[: whole.text.index(stop)])
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert all(cut) and len(cut) == 4


def test_a_method_with_its_own_search_has_no_stop_strings():
    """Bug: a setting that a method ignores in silence."""
    guard = ig.Guard(mock_policy(), LetterCost(), LetterReward(), stop=["a"], **SMALL)
    assert method_of("args").search
    with pytest.raises(ig.ParameterError, match="'args' does not read stop"):
        guard.with_method("args")
    assert guard.with_method("rejection").config.stop == ("a",)


# --- what a chat says -----------------------------------------------------------------------------


def test_parts_that_are_all_text_are_one_text():
    """Bug: chats as OpenAI's have them were refused; a picture may not vanish."""
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert as_prompt([{"role": "user", "content": parts}]).text == "Hi\nthere"
    for wrong in ([], [{"type": "image"}], [*parts, "x"], [{"type": "text", "text": 1}]):
        with pytest.raises(ig.ParameterError, match="parts of type text"):
            role_and_content({"role": "user", "content": wrong})


def test_a_loaded_pair_takes_options_of_its_chat_template():
    """Bug: thinking could be switched off for a policy by name alone."""
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    pair = tiny_model(tokenizer), tokenizer
    guard = ig.Guard(pair, len, chat_options={"enable_thinking": True}, **SMALL)
    assert tokenizer.decode(guard.policy.encode("Hi")) == "Hi<think>"
    with pytest.raises(ig.ParameterError, match="chat_options of the pair has 'reasoning'"):
        ig.Guard(pair, len, chat_options={"reasoning": True}, **SMALL)
