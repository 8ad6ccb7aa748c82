"""A judge that never thinks: an OpenAI-compatible endpoint on loopback with canned replies. Knows
HTTP and hashes; runs no model.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.loopback import Answering, Reply, running

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
    body : str, optional
        Sent as it is in place of a chat completion.
    """

    content: str | None = None
    finish_reason: str = "stop"
    status: int = 200
    body: str | None = None

    def reply(self, model: str) -> Reply:
        """Return what a server sends."""
        if self.body is not None:
            return Reply(self.body)
        if self.status != 200:
            failure = {"message": self.content, "type": "stub", "code": self.status}
            return Reply({"error": failure}, self.status)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.content},
            "finish_reason": self.finish_reason,
        }
        about = {"id": "stub", "object": "chat.completion", "created": 0, "model": model}
        tokens = {"prompt_tokens": 0, "completion_tokens": len((self.content or "").split())}
        return Reply(about | {"choices": [choice], "usage": tokens})


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


class Stub(Answering):
    """The server; `requests` holds the bodies it was sent, `keys` the headers with the key."""

    def __init__(self, judge: Callable[[dict], Canned]):
        super().__init__()
        self.judge = judge

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def requests(self) -> list[dict]:
        return [request for _, request, _ in self.asked]

    @property
    def keys(self) -> list[str | None]:
        return [headers.get("authorization") for _, _, headers in self.asked]

    def answer(self, path: str, request: dict) -> Reply:
        """Judge, or say that there is nothing else."""
        if path != "/v1/chat/completions":
            return Reply("no such path", 404)
        return self.judge(request).reply(request.get("model", ""))


@contextmanager
def stub_judge(judge: Callable[[dict], Canned] = by_hash) -> Iterator[Stub]:
    """Serve canned replies on loopback.

    Parameters
    ----------
    judge : callable
        From the body of a request to its reply; called by several threads at once.
    """
    with running(Stub(judge)) as server:
        yield server
