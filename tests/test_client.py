"""Tests of the HTTP client of policies and judges: it ends, and shows no key."""

import gzip
import os
import signal
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import psutil
import pytest
from servedstub import Reply, answering

from igcore import ParameterError
from igserve import client as way
from igserve.client import Client, Failed, Refused, Request, check_endpoint, key_in
from tests.loopback import Answering, running

KEY = "a-key-that-nobody-may-see"
ASK = Request("/ask", {"text": "a"})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(way, "FIRST_PAUSE", 0.01)


def answers(client, requests=(ASK,)):
    """Return the replies to requests in their order; raise what is none."""
    _, found = zip(*sorted(client.replies(requests)), strict=True)
    for reply in found:
        if isinstance(reply, Failed):
            raise reply
    return list(found)


def failure(reply, requests=(ASK,), **options):
    """Return the failure of the first request, and the requests that the server received."""
    with answering(lambda path, request: reply) as (url, asked):
        client = Client(url, KEY, **{"timeout": 5.0, "retries": 2} | options)
        found = dict(client.replies(requests))
    assert all(isinstance(found[place], Failed) for place in range(len(requests)))
    assert "\n" not in str(found[0]) and KEY not in str(found[0])
    return found[0], asked


@pytest.mark.parametrize(
    ("reply", "kind", "sentence", "attempts"),
    [
        (Reply("busy", 429), Failed, "refuses the request or fails; .*status 429: busy", 3),
        (Reply({"error": {"message": "boom"}}, 500), Failed, "refuses the request .*boom", 3),
        (Reply(drop=True), Failed, "does not reply; start it, correct its address", 3),
        (Reply("no such model", 404), Failed, "correct the key, model or options.*such model", 1),
        (Reply("too long", 400), Refused, "refuses the request or fails; .*too long", 1),
        (Reply(f"{KEY} is wrong", 401), Failed, "its message repeats the key", 1),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_endpoint_that_fails_says_so_in_one_sentence(reply, kind, sentence, attempts):
    """Bug: a traceback; a key that the endpoint repeats; a permanent failure that is retried."""
    error, asked = failure(reply)
    assert isinstance(error, kind) and isinstance(error, Refused) == (kind is Refused)
    with pytest.raises(kind, match=sentence):
        raise error
    assert len(asked) == attempts
    assert {headers["authorization"] for _, _, headers in asked} == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    "first", [Reply("busy", 429), Reply("oh", 502), Reply(drop=True), Reply("{ }", drip=0.4)]
)
def test_an_endpoint_that_recovers_is_asked_again(first):
    """Bug: one busy second of a server ends a run of a night."""
    replies = [first]
    with answering(lambda path, request: replies.pop() if replies else Reply("8")) as (url, asked):
        assert answers(Client(url, timeout=0.5, retries=1)) == [b"8"]
    assert len(asked) == 2 and asked[0][:2] == asked[1][:2] == ASK


def test_pauses_grow(monkeypatch):
    """Bug: a busy server is retried at once, again and again."""
    times = []
    monkeypatch.setattr(way, "FIRST_PAUSE", 0.05)

    def answer(path, request):
        times.append(time.monotonic())
        return Reply("busy", 429)

    with answering(answer) as (url, _), pytest.raises(Failed):
        answers(Client(url, timeout=5.0, retries=3))
    first, second, third = np.diff(times)
    assert first >= 0.05 and second >= 0.1 and third >= 0.2


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Reply("8", delay=30), "does not reply; .*no whole reply in"),
        (Reply(b" " * 10_000, drip=0.05), "sends a reply that does not end; .*no whole reply in"),
        (Reply("no", 500), "refuses the request"),
    ],
)
def test_an_endpoint_that_fails_takes_bounded_time(reply, sentence):
    """Bug: the timeout is counted for each piece, or for each of many requests and attempts."""
    began = time.monotonic()
    error, _ = failure(reply, [ASK] * 9, timeout=0.5, at_once=2, retries=2)
    with pytest.raises(Failed, match=sentence):
        raise error
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b" " * 2**25),
        Reply(b" " * 2**25, status=500),
        Reply(gzip.compress(b" " * 2**25), headers={"Content-Encoding": "gzip"}),
    ],
    ids=["long", "long error", "packed"],
)
def test_size_is_bounded(reply, monkeypatch):
    """Bug: a reply of gigabytes, or one that unpacks to them, fills the memory."""
    monkeypatch.setattr(way, "MAX_BYTES", 2**20)
    packed = bool(reply.headers)
    tracemalloc.start()
    with answering(lambda path, request: reply) as (url, asked):
        ((_, found),) = Client(url, timeout=30.0).replies([ASK])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert asked[0][2]["accept-encoding"] == "identity"
    assert found == reply.body if packed else "longer than 1048576 bytes" in str(found)
    assert most < 2**25 + 2**23  # the server's own copy, and little more


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    """Bug: prompts sent to a host that was not configured; its address shown, maybe with a key."""
    with answering(lambda path, request: Reply("8")) as (elsewhere, never):
        error, _ = failure(Reply(status=status, headers={"Location": f"{elsewhere}/?{KEY}"}))
    assert str(error) == f"redirects to another address; give that one (status {status})"
    assert not never


def test_after_a_failure_nothing_more_is_asked_and_a_refusal_leaves_others_alone():
    """Bug: a hundred more requests to a server that is down; one refused text costs all others."""
    error, asked = failure(Reply("no", 401), [ASK] * 20)
    assert type(error) is Failed and len(asked) == 1
    _, asked = failure(Reply("no", 400), [ASK] * 5)
    assert len(asked) == 5


def test_requests_at_a_time_are_bounded_and_replies_are_in_order():
    """Bug: a server flooded, or sent one request after the other; replies out of order."""
    under_way, most = [], []
    barrier = threading.Barrier(3)

    def answer(path, request):
        under_way.append(1)
        barrier.wait(timeout=30)  # until three are there
        most.append(len(under_way))
        barrier.wait(timeout=30)
        under_way.pop()
        return request

    requests = [Request("/ask", {"number": number}) for number in range(6)]
    with answering(answer) as (url, _):
        found = answers(Client(url, timeout=30.0, at_once=3), requests)
    assert most == [3] * 6
    assert found == [b'{"number": %d}' % number for number in range(6)]


def test_connections_are_kept_and_go_with_the_client():
    """Bug: a connection for each request; a thread that waits for the next call, which a forked
    process does not have; a connection that nobody can close.
    """
    with running(Answering(lambda path, request: Reply("8"))) as server:
        files, threads = psutil.Process().num_fds(), threading.active_count()
        client = Client(server.url, timeout=5.0, at_once=4)
        for _ in range(5):
            assert answers(client, [ASK] * 8) == [b"8"] * 8
            assert not [each for each in threading.enumerate() if "ThreadPool" in each.name]
        assert 1 <= len(server.connections) <= 4
        del client
        end = time.monotonic() + 30  # the server's side ends when it sees ours end
        while threading.active_count() > threads and time.monotonic() < end:
            time.sleep(0.01)
        # fewer files, where those of an earlier test are only closed now
        assert psutil.Process().num_fds() <= files
        assert threading.active_count() == threads


def test_a_connection_that_a_server_may_have_closed_is_not_used(monkeypatch):
    """Bug: the first request after a pause, or after a restart of the server, fails."""
    monkeypatch.setattr(way, "IDLE", 0.1)
    with running(Answering(lambda path, request: Reply("8"))) as server:
        client = Client(server.url, timeout=5.0)
        assert answers(client) == answers(client) == [b"8"] and len(server.connections) == 1
        time.sleep(0.2)
        assert answers(client) == [b"8"] and len(server.connections) == 2
        port = server.server_port
    monkeypatch.setattr(way, "IDLE", 60.0)
    with running(Answering(lambda path, request: Reply("9"), port)):
        kept = Client(server.url, timeout=5.0)
        assert answers(kept) == [b"9"]
    with running(Answering(lambda path, request: Reply("7"), port)):
        assert answers(kept) == answers(client) == [b"7"]


def test_a_forked_process_opens_connections_of_its_own():
    """Bug: two processes that read one connection take each other's replies."""
    with running(Answering(lambda path, request: Reply(request))) as server:
        client = Client(server.url, timeout=5.0)
        requests = [Request("/ask", {"number": number}) for number in range(30)]
        expected = [b'{"number": %d}' % number for number in range(30)]
        before = psutil.Process().num_threads()
        answers(client)
        # joined, a thread may still hold a lock of OpenSSL, for which the child would wait
        while psutil.Process().num_threads() > before + 1:  # that of the connection
            time.sleep(0.001)
        if (child := os.fork()) == 0:
            signal.alarm(60)
            with suppress(BaseException):
                os._exit(answers(client, requests) != expected)
            os._exit(2)
        assert answers(client, requests) == expected
        assert os.waitpid(child, 0)[1] == 0
        assert answers(client, requests) == expected and len(server.connections) == 2


def test_threads_share_a_client():
    """Bug: two threads that make the first call together, of which one loses its connection."""
    requests = [Request("/ask", {"number": number}) for number in range(8)]
    with running(Answering(lambda path, request: Reply(request))) as server:
        client = Client(server.url, timeout=5.0, at_once=2)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: answers(client, requests), range(16)))
        assert found == [[b'{"number": %d}' % number for number in range(8)]] * 16
        assert len(server.connections) < 16 * 8 and len(client._kept) == 1


def test_a_server_cannot_mark_its_client():
    """Bug: a kept client returns cookies, and an answer depends on the one before."""
    mark = Reply("8", headers={"Set-Cookie": "a=b; Path=/"})
    with answering(lambda path, request: mark) as (url, asked):
        client = Client(url, timeout=5.0)
        assert answers(client) == answers(client)
    assert len(asked) == 2 and not any("cookie" in headers for _, _, headers in asked)


@pytest.mark.parametrize("url", ["http://localhost:69999", "http://localhost:1", "http://a..b"])
def test_an_address_that_nothing_can_reach_is_one_sentence(url, monkeypatch):
    """Bug: an error of the insides of a client; a proxy that answers in its place."""
    with answering(lambda path, request: Reply("8")) as (proxy, asked):
        if "localhost" in url:
            monkeypatch.setenv("ALL_PROXY", proxy)
        with pytest.raises(Failed, match="does not reply|refuses the request"):
            answers(Client(url, timeout=5.0))
    assert not asked


def test_what_cannot_be_sent_is_one_sentence(monkeypatch):
    with pytest.raises(Refused, match="cannot be sent half a character .*; correct the text"):
        answers(Client("http://localhost:1", timeout=5.0), [Request("/ask", {"text": "\ud83d"})])
    monkeypatch.setenv("HTTP_PROXY", "foo://bar")
    with pytest.raises(Failed, match="does not reply; .*ValueError: .*proxy"):
        answers(Client("http://host.example", timeout=5.0))


@pytest.mark.parametrize("package", ["httpx2", "tenacity"])
def test_a_missing_package_is_named(package, monkeypatch):
    """Bug: the remedy is an extra of igcore, which no package index has."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ParameterError, match=f"needs {package}; .* pip install {package}$"):
        Client("http://localhost:1", timeout=5.0)


# --- addresses and keys ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://localhost:8000/v1", True),
        ("https://[::1]:8/v1", True),
        ("http://10.0.0.1/v1/", True),
        ("http://a-b.c_d.example", True),
        ("localhost:8000", False),
        ("ftp://x/v1", False),
        ("http://[::1", False),
        ("http://h:8000x/v1", False),
        ("http://h\\@x/v1", False),
        ("http://a b/v1", False),
        (f"http://user:{KEY}@host", False),
        (f"http://host/?key={KEY}", False),
    ],
)
def test_an_address_holds_no_key(url, plain):
    """Bug: a key in a record or an error; a rule against odd addresses that refuses a good one."""
    if plain:
        check_endpoint("url", url, "IGCORE_JUDGE_KEY", way.JUDGE)
        return
    with pytest.raises(ParameterError, match="parameter url is not a plain http address") as caught:
        check_endpoint("url", url, "IGCORE_JUDGE_KEY", way.JUDGE)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("prefix", [way.JUDGE, way.SERVER])
@pytest.mark.parametrize("name", ["HF_TOKEN", "igcore_judge_key", f"sk-{KEY}", f"{way.JUDGE}{KEY}"])
def test_a_params_file_sends_no_variable_away_that_was_not_meant_for_an_endpoint(name, prefix):
    """Bug: `api_key_env: HF_TOKEN` beside an address of the file's own."""
    with pytest.raises(ParameterError) as caught:
        check_endpoint("url", "https://judge.example/v1", name, prefix)
    assert str(caught.value) == (
        "parameter api_key_env does not name an environment variable that may be sent; give "
        f"one that begins with {prefix}, and put the key there"
    )
    check_endpoint("url", "https://judge.example/v1", f"{prefix}MINE", prefix)


@pytest.mark.parametrize("key", ["a\nb", "kéy", " "])
def test_a_key_that_no_header_can_hold_is_named(key, monkeypatch):
    """Bug: called an endpoint that cannot be reached."""
    monkeypatch.setenv("IGCORE_JUDGE_KEY", key)
    with pytest.raises(ParameterError) as caught:
        key_in("https://judge.example", "IGCORE_JUDGE_KEY", way.JUDGE)
    assert str(caught.value).startswith(
        "the environment variable IGCORE_JUDGE_KEY has no valid key; put only the key of https://judge."
    )
    assert key == " " or key not in str(caught.value)


def test_who_needs_no_key(monkeypatch):
    monkeypatch.delenv("IGCORE_JUDGE_KEY", raising=False)
    assert key_in("http://127.0.0.1:8000", "IGCORE_JUDGE_KEY", way.JUDGE) == ""
    assert key_in("https://host.example", "IGCORE_SERVER_KEY", way.SERVER) == ""
    monkeypatch.setenv("IGCORE_JUDGE_KEY", f" {KEY}\n")
    assert key_in("http://localhost", "IGCORE_JUDGE_KEY", way.JUDGE) == KEY


@pytest.mark.parametrize(
    ("text", "key", "is_shown"),
    [
        ("no abcdefgh here", "abcdefgh", False),
        ("no abcdefg here", "abcdefgh", True),
        ("cdefghijk, 123456789", "abcdefghijk-0123456789", False),
        ("an abc", "abc", False),
        ("anything", "", True),
        ("", "abc", True),
    ],
)
def test_words_that_repeat_parts_of_a_key_are_not_shown(text, key, is_shown):
    """Bug: an endpoint that repeats all but the end of a key."""
    assert way.without_key(text, key) == (text if is_shown else "its message repeats the key")
