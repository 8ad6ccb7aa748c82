"""A batch that is killed: ``python tests/batches.py``, a part of `make serve-audit`.

A thousand prompts are guarded once without a stop, and once in four shards, which are killed ten
times at random and started again. Both have the same lines, but for fields of time.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from test_batch import COST, lines_of
from tiny import saved, tiny_model, tiny_tokenizer

ROWS, SHARDS, KILLS = 1000, 4, 10
WORDS = "the sun a tree one more of it and to in is that we for as not but they all".split()
RECIPE = "cost: own_vowels:vowels\nbudget: 0\nspend: 12\nblock_size: 4\nmax_new_tokens: 12\n"


def start(folder: Path, out: str, *options: str) -> subprocess.Popen:
    """Start the command."""
    command = [sys.executable, "-m", "igserve", "batch", str(folder / "in.jsonl")]
    command += [str(folder / out), "--guard", str(folder / "guard.yaml"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_at(job: subprocess.Popen, path: Path, size: int) -> bool:
    """Kill a job when its file has grown to a size; False if it ended before."""
    while job.poll() is None:
        if size_of(path) >= size:
            job.kill()
            job.wait()
            return True
        time.sleep(0.002)
    return False


def main() -> None:
    """Run both, and compare."""
    chance = random.Random(5)
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), tiny_tokenizer()
        saved(folder / "model", tiny_model(tokenizer), tokenizer)
        (folder / "own_vowels.py").write_text(COST)
        (folder / "guard.yaml").write_text(f"policy: {folder / 'model'}\n{RECIPE}")
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(1, 5))) for _ in range(ROWS)]
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (folder / "in.jsonl").write_text("".join(lines))
        printed, _ = start(folder, "one.jsonl").communicate()
        print(printed.strip().splitlines()[-1])
        whole, size = lines_of(folder / "one.jsonl"), size_of(folder / "one.jsonl")
        kills = 0
        for i in range(1, SHARDS + 1):
            path, shard = folder / f"part-{i}-of-{SHARDS}.jsonl", ["--shard", f"{i}/{SHARDS}"]
            own = KILLS * i // SHARDS - KILLS * (i - 1) // SHARDS
            places = sorted(chance.uniform(1, 0.9 * size / SHARDS) for _ in range(own))
            for at in places:
                kills += kill_at(start(folder, "part.jsonl", *shard), path, int(at))
            printed, _ = start(folder, "part.jsonl", *shard).communicate()
            print(printed.strip().splitlines()[-1])
        parts = [line for path in sorted(folder.glob("part-*.jsonl")) for line in lines_of(path)]
    print(
        f"{kills} kills; {len(parts)} lines of {len(whole)}, equal but for time: {parts == whole}"
    )
    if parts != whole or kills != KILLS or len(whole) != ROWS:
        sys.exit(1)


if __name__ == "__main__":
    main()
