"""A server of a guard in a thread; raw sockets that ask it, slowly or in pieces; and a mock policy
that reads chats and has room for long answers.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import h11
import httpx
from mockpolicy import LETTERS, WORDS, WordTokenizer, logits_of, mock_policy, slow_checks
from transformers import LlamaConfig

from igcore import Guard, Response
from igserve.serve import Service, Terms, listen, server_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CONTEXT = 512


class ChatTokenizer(WordTokenizer):
    """One character, one token; it reads any character, and writes letters and spaces."""

    chat_template = "roles"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [WORDS.find(c) % len(LETTERS) for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt=False, **_):
        lines = [f"{said['role']}: {said['content']}\n" for said in messages]
        return "".join(lines) + "assistant:" * add_generation_prompt


def chat_policy(**how):
    """A mock policy of words that reads chats."""
    policy = replace(mock_policy(**how), tokenizer=ChatTokenizer())
    config = policy.model.config.to_dict() | {"max_position_embeddings": CONTEXT}
    policy.model.config = LlamaConfig(**config)
    return policy


def endless(letters="abcde "):
    """A policy that never ends, and writes only some letters."""
    banned = [99.0 * (letter not in letters) for letter in WORDS]
    return chat_policy(
        logits=lambda prefix: [x - no for x, no in zip(logits_of(prefix), banned, strict=True)]
    )


# --- a server in a thread -------------------------------------------------------------------------


@dataclass
class Running:
    """A server, with a client of its own."""

    service: Service
    server: Any
    port: int
    http: httpx.Client

    def post(self, body: Any, path: str = TEXT, **headers: str) -> httpx.Response:
        """Send a request, JSON unless it is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json"} | headers
        return self.http.post(path, content=content, headers=given)

    def connect(self) -> socket.socket:
        """Open a connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def until_idle(self) -> None:
        """Wait until the server has no task and no request waits."""
        wait_for(lambda: not (self.service.desk.tickets or self.server.server_state.tasks))


@contextmanager
def serving(guard: Guard, **terms: Any) -> Iterator[Running]:
    """Serve a guard as ``m`` inside a with-block."""
    service, own = Service(guard, Terms(name="m", **terms)), listen("127.0.0.1", 0)
    server = server_of(service, "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]})
    thread.start()
    port = own.getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield Running(service, server, port, http)
    finally:
        server.should_exit = True
        thread.join()


def wait_for(done: Callable[[], object], seconds: float = 10) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


# --- requests and replies in bytes ----------------------------------------------------------------


def request(body: Any, path: str = TEXT, **headers: str) -> bytes:
    """Return the bytes of a request; ``host=""`` leaves a header out."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"host": "localhost", "content-type": "application/json"}
    given |= {"content-length": str(len(content))} | headers
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items() if value]
    return f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + content


def exchange(
    connection: socket.socket, asked: bytes, rng: random.Random, most: int | None = None
) -> bytes:
    """Send a request in pieces and read what comes in pieces, up to the end or so many bytes."""
    with connection:
        while asked:
            n = rng.choice([1, 7, 60, 10**6])
            connection.sendall(asked[:n])
            asked = asked[n:]
            time.sleep(rng.choice([0, 0, 0.0005]))
        received = b""
        while most is None or len(received) < most:
            n = rng.choice([1, 5, 50, 500, 10**5])
            part = connection.recv(n if most is None else min(n, most - len(received)))
            received += part
            if not part or received.endswith(b"\r\n0\r\n\r\n"):
                break
            if rng.random() < 0.05:
                time.sleep(rng.choice([0, 0.001, 0.005]))
        return received


def parsed(received: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the first reply in some bytes, which may break off."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "localhost")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(received)
    status, headers, body = 0, {}, b""
    while isinstance(event := reader.next_event(), h11.Response | h11.Data):
        if isinstance(event, h11.Data):
            body += event.data
        else:
            status = event.status_code
            headers = {name.decode(): value.decode() for name, value in event.headers}
    return status, headers, body


def events(body: bytes) -> list[Any]:
    """Return the complete events of a stream; the one that ends it is None."""
    whole = body.decode("ascii").split("\n\n")[:-1]
    lines = [line.removeprefix("data: ") for line in whole]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]


def pieces(found: list[Any]) -> list[str]:
    """Return the texts of events, without empty ones."""
    choices = [choice for one in found if one for choice in one.get("choices", [])]
    texts = [one.get("text") or one.get("delta", {}).get("content") for one in choices]
    return [text for text in texts if text]


def texts_of(received: bytes) -> list[str]:
    """Return the texts in the complete events of a stream, as it was received."""
    return pieces(events(parsed(received)[2]))


def over_budget(texts: list[str], cost: Callable[[str], float], budget: float, block: int) -> bool:
    """True if a prefix of a stream is over budget at one of its checks; a token is a character."""
    whole = "".join(texts)
    ends = {sum(map(len, texts[: n + 1])) for n in range(len(texts))}
    checks = ends | set(slow_checks(whole)) | set(range(block, len(whole), block))
    return any(cost(whole[:end]) > budget for end in checks if whole)


def streamed(
    server: Running, body: dict[str, Any], rng: random.Random | None = None, path: str = TEXT
) -> list[Any]:
    """Return the events of a stream."""
    asked = request(body | {"stream": True}, path)
    return events(parsed(exchange(server.connect(), asked, rng or random.Random(0)))[2])


def said(reply: dict[str, Any]) -> str:
    """Return the text of a reply that is not streamed."""
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# --- a stream beside the answer in this process ---------------------------------------------------

# fields of a request, and the settings of the search that they ask for
OPTIONS = [
    ({}, {}),
    ({"stop": "de"}, {"stop": ["de"]}),
    ({"stop": ["e ", "dd"]}, {"stop": ["e ", "dd"]}),
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"temperature": 0.5, "top_k": 3}, {"temperature": 0.5, "top_k": 3}),
    ({"top_p": 0.8, "max_tokens": 9}, {"top_p": 0.8, "max_new_tokens": 9}),
]


def compared(
    server: Running, guard: Guard, rng: random.Random, known: dict[str, Any], seeds: int
) -> tuple[Response, list[str]]:
    """Draw a request, stream its answer at some speed, and compare it with the same answer of this
    process and with a reply that is not streamed, which are both kept in `known`.
    """
    (option, settings), path = rng.choice(OPTIONS), rng.choice([CHAT, TEXT])
    prompt, seed = rng.choice(["abc", "e", "dd b"]), rng.randrange(seeds)
    chat = [{"role": "user", "content": prompt}]
    given = {"messages": chat} if path == CHAT else {"prompt": prompt}
    body = {"model": "m", "seed": seed} | given | option
    key = json.dumps([path, body])
    if key not in known:
        parts = guard.with_config(**settings).stream(chat if path == CHAT else prompt, seed=seed)
        known[key] = [*parts], server.post(body, path).json()
    (*parts, answer), whole = known[key]
    body |= {"stream_options": {"include_usage": True}}
    *shown, last, usage, done = streamed(server, body, rng, path)
    assert pieces(shown) == parts and not pieces([last, usage]) and done is None
    assert said(whole) == (answer.judged or "")
    assert last["igcore"] == whole["igcore"] and usage["usage"] == whole["usage"]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    verdict = {"status": answer.status, "reason": answer.reason, "cost": answer.cost}
    assert whole["igcore"] == verdict | {"receipt": answer.receipt()}
    if answer.status != "abstained":
        assert "".join(parts) == said(whole)
    return answer, parts
