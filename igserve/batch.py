"""Guard a file of prompts: ``igserve batch IN OUT --guard guard.yaml --shard 3/64``.

The output is JSON lines in the order of the input, also of a table: a process that was killed
goes on at the first line that is missing, and the files of all shards after one another are the
file of a single run, but for fields of time.
"""

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from igcore import Guard, ParameterError, Response, decode
from igcore.errors import RunError
from igcore.files import append_line, whole_lines, writing
from igcore.models.prompts import file_texts
from igcore.progress import progress
from igcore.tools.answers import OTHER_FILE, check_same, line_in, writer_of
from igcore.tools.receipt import origin_of, text_digest

from .wire import PATHS, TEXT, Asked, read_request, reply

Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of the input.

    Attributes
    ----------
    number : int
        In the whole input, from 0.
    kind : str
        See `igserve.wire.Asked`.
    body : object
        The request, which nobody has checked yet.
    name : str or None
        The ``custom_id`` of a line in OpenAI's format; None of a row of a table.
    """

    number: int
    kind: str
    body: object
    name: str | None = None

    def line(self, asked: Asked, answer: Response) -> Line:
        """Return the line of an answer."""
        if self.name is None:
            return {"row": self.number} | answer.to_dict() | {"receipt": answer.receipt()}
        name = f"igcore-{self.number}"
        body = reply(asked, answer, name, int(time.time()))
        response = {"status_code": 200, "request_id": name, "body": body}
        return self._named(response, None)

    def fault(self, why: ParameterError) -> Line:
        """Return the line of a row that cannot be answered."""
        if self.name is None:
            return {"row": self.number, "error": str(why)}
        return self._named(None, {"code": "400", "message": str(why)})

    def _named(self, response: Line | None, error: Line | None) -> Line:
        named = {"id": f"batch_req_{self.number}", "custom_id": self.name}
        return named | {"response": response, "error": error}


def verdict_in(line: Line) -> Line:
    """Return status, cost and receipt of a line; empty for one without an answer."""
    if "custom_id" not in line:
        return {} if "error" in line else line
    verdict: Line = line["response"]["body"]["igcore"] if line["response"] else {}
    return verdict


# --- the input ------------------------------------------------------------------------------------


def rows_of(path: Path, column: str) -> list[Row]:
    """Return the rows of a file: requests in OpenAI's format for batches, or a column of prompts.

    Raises
    ------
    ParameterError
        See `igcore.models.prompts.file_texts`; or when a line has no ``custom_id`` of its own.
    """
    if path.suffix != ".jsonl" or not in_openai_format(path):
        texts = file_texts(path, column)
        return [Row(n, TEXT, {"model": "", "prompt": text}) for n, text in enumerate(texts)]
    try:
        # not `splitlines`, which divides at characters that a text in JSON may hold
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except ValueError as error:
        raise ParameterError(f"{path} cannot be read ({error}); give UTF-8") from None
    rows, names = [], set[str]()
    for number, text in enumerate(line for line in lines if line.strip()):
        where = f"line {number + 1} of {path}"
        try:
            line = dict(json.loads(text))
            name, kind = line["custom_id"], PATHS[line["url"]]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise ParameterError(
                f"{where} is no request; give custom_id, a url of {' or '.join(PATHS)}, and body"
            ) from None
        if not isinstance(name, str) or name in names:
            raise ParameterError(f"{where} has no custom_id of its own; give each line a text")
        names.add(name)
        rows.append(Row(number, kind, line.get("body"), name))
    return rows


def in_openai_format(path: Path) -> bool:
    """Whether the first line of a file names itself, as requests of a batch do."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline().decode("utf-8-sig"))
        return isinstance(first, dict) and {"custom_id", "body"} <= first.keys()
    except (OSError, ValueError, RecursionError):
        return False  # whoever reads it says what is wrong


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


def part_of(rows: Sequence[Row], size: int, i: int, n: int) -> list[Row]:
    """Return the rows of a shard: whole groups, in order; there may be none."""
    groups = -(-len(rows) // size)
    begin, end = (groups * k // n * size for k in (i - 1, i))
    return list(rows[begin:end])


def path_of(out: Path, i: int, n: int) -> Path:
    """Return the file of a shard; the names sort as the shards do."""
    if out.suffix != ".jsonl":
        raise ParameterError(f"OUT is {out}, but answers are JSON lines; end its name in .jsonl")
    digits = len(str(n))
    return out if n == 1 else out.with_stem(f"{out.stem}-{i:0{digits}}-of-{n}")


# --- the answers ----------------------------------------------------------------------------------


def run(guard: Guard, rows: Sequence[Row], path: Path) -> list[Line]:
    """Append the answers that a file lacks, and return all its lines.

    Raises
    ------
    RunError
        When another process is writing to the file, it cannot be written, or it holds answers to
        something else.
    """
    size = guard.config.group_size
    with writer_of(path):
        with writing(path.parent):
            path.touch()  # a shard without a row is complete, too
        kept = whole_lines(path)
        lines = [line_in(text, f"line {n} of {path}") for n, text in enumerate(kept, start=1)]
        if len(lines) > len(rows):
            raise RunError(f"{path} has {len(lines)} answers, and there are {len(rows)} rows")
        for number, (row, line) in enumerate(zip(rows, lines, strict=False), start=1):
            check_line(guard, row, line, f"line {number} of {path}")
        if lines:
            print(f"{path}: an earlier start has left {len(lines)} of {len(rows)} lines")
        with progress(len(rows), path.name) as bar:
            bar.update(len(lines))
            # a group is decoded as a whole, even if some of its lines exist: see `answers_in`
            first = len(lines) // size * size if len(lines) < len(rows) else len(rows)
            for begin in range(first, len(rows), size):
                for row, line in group_lines(guard, rows[begin : begin + size]):
                    if row.number - rows[0].number >= len(lines):
                        append_line(path, line)
                        lines.append(line)
                        bar.update()
    return lines


def check_line(guard: Guard, row: Row, line: Line, where: str) -> None:
    """Raise ``RunError`` unless a kept line is one of a row under a guard."""
    try:
        asked = read_request(row.kind, row.body, guard)
        setup = asked.guard.with_method(asked.guard.method)
        prompt = {"prompt": text_digest(asked.prompt.text), "set": asked.prompt.set_name}
        same = origin_of(setup) | prompt
        check_same(verdict_in(line).get("receipt"), same, where)
    except ParameterError as why:
        if line != row.fault(why):
            raise RunError(f"{where} is not that of its row; {OTHER_FILE}") from why
    except (LookupError, TypeError, AttributeError):
        raise RunError(f"{where} is no answer; {OTHER_FILE}") from None


def group_lines(guard: Guard, rows: Sequence[Row]) -> Iterator[tuple[Row, Line]]:
    """Yield the rows of a group with their lines; rows of equal settings are decoded together."""
    alike: dict[Any, list[tuple[Row, Asked]]] = defaultdict(list)
    lines: dict[int, Line] = {}
    for row in rows:
        try:
            asked = read_request(row.kind, row.body, guard)
            alike[asked.together].append((row, asked))
        except ParameterError as why:
            lines[row.number] = row.fault(why)
    for pairs in alike.values():
        own = pairs[0][1].guard
        answers = decode(own.method, own, [asked.prompt for _, asked in pairs], seed=own.seed)
        for (row, asked), answer in zip(pairs, answers, strict=True):
            lines[row.number] = row.line(asked, answer)
    for row in rows:
        yield row, lines[row.number]


def summary(lines: Sequence[Line], path: Path) -> str:
    """Return a sentence about the lines of a file."""
    found = Counter(verdict_in(line).get("status", "error") for line in lines)
    answered = found["verified_safe"] + found["unverified_unsafe"]
    return (
        f"{path}: {len(lines)} rows, {answered} answered, {found['abstained']} abstained, "
        f"{found['error']} without an answer"
    )


def complete(lines: Sequence[Line]) -> bool:
    """Return whether each row has an answer; an abstention is one."""
    return all(map(verdict_in, lines))
