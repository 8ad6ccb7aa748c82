"""What is on the socket when servers and clients end at any point."""

import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from sockets import exchange, over_budget, request, texts_of

from tests.serving.capture import Capture
from tests.serving.process import BLOCK, BUDGET, Process, last_word, started


def asked(seed: int) -> bytes:
    """Return the request for a stream."""
    body = {"model": "m", "prompt": "abc dad", "seed": seed, "stream": True}
    return request(body, connection="close")


def kills(recipe: Path, many: int, servers: int) -> tuple[str, bool]:
    """End clients at random points, and servers as well, beside other clients."""
    rng, counted, read = random.Random(2), Counter(), []
    with Capture() as capture:
        for number in range(servers):
            left = many // servers
            with started(recipe) as server:
                capture.ports.add(server.port)
                whole = len(exchange(server.connect(), asked(0), rng))
                for n in range(left - 1):
                    cut = rng.randrange(whole)
                    read.append(exchange(server.connect(), asked(left * number + n), rng, cut))
                    counted["clients"] += 1
                # the last point: the server is killed while another client reads, too
                other = threading.Thread(target=read_on, args=(server, number, read))
                other.start()
                cut = rng.randrange(whole)
                read.append(exchange(server.connect(), asked(left * (number + 1)), rng, cut))
                server.process.kill()
                counted["servers"] += 1
                other.join()
    sent = capture.streams()
    for stream in sent:
        texts = texts_of(stream)
        counted["streams"] += b"text/event-stream" in stream
        counted["events"] += len(texts)
        counted["characters"] += sum(map(len, texts))
        counted["over budget"] += over_budget(texts, last_word, BUDGET, BLOCK)
        counted["cut"] += b"[DONE]" not in stream
    counted["not recorded"] = sum(not any(s.startswith(part) for s in sent) for part in read)
    line = f"{many} points at which a client or the server ended: {dict(counted)}"
    bad = counted["over budget"] or counted["not recorded"]
    return line, not bad and counted["cut"] > many / 2 and counted["events"] > many


def read_on(server: Process, seed: int, read: list[bytes]) -> None:
    """Read a stream until the server ends it or is gone."""
    with suppress(OSError):
        read.append(exchange(server.connect(), asked(seed), random.Random(seed)))
