"""Prompt sets of this package by name, and a user's own files of prompts.

The library datasets reads the files. It reads data files alone and runs no code beside them.
"""

import glob
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..catalog import PROMPT_SETS, found
from ..errors import ParameterError, needs, one_line, unknown_name
from ..policy import Prompt, as_prompt

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
        path to a .txt file (one prompt per line) or a .csv, .tsv, .json, .jsonl or .parquet file,
        which may be compressed (.gz).
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
    if ending_of(Path(name)) not in READERS:
        raise unknown_name("prompt set", name, PROMPT_SETS, FILES)
    path = Path(os.path.expanduser(name))
    return path.name.removesuffix(".gz").removesuffix(ending_of(path)), file_texts(path, column)


def as_prompts(texts: Iterable[str], set_name: str) -> list[Prompt]:
    """Return the prompts of a set, ordered by id and without duplicates."""
    return sorted((as_prompt(text, set_name) for text in set(texts)), key=attrgetter("id"))


# --- how files are read ---------------------------------------------------------------------------

# cells are not converted: NA is a word, an empty line a row, 007 three digits
CELLS = {"keep_default_na": False, "skip_blank_lines": False}
# with one batch, each column has one type
WHOLE = {"chunksize": 2**28, "parse_agent_traces": False}
# ending -> reader in the library datasets, and its options
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"encoding": "utf-8-sig"}),
    ".csv": ("csv", CELLS),
    ".jsonl": ("json", WHOLE),
    ".json": ("json", WHOLE),
    ".tsv": ("csv", {"sep": "\t", **CELLS}),
    ".parquet": ("parquet", {}),
}
FILES = f", or a path to a {'/'.join(READERS)} file"


class Unreadable(Exception):
    """A table has the wrong form; the message continues a sentence after the file's name."""


def ending_of(path: Path) -> str:
    """Return the ending of a file's name, such as ``.csv``, without a ``.gz`` after it."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def file_texts(path: Path, column: str = "prompt") -> list[str]:
    """Return the prompts of a file, in its order.

    Parameters
    ----------
    path : Path
        A file with an ending in `READERS`, which may be compressed (.gz). In a text file each line
        is a prompt.
    column : str
        Column of texts.

    Raises
    ------
    ParameterError
        When the file cannot be read, or has no such column or no row, or a row has no prompt.
    """
    ending = ending_of(path)
    reader, options = READERS[ending]
    place = f", in a column {column!r}, or set column to another"
    if reader == "text":
        column, place = "text", ""  # the name of the column in datasets
    elif reader == "csv":
        options = {**options, "converters": {column: str}}
    read = getattr(needs("datasets").IterableDataset, f"from_{reader}")
    cells: list[Any] = []
    try:
        check_file(path)
        # a temporary cache leaves no files; datasets raises StopIteration for JSON without rows
        with TemporaryDirectory() as cache, suppress(StopIteration):
            rows = read(glob.escape(str(path)), cache_dir=cache, **options)
            cells = cells_of(rows, column)
        while reader == "text" and cells and not cells[-1]:  # the file ends with empty lines
            cells.pop()
        if not cells:
            raise Unreadable("holds no row")
    # errors of datasets, pandas and pyarrow have no common base class
    except Exception as why:
        line = _bad_line(path) if ending == ".jsonl" else ""
        reason = f" {why}" if isinstance(why, Unreadable) else f": {one_line(why)}{line}"
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


def cells_of(rows: Iterable[dict[str, Any]], column: str) -> list[Any]:
    """Return the cells of one column; a missing cell is None."""
    cells: list[Any] = []
    columns: dict[str, Any] = {}
    for row in rows:  # reading the last row closes the file
        columns |= row
        cells.append(row.get(column))
    # pandas makes an index column of cells beyond the header of a CSV file
    if "__index_level_0__" in columns:
        raise Unreadable("has a row with more cells than there are columns")
    if cells and column not in columns:
        raise Unreadable(f"has the columns {', '.join(columns)}, but not {column!r}")
    return cells


def _bad_line(path: Path) -> str:
    """Return the place of the first line that is not JSON, for the end of a message.

    pyarrow names a row instead, counted from 0 without empty lines.
    """
    with suppress(OSError, UnicodeDecodeError, RecursionError):  # already in the message
        for number, line in enumerate(read_text(path).split("\n"), start=1):
            try:
                json.loads(line.strip() or "null")
            except json.JSONDecodeError as error:
                return f" at line {number}, column {error.colno}: {error.msg}"
    return ""


def check_file(path: Path) -> None:
    """Raise ``ValueError`` for a pipe or a device, which might never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")


def read_text(path: Path) -> str:
    """Return the text of a file without a byte order mark."""
    check_file(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        return file.read()
