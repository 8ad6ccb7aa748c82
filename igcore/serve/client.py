"""HTTP client: many requests at a time, each with a timeout, a size limit and retries.

The server of a policy, the scorer `endpoint` and the judge share it. It follows no redirect, and
sends no header or cookie that was not configured. A params file may come from anybody: it chooses
only among environment variables that were meant for a judge, a scorer or the server of a policy.
"""

import asyncio
import math
import os
import re
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import ip_address
from threading import Lock, Thread, current_thread
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import IgcoreError, ParameterError, needs

LONGEST, MOST = 2**26, 2**28  # bytes of a reply, and of all replies to one call
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before an attempt is repeated
BUSY = (408, 409, 429)  # statuses of an endpoint that may answer later; and 500 on
OF_THE_REQUEST = (400, 413, 422)  # by which it refuses what it was sent; it may answer others
# what went wrong -> what the user can do
SILENT = "does not reply; start it, correct its address, or raise timeout"
LATE = "is not done in time; raise timeout, or send less at a time"
ENDLESS = "gives a reply that does not come to an end; correct its address, or raise timeout"
LONG = "gives replies that are too long together; send less at a time, or correct its address"
MOVED = "points to another address; give that one"
REFUSED = "refuses the request or fails; correct the key, model or options, or see its log"
HALF = "cannot be sent half a character; correct the text"
# of the environment variables that a params file may name as the key
JUDGE, SCORER, SERVER = "IGCORE_JUDGE_", "IGCORE_SCORER_", "IGCORE_SERVER_"
# such a variable holds the name of one more, which only who starts the run can set
ALLOWED = "KEY_FROM"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# a client can call these addresses, and they hold nothing that may be a key
NAME = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
PORT = r"(?::[0-6]?[0-9]{1,4})?"
PATH = r"""(?:/[!"$->A-~]{0,1000})?"""  # ASCII without spaces, #, ? and @
ADDRESS = re.compile(rf"https?://({NAME}|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]){PORT}{PATH}")
NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}|.*:.*")  # a host that is no name
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
        Seconds for a whole reply.
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
        self.http = needs("httpx2", "served")
        self._lock, self._opened = Lock(), (0, None)  # process, and what `_open` returns

    def ask(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the replies to requests, in their order.

        Raises
        ------
        Failed
            When one of them has no reply that can be used. The others are given up.
        """
        replies = []
        for reply in self._replies(requests, None, apart=False):
            if isinstance(reply, Failed):
                raise reply
            replies.append(reply)
        return replies

    def each(self, requests: Sequence[Request], seconds: float) -> list[bytes | Failed]:
        """Return the reply to each request, or why there is none.

        After a failure that holds for all requests, those that are not answered yet are given up.

        Parameters
        ----------
        seconds : float
            For all of them together, repeated attempts included.
        """
        return self._replies(requests, time.monotonic() + seconds, apart=True)

    def _replies(
        self, requests: Sequence[Request], end: float | None, apart: bool
    ) -> list[bytes | Failed]:
        """Return the replies; `apart` says whether a refused request leaves the others alone."""
        try:
            with self._lock:  # several threads may ask
                loop, client = self._open()
        except Exception as error:  # of an address, a proxy or a certificate
            return [Failed(self._because(REFUSED, f"{type(error).__name__}: {error}"))] * len(
                requests
            )
        call = _Call(requests, end, apart)
        future = asyncio.run_coroutine_threadsafe(self._all(client, call), loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where the user has stopped waiting

    def _open(self) -> tuple[asyncio.AbstractEventLoop, Any]:
        """Return the client and its loop, in a thread of its own: a notebook's has another loop."""
        process, opened = self._opened
        if opened and process == os.getpid():  # a forked process has no such thread
            return opened
        headers = {"accept-encoding": "identity"}  # a small reply may unpack to a huge one
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        client = self.http.AsyncClient(
            headers=headers,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # keeps none
            timeout=None,  # the whole of a reply has one, not each piece of it
            follow_redirects=False,  # texts go to no host that nobody named
            trust_env=not is_local(self.url),  # no proxy between this computer and itself
            limits=self.http.Limits(max_connections=self.at_once),
        )
        loop = asyncio.new_event_loop()
        thread = Thread(target=_serve, args=(loop, client), daemon=True)
        thread.start()
        weakref.finalize(self, _stop, loop, thread)
        self._opened = os.getpid(), (loop, client)
        return loop, client

    async def _all(self, client: Any, call: "_Call") -> list[bytes | Failed]:
        """Ask all requests, some at a time; the first failure ends the others."""
        room, down = asyncio.Semaphore(self.at_once), []

        async def one(place: int) -> None:
            async with room:
                if down:  # nothing more is sent
                    return
                try:
                    call.found[place] = await self._one(client, call.requests[place], call)
                except Failed as error:
                    call.found[place] = error
                    if not (call.apart and isinstance(error, Refused)):
                        down.append(error)
                        raise

        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(call.requests)):
                    group.create_task(one(place))
        except* Failed:
            pass  # it stands in `down`
        return [call.found[i] if i in call.found else down[0] for i in range(len(call.requests))]

    async def _one(self, client: Any, request: Request, call: "_Call") -> bytes:
        """Ask one request, several times if need be."""
        why = LATE
        for attempt in range(self.retries + 1):
            left = min(self.timeout, call.left)
            if left <= 0:
                break
            reply = _Reply()
            try:
                async with asyncio.timeout(left):
                    await self._read(client, request, reply, call)
                if reply.status == 200:
                    return bytes(reply.content)
                why = self._refusal(reply)
            except Failed:
                raise
            except UnicodeEncodeError:
                raise Refused(HALF) from None
            except TimeoutError:
                begun = ENDLESS if reply.content else SILENT
                why = f"{begun} (no whole reply in {left:.3g} seconds)"
            except (self.http.TransportError, OSError) as error:
                why = self._because(SILENT, f"{type(error).__name__}: {error}")
            except Exception as error:  # will not change
                said = f"{type(error).__name__}: {error}"
                raise Failed(self._because(REFUSED, said)) from None
            pause = min(max(reply.wait, FIRST_PAUSE * 2 ** min(attempt, 9)), LONGEST_PAUSE)
            if attempt == self.retries or pause > call.left:
                break
            await asyncio.sleep(pause)
        raise Failed(why)

    async def _read(self, client: Any, request: Request, reply: "_Reply", call: "_Call") -> None:
        """Read a reply, which may not be too long."""
        method = "GET" if request.body is None else "POST"
        where = f"{self.url}{request.path}"
        async with client.stream(method, where, json=request.body) as response:
            reply.status = response.status_code
            reply.wait = _seconds(response.headers.get("retry-after", ""))
            async for piece in response.aiter_raw():
                reply.content += piece
                call.size += len(piece)
                if len(reply.content) > LONGEST:
                    raise Failed(f"{ENDLESS} (it is longer than {LONGEST} bytes)")
                if call.size > MOST:
                    raise Failed(f"{LONG} (they are longer than {MOST} bytes)")

    def _refusal(self, reply: "_Reply") -> str:
        """Return why a status is no reply; raise where another attempt would end the same way."""
        if 300 <= reply.status < 400:  # without the other address, which may hold a key
            raise Failed(f"{MOVED} (status {reply.status})")
        said = f"status {reply.status}: {reply.content[:1000].decode(errors='replace')}"
        why = self._because(REFUSED, said)
        if reply.status in OF_THE_REQUEST:
            raise Refused(why)
        if reply.status < 500 and reply.status not in BUSY:
            raise Failed(why)
        return why

    def _because(self, why: str, said: str) -> str:
        """Return what went wrong, with what the endpoint said unless it repeats the key."""
        return f"{why} ({without_key(said, self.key)})"


@dataclass
class _Call:
    """Requests that are asked together, when they have to be answered, and the replies so far."""

    requests: Sequence[Request]
    end: float | None
    apart: bool
    found: dict[int, bytes | Failed] = field(default_factory=dict)
    size: int = 0  # bytes read, of failed attempts too

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return math.inf if self.end is None else self.end - time.monotonic()


@dataclass
class _Reply:
    """A reply as far as it was read: status, seconds that it asks to wait, and content."""

    status: int = 0
    wait: float = 0.0
    content: bytearray = field(default_factory=bytearray)


def _seconds(header: str) -> float:
    """Return the pause that an endpoint asks for, 0 where it is no plain number."""
    try:
        return max(0.0, float(header))
    except ValueError:
        return 0.0


def _serve(loop: asyncio.AbstractEventLoop, client: Any) -> None:
    """Run a loop until it is stopped; the thread holds no reference to the `Client`."""
    loop.run_forever()
    loop.run_until_complete(client.aclose())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
    """Stop a loop when nobody can use it any more."""
    loop.call_soon_threadsafe(loop.stop)
    if thread is not current_thread():
        thread.join(1)


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
        With which such names begin.
    """
    if not VARIABLE.fullmatch(variable):
        raise ParameterError(  # without the value, which may be the key
            "parameter api_key_env is no name of an environment variable; give one that "
            f"begins with {prefix}, and put the key there"
        )
    if not is_address(url):
        raise ParameterError(  # without the value, which may hold a key
            f"parameter {field} is no plain http address such as http://localhost:8000/v1; a "
            f"key belongs into the environment variable {variable}"
        )


def key_in(
    url: str, variable: str, prefix: str, failure: type[IgcoreError], needed: bool = True
) -> str:
    """Return the key that an environment variable holds for an address, or an empty string.

    Parameters
    ----------
    needed : bool
        Whether an endpoint elsewhere needs one; one on this computer does not.

    Raises
    ------
    ParameterError
        When the variable may not be sent to an endpoint.
    IgcoreError
        The given failure where the variable holds no key.
    """
    check_variable(variable, prefix)
    key = os.environ.get(variable, "").strip()
    clean = key.isascii() and (key.isprintable() or not key)
    if not clean or (needed and not key and not is_local(url)):
        raise failure(
            f"the environment variable {variable} holds no key; put only the key of "
            f"{url} there, without a line break, or any word if it asks for none"
        )
    return key


def is_address(url: str) -> bool:
    """Say whether a client can call this address, and it holds nothing that may be a key."""
    found = ADDRESS.fullmatch(url)
    if found and NUMBERS.fullmatch(host := found[1].strip("[]")):
        try:
            ip_address(host)
        except ValueError:
            return False
    return found is not None


def is_local(url: str) -> bool:
    """Say whether an address is on this computer."""
    return bool(LOOPBACK.fullmatch(urlsplit(url).hostname or ""))


def check_variable(name: str, prefix: str) -> None:
    """Raise ``ParameterError`` unless this environment variable may be sent to an endpoint.

    `prefix` is `JUDGE`, `SCORER` or `SERVER`.
    """
    allowed = prefix + ALLOWED
    if not name.startswith(prefix) and name != os.environ.get(allowed):
        raise ParameterError(
            f"api_key_env names the environment variable {name}, which a params file alone may not "
            f"send away; put the key into {prefix}KEY or another one that begins with {prefix}, or "
            f"allow this one by setting {allowed} to its name"
        )


def without_key(text: str, key: str) -> str:
    """Return the beginning of what an endpoint said, on one line; nothing if it repeats the key."""
    size = min(SHOWN, len(key))
    parts = [key[start : start + size] for start in range(len(key) - size + 1)]
    if key and any(part in text for part in parts):
        return "its words repeat the key"
    return " ".join(text.split())[:200]
