"""Tests of chat templates as programs: their limits, and the user's own alarm beside them."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny import tiny_model, tiny_tokenizer

from igcore import AssetError, Guard, ParameterError, rendering
from igcore.rendering import rendered

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ONCE = "{% if messages[1:] %}{{ raise_exception('One turn\n only!') }}{% endif %}" + PLAIN
SMALL = {"block_size": 2, "max_new_tokens": 4}
HELLO = [("user", "Hello")]
TURNS = [("user", "a"), ("assistant", "b"), ("user", "c")]


def test_what_a_template_refuses_is_the_callers_to_change():
    """Bug: jinja2.exceptions.TemplateError, and the advice to correct a template that is right."""
    tokenizer = tiny_tokenizer(chat_template=ONCE)
    guard = Guard((tiny_model(tokenizer), tokenizer), len, budget=99, **SMALL)
    message = "the chat template refuses these messages: One turn only!; give those that it takes"
    with pytest.raises(ParameterError, match=message):
        guard([{"role": role, "content": said} for role, said in TURNS])
    assert guard([{"role": "user", "content": "a"}]).status == "verified_safe"


def test_messages_have_the_time_limit_too(monkeypatch):
    """Bug: chat messages went past the limits, so a template without end answered for ever."""
    monkeypatch.setattr(rendering, "SECONDS", 0.1)
    tokenizer = tiny_tokenizer(
        chat_template="{% if messages[1:] %}" + LOOPS + "{% endif %}" + PLAIN
    )
    guard = Guard((tiny_model(tokenizer), tokenizer), len, budget=99, **SMALL)
    with pytest.raises(AssetError, match="TimeoutError: not done in 0.1 seconds"):
        guard([{"role": role, "content": said} for role, said in TURNS])


def test_a_template_that_writes_nothing_is_named():
    """Bug: RuntimeError: cannot reshape a tensor of 0 elements."""
    tokenizer = tiny_tokenizer(chat_template="{% if not messages[1:] %}" + PLAIN + "{% endif %}")
    guard = Guard((tiny_model(tokenizer), tokenizer), len, budget=99, **SMALL)
    with pytest.raises(ParameterError, match="has no tokens in template 'chat'"):
        guard([{"role": role, "content": said} for role, said in TURNS])


@pytest.fixture
def alarm():
    """Make the process's alarm one of the user's, and put back what was there."""

    def handler(*_):
        raise TimeoutError("the user's own")

    before = signal.signal(signal.SIGALRM, handler)
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_the_timer_of_a_user_goes_on(alarm):
    """Bug: the one alarm of the process was taken, and switched off after an answer: pytest-timeout
    and other limits were gone.
    """
    signal.setitimer(signal.ITIMER_REAL, 30)
    rendered(tiny_tokenizer(chat_template=PLAIN), HELLO, opened=True)
    assert 20 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
    assert signal.getsignal(signal.SIGALRM) is alarm


def test_the_alarm_of_a_user_is_heard_inside_a_template(alarm, monkeypatch):
    """Bug: an alarm that was due inside a template never came."""
    monkeypatch.setattr(rendering, "SECONDS", 5.0)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match="^the user's own$"):
        rendered(tiny_tokenizer(chat_template=LOOPS), HELLO, opened=True)
    assert time.perf_counter() - began < 4


def test_a_template_without_end_stops_in_every_thread(monkeypatch):
    """Bug: only the main thread had a limit; and a thread that loops on takes half a processor."""
    monkeypatch.setattr(rendering, "SECONDS", 0.1)
    tokenizer, before = tiny_tokenizer(chat_template=LOOPS), threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(AssetError, match="TimeoutError: not done in 0.1 seconds"):
            pool.submit(rendered, tokenizer, HELLO, opened=True).result()
    began = time.perf_counter()
    while threading.active_count() > before and time.perf_counter() - began < 5:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_template_works_where_there_are_no_alarms(monkeypatch):
    """Guards Windows, which has no SIGALRM."""
    monkeypatch.delattr(signal, "SIGALRM")
    monkeypatch.delattr(signal, "setitimer")
    text = rendered(tiny_tokenizer(chat_template=PLAIN), HELLO, opened=True)
    assert text == "user: Hello"
