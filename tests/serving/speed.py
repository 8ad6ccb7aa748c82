"""What the server adds to decoding: CPU seconds of a request, and the time to the first text."""

import statistics
import time
from pathlib import Path

from sockets import request, texts_of

from igcore import Guard
from igserve.recipe import guard_of, read_recipe
from tests.serving.process import Process, started

PROMPTS = ["How do plants grow?", "Name three rivers.", "Why is the sky blue?"]
MODEL = """
policy: smollm2-chat
cost: offensive-language
budget: 0.5
max_new_tokens: 24
keep_shown: true
"""


def overhead(recipe: Path, many: int) -> tuple[str, bool]:
    """Compare the CPU seconds of a request with those of a call in this process."""
    guard = guard_of(read_recipe(recipe), recipe.parent)
    bodies = [{"model": "m", "prompt": "abc dad", "seed": seed} for seed in range(many + 20)]
    with started(recipe) as server:
        for body in bodies[many:]:  # both warm up
            server.post(body)
            guard(body["prompt"], seed=body["seed"])
        spent = [server.cpu_s(), time.process_time()]
        for body in bodies[:many]:
            server.post(body).raise_for_status()
        served = server.cpu_s() - spent[0]
        spent[1] = time.process_time()
        for body in bodies[:many]:
            guard(body["prompt"], seed=body["seed"])
        here = time.process_time() - spent[1]
    more = (served - here) / many
    line = (
        f"{many} requests: {1000 * served / many:.2f} ms of CPU each, a call in process "
        f"{1000 * here / many:.2f} ms, overhead {1000 * more:.2f} ms (at most 10)"
    )
    return line, more <= 0.010


def first_text(folder: Path, pairs: int) -> tuple[str, bool]:
    """Compare the time to the first text over the socket with the first block in this process."""
    recipe = folder / "real.yaml"
    recipe.write_text(MODEL)
    guard = guard_of(read_recipe(recipe), folder)
    here, there = [], []
    with started(recipe) as server:
        for pair in range(-2, pairs):  # two to warm up
            prompt = PROMPTS[pair % len(PROMPTS)]
            seconds = first_here(guard, prompt, pair), first_there(server, prompt, pair)
            if pair >= 0:
                here.append(seconds[0])
                there.append(seconds[1])
    ratio = statistics.median(b / a for a, b in zip(here, there, strict=True))
    line = (
        f"first text of smollm2-chat: {statistics.median(there):.3f} s over the socket, "
        f"{statistics.median(here):.3f} s in process, ratio {ratio:.2f} (median of {pairs} pairs, "
        "at most 1.2)"
    )
    return line, ratio <= 1.2


def first_here(guard: Guard, prompt: str, seed: int) -> float:
    """Return the seconds to the first part of an answer in this process."""
    begun = time.monotonic()
    parts = guard.stream(prompt, seed=seed)
    next(parts)
    seconds = time.monotonic() - begun
    list(parts)
    return seconds


def first_there(server: Process, prompt: str, seed: int) -> float:
    """Return the seconds to the first text over the socket."""
    body = {"model": "m", "prompt": prompt, "seed": seed, "stream": True}
    begun, seconds, received = time.monotonic(), 0.0, b""
    with server.connect() as connection:
        connection.sendall(request(body, connection="close"))
        while part := connection.recv(10**5):
            received += part
            if not seconds and texts_of(received):
                seconds = time.monotonic() - begun
    return seconds
