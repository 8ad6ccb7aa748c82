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

from ..errors import AssetError, unknown_name
from ..settings import settings
from .hub import snapshot
from .registry import named
from .rows import Unreadable, column_of, read_text

HH_FOLDERS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
HH_ANSWER = "\n\nAssistant:"  # after the last one stands the answer
PKU_FOLDERS = ("Alpaca-7B", "Alpaca2-7B", "Alpaca3-8B")
HEX_PHI_FILES = [f"category_{i}.csv" for i in range(1, 12) if i != 2]  # the second was withdrawn

log = logging.getLogger("igcore")


# --- how the files are read -----------------------------------------------------------------------


def _dialogues(path: Path) -> list[str | None]:
    """Return each dialogue up to where its last answer begins; None where there is no answer."""
    prompts = []
    for chosen in column_of(path, "chosen"):
        before, seam, _ = str(chosen).rpartition(HH_ANSWER)
        prompts.append(before + seam or None)
    return prompts


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
    configs : mapping of str to sequence of str
        Selections of its files, as patterns in which ``{part}`` stands for a part; the first is the
        default.
    read : callable
        A file -> what is in the place of a prompt, row by row.
    parts : tuple of str
        How its owners divided it, or ``("all",)``.
    revision : str, optional
        The commit that is taken unless another is given; without one its newest state.
    """

    repo: str
    configs: Mapping[str, Sequence[str]]
    read: Callable[[Path], list] = column_of
    parts: tuple[str, ...] = ("train", "test")
    revision: str | None = None


def _folders(folders: Sequence[str], pattern: str) -> dict[str, list[str]]:
    """Return the files of every folder as a config of its name, all together as ``default``."""
    files = {folder.lower(): [pattern.format(folder)] for folder in folders}
    return {"default": [pattern.format(folder) for folder in folders]} | files


PKU = _folders(PKU_FOLDERS, "data/{}/{{part}}.jsonl")
ANTHROPIC = _folders(HH_FOLDERS, "{}/{{part}}.jsonl.gz")
SOURCES: dict[str, dict[str, Source]] = {  # set -> version -> where it is
    "pku-saferlhf": {"pku-alignment": Source("PKU-Alignment/PKU-SafeRLHF", PKU)},
    "hex-phi": {
        "llm-tuning-safety": Source(
            "LLM-Tuning-Safety/HEx-PHI", {"default": HEX_PHI_FILES}, _lines, parts=("all",)
        )
    },
    "hh-rlhf": {
        "dahoas": Source("Dahoas/full-hh-rlhf", {"default": ["data/{part}-*.parquet"]}),
        "anthropic": Source(
            "Anthropic/hh-rlhf",
            ANTHROPIC,
            _dialogues,
            revision="09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa",
        ),
    },
}


# --- options --------------------------------------------------------------------------------------


@settings
class PromptOptions:
    """The options that may stand beside the name of a prompt set.

    Attributes
    ----------
    dedupe : bool
        Whether a prompt that stands in several rows counts once.
    revision : str, optional
        See `igcore.models.hub.snapshot`.
    config : str, optional
        Which of its files, one of the `Source.configs`.
    part : str, optional
        One of the `Source.parts`.
    version : str, optional
        Which data set, where several go by one name; by default the first in `SOURCES`.
    """

    dedupe: bool = True
    revision: str | None = None
    config: str | None = None
    part: str | None = None
    version: str | None = None


def options_of(name: str, given: Mapping) -> PromptOptions:
    """Return the options that a mapping gives beside the name of a prompt set.

    Raises
    ------
    ParameterError
        For an option or a value that the set does not have.
    """
    choices: dict[str, Sequence[str]] = {}
    if name in SOURCES:
        source = _source(name, given.get("version"))
        choices = {
            "config": tuple(source.configs),
            "part": source.parts,
            "version": tuple(SOURCES[name]),
        }
    choices = {option: values for option, values in choices.items() if len(values) > 1}
    hub = ["revision"] if name in SOURCES else []
    _, values = named(given, "prompt set", ["dedupe", *hub, *choices])
    options = PromptOptions(**values)
    for option, allowed in choices.items():
        value = getattr(options, option)
        if value is not None and value not in allowed:
            raise unknown_name(f"{option} of prompt set {name!r}:", value, allowed)
    return options


def _source(name: str, version: object) -> Source:
    """Return the source of a set in a version, by default its first."""
    versions = SOURCES[name]
    return versions.get(str(version), next(iter(versions.values())))


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
    source = _source(name, options.version)
    folder = snapshot(source.repo, options.revision or source.revision, kind="dataset")
    files = source.configs[options.config or "default"]
    parts = source.parts if options.part is None else (options.part,)
    try:
        return {part: _texts(source, folder, files, part) for part in parts}
    except Unreadable as why:
        reason = shorten(str(why), 160, placeholder=" ...")
        raise AssetError(
            f"data set {source.repo!r} is not laid out as expected in {folder} ({reason}); choose "
            "another revision or config, or download it again"
        ) from why


def _texts(source: Source, folder: Path, files: Sequence[str], part: str) -> list[str]:
    """Return the prompts of a part; warn of rows without one."""
    rows = []
    for pattern in files:
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
        log.warning(
            "%d of %d rows of part %r of %s have no prompt and are left out",
            lost,
            len(rows),
            part,
            source.repo,
        )
    return texts
