"""Tests of what guards read: turns of a policy, options of chat templates, and places for texts."""

import pytest
from scorerfiles import decoder_tokenizer

from igcore import ParameterError
from igcore.models.wording import Wording

DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: And {response}?\n\nAssistant:"
ASKED = {"role": "user", "content": "{prompt}"}
ANSWERED = {"role": "assistant", "content": "{response}"}
CRITERION = {"role": "user", "content": "<guardian> Is it {rude}?"}
LABELS = {"unsafe": ["yes"], "safe": ["no"]}
# a template that reads an option, as those of Qwen3 and Granite Guardian do
OPTIONS = """{% if policy is defined %}[{{ policy }}]{% endif -%}
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% if not thinking %}<think></think>{% endif -%}
{% endif %}"""


def written(prompt, response, template=None, **options):
    tokenizer = decoder_tokenizer()
    if template:
        tokenizer.chat_template = template
    return Wording(**LABELS, **options).text(tokenizer, prompt, response)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (  # Granite Guardian: the criterion comes after the answer
            [ASKED, ANSWERED, CRITERION],
            "<|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>And {response}?<|end|>"
            "<|assistant|>I {prompt}<|end|><|user|><guardian> Is it {rude}?<|end|><|assistant|>",
        ),
        (  # a policy before it
            [{"role": "system", "content": "No rudeness."}, ASKED, ANSWERED],
            "<|system|>No rudeness.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>"
            "<|user|>And {response}?<|end|><|assistant|>I {prompt}<|end|><|assistant|>",
        ),
        (  # Nemotron, PolyGuard: all in one turn
            [{"role": "user", "content": "Q: {prompt} A: {response} /no_think"}],
            f"<|user|>Q: {DIALOGUE} A: I {{prompt}} /no_think<|end|><|assistant|>",
        ),
    ],
)
def test_turns_of_a_policy(messages, text):
    """Bug: a criterion in the place of the answer; a dialogue lumped into one turn; a place that a
    prompt writes itself is filled.
    """
    assert written(DIALOGUE, "I {prompt}", messages=messages, prefix="<score>") == text + "<score>"


def test_options_reach_the_chat_template():
    """Bug: the verdict of a guard that would reason first is read too early."""
    plain = "<|user|>q<|end|><|assistant|>a<|end|><|assistant|>"
    assert written("q", "a", OPTIONS) == plain + "<think></think>"
    options = {"thinking": True, "policy": "P"}
    assert written("q", "a", OPTIONS, chat_options=options) == "[P]" + plain
    with_turns = written("q", "a", OPTIONS, chat_options=options, messages=[ASKED, ANSWERED])
    assert with_turns == "[P]" + plain


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"messages": [ASKED]}, "messages has no {response}; write it into the text"),
        ({"messages": [ANSWERED, CRITERION]}, "messages has no {prompt}; write it into the text"),
        ({"messages": [ASKED, {"role": "judge", "content": "{response}"}]}, "cannot be read; give"),
        ({"messages": [ASKED, {"content": "{response}"}]}, "cannot be read; give a mapping"),
        ({"messages": "{prompt}"}, "messages is '{prompt}': it must be a valid list"),
    ],
)
def test_what_cannot_be_written_is_named(options, sentence):
    """Bug: an answer that the guard never sees, and so never finds unsafe."""
    with pytest.raises(ParameterError) as caught:
        Wording(**LABELS, **options)
    assert sentence in str(caught.value)


def test_an_option_of_our_own_is_refused():
    """Bug: an option that ends the text before the guard's turn, in silence."""
    with pytest.raises(ParameterError, match="the chat template refuses .*add_generation_prompt"):
        written("q", "a", chat_options={"add_generation_prompt": False})
