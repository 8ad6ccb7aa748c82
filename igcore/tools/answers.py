"""Answers in a file: JSON lines that grow by whole lines, and go on after a stop.

A line is the answer as `igcore.Response.to_dict` gives it, and its receipt. The lines are in the
order of the prompts, so a file is always the beginning of the whole one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..decoding import PromptLike, decode
from ..errors import RunError
from ..files import append_line, locked, whole_lines
from ..prompt import as_prompt
from ..response import Response
from ..setup import Setup
from .receipt import origin_of, text_digest

OTHER_FILE = "choose another file, or delete the line and those after it"


def answers_in(
    path: Path, guard: Setup, prompts: Sequence[PromptLike], seed: int
) -> Iterator[Response]:
    """Yield the answers to prompts: those that a file has, then the others, which it gets.

    A group of prompts is decoded as a whole, even if the file has some of its answers: they may
    depend on it in half precision.

    Raises
    ------
    RunError
        When another process is writing to the file, it cannot be written, or it holds answers to
        other prompts or of another guard.
    """
    setup = replace(guard.with_method(guard.method), seed=seed)
    origin = origin_of(setup)
    with writer_of(path):
        kept = [line_in(text, f"line {n} of {path}") for n, text in enumerate(whole_lines(path), 1)]
        if len(kept) > len(prompts):
            raise RunError(f"{path} has {len(kept)} answers, and there are {len(prompts)} prompts")
        for number, (line, given) in enumerate(zip(kept, prompts, strict=False), start=1):
            prompt = as_prompt(given)
            asked = origin | {"prompt": text_digest(prompt.text), "set": prompt.set_name}
            answer = answer_of(line, asked, f"line {number} of {path}")
            answer.guard = setup
            yield answer
        if len(kept) == len(prompts):
            return
        begin = len(kept) - len(kept) % guard.config.group_size
        again = decode(guard.method, guard, prompts[begin:], seed=seed)
        for number, answer in enumerate(again, begin):
            if number >= len(kept):
                append_line(path, answer.to_dict() | {"receipt": answer.receipt()})
                yield answer


def answer_of(line: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> Response:
    """Return the answer of a line; raise ``RunError`` unless it is one to what is asked."""
    try:
        answer = Response.from_dict(line)
        text = {"text": text_digest(answer.judged)}
    except (LookupError, TypeError, AttributeError):
        raise RunError(f"{where} is no answer; {OTHER_FILE}") from None
    check_same(line.get("receipt"), {**asked, **text}, where)
    return answer


def writer_of(path: Path) -> AbstractContextManager[object]:
    """Return the lock of a file of answers, which one process writes at a time."""
    busy = f"another process is writing to {path}; wait for it, or choose another file"
    return locked(path.with_name(f".{path.name}.lock"), busy)


def line_in(text: bytes, where: str) -> dict[str, Any]:
    """Return a line of a file of answers; raise ``RunError`` unless it holds one."""
    try:
        line: dict[str, Any] = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise RunError(f"{where} is no answer; {OTHER_FILE}") from None
    return line


def check_same(receipt: Any, asked: Mapping[str, Any], where: str) -> None:
    """Raise ``RunError`` unless the receipt of a kept answer has all that is asked for."""
    try:
        found = dict(json.loads(receipt))
    except (ValueError, TypeError, RecursionError):
        found = {}
    if other := [name for name, value in asked.items() if found.get(name) != value]:
        raise RunError(
            f"{where} is an answer to something else ({', '.join(other)}); choose another file, or "
            "ask with the settings and the prompts that it was begun with"
        )
