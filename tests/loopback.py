"""A server on loopback with the replies of a test."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """What a server sends; a mapping or a list becomes JSON, bytes and text stay as they are."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drip: float = 0.0  # seconds between bytes
    drop: bool = False  # the connection breaks off in the middle

    @property
    def content(self) -> bytes:
        """The body in bytes."""
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


class Handler(BaseHTTPRequestHandler):
    """Replies to one connection."""

    server: "Answering"
    protocol_version = "HTTP/1.1"

    def setup(self):
        """Note the connection."""
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self):
        """Answer a request that sends nothing."""
        self.do_POST()

    def do_POST(self):
        """Answer a request, at once or in drips."""
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.server.lock:
            self.server.asked.append((self.path, request, headers))
        reply = self.server.answer(self.path, request)
        reply = reply if isinstance(reply, Reply) else Reply(reply)
        self.server.closing.wait(reply.delay)
        with suppress(ConnectionError):  # the client may have disconnected
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.content) + 10 * reply.drop))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in [reply.content] if not reply.drip else map(bytes, zip(reply.content)):
                self.wfile.write(piece)
                if self.server.closing.wait(reply.drip):
                    break
        self.close_connection = reply.drop or self.close_connection

    def log_message(self, *_):
        """Log nothing."""


class Answering(ThreadingHTTPServer):
    """A server; `asked` holds the path, the body and the headers of each request.

    `connections` holds those of all requests, which end with the server.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[str, dict | None], object] | None = None, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer or self.answer
        self.asked, self.lock, self.closing = [], threading.Lock(), threading.Event()
        self.connections = []

    def server_close(self):
        """Close the port and all connections, also those that a client keeps."""
        super().server_close()
        for connection in self.connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(server: Answering) -> Iterator[Answering]:
    """Serve inside a with-block, in a thread of its own."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            thread.join()
