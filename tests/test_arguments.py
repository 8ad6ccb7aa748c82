"""Tests of what `generate`, a pipeline and a checkpoint say to the search."""

import copy
import warnings

import pytest
from mockpolicy import LetterCost
from tiny import tiny_model, tiny_tokenizer
from transformers import TextStreamer, pipeline

import igcore as ig

ROLES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT = [{"role": "user", "content": "Hi there"}]
TOKENIZER = tiny_tokenizer(chat_template=ROLES, padding_side="left")
SMALL = {"budget": 1e9, "block_size": 4, "max_new_tokens": 8}


def heard(guard):
    """Return the prompts that a guard's cost has read."""
    return {prompt for call in guard.cost.asked for prompt, *_ in call}


@pytest.fixture
def model():
    return tiny_model(TOKENIZER)


def a_guard(model, cost=None, tokenizer=TOKENIZER, **settings):
    """Return a guard whose cost has heard of no prompt yet."""
    guard = ig.Guard((model, tokenizer), cost or LetterCost(), **SMALL | settings)
    getattr(guard.cost, "asked", []).clear()
    return guard


def ids_of(*chats):
    how = {"add_generation_prompt": True, "return_tensors": "pt", "padding": True}
    return TOKENIZER.apply_chat_template(list(chats), return_dict=True, **how)


# --- the prompt that the user wrote ---------------------------------------------------------------


@pytest.mark.parametrize("chats", [[CHAT], [CHAT, [{"role": "user", "content": "Hello"}]]])
def test_a_pipeline_gives_the_cost_its_own_messages(model, chats):
    """Bug: the cost read 'user: Hi there\\nassistant: ', so a budget chosen with `guard(chat)` did
    not hold in a pipeline.
    """
    guard = a_guard(model)
    expected = [guard(chat).tokens for chat in chats]
    assert heard(guard) == {chat[0]["content"] for chat in chats}
    guard.cost.asked.clear()
    pipe = pipeline("text-generation", model=model, tokenizer=TOKENIZER)
    given = chats if len(chats) > 1 else chats[0]
    pipe(given, custom_generate=guard, max_new_tokens=8, temperature=1.0)
    assert heard(guard) == {chat[0]["content"] for chat in chats}
    assert guard.answers[0].tokens == expected[-1]


@pytest.mark.parametrize("more", [{}, {"num_return_sequences": 2, "do_sample": True}])
def test_prompts_are_what_scorers_read(model, more):
    """Bug: no way to say what the user wrote where ids alone are given."""
    guard, other = a_guard(model), [{"role": "user", "content": "Hello"}]
    own = ig.custom_generate(guard, prompts=[CHAT, "Hello"])
    model.generate(**ids_of(CHAT, other), custom_generate=own, max_new_tokens=8, **more)
    assert heard(guard) == {"Hi there", "Hello"}
    assert guard.answers[0].tokens == guard(CHAT).tokens
    n = more.get("num_return_sequences", 1)
    assert [answer.prompt for answer in guard.answers] == ["Hi there"] * n + ["Hello"] * n
    with pytest.raises(ig.ParameterError, match="prompts has 2 prompts for 1 rows"):
        model.generate(**ids_of(CHAT), custom_generate=own, max_new_tokens=8)


@pytest.mark.parametrize(
    ("cost", "template", "warned"),
    [
        (LetterCost(), ROLES, 1),
        (LetterCost(), None, 0),
        (lambda response: 0.0, ROLES, 0),
        (lambda prompt, response: 0.0, ROLES, 1),
        ([lambda response: 0.0, lambda prompt, response: 0.0], ROLES, 1),
    ],
)
def test_a_cost_that_reads_rendered_prompts_is_one_warning(model, cost, template, warned):
    """Bug: a cost of harm moved by .09 on average, and nobody was warned."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    guard = a_guard(model, cost, tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(**ids_of(CHAT), custom_generate=guard, max_new_tokens=8)
    said = [w for w in caught if "reads the prompt as the text of the input ids" in str(w.message)]
    assert len(said) == warned


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["assistant_model", "negative_prompt_ids"])
def test_an_argument_that_is_not_used_is_refused(model, name):
    """Bug: assisted generation and negative prompts ignored in silence."""
    value = tiny_model(TOKENIZER) if name == "assistant_model" else ids_of(CHAT).input_ids
    own = {"custom_generate": a_guard(model), "max_new_tokens": 8, name: value}
    with pytest.raises(
        ig.ParameterError, match=f"was given {name}, which the search cannot use; leave"
    ):
        model.generate(**ids_of(CHAT), **own)


@pytest.mark.parametrize(("name", "value"), [("min_new_tokens", 5), ("max_time", 60.0)])
def test_limits_of_a_checkpoint_are_not_blamed_on_the_caller(model, name, value):
    """Bug: "generate was given min_length=..., leave it out", which nobody had given."""
    setattr(model.generation_config, name, value)
    guard = a_guard(model, lambda response: 0.0)
    model.generate(**ids_of(CHAT), custom_generate=guard, max_new_tokens=8)
    assert guard.answers[0].status == "verified_safe"


@pytest.mark.parametrize(
    "how", [{"keep_shown": True}, {"method": "inferenceguard", "n_samples": 2, "keep": 1}]
)
def test_a_streamer_shows_no_part_of_a_stop_string(model, capsys, how):
    """Bug: the first half of a stop string shown, which no streamer can take back."""
    whole = a_guard(model, lambda response: 0.0, block_size=1, **how)("Hello").text
    stop = whole[3:5]
    guard = a_guard(model, lambda response: 0.0, block_size=1, stop=[stop], **how)
    shown = TextStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=True)
    ids = model.generate(
        **TOKENIZER("Hello", return_tensors="pt"),
        custom_generate=ig.custom_generate(guard, shown),
        max_new_tokens=8,
    )
    assert guard.answers[0].text == whole[: whole.index(stop)]
    assert TOKENIZER.decode(ids[0, 5:], skip_special_tokens=True) == guard.answers[0].text
    assert capsys.readouterr().out.rstrip("\n") == guard.answers[0].text.rstrip("\n")
