"""What is on the socket: streams at any speed, and servers and clients that end at any point."""

import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from mockpolicy import LastWordCost, last_word_cost
from sockets import chat_policy, compared, exchange, over_budget, request, serving, texts_of

from igcore import Guard
from tests.serving.capture import Capture
from tests.serving.process import BLOCK, BUDGET, Process, last_word, started

SETTINGS = dict(budget=1.0, block_size=2, max_new_tokens=12, spend=36, keep_shown=True)


def chunkings(many: int) -> tuple[str, bool]:
    """Stream many answers in random pieces, at random speeds."""
    guard, rng = Guard(chat_policy(), LastWordCost(), refusal="fed", **SETTINGS), random.Random(1)
    known, counted = {}, Counter()
    with serving(guard) as server:
        for _ in range(many):
            try:
                answer, parts = compared(server, guard, rng, known, seeds=20)
            except AssertionError:
                counted["differ"] += 1
                continue
            counted[answer.status] += 1
            counted["over budget"] += over_budget(parts, last_word_cost, 1.0, 2)
    line = f"{many} streams at random speeds of {len(known)} answers: {dict(counted)}"
    return line, not counted["differ"] and not counted["over budget"] and counted.total() >= many


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
