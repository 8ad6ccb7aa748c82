"""Compare the tables of a profile with the committed ones, or publish them.

``python -m docs.compare small`` ends ``make reproduce``: it compares ``runs/small/figures`` with
``figures``, and the answers that were decoded here with the records of the committed tables.
It counts the runs that were read from these records instead. What differs is no error, it is listed
in ``runs/small/compared.txt``. ``python -m docs.compare --publish small`` begins ``make publish``:
it copies tables and pictures into ``figures``, which no walk does.
"""

import argparse
import io
import json
import math
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pandas as pd

from docs.pages import BLOCK, PAGES
from igcore.errors import IgcoreError, RunError, unknown_name
from igstudy.files import replace_file, root
from igstudy.linefile import key, like, read, unpacked
from igstudy.provenance import UNPACKED
from igstudy.runs.rescore import TOLERANCE
from igstudy.runs.witness import differences

PUBLISHED = ("small ablations critic-search pilot searches tune bench served harm").split()
TIMED = re.compile(r"seconds|_s$|^(generation|scoring)_|^fits$")  # never the same twice
# another processor moved means of scores by 1e-7 and of log-likelihoods by 3e-6; a table for people
# shows steps of .001
CLOSE = 1e-5
SHOWN_ANSWERS = 5  # differing answers that are named on the screen


def differing_cells(made: Path, kept: Path) -> dict[str, float]:
    """Return the cells in which two tables differ, each with its distance; seconds are left out."""
    new, old = (pd.read_csv(path, dtype=object, keep_default_na=False) for path in (made, kept))
    if list(new) != list(old) or len(new) != len(old):
        return {f"{kept.name}: {new.shape} rows and columns, not {old.shape}": math.inf}
    columns = [name for name in old if not TIMED.search(name)]
    # the shape is kept because a comparison of equal tables has no columns otherwise
    cells = new[columns].compare(old[columns], keep_shape=True).stack(0, future_stack=True).dropna()
    numbers = cells.apply(pd.to_numeric, errors="coerce")
    apart = (numbers["self"] - numbers["other"]).abs().fillna(math.inf)  # of texts as well
    return {
        f"{kept.name}, line {line + 2}, {column}: {cell['self']}, not {cell['other']}": far
        for ((line, column), cell), far in zip(cells.iterrows(), apart, strict=True)
    }


def compared_answers(profile: str, base: Path) -> dict[str, tuple[int, list[str]]]:
    """Return the near ties of every answer that was given again, and in what it differs.

    Runs that were unpacked from the records hold no new answers. Hashes are left out, and scores
    may differ by `igstudy.runs.rescore.TOLERANCE`.
    """
    found, archive = {}, base / f"records/{profile}.tar.xz"
    if not archive.is_file():
        return found
    with tarfile.open(fileobj=io.BytesIO(unpacked(archive)), mode="r:") as records:
        for entry in records:
            run, file = Path(entry.name).parent, Path(entry.name).name
            from_records = (base / run / UNPACKED).exists()
            if from_records or file != "responses.jsonl" or run.parts[:-1] != ("runs", profile):
                continue  # neither a judge nor a critic
            parts = [path / file for path in (base / run, *base.glob(f"{run}.*-of-*"))]
            again = {key(line): line for part in parts if part.is_file() for line in read(part)}
            for kept in map(json.loads, records.extractfile(entry)):
                if made := again.get(key(kept)):
                    ties = max(made["near_ties"], kept["near_ties"])
                    name = " ".join((run.name, *key(kept)))
                    found[name] = ties, list(differences(name, like(kept, made), kept))
    return found


def compare_profile(profile: str, base: Path) -> list[str]:
    """Return a few lines for a person, and write them with every difference below the runs."""
    folder = base / "runs" / profile
    tables = {
        kept.stem: differing_cells(made, kept)
        for kept in sorted(base.glob("figures/tables/*.csv"))
        if (made := folder / "figures/tables" / kept.name).is_file()
    }
    farthest = {name: max(found.values()) for name, found in tables.items() if found}
    differing = [name for name, apart in farthest.items() if apart > CLOSE]
    given = compared_answers(profile, base)
    other = {name: found for name, found in given.items() if found[1]}
    tied = sum(ties > 0 for ties, _ in other.values())
    unpacked = [path.with_name(UNPACKED).exists() for path in folder.glob("*/manifest.json")]
    lines = [
        f"{unpacked.count(False)} runs decoded here, {unpacked.count(True)} read from records",
        f"{len(tables)} tables beside the committed ones, seconds left out: "
        f"{len(tables) - len(farthest)} equal, {len(farthest) - len(differing)} within {CLOSE:g}, "
        f"{len(differing)} differ ({', '.join(differing) or 'none'})",
        f"{len(given)} answers beside the committed ones: {len(given) - len(other)} equal "
        f"(scores within {TOLERANCE:g}), {len(other)} differ, {tied} of these after near ties of "
        "two tokens, which another processor may decide differently",
        *(f"  {name} (near ties: {ties})" for name, (ties, _) in other.items()),
    ]
    every = [*lines, *(cell for found in tables.values() for cell in found)]
    every += [sentence for _, found in other.values() for sentence in found]
    replace_file(folder / "compared.txt", "\n".join([*every, ""]))
    last = f"runs/{profile}/compared.txt has every difference; no committed file has changed"
    return [*lines[: 3 + SHOWN_ANSWERS], last]


def publish(profile: str, base: Path) -> None:
    """Copy the tables and pictures of a profile over the committed ones.

    The sources of all tables lie in one file, and of the Markdown tables only those that a page
    shows are kept.

    Raises
    ------
    ParameterError
        For a profile without committed tables.
    RunError
        When it was not run.
    """
    if profile not in PUBLISHED:
        raise unknown_name("profile with committed tables", profile, PUBLISHED)
    made = base / "runs" / profile / "figures"
    if not made.is_dir():
        raise RunError(f"runs/{profile} has no figures; walk the profile first")
    text = "".join((base / page).read_text(encoding="utf-8") for page in PAGES)
    shown = {name for _, kind, name, _ in BLOCK.findall(text) if kind == "table"}
    kept = base / "figures/tables/sources.json"
    sources = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for path in sorted(made.rglob("*.*")):
        if path.suffix == ".json":
            sources[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix != ".md" or path.stem in shown:
            shutil.copyfile(path, base / "figures" / path.relative_to(made))
    replace_file(kept, json.dumps(sources, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


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
            print(*compare_profile(given.profile, root()), sep="\n")
    except IgcoreError as error:
        sys.exit(f"error: {error}" if given.publish else print(f"not compared: {error}"))


if __name__ == "__main__":
    main()
