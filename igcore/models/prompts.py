"""Prompt sets of this package by name, and a user's own files of prompts.

The standard library reads text, CSV and lines of JSON. The library datasets reads Parquet: it reads
data files alone and runs no code beside them.
"""

import csv
import glob
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..catalog import PROMPT_SETS, found
from ..errors import ParameterError, needs, one_line, unknown_name
from ..prompt import Prompt, as_prompt

log = logging.getLogger("igcore")


def _shipped(name: str) -> list[str]:
    """Return the prompts in a file of this package, one per line."""
    return (files(__package__) / f"data/{name}.txt").read_text(encoding="utf-8").splitlines()


# 24 harmless openings for teaching
mild = partial(_shipped, "mild")
# 80 everyday instructions and questions; the last 20 only sound dangerous
benign = partial(_shipped, "benign")


def load_prompts(name: str | Path, column: str = "prompt") -> list[Prompt]:
    """Load a prompt set, ordered by prompt id and without duplicates; log its size.

    Parameters
    ----------
    name : str or Path
        ``"mild"`` (24 harmless openings for teaching), ``"benign"`` (80 everyday instructions that
        need no refusal), a set that another package added to `igcore.catalog.PROMPT_SETS`, or a
        path to a .txt file (one prompt per line), or a .csv, .tsv or .jsonl file, or a .parquet
        file, which needs the library datasets.
    column : str
        Column of the prompts in such a file.

    Raises
    ------
    ParameterError
        If the set or the file is unknown, if the file cannot be read or has no prompts, or if a
        prompt is blank or no text.
    """
    set_name, texts = texts_of(str(name), column)
    prompts = as_prompts(texts, set_name)
    log.info("prompt set %s: %d rows, %d unique", name, len(texts), len(prompts))
    return prompts


def texts_of(name: str, column: str) -> tuple[str, list[str]]:
    """Return the name of a set and its texts in file order, see `load_prompts`."""
    if name in PROMPT_SETS:
        return name, found(PROMPT_SETS[name])()
    if Path(name).suffix not in READERS:
        raise unknown_name("prompt set", name, PROMPT_SETS, FILES)
    path = Path(os.path.expanduser(name))
    return path.stem, file_texts(path, column)


def as_prompts(texts: Iterable[str], set_name: str) -> list[Prompt]:
    """Return the prompts of a set, ordered by id and without duplicates."""
    return sorted((as_prompt(text, set_name) for text in set(texts)), key=attrgetter("id"))


# --- how files are read ---------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1"
END = "\x1f"  # no cell of a table


class Unreadable(ValueError):
    """A table has the wrong form; the message continues a sentence after the file's name."""


def file_texts(path: Path, column: str = "prompt") -> list[str]:
    """Return the prompts of a file, in its order.

    Parameters
    ----------
    path : Path
        A file with an ending in `READERS`. In a text file each line is a prompt.
    column : str
        Column of texts.

    Raises
    ------
    ParameterError
        When the file cannot be read, or has no such column or no row, or a row has no prompt.
    """
    ending = path.suffix
    place = f", in a column {column!r}, or set column to another" if ending != ".txt" else ""
    try:
        cells = READERS[ending](path, column)
        if not cells:
            raise Unreadable("holds no row")
        "".join(map(str, cells)).encode()  # fails for half of a surrogate pair, which is no text
    # errors of datasets and pyarrow have no common base class
    except Exception as why:
        reason = f" {why}" if isinstance(why, Unreadable) else f": {one_line(why)}"
        raise ParameterError(
            f"no prompts could be read from {path}, seen from {Path.cwd()} ({path.name}{reason}); "
            f"give valid UTF-8 {ending} with at least one prompt{place}"
        ) from why
    for row, cell in enumerate(cells, start=1):
        if not isinstance(cell, str) or not cell.strip():
            raise ParameterError(
                f"row {row} of {path} is {cell!r:.200}, which is no prompt; write text, "
                "or remove the row"
            )
    return cells


def check_file(path: Path) -> None:
    """Refuse a missing file, what might never end, and a pointer of Git LFS in place of it."""
    if not path.exists():
        raise Unreadable("is missing")
    if not path.is_file():
        raise Unreadable("is no file, but a folder, a pipe or a device")
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise Unreadable("is a pointer of Git LFS, not the file; run git lfs pull to get it")


def read_text(path: Path) -> str:
    """Return the text of a file without a byte order mark."""
    check_file(path)
    return path.read_bytes().decode("utf-8-sig")


def lines_of(path: Path, column: str) -> list[str]:
    """Return the lines of a text file without empty ones at its end."""
    lines = io.StringIO(read_text(path), newline=None).read().rstrip("\n").split("\n")
    return lines if lines != [""] else []


def csv_cells(path: Path, column: str) -> list[Any]:
    """Return a column of a table with a header; a missing cell is an empty text."""
    lines = io.StringIO(read_text(path), newline="")
    delimiter = "\t" if path.suffix == ".tsv" else ","
    limit = csv.field_size_limit(sys.maxsize)  # a prompt may be long
    try:
        # within quotes that do not end, the last line is no row of two cells
        *rows, last = csv.reader([*lines, END + delimiter + END], delimiter=delimiter)
    finally:
        csv.field_size_limit(limit)
    if last != [END, END]:
        raise Unreadable("ends within quotes")
    header = rows.pop(0) if rows else [column]
    if any(len(row) > len(header) for row in rows):
        raise Unreadable("has a row with more cells than there are columns")
    check_columns(header, column)
    place = header.index(column)
    return [row[place] if place < len(row) else "" for row in rows]


def json_cells(path: Path, column: str) -> list[Any]:
    """Return the values of one key in an object a line."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    rows = [json_line(n, line) for n, line in lines if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise Unreadable("holds what is no object of a key and a prompt")
    return cells_of(rows, column)


def json_line(number: int, line: str) -> Any:
    """Return the value of a line of JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as why:
        place = f"line {number}, column {why.colno}"
        raise Unreadable(f"is no JSON at {place}: {why.msg}") from None


def parquet_cells(path: Path, column: str) -> list[Any]:
    """Return a column of a Parquet file."""
    check_file(path)
    load_dataset = needs("datasets").load_dataset
    with TemporaryDirectory() as cache:  # nothing stays in the user's home
        files = glob.escape(str(path))
        where = {"split": "train", "streaming": True, "cache_dir": cache}
        return cells_of(load_dataset("parquet", data_files=files, **where), column)


# ending -> what returns the cells of a column
READERS: dict[str, Callable[[Path, str], list[Any]]] = {
    ".txt": lines_of,
    ".csv": csv_cells,
    ".jsonl": json_cells,
    ".tsv": csv_cells,
    ".parquet": parquet_cells,
}
FILES = f", or a path to a {'/'.join(READERS)} file"


def cells_of(rows: Iterable[dict[str, Any]], column: str) -> list[Any]:
    """Return the cells of one column; a missing cell is None."""
    cells: list[Any] = []
    columns: dict[str, Any] = {}
    for row in rows:  # reading the last row closes the file
        columns |= row
        cells.append(row.get(column))
    if cells:
        check_columns(columns, column)
    return cells


def check_columns(columns: Iterable[str], column: str) -> None:
    """Refuse a table without a column."""
    if column not in columns:
        raise Unreadable(f"has the columns {', '.join(columns)}, but not {column!r}")
