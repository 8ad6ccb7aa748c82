"""The server under load and under hostile clients."""

import random
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
from sockets import TEXT, events, over_budget, pieces, request, said

from tests.serving.process import BLOCK, BUDGET, Process, last_word, started

BODY = {"model": "m", "prompt": "abc dad"}


# --- many clients ---------------------------------------------------------------------------------


def crowd(recipe: Path, clients: int, seconds: float) -> tuple[str, bool]:
    """Let many clients ask at once; every answer must be within budget, and memory stay flat."""
    counted, lock = Counter(), threading.Lock()
    with started(recipe, "--waiting", str(clients - 4)) as server:
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=ask_on, args=(server, n, end, counted, lock))
            for n in range(clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(min(20, seconds / 3))
        early = server.memory()
        for thread in threads:
            thread.join()
        late = server.memory()
    line = (
        f"{clients} clients for {seconds:.0f} s: {dict(counted)}; memory {early:.0f} MiB after "
        f"20 s, {late:.0f} MiB at the end"
    )
    wrong = counted.keys() - {"answers", "503", "streams"}
    # oneDNN keeps kernels for up to 1,024 shapes: some 80 MiB in the first 5,000 answers
    return line, not wrong and counted["answers"] > clients and late < 1.15 * early


def ask_on(server: Process, number: int, end: float, counted: Counter, lock: threading.Lock):
    """Ask again and again until a time, and count what comes."""
    rng = random.Random(number)
    with httpx.Client(base_url=server.http.base_url, timeout=60) as http:
        while time.monotonic() < end:
            body = BODY | {"seed": rng.randrange(10**6), "stream": rng.random() < 0.5}
            body |= rng.choice([{}, {"temperature": 0.8}, {"max_tokens": 20}])
            kind = kind_of(http, body)
            with lock:
                counted[kind] += 1
                counted["streams"] += body["stream"] and kind == "answers"
            if kind == "503":
                time.sleep(rng.random())


def kind_of(http: httpx.Client, body: dict) -> str:
    """Return what came of a request."""
    try:
        reply = http.post(TEXT, json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    if reply.status_code != 200:
        return str(reply.status_code)
    if not body["stream"]:
        return "over budget" if over([said(reply.json())]) else "answers"
    found = events(reply.content)
    if found[-1] is not None:
        return "no end"
    return "over budget" if over(pieces(found)) else "answers"


def over(texts: list[str]) -> bool:
    """True if a stream is over budget at one of its checks."""
    return over_budget(texts, last_word, BUDGET, BLOCK)


# --- hostile clients ------------------------------------------------------------------------------


def attacks() -> dict[str, tuple[bytes, set[str]]]:
    """Return what hostile clients send, and the statuses that may come of it."""
    closed = {"connection": "close"}
    deep = b"[" * 500_000
    text = BODY | {"prompt": "a\x00b\x1b[2J\u202e\u0007"}
    control = request(BODY, **closed).replace(b"close", b"close\r\nx-name: a\x00b")
    both = request(BODY, transfer_encoding="chunked", **closed)
    return {
        "deep": (request(deep, **closed), {"400"}),
        "control characters": (request(text, **closed), {"200"}),
        "control characters in a header": (control, {"400"}),
        "header of 100 kB": (
            request(BODY, x_name="a" * 100_000, **closed),
            {"200", "400"},
        ),  # as its parts come
        "length and chunks": (both, {"408"}),  # chunks count, and none comes
        "another protocol": (b"\x16\x03\x01\x02\x00\x01" * 50 + b"\r\n\r\n", {"400"}),
    }


def statuses(server: Process, sent: bytes) -> str:
    """Send bytes, read up to the end of the connection, and return the statuses of replies."""
    received = b""
    with server.connect() as connection, suppress(ConnectionError):
        connection.sendall(sent)
        while part := connection.recv(10**6):
            received += part
    return " ".join(status.decode() for status in re.findall(rb"HTTP/1.1 (\d+)", received))


def usual_s(server: Process) -> float:
    """Return the seconds of a request, the least of 25: other processes may take the rest."""
    found = []
    for seed in range(25):
        begun = time.monotonic()
        server.post(BODY | {"seed": seed}).raise_for_status()
        found.append(time.monotonic() - begun)
    return min(found)


def hostile(recipe: Path) -> tuple[str, bool]:
    """Attack the server; each attack gets one error or an end, and others get their answers."""
    wrong = {}
    with started(recipe) as server:
        usual_s(server)
        before = usual_s(server)
        for name, (sent, expected) in attacks().items():
            found = statuses(server, sent)
            if found not in expected:
                wrong[name] = found
        with ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(server.connect())
            beside = usual_s(server)
        after = usual_s(server)
    if "Traceback" in (recipe.parent / "log.txt").read_text():
        wrong["log"] = "Traceback"
    line = (
        f"{len(attacks())} hostile clients, unexpected replies: {wrong or 'none'}; a request takes "
        f"{before:.3f} s before, {beside:.3f} s beside 200 idle connections, {after:.3f} s after"
    )
    return line, not wrong and max(beside, after) < 1.5 * before + 0.02
