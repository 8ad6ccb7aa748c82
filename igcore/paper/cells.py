"""Which cell of our runs stands beside a printed row.

A cell is what one run holds of a policy, prompt set, method and settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter

import pandas as pd

from ..report.experiments import EXPERIMENTS
from . import IDENTITY

# start of a table's name -> experiment that sweeps as it does
SWEEPS = {"lambda": "lambda", "ndk": "ndk", "latency": "compute"}


@dataclass(frozen=True)
class Cell:
    """What one run holds under one configuration: `about` has the names of `IDENTITY`."""

    about: dict
    run: str
    lines: pd.DataFrame

    def is_of(self, row: dict) -> bool:
        """Say whether all that a printed row says of its configuration is so here."""
        return all(self.about[name] == row[name] for name in IDENTITY if pd.notna(row[name]))


def cells(records: pd.DataFrame) -> list[Cell]:
    """Return the cells of records; runs with a critic that was shuffled are no cells of any table.

    A multiplier, which every record has, is left out of `Cell.about` where the method does not use
    it.
    """
    if not len(records):
        return []
    lines = records[records["critic_control"] == "none"]
    found = []
    for (*about, run), cell in lines.groupby([*IDENTITY, "run"], dropna=False, sort=False):
        about = dict(zip(IDENTITY, about, strict=True))
        if "lagrangian" not in about["method"]:
            about["lagrange_multiplier"] = None
        found.append(Cell(about, run, cell))
    return found


def matches(run: str, patterns: Sequence[str]) -> bool:
    """Say whether the name of a run is of one of these patterns."""
    return any(fnmatchcase(run, pattern) for pattern in patterns)


def place(table: str, run: str) -> int | None:
    """Return how readily a table reads a run.

    0 for a sweep made for it, 1 for a run of no experiment, None for all others.
    """
    sweep = next((start for start in SWEEPS if table.startswith(start)), None)
    if sweep:
        of = EXPERIMENTS[SWEEPS[sweep]]
        if matches(run, [f"decode-sweep-{sweep}-*", *of.runs, *of.borrowed]):
            return 0
    of_experiments = [pattern for of in EXPERIMENTS.values() for pattern in of.runs]
    return None if matches(run, of_experiments) else 1


def readable(table: str, found: list[Cell]) -> list[Cell]:
    """Return the cells that a table may read, the most readily read first.

    Equals are in the order of the names of their runs.
    """
    ranks = {cell.run: place(table, cell.run) for cell in found}
    by_name = sorted((cell for cell in found if ranks[cell.run] is not None), key=attrgetter("run"))
    return [cell for rank in (0, 1) for cell in by_name if ranks[cell.run] == rank]
