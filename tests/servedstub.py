"""Servers on loopback: one with the replies of a test, and one of a language model.

The model is a function of the token ids before, in the forms of vLLM.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from mockpolicy import logits_of

from tests.loopback import Answering, Reply, running

MODEL = "mock/letters"
ROUTE = "/v1/completions"


@contextmanager
def answering(answer: Callable[[str, dict | None], object]) -> Iterator[tuple[str, list]]:
    """Serve ``answer(path, request)`` on loopback; yield the address and the list of requests."""
    with running(Answering(answer)) as server:
        yield server.url, server.asked


class Served(Answering):
    """The server of a model; `requests` holds the bodies of those for completions.

    Attributes
    ----------
    fault : callable or None
        (number of the request) -> `Reply` instead of a completion, or None.
    tokenized : callable or None
        (text) -> the tokens in a reply of /tokenize; None: no such route.
    processed : bool
        Whether it returns log-probabilities after temperature and truncation, as vLLM does with
        ``--logprobs-mode processed_logprobs``.
    """

    tokenized: Callable[[str], object] | None = None
    processed = False

    def __init__(self, logits, ends, fault, port: int):
        super().__init__(port=port)
        self.logits, self.ends = logits, ends
        self.fault, self.overrun = fault, False

    @property
    def requests(self) -> list[dict]:
        return [request for path, request, _ in list(self.asked) if path == ROUTE]

    def answer(self, path: str, request: dict | None) -> object:
        """Complete a prompt, or describe the server."""
        if path == "/tokenize" and self.tokenized:
            assert not request["add_special_tokens"]
            return {"tokens": self.tokenized(request["prompt"]), "count": 1}
        if path == ROUTE:
            fault = self.fault and self.fault(len(self.requests))
            return fault or self.completion(request)
        facts = self.facts(path)
        return facts if facts is not None else Reply("no such route", 404)

    def sample(self, request: dict, child: int) -> list[tuple[int, float]]:
        """Return tokens with their log-probabilities, by default the reference's."""
        rng = random.Random(request["seed"] + child)
        sequence, found = tuple(request["prompt"]), []
        shape = request["temperature"], request["top_k"], request["top_p"]
        for _ in range(request["max_tokens"]):
            log_p, weights = distribution(self.logits, sequence, *shape)
            (token,) = rng.choices(range(len(weights)), weights)
            told = math.log(weights[token] / sum(weights)) if self.processed else log_p[token]
            found.append((token, told))
            sequence += (token,)
            if token in self.ends and not self.overrun:
                break
        return found

    def choice(self, request: dict, child: int) -> dict:
        """Return one sample."""
        sample = self.sample(request, child)
        logprobs = {"token_logprobs": [x for _, x in sample]}
        ids = [token for token, _ in sample]
        return {"index": child, "text": "", "logprobs": logprobs, "token_ids": ids}

    def completion(self, request: dict) -> dict:
        """Return the reply to a request."""
        choices = [self.choice(request, child) for child in range(request["n"])]
        return {"id": "stub", "object": "text_completion", "choices": choices[::-1]}

    def facts(self, path: str) -> dict | None:
        """Return the software's description of itself at a path."""
        entry = {"id": MODEL, "owned_by": "vllm", "max_model_len": 64}
        known = {"/v1/models": {"data": [entry]}, "/version": {"version": "0.32.0"}}
        return known.get(path)


@cache
def distribution(
    logits: Callable, prefix: tuple, temperature: float, top_k: int, top_p: float
) -> tuple[list[float], list[float]]:
    """Return log-probabilities after a prefix, and the weights by which a token is sampled."""
    log_p = log_softmax(logits(prefix))
    weights = [math.exp(x / temperature) for x in log_p]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = order[:top_k] if top_k > 0 else order
    total, above, left = sum(weights[token] for token in order), 0.0, set()
    for token in order:
        if above < top_p * total or top_p == 1:
            left.add(token)
        above += weights[token]
    return log_p, [weight if token in left else 0.0 for token, weight in enumerate(weights)]


def log_softmax(logits: list[float]) -> list[float]:
    """Return log-probabilities by plain arithmetic."""
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


@contextmanager
def served(
    logits: Callable[[tuple[int, ...]], list[float]] = logits_of,
    ends: frozenset[int] = frozenset({0}),
    fault: Callable[[int], Reply | None] | None = None,
    port: int = 0,
) -> Iterator[Served]:
    """Serve a model on loopback; port 0 takes a free one."""
    with running(Served(logits, ends, fault, port)) as server:
        yield server
