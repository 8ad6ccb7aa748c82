"""Finished runs as tables: the lines of all folders of a profile, shards joined."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd

from igcore import METHODS, RunError

from ..files import root
from ..linefile import RECORD_FIELDS, read

# how the names of runs begin that belong to no table of methods: their answers are shown, or claims
# compare them
EXCLUDED_PREFIX = "regime"
# in tables the baselines come first
ORDER = sorted(METHODS, key=lambda name: name.startswith("inferenceguard"))


def load_runs(profile: str, base: Path | None = None, pattern: str = "*") -> pd.DataFrame:
    """Return the lines of all finished runs of a profile, shards joined, in the order of methods.

    The lines of a run and method are in the order of their prompts' ids, however they were decoded:
    a bootstrap depends on it. Besides `RECORD_FIELDS`, each has its ``run`` and ``critic_control``.

    Parameters
    ----------
    pattern : str
        Of the names of folders, such as ``decode-main-*``. ``*`` leaves out those that begin as
        `EXCLUDED_PREFIX` says.

    Raises
    ------
    RunError
        When there is none, or one has not finished.
    """
    base = base or root() / "runs" / profile
    folders = _folders(base, pattern)
    if not folders:
        raise RunError(f"there is no run in {base / pattern}; decode first with notebook 30_decode")
    shards: dict[str, list[tuple[int, int]]] = {}
    lines = []
    for folder in folders:
        if not (folder / "manifest.json").exists():
            raise RunError(
                f"the run {folder} has not finished; run notebook 30_decode with its "
                f"parameters again"
            )
        params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
        source = {
            "run": params.get("run", folder.name),
            "critic_control": params.get("critic_control", "none"),
        }
        shard = params.get("n_shards", 1), params.get("shard", 0)
        shards.setdefault(source["run"], []).append(shard)
        lines += [line | source for line in read(folder / "responses.jsonl")]
    _check_shards(shards)
    frame = pd.DataFrame(lines)
    frame["order"], _ = pd.factorize(frame["run"])  # runs stay in the order of their folders
    return by_method(frame.sort_values(["order", "prompt_id"]).drop(columns="order"))


def _folders(base: Path, pattern: str) -> list[Path]:
    """Return the folders of runs whose names match, in alphabetical order.

    ``*`` leaves out those of `EXCLUDED_PREFIX`.
    """
    # of names alone: a pattern of a path would lead out of the folder
    every = sorted(path.parent for path in base.glob("*/params.json"))
    excluded = EXCLUDED_PREFIX if pattern == "*" else ()
    found = [folder for folder in every if fnmatchcase(folder.name, pattern)]
    return [folder for folder in found if not folder.name.startswith(excluded)]


def load_finished(profile: str, pattern: str = "*") -> pd.DataFrame:
    """Return the lines of all finished runs, and print a sentence for each run that is left out.

    Without a finished run the table is empty, with all its columns.
    """
    parts = list(each_finished(profile, pattern))
    if not parts:
        return pd.DataFrame(columns=[*RECORD_FIELDS, "run", "critic_control"])
    return by_method(pd.concat(parts, ignore_index=True))


def by_method(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table in the `ORDER` of methods; those of any other method come last.

    Rows of one method stay in their order.
    """
    place = {method: i for i, method in enumerate(ORDER)}
    places = table["method"].map(place).fillna(len(place)).astype(float)
    return table.iloc[places.argsort(kind="stable")].reset_index(drop=True)


def each_finished(profile: str, pattern: str = "*") -> Iterator[pd.DataFrame]:
    """Yield the lines of each finished run, its shards joined.

    For every other run a sentence is printed that says why it is left out.
    """
    names = [folder.name for folder in _folders(root() / "runs" / profile, pattern)]
    shards_as_one = [re.sub(r"\.\d+-of-\d+$", ".*-of-*", name) for name in names]
    for name in dict.fromkeys(shards_as_one):
        try:
            lines = load_runs(profile, pattern=name)
        except RunError as error:
            print(f"left out: {error}")
        else:
            yield lines


def _check_shards(runs: dict[str, list[tuple[int, int]]]) -> None:
    """Raise ``RunError`` unless every run is there once: whole, or in all its shards."""
    for name, parts in runs.items():
        n = parts[0][0]
        if sorted(parts) != [(n, i) for i in range(n)]:
            held = ", ".join(f"shard {i} of {n}" for n, i in sorted(parts))
            raise RunError(
                f"run {name} is there as {held}; decode what is missing, or move away the "
                f"folders of another sharding"
            )
