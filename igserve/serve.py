"""A guard behind OpenAI's interface: ``igserve serve --guard guard.yaml``.

Starlette and uvicorn, because both are small, well kept, and the pair that most servers of models
build on.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as Reply
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from igcore import Guard, ParameterError, Response
from igcore.settings import Count, Seconds, settings
from igcore.streaming import may_abstain

from .client import is_local, url_of
from .desk import Desk, Full, News, Ticket
from .wire import (
    PATHS,
    TIME_UP,
    Asked,
    chunk,
    fault,
    finish_reason,
    read_request,
    reply,
    usage_of,
    verdict_of,
)

log = logging.getLogger("igserve")
BODY_S = 10  # seconds in which a body must have come
ALIVE_S = 1  # after so many without news it is asked whether the caller is there
CONNECTIONS = 512


@settings(kw_only=True)
class Terms:
    """What a server allows.

    Attributes
    ----------
    name : str
        Of the model, as clients write it.
    key : str
        Which clients send as a bearer token; empty if they need none.
    waiting : int
        Requests that may wait.
    seconds : float
        From a request to its answer.
    body_bytes : int
        Of a request.
    origins : list of str
        Web pages that may ask from a browser.
    """

    name: str
    key: str = ""
    waiting: Count = 64
    seconds: Seconds = 300.0
    body_bytes: Annotated[int, Field(ge=1)] = 1_000_000
    origins: list[str] = field(default_factory=list)


@dataclass
class Service:
    """The answers to requests; each method is a route."""

    guard: Guard
    terms: Terms
    began: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not may_abstain(self.guard):
            raise ParameterError(
                f"method {self.guard.method!r} emits answers over budget under these settings, so "
                "it cannot be served; name 'backtracking', and on_failure 'abstain' or 'truncate'"
            )
        self.desk = Desk(self.terms.waiting)

    # --- routes ---

    async def health(self, request: Request) -> Reply:
        """Say that the server answers, and how many requests wait."""
        return JSONResponse({"status": "ok", "waiting": len(self.desk.tickets)})

    async def models(self, request: Request) -> Reply:
        """List the one model."""
        self.check_key(request)
        own = {"id": self.terms.name, "object": "model", "owned_by": "igcore"}
        return JSONResponse({"object": "list", "data": [own | {"created": self.began}]})

    async def complete(self, request: Request) -> Reply:
        """Answer a request, or say in one sentence why there is no answer."""
        try:
            return await self.answered(request)
        except ClientDisconnect:
            return Reply()  # which nobody reads
        except Exception as error:  # uvicorn would log its message, which may repeat a text
            return await refuse(request, error)

    async def answered(self, request: Request) -> Reply:
        """Answer a request, whole or in parts."""
        self.check_key(request)
        given = await self.body_of(request)
        kind = PATHS[request.url.path]
        # in a thread: a long prompt takes a second to be tokenized
        asked = await asyncio.to_thread(read_request, kind, given, self.guard)
        if asked.body.model != self.terms.name:
            raise HTTPException(
                404, f"model is {asked.body.model!r:.100}; this server has {self.terms.name!r}"
            )
        news: asyncio.Queue[News] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(value: News) -> None:
            loop.call_soon_threadsafe(news.put_nowait, value)

        ticket = Ticket(asked, time.monotonic() + self.terms.seconds, tell)
        try:
            self.desk.add(ticket)
        except Full:
            raise HTTPException(
                503,
                f"{self.terms.waiting} requests wait already; try again later",
                {"retry-after": "1"},
            ) from None
        if asked.body.stream:
            return Stream(ticket, self.parts(ticket, news))
        answer = await self.answer_of(request, ticket, news)
        return JSONResponse(reply(asked, answer, new_name(), int(time.time())))

    # --- steps ---

    def check_key(self, request: Request) -> None:
        """Refuse a request without the key."""
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), self.terms.key.encode()) and self.terms.key:
            raise HTTPException(401, "the key is missing or wrong; send it as a bearer token")

    async def body_of(self, request: Request) -> Any:
        """Return the body of a request, as JSON gives it."""
        # a web page of somebody else can send any other type without being asked for its origin
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "content-type is not application/json; send JSON")
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    content += part
                    if len(content) > self.terms.body_bytes:
                        most = self.terms.body_bytes
                        raise HTTPException(413, f"the body has more than {most} bytes; send less")
        except TimeoutError:
            said = f"the body did not come in {BODY_S} seconds; send it faster"
            raise HTTPException(408, said, {"connection": "close"}) from None
        try:
            return json.loads(bytes(content).decode())
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is no JSON in UTF-8; correct it") from None

    async def answer_of(
        self, request: Request, ticket: Ticket, news: asyncio.Queue[News]
    ) -> Response:
        """Wait for an answer; the search ends if the caller leaves."""
        try:
            while True:
                try:
                    async with asyncio.timeout(ALIVE_S):
                        value = await next_news(ticket, news)
                except TimeoutError:
                    if await request.is_disconnected():
                        raise ClientDisconnect from None
                    continue
                if isinstance(value, Exception):
                    raise value
                if isinstance(value, Response):
                    log_answer(ticket.asked, value)
                    return value
        finally:
            ticket.gone = True

    async def parts(self, ticket: Ticket, news: asyncio.Queue[News]) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        asked, name, created = ticket.asked, new_name(), int(time.time())
        while isinstance(value := await next_news(ticket, news), str):
            yield event(chunk(asked, name, created, value))
        if isinstance(value, Exception):
            yield event(fault(*status_of(value)))
            return
        log_answer(asked, value)
        last = chunk(asked, name, created, "", finish_reason(value))
        yield event(last | {"igcore": verdict_of(value)})
        if (asked.body.stream_options or {}).get("include_usage"):
            yield event(last | {"choices": [], "usage": usage_of(asked, value)})
        yield "data: [DONE]\n\n"


class Stream(StreamingResponse):
    """A stream that ends with the time of its request, also for a caller who does not read.

    The search ends with it, however it ends.
    """

    def __init__(self, ticket: Ticket, parts: AsyncIterator[str]):
        super().__init__(parts, media_type="text/event-stream")
        self.ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        # the last event says that the time is used up, if it can be sent
        seconds = self.ticket.until - time.monotonic() + ALIVE_S
        try:
            async with asyncio.timeout(seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a caller did not read its stream in time")
        finally:
            self.ticket.gone = True


async def next_news(ticket: Ticket, news: asyncio.Queue[News]) -> News:
    """Return the next news of a request, or that its time is used up."""
    try:
        async with asyncio.timeout(ticket.until - time.monotonic()):
            return await news.get()
    except TimeoutError:
        return TimeoutError(TIME_UP)


# --- replies --------------------------------------------------------------------------------------


def new_name() -> str:
    """Return the id of a reply."""
    return f"igcore-{secrets.token_hex(12)}"


def event(value: dict[str, Any]) -> str:
    """Return a value as an event of a stream."""
    return f"data: {json.dumps(value)}\n\n"


def log_answer(asked: Asked, answer: Response) -> None:
    """Log an answer by its numbers, without a text."""
    work = answer.counts.policy_tokens
    seconds = answer.generate_s + answer.cost_s + answer.reward_s
    log.info(
        "%s: %s, %d tokens of %d drawn, %.2f s",
        asked.kind,
        answer.reason or answer.status,
        answer.n_tokens,
        work,
        seconds,
    )


def status_of(error: Exception) -> tuple[int, str]:
    """Return status and message of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    if isinstance(error, ParameterError):
        return 400, str(error)
    if isinstance(error, TimeoutError):
        return 504, str(error)
    # what a scorer raises may repeat a text that has not passed
    return 500, f"the guard has no answer, because it raised {type(error).__name__}"


async def refuse(request: Request, error: Exception) -> Reply:
    """Return the reply to a request that failed."""
    status, message = status_of(error)
    headers = getattr(error, "headers", None)
    return JSONResponse(fault(status, message), status, headers)


# --- the server -----------------------------------------------------------------------------------


def app_of(service: Service, host: str) -> Starlette:
    """Return the application of a service at a host."""
    routes = [
        Route("/healthz", service.health),
        Route("/v1/models", service.models),
        *(Route(path, service.complete, methods=["POST"]) for path in PATHS),
    ]
    middleware = []
    if is_local(url_of(host)):  # no page may reach it by a name that leads here
        names = ["localhost", "127.0.0.1", "[::1]", url_of(host).removeprefix("http://")]
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=names))
    if service.terms.origins:
        allowed = {"allow_origins": service.terms.origins, "allow_headers": ["*"]}
        allowed["allow_methods"] = ["GET", "POST"]
        middleware.append(Middleware(CORSMiddleware, **allowed))  # type: ignore[arg-type]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.desk.close)

    handlers: Any = {HTTPException: refuse}
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan
    )
    app.router.redirect_slashes = False  # to an address that the caller has named
    return app


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; 0 takes a free port.

    Raises
    ------
    ParameterError
        When the port is in use or the host is not of this machine.
    """
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio lets the parts of a reply go at once only where a socket names its protocol
    own = socket.socket(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((host, port))
        own.listen(CONNECTIONS)  # else another server could take the port while a policy is loaded
    except (OSError, OverflowError) as error:
        own.close()
        why = getattr(error, "strerror", None) or error
        raise ParameterError(
            f"cannot listen at {host} on port {port} ({why}); choose another --port"
        ) from None
    return own


def server_of(service: Service, host: str) -> uvicorn.Server:
    """Return the server of a service at a host."""
    config = uvicorn.Config(
        app_of(service, host),
        log_config=None,
        access_log=False,  # its lines have whole addresses
        server_header=False,
        http="h11",  # uvicorn's other parser has no limit of headers
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(service.terms.seconds),
    )
    return uvicorn.Server(config)
