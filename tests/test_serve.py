"""Tests of `igserve serve` over real sockets: streams, clients that leave, the queue, time limits,
the key, and the command itself.
"""

import json
import logging
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from mockpolicy import LastWordCost, last_word_cost
from sockets import (
    CHAT,
    TEXT,
    chat_policy,
    compared,
    endless,
    events,
    exchange,
    over_budget,
    parsed,
    pieces,
    request,
    said,
    serving,
    streamed,
    texts_of,
    wait_for,
)
from tiny import saved, tiny_model, tiny_tokenizer

from igcore import Guard, ParameterError, decode
from igcore.engine.local import LocalEngine
from igcore.errors import ScorerWarning
from igserve import commands
from igserve.commands import main
from igserve.serve import BODY_S, CONNECTIONS, listen

SETTINGS = dict(budget=1.0, block_size=2, max_new_tokens=16, spend=48, keep_shown=True)
ASKED = {"model": "m", "prompt": "abc"}


def guard_of(cost=None, policy=None, **settings):
    """A guard of the mock policy of words, whose refusal may be emitted."""
    how = SETTINGS | {"refusal": "fed"} | settings
    return Guard(policy or chat_policy(), cost or LastWordCost(), **how)


class Held(LastWordCost):
    """A cost that waits until it is let go."""

    def __init__(self, *of):
        super().__init__(*of)
        self.free = threading.Event()
        self.free.set()

    def score(self, *texts):
        self.free.wait(20)
        return super().score(*texts)


@pytest.fixture
def groups(monkeypatch):
    """The answers that were decoded together, group by group."""
    found = []

    def spy(method, guard, prompts, *, on_answer, **how):
        places = {id(prompt): n for n, prompt in enumerate(prompts)}
        own = [None] * len(prompts)
        found.append(own)

        def told(prompt, answer):
            own[places[id(prompt)]] = answer
            on_answer(prompt, answer)

        return decode(method, guard, prompts, on_answer=told, **how)

    monkeypatch.setattr("igserve.desk.decode", spy)
    return found


@pytest.fixture
def pool():
    """Threads of clients."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


# --- what is shown --------------------------------------------------------------------------------


def test_a_stream_is_the_answer_whatever_the_chunks_and_the_speed():
    """Guards the stream: the same text, verdict and counts as a reply that is not streamed, and as
    a call in this process.
    """
    guard, rng, known, seen = guard_of(), random.Random(1), {}, []
    with serving(guard) as server:
        for _ in range(200):
            seen.append(compared(server, guard, rng, known, seeds=3))
            _, parts = seen[-1]
            assert not over_budget(parts, last_word_cost, 1.0, 2)
    assert 0 < sum(answer.status == "abstained" for answer, _ in seen) < 150 and len(known) > 80


class Slow(LastWordCost):
    """A cost that takes a while."""

    def score(self, *texts):
        time.sleep(0.001)
        return super().score(*texts)


def test_a_client_that_leaves_has_seen_checked_text_alone(groups, monkeypatch):
    """Bug that must not come: text on the socket that no check has passed, or a search that goes
    on for nobody and keeps its rows.
    """
    rows, own, rng = [], LocalEngine.select, random.Random(2)
    select = lambda self, kept: rows.append(len(kept)) or own(self, kept)  # noqa: E731
    monkeypatch.setattr(LocalEngine, "select", select)
    guard = guard_of(Slow(), endless("bde "), max_new_tokens=30, spend=120)
    body, cancelled, shown = ASKED | {"stream": True}, 0, 0
    with serving(guard) as server:
        whole = len(exchange(server.connect(), request(body), rng))
        for seed in range(30):
            asked = request(body | {"seed": seed})
            received = exchange(server.connect(), asked, rng, rng.randrange(whole))
            texts = texts_of(received)
            assert not over_budget(texts, last_word_cost, 1.0, 2)
            shown += len(texts)
            assert server.post(ASKED | {"max_tokens": 2}).status_code == 200
            server.until_idle()
            wait_for(lambda: rows[-1] == 0)
            cancelled += any(a.reason == "cancelled" for group in groups for a in group)
            groups.clear()
    assert cancelled > 15 and shown > 50


def after(n):
    """Return a cost that no text longer than n letters keeps, but the refusal."""
    return LastWordCost(lambda text: 9.0 * (len(text) > n and text != "fed"))


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize(
    ("cost", "shown", "whole", "number"),
    [
        (after(4), True, "fed", 0.0),
        (after(0), False, "fed", 0.0),
        (LastWordCost(lambda text: 9.0 * bool(text)), False, "", 0.0),
        (LastWordCost(lambda text: 9.0), False, "", None),
    ],
    ids=["shown", "refusal", "empty", "nothing"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_abstention_is_said_and_nothing_follows_it(path, cost, shown, whole, number):
    """Guards abstentions: their fields, and no refusal behind text that has been shown."""
    asked = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else ASKED
    body = asked | {"model": "m"}
    with serving(guard_of(cost, endless())) as server:
        reply, found = server.post(body, path).json(), streamed(server, body, path=path)
    assert said(reply) == whole
    assert reply["choices"][0]["finish_reason"] == "content_filter"
    verdict = {"status": "abstained", "reason": "exhausted", "cost": number}
    assert reply["igcore"] | verdict == reply["igcore"]
    receipt = json.loads(reply["igcore"]["receipt"])
    assert (receipt["status"], receipt["cost"]) == ("abstained", number)
    *parts, last, done = found
    text = "".join(pieces(found))
    assert len(text) == 4 if shown else text == whole
    assert last["igcore"] == reply["igcore"] and done is None
    assert last["choices"][0]["finish_reason"] == "content_filter" and not pieces([last])
    assert all("igcore" not in part for part in parts)


class Forgets(LastWordCost):
    """A cost that lets a longer text pass the first time alone, once it is armed."""

    armed = False

    def score(self, prompts, responses, finished):
        read = [text for call in self.asked for _, text, _ in call]
        super().score(prompts, responses, finished)
        again = [len(text) > 4 and text in read and text != "fed" for text in responses]
        return [9.0 * (self.armed and rejected) for rejected in again]


def test_what_a_second_reading_rejects_is_never_sent():
    """Bug that must not come: a text on the socket because the search, which may be wrong, passed
    it.
    """
    cost = Forgets()
    with serving(guard_of(cost, endless())) as server:
        cost.armed = True
        *parts, last, _ = streamed(server, ASKED)
    assert len("".join(pieces(parts))) == 4 and last["igcore"]["status"] == "abstained"


# --- the queue ------------------------------------------------------------------------------------


def test_requests_that_wait_are_answered_together_as_alone(groups, pool):
    """Bug that must not come: other answers in a group, mixed settings, two equal prompts that are
    taken for one, or a queue without an end.
    """
    cost = Held()
    guard = guard_of(cost)
    alike = [ASKED, ASKED, ASKED | {"prompt": "e"}, ASKED | {"prompt": "dd b", "user": "x"}]
    other = [ASKED | {"seed": 1}, ASKED | {"temperature": 0.5}, ASKED | {"stop": "de"}]
    bodies = [*alike[:2], *other, *alike[2:]]
    *parts, _ = guard.stream("abc")
    with serving(guard, waiting=1 + len(bodies)) as server:
        alone = [server.post(body).json() for body in bodies]
        groups.clear()
        cost.free.clear()
        first, asked = pool.submit(server.post, ASKED | {"seed": 9}), []
        wait_for(lambda: groups)
        leaver = server.connect()
        leaver.sendall(request(ASKED | {"stream": True}))
        for n, body in enumerate(bodies):
            wait_for(lambda n=n: len(server.service.desk.tickets) == n + 1)
            ask = streamed if n == 0 else lambda server, body: server.post(body).json()
            asked.append(pool.submit(ask, server, body))
        wait_for(lambda: len(server.service.desk.tickets) == 1 + len(bodies))
        full = server.post(ASKED)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        assert server.http.get("/healthz").json() == {"status": "ok", "waiting": 1 + len(bodies)}
        leaver.close()
        wait_for(lambda: server.service.desk.tickets[0].gone)
        cost.free.set()
        assert first.result().status_code == 200
        for answer, expected in zip(asked[1:], alone[1:], strict=True):
            assert answer.result()["choices"] == expected["choices"]
            assert answer.result()["igcore"] == expected["igcore"]
        assert pieces(asked[0].result()) == parts and len(parts) > 1
    assert [len(group) for group in groups] == [1, 1 + len(alike), *[1] * len(other)]
    assert [answer.reason == "cancelled" for answer in groups[1]] == [True, *[False] * len(alike)]


def test_a_client_that_leaves_the_queue_is_dropped(groups, pool):
    """Bug: requests that nobody waited for filled the queue and were decoded."""
    cost = Held()
    with serving(guard_of(cost), waiting=1) as server:
        cost.free.clear()
        first = pool.submit(server.post, ASKED)
        wait_for(lambda: groups)
        tickets = lambda: server.service.desk.tickets  # noqa: E731
        for seed, body in enumerate((ASKED, ASKED | {"stream": True})):
            with server.connect() as connection:
                connection.sendall(request(body | {"seed": seed}))
                wait_for(lambda seed=seed: [t.asked.guard.seed for t in tickets()] == [seed])
            wait_for(lambda: tickets()[0].gone)
        last = pool.submit(server.post, ASKED | {"seed": 2})
        wait_for(lambda: tickets()[0].asked.guard.seed == 2)
        cost.free.set()
        assert first.result().status_code == last.result().status_code == 200
    assert [len(group) for group in groups] == [1, 1]


# --- faults ---------------------------------------------------------------------------------------


class Leaky(LastWordCost):
    """A cost that fails on some texts, and repeats them."""

    def __init__(self, least):
        super().__init__()
        self.least, self.read_texts, self.armed = least, [], False

    def score(self, prompts, responses, finished):
        self.read_texts += responses
        if self.armed and any(len(text) >= self.least for text in responses):
            raise RuntimeError(f"{responses} to {prompts}")
        return super().score(prompts, responses, finished)


SECRET = "deedabcdeed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", ["cost", "all", "engine"])
def test_what_fails_repeats_no_text(monkeypatch, caplog, recwarn, stream, broken, pool):
    """Bug: a scorer's error went to the client and to the log with the text that it could not
    score; and it failed the other requests of its group.
    """
    caplog.set_level(logging.DEBUG)
    cost = Leaky(1 if broken == "all" else 7)
    guard = guard_of(cost, endless("bde "), failure_rate=0.0 if broken == "all" else 1.0, spend=400)
    monkeypatch.setattr("igcore.scoring.AT_LEAST", 5)
    with serving(guard) as server:
        cost.armed = True
        if broken == "engine":

            def sample(*_, **__):
                raise ValueError(f"no logits after {SECRET}")

            monkeypatch.setattr(LocalEngine, "go_on", sample)
        body = ASKED | {"prompt": SECRET, "stream": stream}
        replies = [server.post(body | {"seed": n}) for n in range(2)]
        cost.armed = False
        monkeypatch.undo()
        assert server.post(ASKED).status_code == 200
    for reply in replies:
        if stream:
            assert not pieces(events(reply.content)[-1:])
        if broken == "cost":
            assert "scorer_error" in reply.text
        else:
            assert '"the guard has no answer, because it raised ' in reply.text
            assert '"code": 500' in reply.text if stream else reply.status_code == 500
    logged = caplog.text + "".join(str(warning.message) for warning in recwarn.list)
    secrets = {SECRET, *(text for text in cost.read_texts if len(text) > 6)}
    everywhere = logged + ("" if broken == "cost" else "".join(reply.text for reply in replies))
    assert not [text for text in secrets if text in everywhere]
    assert not [warning for warning in recwarn.list if warning.category is ScorerWarning]


class Fails(Held):
    """A cost that fails after one prompt."""

    def score(self, prompts, responses, finished):
        if self.asked and "e" in prompts and any(responses):
            raise RuntimeError
        return super().score(prompts, responses, finished)


def test_a_request_that_fails_leaves_the_others_of_its_group_alone(groups, pool, monkeypatch):
    """Bug: whoever was decoded together with a request that failed got its error."""
    monkeypatch.setattr("igcore.scoring.AT_LEAST", 5)
    cost = Fails()
    with serving(guard_of(cost, failure_rate=0.1)) as server:
        alone = [server.post(body).json() for body in (ASKED, ASKED | {"prompt": "dd b"})]
        cost.free.clear()
        waiting = [pool.submit(server.post, ASKED | {"seed": 9})]
        wait_for(lambda: len(groups) == 3)
        for n, prompt in enumerate(("abc", "e", "dd b")):
            waiting.append(pool.submit(server.post, ASKED | {"prompt": prompt}))
            wait_for(lambda n=n: len(server.service.desk.tickets) == n + 1)
        cost.free.set()
        _, first, failed, last = (one.result() for one in waiting)
    assert failed.status_code == 500
    assert [said(first.json()), said(last.json())] == [said(one) for one in alone]


def test_a_request_ends_with_its_time(pool):
    """Guards the limit: 504, or an event that says so, also while another request is decoded."""
    cost = Held()
    with serving(guard_of(cost), seconds=0.3) as server:
        cost.free.clear()
        replies = [pool.submit(server.post, ASKED | {"stream": n > 1}) for n in range(4)]
        replies = [reply.result() for reply in replies]
        cost.free.set()
        assert [reply.status_code for reply in replies] == [504, 504, 200, 200]
        assert replies[0].json()["error"]["message"] == "the time of the request is used up"
        for reply in replies[2:]:
            (fault,) = events(reply.content)
            assert fault["error"] == replies[0].json()["error"]
        server.until_idle()
        assert server.post(ASKED | {"max_tokens": 2}).status_code == 200


def test_a_client_that_does_not_read_is_left(monkeypatch, groups):
    """Bug: the stream to a client that reads nothing never ended, and its search went on."""
    monkeypatch.setattr("igserve.serve.event", lambda value: ":" + " " * 2_000_000 + "\n\n")
    monkeypatch.setattr("igserve.serve.ALIVE_S", 0.1)
    guard = guard_of(Slow(), endless("bde "), max_new_tokens=400, spend=1600)
    with serving(guard, seconds=0.4) as server:
        with server.connect() as connection:
            connection.sendall(request(ASKED | {"stream": True}))
            wait_for(lambda: groups)
            begun = time.monotonic()
            server.until_idle()
            assert time.monotonic() - begun < 5
            assert server.http.get("/healthz").status_code == 200
        wait_for(lambda: groups[0] == [] or groups[0][0] is not None)
    assert groups[0][0].reason == "cancelled"


def test_a_slow_body_and_half_a_connection_end(monkeypatch, server):
    """Guards the body: one that drips gets 408, and a client that only half closes an end."""
    assert 5 <= BODY_S <= 60 and CONNECTIONS >= 64
    monkeypatch.setattr("igserve.serve.BODY_S", 0.2)
    asked = request(ASKED)
    with server.connect() as connection:
        connection.sendall(asked[:-20])
        with suppress(ConnectionError):
            for byte in asked[-20:]:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        received = b"".join(iter(lambda: connection.recv(1000), b""))
        status, headers, body = parsed(received)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["message"].startswith("the body did not come in 0.2")
    for sent in (asked, asked[:-5], asked[:30], b""):
        with server.connect() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert b"500" not in b"".join(iter(lambda: connection.recv(1000), b""))[:20]
    server.until_idle()
    assert server.post(ASKED).status_code == 200


def test_requests_in_one_connection_are_answered_in_order(server):
    """Guards pipelines, and a body without a length that is sent in chunks."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in
                      (b'{"model": "m",', b' "prompt": "abc"}')) + b"0\r\n\r\n"  # fmt: skip
    head = request(b"", transfer_encoding="chunked", content_length="")
    with server.connect() as connection:
        connection.sendall(request(ASKED | {"model": "x"}) + head + chunks)
        received = b""
        while received.count(b"HTTP/1.1") < 2 or not received.endswith(b"}"):
            received += connection.recv(10**5)
    assert received.index(b"404 Not Found") < received.index(b"200 OK")
    assert received.count(b"verified_safe") or received.count(b"abstained")


# --- who may ask ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """A server with the usual terms, and a small limit of a body."""
    with serving(guard_of(), body_bytes=400_000) as server:
        yield server


def test_a_key_opens_and_is_never_repeated(caplog):
    """Guards the key: needed where one is set, also for the list of models, and said nowhere."""
    caplog.set_level(logging.DEBUG)
    key = "k3y-of-the-house"
    with serving(guard_of(), key=key) as server:
        found = []
        for sent in ("", "Bearer wrong", f"Bearer {key}x", "Bearer \xe9", f"Basic {key}"):
            headers = {"authorization": sent.encode("latin-1")} if sent else {}
            listed = server.http.get("/v1/models", headers=headers)
            for reply in (server.post(ASKED, **headers), listed):
                assert reply.status_code == 401 and reply.json()["error"]["code"] == 401
                found.append(reply)
        right = {"authorization": f"Bearer {key}"}
        found += [server.post(ASKED, **right), server.http.get("/v1/models", headers=right)]
        assert [reply.status_code for reply in found[-2:]] == [200, 200]
        assert found[-1].json()["data"][0]["id"] == "m"
        found.append(server.http.get("/healthz"))
    assert key not in caplog.text + "".join(r.text + str(r.headers) for r in found)


def test_a_browser_may_ask_from_a_page_that_is_named(server):
    """Bug: a page that was allowed could not send a request, only read the list of models."""
    page = "http://localhost:3000"
    before = {"origin": page, "access-control-request-method": "POST"}
    before |= {"access-control-request-headers": "content-type,authorization"}
    with serving(guard_of(), origins=[page]) as open_server:
        reply = open_server.http.options(CHAT, headers=before)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, page)
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert open_server.post(ASKED, origin=page).headers["access-control-allow-origin"] == page
        other = open_server.post(ASKED, origin="http://elsewhere")
        assert "access-control-allow-origin" not in other.headers
    assert server.http.options(CHAT, headers=before).status_code == 405
    assert "access-control-allow-origin" not in server.post(ASKED, origin=page).headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:9", 200), ("[::1]:9", 200), ("elsewhere.example", 400)]
    + [("localhost.elsewhere.example", 400), ("localhost:9/x", 400), ("", 400)],
)
def test_a_name_that_leads_here_is_refused(server, host, status):
    """Guards against a page whose name was made to lead to this computer."""
    asked = request(ASKED, host=host, connection="close")
    assert parsed(exchange(server.connect(), asked, random.Random(0)))[0] == status


def test_the_wrong_place_or_method_is_one_sentence(server):
    """Guards the routes: 404, 405 and the headers of 413, not a page of HTML."""
    for path, status in (("/v1/chat", 404), ("/", 404), (f"{TEXT}/", 404), ("//v1/models", 404)):
        assert server.post(ASKED, path).status_code == status
    assert server.http.get(TEXT).status_code == 405 and server.post(ASKED, "/healthz").is_error
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "m"


def test_a_body_above_the_limit_is_refused_also_in_chunks(server):
    """Bug that must not come: a body without a length that fills the memory."""
    assert server.post(ASKED | {"user": "x" * 400_000}).status_code == 413
    parts = (b"x" * 10_000 for _ in range(60))
    headers = {"content-type": "application/json"}
    reply = server.http.post(TEXT, content=parts, headers=headers)
    assert reply.status_code == 413 and "400000 bytes" in reply.json()["error"]["message"]
    assert server.post(ASKED).status_code == 200


# --- the command ----------------------------------------------------------------------------------

RECIPE = "policy: model\ncost: offensive-language\nbudget: 0.5\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the recipe of a guard and its policy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(commands.KEY, raising=False)
    (tmp_path / "guard.yaml").write_text(RECIPE)
    tokenizer = tiny_tokenizer()
    saved(tmp_path / "model", tiny_model(tokenizer), tokenizer)
    return tmp_path


def refused(capsys, *options):
    """Return the sentence with which the command ends."""
    assert main(["serve", "--guard", "guard.yaml", "--port", "0", *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (RECIPE.replace("budget: 0.5\n", ""), "budget is missing"),
        ("- a\n", "it must be the recipe of a guard"),
        (None, "guard.yaml cannot be read"),
        (RECIPE + "method: base\n", "method 'base' emits answers over budget"),
        (RECIPE + "on_failure: paper\n", "emits answers over budget"),
    ],
)
def test_a_recipe_that_cannot_be_served_is_one_sentence(home, capsys, recipe, sentence):
    """Guards the command: one sentence and status 1, and never a server that does not abstain."""
    (home / "guard.yaml").unlink() if recipe is None else (home / "guard.yaml").write_text(recipe)
    assert sentence in refused(capsys)


def test_a_server_that_others_reach_needs_a_key(home, capsys, monkeypatch):
    """Guards the host: by default this computer alone."""
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        assert f"host is {host}, where others reach the server" in refused(capsys, "--host", host)
    monkeypatch.setenv(commands.KEY, " ")
    assert "put a key into" in refused(capsys, "--host", "0.0.0.0")


@pytest.mark.parametrize("name", ["--waiting", "--seconds", "--body-bytes"])
def test_terms_that_answer_nobody_are_refused(home, capsys, monkeypatch, name):
    """Guards the terms: one sentence, before a policy is loaded."""
    monkeypatch.setattr(commands, "guard_of", None)
    assert f"parameter {name[2:].replace('-', '_')} is 0" in refused(capsys, name, "0")


def test_a_port_in_use_is_said_before_a_policy_is_loaded(home, capsys, monkeypatch):
    """Bugs: a server whose policy was still being loaded did not hold its port; and each reply
    waited forty milliseconds, because its head and its body were two packets.
    """
    monkeypatch.setattr(commands, "guard_of", None)
    with listen("127.0.0.1", 0) as own:
        assert own.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY where it is named
        port = own.getsockname()[1]
        sentence = refused(capsys, "--port", f"{port}")
        assert f"cannot listen at 127.0.0.1 on port {port} (" in sentence
    assert "port 70000" in refused(capsys, "--port", "70000")
    with pytest.raises(ParameterError, match="cannot listen at 192.0.2.1"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_command_serves_what_the_recipe_says(home, capsys, monkeypatch, host):
    """Bug: the loopback address of IPv6 was taken for one that others reach."""
    seen = []

    class Server:
        def __init__(self, service, host):
            seen.append(service)

        def run(self, sockets):
            seen.extend(sockets)

    monkeypatch.setattr("igserve.serve.server_of", Server)
    monkeypatch.setenv(commands.KEY, "sesame")
    assert main(["serve", "--guard", "guard.yaml", "--port", "0", "--host", host]) == 0
    service, own = seen
    own.close()
    assert (service.terms.key, service.terms.name) == ("sesame", "model")
    assert service.guard.config.budget == 0.5
    out = capsys.readouterr().out
    assert f"igserve answers at http://{'[::1]' if ':' in host else host}:" in out
    assert "sesame" not in out and "all of it comes at its end" in out
    service.desk.close()
