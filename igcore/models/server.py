"""The way to a server of a language model: many requests, each bounded and tried again."""

import asyncio
import weakref
from collections.abc import Sequence
from functools import cached_property
from threading import Thread, current_thread
from typing import Any, NamedTuple

from ..errors import PolicyError, needs
from .trust import is_local, without_key

LONGEST = 2**26  # bytes of a reply
SLOWEST = 30.0  # seconds between two attempts, at most
BUSY = 429  # status of a server that asks to wait


class Request(NamedTuple):
    """A request: where to, and what; without a body something is only read."""

    path: str
    body: dict[str, Any] | None = None


class Server:
    """The way to a server: many requests at a time, each bounded and tried again.

    A request is tried again, after ever longer pauses, when the server asks to wait (429), fails
    (5xx), is not there, drops the connection or takes too long. No redirect is followed: prompts go
    to no host that nobody named.

    Parameters
    ----------
    url : str
        Without ``/v1``.
    model : str
        As the server calls it.
    key : str
        Sent as a bearer token; empty for a server that asks for none.
    timeout : float
        Seconds for a whole reply.
    retries : int
        Further attempts.
    at_once : int
        Requests under way at a time.
    samples : int
        Samples that one request may ask for.
    path : str
        Where it completes prompts.
    pause : float
        Seconds before the second attempt; they double with every further one.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str = "",
        *,
        timeout: float = 120.0,
        retries: int = 6,
        at_once: int = 32,
        samples: int = 1,
        path: str = "/v1/completions",
        pause: float = 0.5,
    ):
        self.url, self.model, self.key, self.timeout = url, model, key, timeout
        self.retries, self.at_once, self.pause = retries, at_once, pause
        self.samples, self.path = samples, path
        self.http = needs("httpx2", "served")

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the replies to requests for completions, see `ask`."""
        return self.ask([Request(self.path, {"model": self.model} | body) for body in bodies])

    def ask(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the replies to requests, in their order.

        Raises
        ------
        PolicyError
            When one of them has no reply that can be used. The others are given up.
        """
        loop, client = self._open
        future = asyncio.run_coroutine_threadsafe(self._all(client, requests), loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where the user has stopped waiting

    @cached_property
    def _open(self) -> tuple[asyncio.AbstractEventLoop, Any]:
        """A loop in a thread of its own, and the client: a notebook's thread has its own loop."""
        headers = {"accept-encoding": "identity"}  # a small reply may unpack to a huge one
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        client = self.http.AsyncClient(
            headers=headers,
            timeout=None,  # the whole of a reply has one, not each piece of it
            follow_redirects=False,
            trust_env=not is_local(self.url),  # no proxy between this computer and itself
            limits=self.http.Limits(max_connections=self.at_once),
        )
        loop = asyncio.new_event_loop()
        thread = Thread(target=_serve, args=(loop, client), daemon=True)
        thread.start()
        weakref.finalize(self, _stop, loop, thread)
        return loop, client

    async def _all(self, client: Any, requests: Sequence[Request]) -> list[bytes]:
        """Ask all requests, some at a time; the first error ends the others."""
        room = asyncio.Semaphore(self.at_once)
        tasks = [asyncio.ensure_future(self._one(client, room, request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, client: Any, room: asyncio.Semaphore, request: Request) -> bytes:
        """Ask one request, several times if need be."""
        async with room:
            for attempt in range(self.retries + 1):
                wait = 0.0
                try:
                    async with asyncio.timeout(self.timeout):
                        status, asked, content = await self._reply(client, request)
                    if status == 200:
                        return content
                    why = f"status {status}: {content[:1000].decode(errors='replace')}"
                    if status != BUSY and status < 500:
                        raise self._refused(status, why)
                    wait = float(asked) if asked.isdecimal() else 0.0
                except TimeoutError:
                    why = f"no whole reply in {self.timeout:g} seconds"
                except self.http.TransportError as error:
                    why = f"{type(error).__name__}: {error}"
                except self.http.HTTPError as error:  # will not change
                    raise self._refused(0, f"{type(error).__name__}: {error}") from None
                if attempt < self.retries:
                    await asyncio.sleep(min(max(wait, self.pause * 2**attempt), SLOWEST))
        raise PolicyError(
            f"the server at {self.url} gave no reply in {self.retries + 1} attempts "
            f"({without_key(why, self.key)}); start it or look into its log, or raise timeout, "
            "then run again, which goes on where this stopped"
        )

    async def _reply(self, client: Any, request: Request) -> tuple[int, str, bytes]:
        """Return status, seconds to wait and content of one reply, which may not be too long."""
        method = "GET" if request.body is None else "POST"
        where = f"{self.url}{request.path}"
        async with client.stream(method, where, json=request.body) as response:
            content = bytearray()
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > LONGEST:
                    raise PolicyError(
                        f"the server at {self.url} gave a reply of more than {LONGEST} bytes; "
                        "lower top_k or n_samples, or correct the address"
                    )
            return response.status_code, response.headers.get("retry-after", ""), bytes(content)

    def _refused(self, status: int, why: str) -> PolicyError:
        """Return the error for a request that would fail again."""
        if 300 <= status < 400:  # without the other address, which may hold a key
            return PolicyError(
                f"the server at {self.url} points to another address (status {status}); give that "
                "one as server"
            )
        return PolicyError(
            f"the server at {self.url} refuses a request ({without_key(why, self.key)}); correct "
            "the address, the key or the model's name, or look into its log"
        )


def _serve(loop: asyncio.AbstractEventLoop, client: Any) -> None:
    """Run a loop until it is stopped; the thread holds no reference to the `Server`."""
    loop.run_forever()
    loop.run_until_complete(client.aclose())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
    """Stop a loop when nobody can use it any more."""
    loop.call_soon_threadsafe(loop.stop)
    if thread is not current_thread():
        thread.join(1)
