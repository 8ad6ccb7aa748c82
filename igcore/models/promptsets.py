"""Files of prompts: a user's own, and the paper's prompt sets on the model hub.

Only data files are read; no code of a repository runs. `igcore.models.prompts` assigns ids and
splits.
"""

import csv
import glob
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Annotated, Any

from ..errors import AssetError, needs, said
from ..settings import one_of, settings
from .hub import snapshot
from .templates import turns_of

log = logging.getLogger("igcore")


# --- how files are read ---------------------------------------------------------------------------

# a cell stays as it was written: NA is a word, an empty line a row, 007 three digits
CELLS = {"keep_default_na": False, "skip_blank_lines": False}
# one batch of this many bytes has one type for each column
WHOLE = {"chunksize": 2**28, "parse_agent_traces": False}
# ending -> the method of datasets that reads such a file, and its options
READERS: dict[str, tuple[str, dict]] = {
    ".txt": ("from_text", {"encoding": "utf-8-sig"}),
    ".csv": ("from_csv", CELLS),
    ".jsonl": ("from_json", WHOLE),
    ".json": ("from_json", WHOLE),
    ".tsv": ("from_csv", {"sep": "\t", **CELLS}),
    ".parquet": ("from_parquet", {}),
}
SPEAKERS = {"user": "Human", "assistant": "Assistant"}


class Unreadable(Exception):
    """A file holds no table of the wanted form.

    The message says why; the caller makes a full sentence of it.
    """


def ending_of(path: Path) -> str:
    """Return what a file's name ends with, such as ``.csv``, whether or not ``.gz`` follows."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def column_of(path: Path, column: str = "prompt") -> list:
    """Return the prompts of one column in file order; a cell that is not there is None.

    Parameters
    ----------
    path : Path
        A file with one of the endings of `READERS`, perhaps compressed (.gz). In a text file each
        line is a prompt.
    column : str
        Its cells are texts, or lists of chat messages with ``role`` and ``content``.

    Raises
    ------
    Unreadable
        When the file cannot be read or has no such column.
    """
    method, options = READERS[ending_of(path)]
    if method == "from_text":
        column = "text"  # as datasets calls it
    if method == "from_csv":
        options = {**options, "converters": {column: str}}
    read = getattr(needs("datasets", "study").IterableDataset, method)
    cells, names, rows = [], {}, []
    try:
        check_file(path)
        # nothing stays in the user's home, and an error is one sentence
        with TemporaryDirectory() as cache, unlogged(method.removeprefix("from_")):
            try:
                rows = read(glob.escape(str(path)), cache_dir=cache, **options)
            except StopIteration:  # what datasets raises for JSON without a row
                pass
            for row in rows:
                names |= dict.fromkeys(row)
                cells.append(row.get(column))
    # datasets, pandas and pyarrow have errors of their own, without a common base
    except Exception as error:
        line = _bad_line(path) if ending_of(path) == ".jsonl" else ""
        raise Unreadable(f"{path.name}: {said(error)}{line}") from error
    while method == "from_text" and cells and not cells[-1]:  # the file ends with empty lines
        cells.pop()
    if not cells:
        raise Unreadable(f"{path.name} holds no row")
    # pandas makes an index of what a row holds more than the header
    if method == "from_csv" and any(name.startswith("__index_level_") for name in names):
        raise Unreadable(f"{path.name} has a row with more cells than there are columns")
    if column not in names:
        raise Unreadable(f"{path.name} has the columns {', '.join(names)}, but not {column!r}")
    return [_text(cell) for cell in cells]


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
    number = 0
    try:
        for line in read_text(path).split("\n"):
            number += 1
            if line.strip():
                json.loads(line)
    except json.JSONDecodeError as error:
        return f" at line {number}, column {error.colno}: {error.msg}"
    except (OSError, ValueError, RecursionError):  # the message says it already
        pass
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
    column : str, optional
        Of a file: the column that holds the prompts, by default ``prompt``.
    """

    revision: str | None = None
    only: str | None = None
    part: Annotated[str, one_of(("train", "test"))] | None = None
    column: str | None = None


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
