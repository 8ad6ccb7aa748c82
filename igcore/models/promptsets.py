"""Files of prompts: a user's own, and the paper's prompt sets on the model hub.

Only data files are read; no code of a repository runs. `igcore.models.prompts` assigns ids and
splits.
"""

import csv
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from ..errors import AssetError, needs
from ..settings import one_of, settings
from .hub import snapshot

log = logging.getLogger("igcore")


# --- how files are read ---------------------------------------------------------------------------

FORMATS = (".txt", ".csv", ".jsonl", ".json")  # of a user's own file


class Unreadable(Exception):
    """A file holds no table of the wanted form.

    The message says why; the caller makes a full sentence of it.
    """


def column_of(path: Path, column: str = "prompt") -> list:
    """Return the cells of one column in file order; a cell that is not there is None.

    Parameters
    ----------
    path : Path
        A file of one of the `FORMATS`, or of Parquet. In a text file each line is a prompt.

    Raises
    ------
    Unreadable
        When the file cannot be read or has no such column.
    """
    try:
        rows = _rows(path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise Unreadable(f"{path.name}: {type(error).__name__}: {reason}") from error
    if not rows:
        raise Unreadable(f"{path.name} holds no row")
    names = list(dict.fromkeys(name for row in rows for name in row))
    if column not in names:
        raise Unreadable(f"{path.name} has the columns {', '.join(names)}, but not {column!r}")
    return [row.get(column) for row in rows]


def read_text(path: Path) -> str:
    """Return the text of a file without a byte order mark."""
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise ValueError("it is no file")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return file.read()


def _rows(path: Path) -> list[dict]:
    """Return the rows of a file by column."""
    if path.suffix == ".parquet":
        needs("pyarrow", "study")
        return needs("pandas", "study").read_parquet(path).to_dict("records")
    text = read_text(path)
    if path.suffix == ".txt":
        lines = io.StringIO(text.rstrip("\r\n"), newline=None)  # every line end is a newline
        return [{"prompt": line.removesuffix("\n")} for line in lines]
    if path.suffix == ".csv":
        header, *table = [*csv.reader(io.StringIO(text, newline=""), strict=True)] or [[]]
        if any(len(row) > len(header) for row in table):  # an unquoted comma
            raise ValueError("a row has more cells than there are columns")
        return [dict(zip_longest(header, row, fillvalue="")) for row in table]
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [_row(line, n) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("not every row is a mapping of columns to cells")
    return rows


def _row(line: str, number: int) -> Any:
    """Return what a line of JSON holds; an error names the line."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error


def _lines(path: Path) -> list[str]:
    """Return the lines of a CSV file without header.

    An unquoted comma is part of the prompt, so the cells of a line are joined again.
    """
    try:
        table = csv.reader(io.StringIO(read_text(path), newline=""))
        return [",".join(cells) for cells in table if cells]
    except (OSError, ValueError, csv.Error) as error:
        raise Unreadable(f"{path.name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Source:
    """One data set of the hub.

    Attributes
    ----------
    repo : str
        ``owner/name``.
    files : sequence of str
        Patterns, in which ``{part}`` stands for a part.
    read : callable
        A file -> what is in the place of a prompt, row by row.
    parts : tuple of str
        How its owners divided it, or ``("all",)``.
    """

    repo: str
    files: Sequence[str]
    read: Callable[[Path], list] = column_of
    parts: tuple[str, ...] = ("train", "test")


PKU_FILES = [f"data/{model}/{{part}}.jsonl" for model in ("Alpaca-7B", "Alpaca2-7B", "Alpaca3-8B")]
CATEGORIES = {  # of HEx-PHI, by the number in the name of a file
    1: "illegal activity",
    3: "hate, harassment, violence",
    4: "malware",
    5: "physical harm",
    6: "economic harm",
    7: "fraud, deception",
    8: "adult content",
    9: "political campaigning",
    10: "privacy violation",
    11: "tailored financial advice",
}
HEX_PHI_FILES = [f"category_{i}.csv" for i in CATEGORIES]  # the second was withdrawn
SOURCES = {
    "pku-saferlhf": Source("PKU-Alignment/PKU-SafeRLHF", PKU_FILES),
    "hex-phi": Source("LLM-Tuning-Safety/HEx-PHI", HEX_PHI_FILES, _lines, parts=("all",)),
    "hh-rlhf": Source("Dahoas/full-hh-rlhf", ["data/{part}-*.parquet"]),
}


# --- options --------------------------------------------------------------------------------------


@settings
class PromptOptions:
    """The options that may stand beside the name of a prompt set.

    Attributes
    ----------
    revision : str, optional
        See `igcore.models.hub.snapshot`.
    part : str, optional
        One of the `Source.parts`.
    only : str, optional
        A text file with the ids of the prompts that are taken, one a line; # begins a comment. Seen
        from `igcore.files.root`.
    """

    revision: str | None = None
    only: str | None = None
    part: Annotated[str, one_of(("train", "test"))] | None = None


# --- prompts --------------------------------------------------------------------------------------


def hub_texts(name: str, options: PromptOptions) -> dict[str, list[str]]:
    """Return the prompts of a set of the hub for each of its parts, in file order.

    Rows without a prompt are left out, and a warning counts them.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.

    Raises
    ------
    AssetError
        When the set cannot be fetched, see `igcore.models.hub.snapshot`, or its files are not those
        of `SOURCES`.
    """
    source = SOURCES[name]
    folder = snapshot(source.repo, options.revision, kind="dataset")
    parts = source.parts if options.part is None else (options.part,)
    try:
        return {part: _texts(source, folder, part) for part in parts}
    except Unreadable as why:
        reason = shorten(str(why), 160, placeholder=" ...")
        raise AssetError(
            f"data set {source.repo!r} is not laid out as expected in {folder} ({reason}); choose "
            "another revision, or download it again"
        ) from why


def categories() -> dict[str, str]:
    """Return the category of each prompt of HEx-PHI.

    Raises
    ------
    AssetError
        When the set cannot be fetched, see `igcore.models.hub.snapshot`.
    """
    folder = snapshot(SOURCES["hex-phi"].repo, None, kind="dataset")
    files = zip(CATEGORIES.values(), HEX_PHI_FILES, strict=True)
    return {text: category for category, name in files for text in _lines(folder / name)}


def _texts(source: Source, folder: Path, part: str) -> list[str]:
    """Return the prompts of a part; warn of rows without one."""
    rows = []
    for pattern in source.files:
        pattern = pattern.format(part=part)
        paths = sorted(folder.glob(pattern))
        if not paths:
            raise Unreadable(f"there is no file {pattern}")
        for path in paths:
            rows += source.read(path)
    texts = [row for row in rows if isinstance(row, str) and row.strip()]
    if not texts:
        raise Unreadable(f"part {part!r} has {len(rows)} rows, and no prompt in them")
    if lost := len(rows) - len(texts):
        message = "%d of %d rows of part %r of %s have no prompt and are left out"
        log.warning(message, lost, len(rows), part, source.repo)
    return texts
