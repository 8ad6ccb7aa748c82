"""HTTP client: many requests at a time, each with a timeout, a size limit and retries.

The server of a policy and the judge share it. It follows no redirect, and sends no header that was
not configured. A params file may come from a stranger, so it chooses only among environment
variables with the prefix of a judge or of the server of a policy.

The threads of a call end before it returns. Connections are kept for the next call, and closed when
the client goes. A forked process opens its own, because two processes that read one connection
would take each other's replies. Do not fork within milliseconds of a call: a thread that ends may
hold a lock of OpenSSL, for which the new process would wait without end.
"""

import os
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from igcore.errors import ParameterError, needs, one_line

MAX_BYTES = 2**26  # bytes of a reply
IDLE = 2.0  # seconds that an unused connection is kept; servers close theirs after 5
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0  # seconds before an attempt is repeated
RETRIED = (408, 409, 429)  # statuses of an endpoint that may answer later; and from 500 on
REQUEST_ERRORS = (400, 413, 422)  # statuses that refuse this request; others may be answered
# what went wrong -> what the user can do
NO_REPLY = "does not reply; start it, correct its address, or raise timeout"
TOO_LONG = "sends a reply that does not end; correct its address, or raise timeout"
REDIRECTED = "redirects to another address; give that one"
REFUSED = "refuses the request or fails; correct the key, model or options, or see its log"
LONE_SURROGATE = "cannot be sent half a character (a lone surrogate); correct the text"
# prefixes of the environment variables that a params file may name as the key
JUDGE, SERVER = "IGCORE_JUDGE_", "IGCORE_SERVER_"
# without a user, a query or a fragment, which may hold a key
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[^\s?#@]*)?")
LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")
KEY_PART = 8  # no message shows this many consecutive characters of a key


class Request(NamedTuple):
    """The path and the body of a request; without a body it is a GET, else a POST of JSON."""

    path: str
    body: dict[str, Any] | None = None


class Failed(Exception):
    """A request failed, and others to this endpoint would fail as well."""


class Refused(Failed):
    """The endpoint refused this request; it may answer others."""


class Temporary(Failed):
    """An attempt failed; a retry may succeed."""


class Client:
    """Sends requests to an endpoint.

    A request is retried, after growing pauses, when the endpoint asks to wait (429), fails (5xx),
    cannot be reached, drops the connection or takes too long.

    Parameters
    ----------
    url : str
        Address to which the paths of requests are added.
    key : str
        Sent as a bearer token; empty for an endpoint that needs none.
    timeout : float
        Seconds for a whole reply. They are counted between two pieces of it; connecting, sending
        and waiting for one piece may each take as long.
    retries : int
        Attempts after the first one.
    at_once : int
        Requests in flight at a time, and most connections that are kept between two calls.
    """

    def __init__(
        self, url: str, key: str = "", *, timeout: float, retries: int = 0, at_once: int = 1
    ):
        self.url, self.key, self.timeout = url, key, timeout
        self.retries, self.at_once = retries, at_once
        self.http, self.tenacity = needs("httpx2"), needs("tenacity")
        self.headers = {"accept-encoding": "identity"}  # a small reply may unpack to a huge one
        if key:
            self.headers["authorization"] = f"Bearer {key}"
        # loaded once: this takes longer than many requests
        self.certificates = url.startswith("https:") and self.http.create_ssl_context()
        self._kept: dict[int, Any] = {}  # process -> its connections
        weakref.finalize(self, _close, self._kept)

    @property
    def connections(self) -> Any:
        """The connections of this process, an ``httpx2.Client``."""
        process = os.getpid()
        if process not in self._kept:
            # threads that come here together use the first one; the others were never connected
            self._kept.setdefault(process, self._open())
        return self._kept[process]

    def _open(self) -> Any:
        """Return a client without a connection."""
        return self.http.Client(
            headers=self.headers,
            timeout=self.timeout,
            limits=self.http.Limits(max_keepalive_connections=self.at_once, keepalive_expiry=IDLE),
            follow_redirects=False,  # texts go to the configured host alone
            trust_env=not is_local(self.url),  # no proxy between this computer and itself
            verify=self.certificates,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # keeps and sends none
        )

    def replies(self, requests: Sequence[Request]) -> Iterator[tuple[int, bytes | Failed]]:
        """Yield the index of each request with its reply or its failure, as they arrive.

        After a failure other than `Refused`, the requests without a reply fail in the same way.
        """
        call = _Call()
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
        """Return the reply to a request, or its failure after all attempts."""
        own = self.tenacity
        retrying = own.Retrying(
            retry=own.retry_if_exception_type(Temporary),
            wait=own.wait_exponential(FIRST_PAUSE, MAX_PAUSE),
            stop=own.stop_after_attempt(self.retries + 1) | own.stop_when_event_set(call.over),
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
        """Return the reply to one attempt; raise `Failed` if there is none."""
        if call.over.is_set():  # no further request is sent
            raise call.failed
        content, end = bytearray(), time.monotonic() + self.timeout
        try:
            method = "GET" if request.body is None else "POST"
            address = f"{self.url}{request.path}"
            with self.connections.stream(method, address, json=request.body) as response:
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > MAX_BYTES:
                        raise Failed(f"{TOO_LONG} (it is longer than {MAX_BYTES} bytes)")
                    if time.monotonic() > end:  # httpx counts its own for each piece
                        raise self.http.ReadTimeout("")
        except UnicodeEncodeError:
            raise Refused(LONE_SURROGATE) from None
        except self.http.TimeoutException:
            why = TOO_LONG if content else NO_REPLY
            raise Temporary(f"{why} (no whole reply in {self.timeout:.3g} seconds)") from None
        except (self.http.HTTPError, self.http.InvalidURL, OSError, ValueError) as error:
            raise Temporary(f"{NO_REPLY} ({without_key(one_line(error), self.key)})") from None
        if response.status_code == 200:
            return bytes(content)
        raise self._refusal(response.status_code, bytes(content[:1000]))

    def _refusal(self, status: int, content: bytes) -> Failed:
        """Return the failure for a status other than 200."""
        if 300 <= status < 400:  # without the other address, which may hold a key
            return Failed(f"{REDIRECTED} (status {status})")
        words = without_key(content.decode(errors="replace"), self.key)
        why = f"{REFUSED} (status {status}: {words})"
        if status in REQUEST_ERRORS:
            return Refused(why)
        return Temporary(why) if status >= 500 or status in RETRIED else Failed(why)


def _close(kept: dict[int, Any]) -> None:
    """Close the connections of this process, and not those of its parent, which may use them."""
    if own := kept.get(os.getpid()):
        own.close()


@dataclass
class _Call:
    """The state that the requests of one call share."""

    over: Event = field(default_factory=Event)  # set when no further request is sent
    failed: Failed = field(default_factory=Failed)  # the reason


# --- addresses and keys ---------------------------------------------------------------------------


def check_endpoint(field: str, url: str, variable: str, prefix: str) -> None:
    """Raise ``ParameterError`` for an address or a variable's name that may contain a key.

    Parameters
    ----------
    field : str
        The parameter with the address.
    variable : str
        Name of the environment variable with the key.
    prefix : str
        Prefix of such names: a params file may send no other variable to a server.
    """
    if not re.fullmatch(prefix + r"\w+", variable, re.ASCII):
        raise ParameterError(  # without the value, which may be the key
            "parameter api_key_env does not name an environment variable that may be sent; give "
            f"one that begins with {prefix}, and put the key there"
        )
    if not ADDRESS.fullmatch(url):
        raise ParameterError(  # without the value, which may contain a key
            f"parameter {field} is not a plain http address such as http://localhost:8000/v1; put "
            f"a key into the environment variable {variable}"
        )


def key_in(url: str, variable: str, prefix: str) -> str:
    """Return the key in an environment variable, or an empty string where none is needed.

    A judge on another computer needs one.

    Raises
    ------
    ParameterError
        When a key is needed and missing, or cannot be sent in a header.
    """
    key = os.environ.get(variable, "").strip()
    needed = prefix != SERVER and not is_local(url)
    if not (key.isascii() and key.isprintable()) or (needed and not key):
        raise ParameterError(
            f"the environment variable {variable} has no valid key; put only the key of "
            f"{url} there, without a line break, or any word if it needs none"
        )
    return key


def url_of(host: str) -> str:
    """Return the address of a host, in which one of IPv6 has brackets."""
    return f"http://[{host}]" if ":" in host else f"http://{host}"


def is_local(url: str) -> bool:
    """True if an address is on this computer."""
    return bool(LOOPBACK.fullmatch(urlsplit(url).hostname or ""))


def without_key(text: str, key: str) -> str:
    """Return the start of an endpoint's message, on one line; a placeholder if it has the key."""
    size = min(KEY_PART, len(key))
    parts = [key[start : start + size] for start in range(len(key) - size + 1)]
    if key and any(part in text for part in parts):
        return "its message repeats the key"
    return " ".join(text.split())[:200]
