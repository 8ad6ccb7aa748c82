"""Tests of the fields of requests over a socket: each is honoured, or refused by its name in one
sentence.
"""

import json
import re
from pathlib import Path

import pytest
import yaml
from mockpolicy import LastWordCost
from sockets import CHAT, CONTEXT, TEXT, endless, serving

from igcore import Guard
from igserve.wire import BODIES

HELLO = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def server():
    """A server of a policy that never ends, and whose every letter passes."""
    settings = dict(budget=1.0, block_size=2, max_new_tokens=16, spend=48, keep_shown=True)
    with serving(Guard(endless("de "), LastWordCost(), refusal="fed", **settings)) as server:
        yield server


def fault(reply, status):
    """Return the one sentence of an error."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status and error["param"] is None
    said = error["message"]
    assert len(said) < 1200 and said.isprintable() and not re.search(r"[a-z]\. [A-Z]", said)
    return said


def asked(path, more):
    """Return the smallest request to a path, with more fields."""
    given = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    return {"model": "m"} | given | more


# --- honoured -------------------------------------------------------------------------------------


def text_of(server, path, **more):
    """Return the text of a reply, and why it ends."""
    reply = server.post(asked(path, more), path)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    said = choice["text"] if path == TEXT else choice["message"]["content"]
    return said, choice["finish_reason"], reply.json()["usage"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_each_field_of_the_search_is_honoured(server, path):
    """Bug that must not come: a field that is taken and does nothing."""
    seed = 4
    plain, end, usage = text_of(server, path, seed=seed)
    assert (len(plain), end, usage["completion_tokens"]) == (16, "length", 16)
    assert text_of(server, path, seed=seed, n=1)[0] == plain
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert text_of(server, path)[0] == text_of(server, path, seed=0)[0] != plain
    short, end, usage = text_of(server, path, seed=seed, max_tokens=5)
    assert (short, end, usage["completion_tokens"]) == (plain[:5], "length", 5)
    assert text_of(server, path, seed=seed, max_tokens=1)[0] == plain[:1]  # less than a block
    for stop in (plain[4:6], [plain[4:6], "zz"]):
        cut, end, _ = text_of(server, path, seed=seed, stop=stop)
        assert (cut, end) == (plain[: plain.index(plain[4:6])], "stop")
    # Bug: a stop string whose end is the last token that is allowed was called a cut
    assert text_of(server, path, seed=seed, stop=plain[10:])[:2] == (plain[:10], "stop")
    for more in ({"temperature": 0.2}, {"top_p": 0.3}, {"top_k": 2}):
        found = {text_of(server, path, seed=seed, **more)[0] for seed in range(3)}
        assert found.isdisjoint({text_of(server, path, seed=seed)[0] for seed in range(3)})
    if path == CHAT:
        newer = {"max_completion_tokens": 3, "max_tokens": 9}
        assert text_of(server, path, seed=seed, **newer)[0] == plain[:3]


EMPTY = {"user": "x", "metadata": {"a": "b"}, "stream": False, "seed": None, "max_tokens": None}
EMPTY |= {"temperature": 1, "top_p": 1, "n": None, "presence_penalty": 0, "frequency_penalty": 0.0}
EMPTY |= {"logit_bias": {}, "stop": None, "stream_options": None, "top_k": None}
CHAT_ONLY = {"logprobs": False, "top_logprobs": 0, "tools": [], "store": False}
CHAT_ONLY |= {"response_format": {"type": "text"}}


@pytest.mark.parametrize(
    ("path", "more"),
    [(CHAT, EMPTY | CHAT_ONLY), (TEXT, EMPTY | {"echo": False, "best_of": 1, "suffix": None})],
)
def test_fields_that_ask_for_nothing_are_taken(server, path, more):
    """Bug: clients that write every field with its default were refused."""
    assert text_of(server, path, **more) == text_of(server, path)
    kind = BODIES["chat.completion" if path == CHAT else "text_completion"]
    assert more.keys() <= set(kind.__dataclass_fields__)


def test_messages_are_read_with_their_roles(server):
    """Guards chats: parts of text, a system's message, and fields without a value."""
    plain = text_of(server, CHAT)
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}], "name": None}]
    assert text_of(server, CHAT, messages=parts) == plain
    assert text_of(server, CHAT, messages=[{"role": "system", "content": "e"}, *HELLO]) != plain
    control = "a\x00b\x07\x1b[2J\u202e\r\n\U0001f600"
    for path, more in (
        (TEXT, {"prompt": control}),
        (CHAT, {"messages": [HELLO[0] | {"content": control}]}),
    ):
        assert text_of(server, path, **more)[1] in ("stop", "length", "content_filter")


# --- refused --------------------------------------------------------------------------------------

DEEP, LONG = [], "a" * CONTEXT
for _ in range(900):
    DEEP = [DEEP]
TABLE = yaml.safe_load((Path(__file__).parent / "data" / "requests.yaml").read_text())
CASES = [(path, *case) for path in (CHAT, TEXT) for case in TABLE["both"]]
CASES += [(CHAT, *case) for case in TABLE["chat"]] + [(TEXT, *case) for case in TABLE["text"]]
CASES += [(CHAT, {"messages": [HELLO[0] | {"content": LONG}]}, "exceeds the context")]
CASES += [(CHAT, {"messages": [HELLO[0] | {"content": DEEP}]}, "cannot be read")]
CASES += [(TEXT, {"prompt": LONG}, "exceeds the context"), (TEXT, {"user": DEEP}, "user is")]
CASES += [(TEXT, {"metadata": DEEP}, "parameter metadata is")]


def test_what_cannot_be_honoured_is_refused_by_name(server):
    """Bug that must not come: a field that is dropped in silence, a setting of the guard that a
    client can change, or an error without a name.
    """
    for path, more, words in CASES:
        for stream in ({}, {"stream": True} if "stream" not in more else {}):
            body = json.dumps(asked(path, stream | more)).encode()
            assert words in fault(server.post(body, path), 400), (path, more)
    assert text_of(server, TEXT)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe{}", "no JSON in UTF-8"),
        ('{"model": "m"}'.encode("utf-16"), "no JSON in UTF-8"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "no JSON"),
        (b'{"model": "m", "prompt": "abc", "seed": ' + b"9" * 9999 + b"}", "no JSON"),
        (b"7", "no object"),
        (b"{}", "is missing"),
        (b'{"model": "m"}', "is missing"),
    ],
)
def test_a_body_that_is_no_request_is_one_sentence(server, content, words):
    """Guards the reader: no trace, no dead thread, and the server goes on."""
    for path in (CHAT, TEXT):
        assert words in fault(server.post(content, path), 400)


def test_the_type_and_the_model_are_checked(server):
    """Guards against a form of a web page, which can send any type but JSON unasked."""
    for kind in ("text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"):
        reply = server.http.post(TEXT, content=b"{}", headers={"content-type": kind})
        assert "application/json" in fault(reply, 415)
    for kind in ("application/json; charset=utf-8", "Application/JSON ;a=b"):
        body = json.dumps(asked(TEXT, {})).encode()
        reply = server.http.post(TEXT, content=body, headers={"content-type": kind})
        assert reply.status_code == 200
    assert "this server has 'm'" in fault(server.post(asked(TEXT, {"model": "gpt\ud800"})), 404)
