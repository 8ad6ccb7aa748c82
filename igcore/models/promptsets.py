"""The paper's prompt sets on the model hub: repositories, file layouts and prompt columns.

Only data files are read; no code of a repository runs. `igcore.models.prompts` assigns ids and
splits.
"""

import csv
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten

from ..config import check_types
from ..errors import AssetError, unknown_name
from .hub import snapshot
from .tabular import Unreadable, opened

HH_FOLDERS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
HH_ANSWER = "\n\nAssistant:"  # after the last one stands the answer
HEX_PHI_FILES = [f"category_{i}.csv" for i in range(1, 12) if i != 2]  # the second was withdrawn
HEX_PHI_LINES = 30

log = logging.getLogger("igcore")


@dataclass(frozen=True)
class Source:
    """One data set of the hub.

    Attributes
    ----------
    repo : str
        ``owner/name``.
    read : callable
        (folder, config) -> for every part what is in the place of a prompt, row by row; raises
        `Unreadable`.
    configs : tuple of str
        Selections of its files; the first is the default.
    parts : tuple of str
        How its owners divided it, or nothing.
    revision : str, optional
        The commit that is taken unless another is given; without one its newest state.
    """

    repo: str
    read: Callable[[Path, str | None], dict[str, list]]
    configs: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("train", "test")
    revision: str | None = None


@dataclass(frozen=True)
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

    def __post_init__(self):
        """Refuse an option of the wrong type."""
        check_types(self)


# --- how the files are read -----------------------------------------------------------------------


def _tables(
    folder: Path,
    config: str | None,
    *,
    column: str,
    options: Callable[[str | None], dict],
    prompt: Callable | None = None,
) -> dict[str, list]:
    """Read a column of every part.

    `options` gives the arguments of ``load_dataset`` for a config; `prompt` extracts the
    prompt from a cell.
    """
    with opened(folder, **options(config)) as tables:
        for part in ("train", "test"):
            if part not in tables:
                raise Unreadable(f"it has the parts {', '.join(tables)}, but not {part!r}")
            if column not in (found := tables[part].column_names):
                raise Unreadable(
                    f"its part {part!r} has the columns {', '.join(found)}, but not {column!r}"
                )
        return {
            part: [prompt(cell) if prompt else cell for cell in tables[part][column]]
            for part in ("train", "test")
        }


def _without_answer(chosen: object) -> str | None:
    """Return the dialogue up to where its last answer begins; None where there is no answer."""
    before, seam, _ = chosen.rpartition(HH_ANSWER) if isinstance(chosen, str) else ("", "", "")
    return before + seam or None


def _no_options(config: str | None) -> dict:
    """Return no arguments of ``load_dataset``."""
    return {}


def _config_name(config: str) -> dict:
    """Return a config as the argument of ``load_dataset``."""
    return {"name": config}


def _hh_files(config: str) -> dict:
    """Return the files of HH-RLHF as arguments of ``load_dataset``."""
    folders = HH_FOLDERS if config == "default" else (config,)
    return {
        "data_files": {
            part: [f"{folder}/{part}.jsonl.gz" for folder in folders] for part in ("train", "test")
        }
    }


def _hex_phi(folder: Path, _) -> dict[str, list]:
    """Read the files without header, one prompt a line.

    An unquoted comma is part of the prompt, so the cells of a line are joined again.
    """
    lines = {}
    for name in HEX_PHI_FILES:
        try:
            with folder.joinpath(name).open(encoding="utf-8-sig", newline="") as file:
                lines[name] = [",".join(cells) for cells in csv.reader(file) if cells]
        except (OSError, ValueError, csv.Error) as error:
            raise Unreadable(f"{name} cannot be read, {type(error).__name__}: {error}") from error
    if short := [
        f"{name} {len(found)}" for name, found in lines.items() if len(found) != HEX_PHI_LINES
    ]:
        log.warning(
            "the files of HEx-PHI have %d prompts each, but here are in %s",
            HEX_PHI_LINES,
            ", ".join(short),
        )
    return {"all": [line for found in lines.values() for line in found]}


SOURCES: dict[str, dict[str, Source]] = {  # set -> version -> where it is
    "pku-saferlhf": {
        "pku-alignment": Source(
            "PKU-Alignment/PKU-SafeRLHF",
            partial(_tables, column="prompt", options=_config_name),
            configs=("default", "alpaca-7b", "alpaca2-7b", "alpaca3-8b"),
        ),
    },
    "hex-phi": {"llm-tuning-safety": Source("LLM-Tuning-Safety/HEx-PHI", _hex_phi, parts=())},
    "hh-rlhf": {
        "dahoas": Source(
            "Dahoas/full-hh-rlhf", partial(_tables, column="prompt", options=_no_options)
        ),
        "anthropic": Source(
            "Anthropic/hh-rlhf",
            partial(_tables, column="chosen", options=_hh_files, prompt=_without_answer),
            configs=("default", *HH_FOLDERS),
            revision="09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa",
        ),
    },
}


# --- what is asked for ----------------------------------------------------------------------------


def allowed_options(name: str, given: Mapping) -> list[str]:
    """Return the options that a set takes, which may depend on the version in `given`."""
    if name not in SOURCES:
        return ["dedupe"]
    versions = SOURCES[name] if len(SOURCES[name]) > 1 else ()
    source = _source(name, given.get("version") if versions else None)
    some = {"config": source.configs, "part": source.parts, "version": versions}
    return ["dedupe", "revision", *(option for option, choices in some.items() if choices)]


def check_options(name: str, options: PromptOptions) -> None:
    """Raise ``ParameterError`` for a config or part that a set of the hub does not have."""
    source = _source(name, options.version)
    for option, value, choices in (
        ("config", options.config, source.configs),
        ("part", options.part, source.parts),
    ):
        if value is not None and value not in choices:
            raise unknown_name(f"{option} of prompt set {name!r}:", value, choices)


def _source(name: str, version: object) -> Source:
    """Return the source of a set in a version, by default its first."""
    versions = SOURCES[name]
    if version is None:
        return next(iter(versions.values()))
    if version not in list(versions):
        raise unknown_name(f"version of prompt set {name!r}:", version, versions)
    return versions[version]


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
        When the set is not there or not to be had, see `igcore.models.hub.snapshot`, or is laid out
        otherwise than is known here.
    """
    source = _source(name, options.version)
    folder = snapshot(source.repo, options.revision or source.revision, kind="dataset")
    config = options.config or next(iter(source.configs), None)
    try:
        rows = source.read(folder, config)
        texts = {part: _filled(part, values, source.repo) for part, values in rows.items()}
    except Unreadable as why:
        reason = shorten(str(why), 160, placeholder=" ...")
        raise AssetError(
            f"data set {source.repo!r} is not laid out as expected in {folder} ({reason}); it "
            f"holds {_held(folder)}; choose another revision or config, or fetch it again"
        ) from why
    return texts if options.part is None else {options.part: texts[options.part]}


def _filled(part: str, values: Iterable, repo: str) -> list[str]:
    """Return the rows that hold a prompt; warn of the others."""
    values = list(values)
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if not texts:
        raise Unreadable(f"part {part!r} has {len(values)} rows, and no prompt in them")
    if lost := len(values) - len(texts):
        log.warning(
            "%d of %d rows of part %r of %s have no prompt and are left out",
            lost,
            len(values),
            part,
            repo,
        )
    return texts


def _held(folder: Path) -> str:
    """Return the names of the files in a folder, for an error message."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return (
        ", ".join(files[:12]) + (f" and {len(files) - 12} more" if len(files) > 12 else "")
        if files
        else "no files"
    )
