"""Guard a file of prompts: ``igserve batch IN OUT --guard guard.yaml --shard 3/64``.

The output is a file of `igcore.Guard.map`, in the order of the input: a process that was killed
goes on at the first line that is missing, and the files of all shards after one another are the
file of a single run, but for fields of time.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from igcore import Guard, ParameterError, Response
from igcore.files import writing


def shard_of(text: str) -> tuple[int, int]:
    """Return i and n of a shard ``i/n``, counted from 1.

    Raises
    ------
    ParameterError
        When there is no such shard.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    i, n = map(int, match.groups()) if match else (0, 0)
    if not 1 <= i <= n:
        raise ParameterError(f"shard is {text!r:.40}, and there is none; give i/n, from 1/n to n/n")
    return i, n


def part_of(prompts: Sequence[str], size: int, i: int, n: int) -> list[str]:
    """Return the prompts of a shard: whole groups, in order; there may be none."""
    groups = -(-len(prompts) // size)
    begin, end = (groups * k // n * size for k in (i - 1, i))
    return list(prompts[begin:end])


def path_of(out: Path, i: int, n: int) -> Path:
    """Return the file of a shard; the names sort as the shards do."""
    if out.suffix != ".jsonl":
        raise ParameterError(f"OUT is {out}, but answers are JSON lines; end its name in .jsonl")
    digits = len(str(n))
    return out if n == 1 else out.with_stem(f"{out.stem}-{i:0{digits}}-of-{n}")


def run(guard: Guard, prompts: Sequence[str], path: Path) -> str:
    """Append the answers that a file lacks, and return a sentence about all its lines.

    Raises
    ------
    ParameterError, ScorerError, PolicyError, RunError
        As `igcore.Guard.map`.
    """
    answers: list[Response] = guard.map(prompts, out=path)
    with writing(path.parent):
        path.touch()  # a shard without a prompt is complete, too
    found = Counter(answer.status for answer in answers)
    answered = len(answers) - found["abstained"]
    return f"{path}: {len(answers)} rows, {answered} answered, {found['abstained']} abstained"
