"""What a request to an endpoint may take at most: seconds as a whole, and bytes of its reply.

The timeout of a client is for each piece that it reads, so that a byte now and then would hold it
for ever; and it reads a reply of any length.
"""

import time
from collections.abc import Callable
from functools import partial
from threading import local
from typing import Any

LONGEST = 2**24  # bytes of a reply


class Bounds(local):
    """The bounds of the request that this thread has under way.

    Parameters
    ----------
    seconds : float
        For a request, from connecting to the last byte of the reply.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self, request: Any) -> None:
        """Count from here; a hook of httpx for every request, a repeated one too."""
        self.end, self.room = time.monotonic() + self.seconds, LONGEST
        request.headers["accept-encoding"] = "identity"
        request.extensions["trace"] = self._watch

    def as_sent(self, response: Any) -> None:
        """Keep httpx from unpacking a reply, which may be small and grow a thousandfold."""
        response.headers.pop("content-encoding", None)

    def _watch(self, event: str, about: dict[str, Any]) -> None:
        """Bound what is read from a new connection; httpcore calls this at every step."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            stream = about["return_value"]
            stream.read = partial(self._read, stream.read)

    def _read(self, read: Callable[..., bytes], size: int, timeout: float | None = None) -> bytes:
        """Read from a connection, within the bounds."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the reply is not complete after {self.seconds:g} seconds")
        data = read(size, timeout=left)
        self.room -= len(data)
        if self.room < 0:
            raise OSError(f"the reply is longer than {LONGEST} bytes")
        return data
