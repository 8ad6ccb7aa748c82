"""``igserve serve`` as a process, with a tiny model or an embedded one, and what it costs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch
from sockets import Running
from tiny import saved, tiny, tiny_tokenizer

BUDGET, BLOCK = 2.0, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COST = '''
def last_word(text):
    """Return how many vowels the last word has."""
    word = (text.split() or [""])[-1]
    return sum(word.count(vowel) for vowel in "aeiou")
'''
RECIPE = f"""
cost: word_cost:last_word
budget: {BUDGET}
block_size: {BLOCK}
max_new_tokens: 48
spend: 192
keep_shown: true
refusal: Not now.
"""


def last_word(text: str) -> float:
    """Compute the cost of the recipe again, in another way."""
    return len(re.findall("[aeiou]", text.rstrip().rpartition(" ")[2]))


def tiny_home(folder: Path) -> Path:
    """Write a tiny model of letters and spaces, its cost and the recipe; return the recipe."""
    tokenizer = tiny_tokenizer(f"{LETTERS}Ġ")  # a byte-level tokenizer writes a space so
    ends = tokenizer.eos_token_id
    size = dict(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=ends)
    saved(folder / "model", tiny("llama", torch.float32, **size, initializer_range=0.1), tokenizer)
    (folder / "word_cost.py").write_text(COST)
    (folder / "guard.yaml").write_text(f"policy: {folder / 'model'}{RECIPE}")
    return folder / "guard.yaml"


@dataclass
class Process(Running):
    """A server in a process of its own."""

    process: subprocess.Popen | None = None

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server so far."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def memory(self) -> float:
        """Return its resident memory in MiB."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


@contextmanager
def started(recipe: Path, *options: str) -> Iterator[Process]:
    """Start the command with a recipe; end it, whatever happens."""
    command = [sys.executable, "-m", "igserve", "serve", "--guard", recipe, "--port", "0"]
    with (recipe.parent / "log.txt").open("a") as log:
        process = subprocess.Popen(
            [*command, "--name", "m", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        line = process.stdout.readline()
        if not line:
            raise OSError((recipe.parent / "log.txt").read_text()[-500:])
        port = int(line.partition("/v1 as")[0].rpartition(":")[2])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            assert http.get("/healthz").status_code == 200
            yield Process(None, None, port, http, process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
