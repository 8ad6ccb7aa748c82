"""A completion server on loopback whose model is a function of the token ids before, in the forms
of vLLM and llama.cpp's server; and servers that fail.
"""

import json
import math
import random
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mockpolicy import logits_of

from tests.rehearsal.stub import serving

MODEL = "mock/letters"
OWNERS = {"vllm": "vllm", "llama.cpp": "llamacpp"}
ROUTES = {"llama.cpp": "/completion"}  # of the others /v1/completions


@dataclass
class Fault:
    """What a server does in place of its reply.

    Attributes
    ----------
    status : int
        Of HTTP.
    body : bytes or None
        Sent as it is; None is the right reply.
    headers : dict of str to str
    drip : float
        Seconds between its bytes.
    drop : bool
        Whether the connection is closed without a reply.
    """

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drip: float = 0.0
    drop: bool = False


class Served(ThreadingHTTPServer):
    """The server; `requests` holds the bodies it was sent, `keys` the headers with the key.

    Attributes
    ----------
    fault : callable or None
        (request, number of the request) -> Fault or None; called for completions alone.
    pieces : collection of int
        Tokens inside a character, of which llama.cpp tells no log-probability.
    states : callable or None
        (token ids of a prompt) -> path of the file with their states.
    tokenized : callable or None
        (text) -> what /tokenize says are its tokens; None where there is no such route.
    """

    states: Callable[[list[int]], str] | None = None
    tokenized: Callable[[str], object] | None = None

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, software: str, logits, ends, fault, slots: int, pieces):
        super().__init__(("127.0.0.1", port), Handler)
        self.software, self.logits, self.ends, self.slots = software, logits, ends, slots
        self.fault, self.requests, self.keys, self.paths = fault, [], [], []
        self.route, self.pieces = ROUTES.get(software, "/v1/completions"), pieces
        self.encodings = []
        self.lock, self.closing, self.overrun = threading.Lock(), threading.Event(), False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sample(self, request: dict, child: int) -> list[tuple[int, float]]:
        """Return tokens with their reference log-probabilities."""
        rng = random.Random(request.get("seed", 0) + child)
        sequence, found = list(request["prompt"]), []
        bias = {int(token): nats for token, nats in request.get("logit_bias", {}).items()}
        for _ in range(request["max_tokens"]):
            log_p = log_softmax(self.logits(tuple(sequence)))
            weights = [math.exp(x + bias.get(token, 0.0)) for token, x in enumerate(log_p)]
            (token,) = rng.choices(range(len(weights)), weights)
            found.append((token, log_p[token]))
            sequence.append(token)
            if token in self.ends and not self.overrun:
                break
        return found

    def choice(self, request: dict, child: int) -> dict:
        """Return one sample in the form of the software."""
        sample = self.sample(request, child)
        log_p = log_softmax(self.logits(tuple(request["prompt"])))
        most = request.get("logprobs", 0)
        top = sorted(range(len(log_p)), key=lambda token: -log_p[token])[:most]
        if self.software == "llama.cpp":
            said = [{"id": token, "token": "", "logprob": x} for token, x in sample]
            said[0]["top_logprobs"] = [{"id": token, "logprob": log_p[token]} for token in top]
            said = [token for token in said if token["id"] not in self.pieces]
            tokens = {"content": "", "tokens": [token for token, _ in sample]}
            return {"index": child, "completion_probabilities": said} | tokens
        names = "token_id:{}" if self.software == "vllm" else "<{}>"
        logprobs = {
            "tokens": [names.format(token) for token, _ in sample],
            "token_logprobs": [x for _, x in sample],
            "top_logprobs": [{names.format(token): log_p[token] for token in top}] * len(sample),
        }
        ids = [token for token, _ in sample]
        return {"index": child, "text": "", "logprobs": logprobs, "token_ids": ids}

    def completion(self, request: dict) -> dict | list:
        """Return the reply to a request."""
        choices = [self.choice(request, child) for child in range(request["n"])]
        if self.software == "llama.cpp":
            assert request["return_tokens"]
            same = {"n_predict": "max_tokens", "n_cmpl": "n", "n_probs": "logprobs"}
            assert all(request[own] == request[openai] for own, openai in same.items())
            return choices[::-1] if len(choices) > 1 else choices[0]
        reply = {"id": "stub", "object": "text_completion", "choices": choices[::-1]}
        if self.states and "seed" not in request:  # a server of states samples nothing
            reply["kv_transfer_params"] = {"hidden_states_path": self.states(request["prompt"])}
        return reply

    def facts(self, path: str) -> dict | None:
        """Return what the software says about itself at a path."""
        entry = {"id": MODEL, "owned_by": OWNERS.get(self.software, "others")}
        if self.software == "llama.cpp":
            entry["meta"] = {"n_ctx": 64, "n_params": 7}
        else:
            entry["max_model_len"] = 64
        return {
            ("any", "/v1/models"): {"data": [entry]},
            ("vllm", "/version"): {"version": "0.32.0"},
            ("llama.cpp", "/props"): {"build_info": "b1", "total_slots": self.slots},
        }.get(("any" if path == "/v1/models" else self.software, path))


class Handler(BaseHTTPRequestHandler):
    """Replies to one connection."""

    server: Served
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """Say something about the server."""
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers.get("Authorization"))
        facts = self.server.facts(self.path)
        self._send(Fault(200 if facts else 404, json.dumps(facts or {}).encode()))

    def do_POST(self):
        """Complete a prompt."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/tokenize" and server.tokenized:
            text = request["content" if server.software == "llama.cpp" else "prompt"]
            assert not (request["add_special_tokens"] or request["add_special"])
            said = {"tokens": server.tokenized(text), "count": 1}
            self._send(Fault(body=json.dumps(said).encode()))
            return
        with server.lock:
            server.requests.append(request)
            server.keys.append(self.headers.get("Authorization"))
            server.encodings.append(self.headers.get("Accept-Encoding"))
            number = len(server.requests)
        fault = server.fault and server.fault(request, number)
        if self.path != server.route:
            fault = Fault(404, b"no such route")
        reply = fault or Fault()
        if reply.drop:
            self.close_connection = True
            return
        if reply.body is None:
            reply = Fault(reply.status, json.dumps(server.completion(request)).encode())
        self._send(fault and Fault(**vars(fault) | {"body": reply.body}) or reply)

    def _send(self, reply: Fault) -> None:
        """Send a reply, at once or in drips."""
        with suppress(ConnectionError):  # who asked may have given up
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.body)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in [reply.body] if not reply.drip else map(bytes, zip(reply.body)):
                self.wfile.write(piece)
                if self.server.closing.wait(reply.drip):
                    return

    def log_message(self, *_):
        """Log nothing."""


def log_softmax(logits: list[float]) -> list[float]:
    """Return log-probabilities by plain arithmetic."""
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


@contextmanager
def served(
    software: str = "vllm",
    logits: Callable[[tuple[int, ...]], list[float]] = logits_of,
    ends: frozenset[int] = frozenset({0}),
    fault: Callable[[dict, int], Fault | None] | None = None,
    slots: int = 4,
    port: int = 0,
    pieces: Collection[int] = (),
) -> Iterator[Served]:
    """Serve on loopback; port 0 takes a free one."""
    with Served(port, software, logits, ends, fault, slots, pieces) as server, serving(server):
        try:
            yield server
        finally:
            server.closing.set()
