"""The paper's prompt sets on the model hub: repositories, file layouts and prompt columns.

Only data files are read; no code of a repository runs. `igcore.models.prompts` assigns ids and
splits.
"""

import csv
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated

from ..errors import AssetError
from ..settings import one_of, settings
from .hub import snapshot
from .registry import named
from .rows import Unreadable, column_of, read_text

log = logging.getLogger("igcore")


# --- how the files are read -----------------------------------------------------------------------


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
HEX_PHI_FILES = [f"category_{i}.csv" for i in range(1, 12) if i != 2]  # the second was withdrawn
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
    """

    revision: str | None = None
    part: Annotated[str, one_of(("train", "test"))] | None = None


def options_of(name: str, given: Mapping) -> PromptOptions:
    """Return the options that a mapping gives beside the name of a prompt set.

    Raises
    ------
    ParameterError
        For an option or a value that the set does not have.
    """
    allowed = ["revision"] if name in SOURCES else []
    if name in SOURCES and len(SOURCES[name].parts) > 1:
        allowed.append("part")
    _, values = named(given, "prompt set", allowed)
    return PromptOptions(**values)


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
