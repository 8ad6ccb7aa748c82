"""Say how the tables of a walk compare with the committed ones, or publish them.

``python -m docs.compare small`` ends ``make reproduce``: it looks at ``runs/small/figures`` beside
``figures``, and at the answers beside the records of the committed tables. What differs is no
error, it is listed in ``runs/small/compared.txt``. ``python -m docs.compare --publish small``
begins ``make publish``: it copies tables and pictures into ``figures``, which no walk does.
"""

import argparse
import json
import math
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pandas as pd

from igcore.errors import IgcoreError, RunError, unknown_name
from igcore.folders import key, read, root
from igcore.runs.cli import differences
from igcore.runs.scope import TOLERANCE

PUBLISHED = ("small", "ablations", "critic-search", "tune", "bench", "served")
SECONDS = re.compile(r"seconds|_s$|^(generation|scoring)_|^fits$")  # never the same twice
CLOSE = 1e-5  # of means and intervals of scores; a table for people shows steps of .001
SHOWN = 5  # differing answers that are named on the screen


def cells(made: Path, kept: Path) -> dict[str, float]:
    """Return the cells in which two tables differ, each with its distance; seconds are left out."""
    new, old = pd.read_csv(made), pd.read_csv(kept)
    if list(new) != list(old) or len(new) != len(old):
        return {f"{kept.name}: {new.shape} rows and columns, not {old.shape}": math.inf}
    found = {}
    for column in old.columns[[not SECONDS.search(name) for name in old]]:
        are_numbers = {new[column].dtype.kind, old[column].dtype.kind} <= {"i", "f"}
        for line, (one, other) in enumerate(zip(new[column], old[column], strict=True), start=2):
            if one != other and not (pd.isna(one) and pd.isna(other)):
                apart = abs(one - other) if are_numbers else math.inf
                name = f"{kept.name}, line {line}, {column}: {one}, not {other}"
                found[name] = math.inf if pd.isna(apart) else apart
    return found


def answers(profile: str, base: Path) -> dict[str, tuple[int, list[str]]]:
    """Return the near ties of every answer that was given again, and in what it differs.

    Hashes are left out, and scores may differ by `igcore.runs.scope.TOLERANCE`.
    """
    found, archive = {}, base / f"records/{profile}.tar.xz"
    if not archive.is_file():
        return found
    with tarfile.open(archive) as records:
        for entry in records:
            run, name = Path(entry.name).parent, Path(entry.name).name
            if name != "responses.jsonl" or run.parts[:-1] != ("runs", profile):
                continue  # neither a judge nor a critic
            parts = [path / name for path in (base / run, *base.glob(f"{run}.*-of-*"))]
            again = {key(line): line for part in parts if part.is_file() for line in read(part)}
            for kept in map(json.loads, records.extractfile(entry)):
                if made := again.get(key(kept)):
                    unlike = differences([_unhashed(made)], [_unhashed(kept)], TOLERANCE)
                    ties = max(made["near_ties"], kept["near_ties"])
                    found[" ".join((run.name, *key(kept)))] = ties, unlike
    return found


def _unhashed(line: dict) -> dict:
    """Return a line without the hashes of its scorers, which change with their code."""
    return {name: value for name, value in line.items() if not name.endswith("_digest")}


def compared(profile: str, base: Path) -> list[str]:
    """Return a few lines for a person, and write them with every difference below the runs."""
    made = sorted((base / "runs" / profile / "figures/tables").glob("*.csv"))
    pairs = [(path, base / "figures/tables" / path.name) for path in made]
    tables = {kept.stem: cells(new, kept) for new, kept in pairs if kept.is_file()}
    unlike = {name: found for name, found in tables.items() if found}
    differing = [name for name, found in unlike.items() if max(found.values()) > CLOSE]
    lines = [
        f"{len(tables)} tables beside the committed ones, seconds left out: "
        f"{len(tables) - len(unlike)} equal, {len(unlike) - len(differing)} within {CLOSE:g}, "
        f"{len(differing)} differ{': ' * bool(differing)}{', '.join(differing)}"
    ]
    given = answers(profile, base)
    other = {name: found for name, found in given.items() if found[1]}
    lines.append(
        f"{len(given)} answers beside the committed ones: {len(given) - len(other)} equal, their "
        f"scores within {TOLERANCE:g}; {len(other)} differ, "
        f"{sum(ties > 0 for ties, _ in other.values())} of them after a near tie of two tokens, "
        "which another processor may settle otherwise"
    )
    shown = [f"{name}, near ties: {ties}" for name, (ties, _) in other.items()]
    file = base / "runs" / profile / "compared.txt"
    every = [*unlike.values(), *(found for _, found in other.values())]
    file.write_text("\n".join([*lines, *shown, *(text for found in every for text in found), ""]))
    more = [f"and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    lines += [f"  {text}" for text in [*shown[:SHOWN], *more]]
    return [*lines, f"{file.relative_to(base)} has every difference; no committed file has changed"]


def publish(profile: str, base: Path) -> None:
    """Copy the tables and pictures of a profile over the committed ones.

    Raises
    ------
    ParameterError
        For a profile of which none are committed.
    RunError
        When it was not walked.
    """
    if profile not in PUBLISHED:
        raise unknown_name("profile with committed tables", profile, PUBLISHED)
    made = base / "runs" / profile / "figures"
    if not made.is_dir():
        raise RunError(f"runs/{profile} has no figures; walk the profile first")
    shutil.copytree(made, base / "figures", dirs_exist_ok=True)


def main() -> None:
    """Compare a profile, or publish it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("--publish", action="store_true", help="copy into figures")
    given = parser.parse_args()
    try:
        if given.publish:
            publish(given.profile, root())
        else:
            print(*compared(given.profile, root()), sep="\n")
    except IgcoreError as error:
        sys.exit(f"error: {error}" if given.publish else print(f"not compared: {error}"))


if __name__ == "__main__":
    main()
