"""Prompts read by datasets: files of a user's own, and data sets of the hub.

Only data files are read; no code of a repository runs. `igcore.models.prompts` assigns ids and
splits.
"""

import glob
import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import AssetError, ParameterError, needs, said
from ..settings import settings
from .hub import snapshot
from .templates import turns_of

log = logging.getLogger("igcore")


# --- how files are read ---------------------------------------------------------------------------

# a cell stays as it was written: NA is a word, an empty line a row, 007 three digits
CELLS = {"keep_default_na": False, "skip_blank_lines": False}
# one batch of this many bytes has one type for each column
WHOLE = {"chunksize": 2**28, "parse_agent_traces": False}
# ending -> the reader of datasets for such a file, and its options
READERS: dict[str, tuple[str, dict]] = {
    ".txt": ("text", {"encoding": "utf-8-sig"}),
    ".csv": ("csv", CELLS),
    ".jsonl": ("json", WHOLE),
    ".json": ("json", WHOLE),
    ".tsv": ("csv", {"sep": "\t", **CELLS}),
    ".parquet": ("parquet", {}),
}
SPEAKERS = {"user": "Human", "assistant": "Assistant"}


class Unreadable(Exception):
    """A table is not of the wanted form; the message is what follows its name in a sentence."""


def ending_of(path: Path) -> str:
    """Return what a file's name ends with, such as ``.csv``, whether or not ``.gz`` follows."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def file_texts(path: Path, column: str = "prompt") -> list[str]:
    """Return the prompts of a file, in its order.

    Parameters
    ----------
    path : Path
        A file with one of the endings of `READERS`, perhaps compressed (.gz). In a text file each
        line is a prompt.
    column : str
        Its cells are texts, or lists of chat messages with ``role`` and ``content``.

    Raises
    ------
    ParameterError
        When the file cannot be read, or has no such column or no row, or a row has no prompt.
    """
    ending = ending_of(path)
    reader, options = READERS[ending]
    place = f", in a column {column!r}"
    if reader == "text":
        column, place = "text", ""  # as datasets calls it
    elif reader == "csv":
        options = {**options, "converters": {column: str}}
    read = getattr(needs("datasets", "study").IterableDataset, f"from_{reader}")
    cells: list = []
    try:
        check_file(path)
        # nothing stays in the user's home, and an error is one sentence; datasets raises
        # StopIteration for JSON without a row
        with TemporaryDirectory() as cache, unlogged(reader), suppress(StopIteration):
            rows = read(glob.escape(str(path)), cache_dir=cache, **options)
            cells = cells_of(rows, column)
        while reader == "text" and cells and not cells[-1]:  # the file ends with empty lines
            cells.pop()
        if not cells:
            raise Unreadable("holds no row")
    # datasets, pandas and pyarrow have errors of their own, without a common base
    except Exception as why:
        line = _bad_line(path) if ending == ".jsonl" else ""
        reason = f" {why}" if isinstance(why, Unreadable) else f": {said(why)}{line}"
        raise ParameterError(
            f"no prompts could be read from {path}, seen from {Path.cwd()} ({path.name}{reason}); "
            f"give valid UTF-8 {ending} with at least one prompt{place}"
        ) from why
    for row, cell in enumerate(cells, start=1):
        if not isinstance(cell, str) or not cell.strip():
            raise ParameterError(
                f"row {row} of {path} is {cell!r:.200}, which is no prompt; write text, or messages"
                " of user and assistant in turn, or remove the row"
            )
    return cells


def cells_of(rows: Iterable[dict], column: str) -> list:
    """Return the cells of one column, chat messages as a text; one that is not there is None."""
    cells: list = []
    columns: dict = {}
    for row in rows:  # to the last, which closes the file
        columns |= row
        cells.append(_text(row.get(column)))
    # pandas makes an index of what a row of a CSV file holds more than the header
    if "__index_level_0__" in columns:
        raise Unreadable("has a row with more cells than there are columns")
    if cells and column not in columns:
        raise Unreadable(f"has the columns {', '.join(columns)}, but not {column!r}")
    return cells


@contextmanager
def unlogged(reader: str) -> Iterator[None]:
    """Keep a reader of datasets from logging in this thread, because it raises the same error."""
    logger = logging.getLogger(f"datasets.packaged_modules.{reader}.{reader}")
    here = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        """Return True for a record of another thread."""
        return record.thread != here

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)


def _text(cell: Any) -> Any:
    """Return chat messages as the text that `turns_of` takes apart; any other cell as it is.

    An answer at the end is left out.
    """
    try:
        messages = [(SPEAKERS[message["role"]], message["content"].strip()) for message in cell]
    except (TypeError, KeyError, AttributeError):
        return cell
    if messages and messages[-1][0] == "Assistant":
        messages.pop()
    contents = [content for _, content in messages]
    turns = [f"\n\n{speaker}: {content}" for speaker, content in messages]
    text = "".join(turns) + "\n\nAssistant:"
    if turns_of(text) != contents:  # speakers do not take turns, or one writes another's name
        return cell
    return text if len(contents) > 1 else contents[0]


def _bad_line(path: Path) -> str:
    """Return the place of the first line that is not JSON, for the end of a message.

    The row that pyarrow names counts from 0, without the empty lines.
    """
    with suppress(OSError, UnicodeDecodeError, RecursionError):  # the message says it already
        for number, line in enumerate(read_text(path).split("\n"), start=1):
            try:
                json.loads(line.strip() or "null")
            except json.JSONDecodeError as error:
                return f" at line {number}, column {error.colno}: {error.msg}"
    return ""


def check_file(path: Path) -> None:
    """Raise ``ValueError`` for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")


def read_text(path: Path) -> str:
    """Return the text of a file without a byte order mark."""
    check_file(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        return file.read()


# --- data sets of the hub -------------------------------------------------------------------------


HEX_PHI = "LLM-Tuning-Safety/HEx-PHI"
SOURCES = {
    "pku-saferlhf": "PKU-Alignment/PKU-SafeRLHF",
    "hex-phi": HEX_PHI,
    "hh-rlhf": "Dahoas/full-hh-rlhf",
}
# repo -> what its owners do not say of its files: without the second, which was withdrawn; lines
# without a header, in which an unquoted comma is part of the prompt
LAYOUTS: dict[str, dict[str, Any]] = {
    HEX_PHI: {
        "data_files": [f"category_{i}.csv" for i in (1, *range(3, 12))],
        "sep": "\x1f",
        "header": None,
        "names": ["prompt"],
        "keep_default_na": False,
    }
}


@settings
class PromptOptions:
    """The options that may stand beside the name of a prompt set.

    Attributes
    ----------
    only : str, optional
        A text file with the ids of the prompts that are taken, one a line; # begins a comment. Seen
        from `igcore.files.root`.
    column : str
        Of a file or a data set: the column that holds the prompts.
    revision, subset, part : str, optional
        Of a data set of the hub: see `igcore.models.hub.snapshot`; one of the configurations that
        its owners name; and one of the parts into which they divided it.
    """

    only: str | None = None
    column: str = "prompt"
    revision: str | None = None
    subset: str | None = None
    part: str | None = None


def hub_texts(name: str, options: PromptOptions) -> dict[str, list[str]]:
    """Return the prompts of a data set of the hub for each of its parts, in file order.

    A set with a train and a test part has those two, any other its only part, as ``all``. Rows
    without a prompt are left out, and a warning counts them. Tests read local copies; a download
    of a set that has no name here was not tried.

    Parameters
    ----------
    name : str
        A key of `SOURCES`, or ``owner/name``.

    Raises
    ------
    AssetError
        When the set cannot be fetched, see `igcore.models.hub.snapshot`, or has no such subset,
        part or column.
    """
    repo = SOURCES.get(name, name)
    folder = snapshot(repo, options.revision, kind="dataset")
    load_dataset = needs("datasets", "study").load_dataset
    try:
        with TemporaryDirectory() as cache:  # nothing stays in the user's home
            where = {"streaming": True, "cache_dir": cache, **LAYOUTS.get(repo, {})}
            parts = dict(load_dataset(str(folder), options.subset, **where))
            if options.part is not None:
                parts = {options.part: parts[options.part]}
            elif {"train", "test"} <= parts.keys():
                parts = {part: parts[part] for part in ("train", "test")}
            elif len(parts) > 1:
                raise Unreadable(f"has the parts {', '.join(parts)}; choose one as part")
            cells = {part: cells_of(rows, options.column) for part, rows in parts.items()}
    except Exception as why:  # as of files
        reason = f"it {why}" if isinstance(why, Unreadable) else said(why)
        raise AssetError(
            f"data set {repo!r} cannot be read in {folder} ({reason:.300}); choose "
            "another revision, subset, part or column, or download it again"
        ) from why
    texts = {}
    for part, found in cells.items():
        texts[part] = [cell for cell in found if isinstance(cell, str) and cell.strip()]
        if lost := len(found) - len(texts[part]):
            message = "%d of %d rows of part %r of %s have no prompt and are left out"
            log.warning(message, lost, len(found), part, repo)
    return texts
