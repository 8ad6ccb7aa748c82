"""HTTP client: many requests at a time, each with a timeout, a size limit and retries.

The server of a policy, the scorer `endpoint` and the judge share it. It follows no redirect, and
sends no header that was not configured. A params file may come from anybody: it chooses only among
environment variables that were meant for a judge, a scorer or the server of a policy.

Each request has a connection and each call has threads of its own, which end before it returns. So
nothing stays behind, and a forked process needs nothing of the one that it came from.
"""

import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import ParameterError, needs, said

LONGEST = 2**26  # bytes of a reply
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an attempt is repeated
BUSY = (408, 409, 429)  # statuses of an endpoint that may answer later; and 500 on
OF_THE_REQUEST = (400, 413, 422)  # by which it refuses what it was sent; it may answer others
# what went wrong -> what the user can do
SILENT = "does not reply; start it, correct its address, or raise timeout"
ENDLESS = "gives a reply that does not come to an end; correct its address, or raise timeout"
MOVED = "points to another address; give that one"
REFUSED = "refuses the request or fails; correct the key, model or options, or see its log"
HALF = "cannot be sent half a character; correct the text"
# of the environment variables that a params file may name as the key
JUDGE, SCORER, SERVER = "IGCORE_JUDGE_", "IGCORE_SCORER_", "IGCORE_SERVER_"
# without a user, a query or a fragment, which may hold a key
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[^\s?#@]*)?")
LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")
SHOWN = 8  # this many characters of a key in a row are never shown


class Request(NamedTuple):
    """A request: where to, and what; without a body something is only read."""

    path: str
    body: dict[str, Any] | None = None


class Failed(Exception):
    """An endpoint gives no reply that can be used, to no request of this kind."""


class Refused(Failed):
    """An endpoint gives no reply to this request; it may answer others."""


class Passing(Failed):
    """An endpoint gives no reply now; it may later."""


class Client:
    """The way to an endpoint.

    A request is tried again, after ever longer pauses, when the endpoint asks to wait (429), fails
    (5xx), is not there, drops the connection or takes too long.

    Parameters
    ----------
    url : str
        Before the paths of requests.
    key : str
        Sent as a bearer token; empty for an endpoint that asks for none.
    timeout : float
        Seconds for a whole reply. They are counted between two pieces of it; to connect, to send
        and to wait for one piece may each take as long.
    retries : int
        Further attempts.
    at_once : int
        Requests under way at a time.
    """

    def __init__(
        self, url: str, key: str = "", *, timeout: float, retries: int = 0, at_once: int = 1
    ):
        self.url, self.key, self.timeout = url, key, timeout
        self.retries, self.at_once = retries, at_once
        self.http, self.tenacity = needs("httpx2", "served"), needs("tenacity", "served")
        self.headers = {"accept-encoding": "identity"}  # a small reply may unpack to a huge one
        if key:
            self.headers["authorization"] = f"Bearer {key}"
        # read once, which takes longer than many requests
        self.certificates = url.startswith("https:") and self.http.create_ssl_context()

    def replies(
        self, requests: Sequence[Request], seconds: float = math.inf
    ) -> Iterator[tuple[int, bytes | Failed]]:
        """Yield the place of each request with its reply, or why there is none, as they come.

        After a failure that holds for all requests, those that are not answered yet are given up.

        Parameters
        ----------
        seconds : float
            After the first attempt of a request, none of it is repeated later than this.
        """
        call = _Call(seconds)
        with ThreadPoolExecutor(self.at_once) as pool:
            places = {
                pool.submit(self._reply, call, request): place
                for place, request in enumerate(requests)
            }
            try:
                for done in as_completed(places):
                    yield places.pop(done), done.result()
            finally:
                call.over.set()

    def _reply(self, call: "_Call", request: Request) -> bytes | Failed:
        """Return the reply to a request, or why there is none, after several attempts."""
        own = self.tenacity
        retrying = own.Retrying(
            retry=own.retry_if_exception_type(Passing),
            wait=own.wait_exponential(FIRST_PAUSE, LONGEST_PAUSE),
            stop=own.stop_after_attempt(self.retries + 1)
            | own.stop_before_delay(call.seconds)
            | own.stop_when_event_set(call.over),
            sleep=own.sleep_using_event(call.over),
            reraise=True,
        )
        try:
            content: bytes = retrying(self._attempt, call, request)
            return content
        except Failed as error:
            if not isinstance(error, Refused) and not call.over.is_set():
                call.failed = error
                call.over.set()
            return error

    def _attempt(self, call: "_Call", request: Request) -> bytes:
        """Return the reply to one attempt."""
        if call.over.is_set():  # nothing more is sent
            raise call.failed
        content, end = bytearray(), time.monotonic() + self.timeout
        try:
            with self.http.stream(
                "GET" if request.body is None else "POST",
                f"{self.url}{request.path}",
                json=request.body,
                headers=self.headers,
                timeout=self.timeout,
                follow_redirects=False,  # texts go to no host that nobody named
                trust_env=not is_local(self.url),  # no proxy between this computer and itself
                verify=self.certificates,
            ) as response:
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > LONGEST:
                        raise Failed(f"{ENDLESS} (it is longer than {LONGEST} bytes)")
                    if time.monotonic() > end:  # the client's is for each piece
                        raise self.http.ReadTimeout("")
        except UnicodeEncodeError:
            raise Refused(HALF) from None
        except self.http.TimeoutException:
            why = ENDLESS if content else SILENT
            raise Passing(f"{why} (no whole reply in {self.timeout:.3g} seconds)") from None
        except (self.http.HTTPError, self.http.InvalidURL, OSError, ValueError) as error:
            raise Passing(f"{SILENT} ({without_key(said(error), self.key)})") from None
        if response.status_code == 200:
            return bytes(content)
        raise self._refusal(response.status_code, bytes(content[:1000]))

    def _refusal(self, status: int, content: bytes) -> Failed:
        """Return the error for a status that is no reply."""
        if 300 <= status < 400:  # without the other address, which may hold a key
            return Failed(f"{MOVED} (status {status})")
        words = without_key(content.decode(errors="replace"), self.key)
        why = f"{REFUSED} (status {status}: {words})"
        if status in OF_THE_REQUEST:
            return Refused(why)
        return Passing(why) if status >= 500 or status in BUSY else Failed(why)


@dataclass
class _Call:
    """Requests that are asked together: when and by how many bytes they have to be answered."""

    seconds: float
    over: Event = field(default_factory=Event)  # nothing more is asked
    failed: Failed = field(default_factory=Failed)  # because of this


# --- addresses and keys ---------------------------------------------------------------------------


def check_endpoint(field: str, url: str, variable: str, prefix: str) -> None:
    """Raise ``ParameterError`` for an address or the name of a variable that may hold a key itself.

    Parameters
    ----------
    field : str
        The parameter that holds the address.
    variable : str
        Name of the environment variable with the key.
    prefix : str
        With which such names begin: a params file may send no other variable away.
    """
    if not re.fullmatch(prefix + r"\w+", variable, re.ASCII):
        raise ParameterError(  # without the value, which may be the key
            "parameter api_key_env is no name of an environment variable that may be sent away; "
            f"give one that begins with {prefix}, and put the key there"
        )
    if not ADDRESS.fullmatch(url):
        raise ParameterError(  # without the value, which may hold a key
            f"parameter {field} is no plain http address such as http://localhost:8000/v1; a "
            f"key belongs into the environment variable {variable}"
        )


def key_in(url: str, variable: str, prefix: str) -> str:
    """Return the key that an environment variable holds for an address, or an empty string.

    A judge or a scorer that is not on this computer needs one.

    Raises
    ------
    ParameterError
        When the variable holds no key.
    """
    key = os.environ.get(variable, "").strip()
    needed = prefix != SERVER and not is_local(url)
    if not (key.isascii() and key.isprintable()) or (needed and not key):
        raise ParameterError(
            f"the environment variable {variable} holds no key; put only the key of "
            f"{url} there, without a line break, or any word if it asks for none"
        )
    return key


def is_local(url: str) -> bool:
    """True if an address is on this computer."""
    return bool(LOOPBACK.fullmatch(urlsplit(url).hostname or ""))


def without_key(text: str, key: str) -> str:
    """Return the start of an endpoint's message, on one line; empty if it repeats the key."""
    size = min(SHOWN, len(key))
    parts = [key[start : start + size] for start in range(len(key) - size + 1)]
    if key and any(part in text for part in parts):
        return "its words repeat the key"
    return " ".join(text.split())[:200]
