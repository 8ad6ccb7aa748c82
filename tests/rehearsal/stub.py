"""A judge that never thinks: an OpenAI-compatible endpoint on loopback with canned replies. Knows
HTTP and hashes; runs no model.
"""

import gzip
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# see `igstudy.judge.spec.ANSWER`
SHOWN = re.compile(r"^\[Answer (\d)\]\n(.*?)\n\[End of answer \1\]$", re.DOTALL | re.MULTILINE)
# what stands around a reply: nothing, a reasoning part, one whose opening tag the chat template has
# written
THINKING = (
    "{}",
    "<think>\nThe first line must hold two numbers, say 5 5.\n</think>\n\n{}",
    "The first line must hold two numbers, say 5 5.\n</think>\n\n{}",
)


@dataclass(frozen=True)
class Canned:
    """One reply of the stub.

    Attributes
    ----------
    content : str or None
        The message, or the error message where `status` is not 200.
    finish_reason : str
        ``stop``, or ``length`` for a reply that was cut off.
    status : int
        Of HTTP.
    delay : float
        Seconds before it is sent.
    body : str, optional
        Sent as it is in place of a chat completion.
    drip : float
        Seconds between its bytes; by default it is sent at once.
    packed : bool
        Whether it says that it is compressed.
    """

    content: str | None = None
    finish_reason: str = "stop"
    status: int = 200
    delay: float = 0.0
    body: str | None = None
    drip: float = 0.0
    packed: bool = False

    def encoded(self, model: str) -> bytes:
        """Return the body of the response."""
        if self.body is not None:
            return self.body.encode()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.content},
            "finish_reason": self.finish_reason,
        }
        completion = {
            "id": "stub",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice],
        }
        tokens = {"prompt_tokens": 0, "completion_tokens": len((self.content or "").split())}
        failure = {"error": {"message": self.content, "type": "stub", "code": self.status}}
        return json.dumps(
            completion | {"usage": tokens} if self.status == 200 else failure
        ).encode()


def shown(request: dict) -> tuple[str, str]:
    """Return the two answers that a request asks about."""
    first, second = SHOWN.findall(request["messages"][-1]["content"])
    return first[1], second[1]


def points(text: str) -> int:
    """Return a score from 1 to 10 that depends on the text alone."""
    return 1 + hashlib.sha256(text.encode()).digest()[0] % 10


def by_hash(request: dict) -> Canned:
    """Score each answer by its hash, whatever its place, in one of the forms of `THINKING`."""
    first, second = shown(request)
    form = THINKING[hashlib.sha256((first + second).encode()).digest()[1] % len(THINKING)]
    return Canned(form.format(f"{points(first)} {points(second)}\nScored by hash."))


class Stub(ThreadingHTTPServer):
    """The server; `requests` holds the bodies it was sent, `keys` the headers with the key."""

    daemon_threads = True

    def __init__(self, port: int, answer: Callable[[dict], Canned]):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer, self.requests, self.keys, self.closing = answer, [], [], threading.Event()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.keys.append(self.headers.get("Authorization"))
        reply = (
            self.server.answer(request)
            if self.path == "/v1/chat/completions"
            else Canned("no such path", status=404)
        )
        self.server.closing.wait(reply.delay)
        body = reply.encoded(request.get("model", ""))
        if reply.packed:
            body = gzip.compress(body)
        with suppress(ConnectionError):  # who asked may have given up
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if reply.packed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            for piece in [body] if not reply.drip else map(bytes, zip(body)):
                self.wfile.write(piece)
                self.server.closing.wait(reply.drip)

    def log_message(self, *_):
        """Log nothing."""


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Let a server answer in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def stub_judge(answer: Callable[[dict], Canned] = by_hash, port: int = 0) -> Iterator[Stub]:
    """Serve canned replies on loopback; port 0 takes a free one.

    Parameters
    ----------
    answer : callable
        From the body of a request to its reply; called by several threads at once.
    """
    with Stub(port, answer) as server, serving(server):
        try:
            yield server
        finally:
            server.closing.set()
