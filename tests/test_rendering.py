"""Tests of chat templates as programs of somebody else's."""

import pytest
from tiny import tiny_model, tiny_tokenizer

from igcore import Guard, ParameterError

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ONCE = "{% if messages[1:] %}{{ raise_exception('One turn\n only!') }}{% endif %}" + PLAIN
SMALL = {"block_size": 2, "max_new_tokens": 4}
TURNS = [("user", "a"), ("assistant", "b"), ("user", "c")]


def test_what_a_template_refuses_is_the_callers_to_change():
    """Bug: jinja2.exceptions.TemplateError, and the advice to correct a template that is right."""
    tokenizer = tiny_tokenizer(chat_template=ONCE)
    guard = Guard((tiny_model(tokenizer), tokenizer), len, budget=99, **SMALL)
    message = r"template refuses these messages \(TemplateError: One turn only!\); give those that"
    with pytest.raises(ParameterError, match=message):
        guard([{"role": role, "content": said} for role, said in TURNS])
    assert guard([{"role": "user", "content": "a"}]).status == "verified_safe"


def test_a_template_that_writes_nothing_is_named():
    """Bug: RuntimeError: cannot reshape a tensor of 0 elements."""
    tokenizer = tiny_tokenizer(chat_template="{% if not messages[1:] %}" + PLAIN + "{% endif %}")
    guard = Guard((tiny_model(tokenizer), tokenizer), len, budget=99, **SMALL)
    with pytest.raises(ParameterError, match="is empty or has no tokens in template 'chat'"):
        guard([{"role": role, "content": said} for role, said in TURNS])
