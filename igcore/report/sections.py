"""A section of notebook 45: the tables of one experiment, how people read them, and their files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from . import tables
from .paired import verdicts
from .pictures import save


@dataclass
class Section:
    """What one experiment came to.

    Attributes
    ----------
    name : str
        A key of `EXPERIMENTS`, or a name of one's own.
    figures : Path
        Folder of pictures; tables lie in its subfolder ``tables``.
    tables : dict of str to DataFrame
        By suffix of their files; without a main table, or with an empty one, the experiment was not
        run.
    varied : sequence of str
        Settings that tell the rows of its tables apart.
    why : str
        What keeps tables from being made of the runs that are there.
    sources : mapping
        Those runs, see `igcore.report.sources.of_runs`.
    """

    name: str
    figures: Path
    tables: dict[str, pd.DataFrame]
    varied: Sequence[str] = field(default_factory=list)
    why: str = ""
    sources: Mapping[str, dict] = field(default_factory=dict)

    @property
    def was_run(self) -> bool:
        return bool(len(self.tables.get("", ())))

    def stem(self, suffix: str = "") -> str:
        return "_".join(["ablation", self.name, *([suffix] if suffix else [])])

    def write(self) -> "Section":
        """Write all tables, see `tables.write`; none when the experiment was not run."""
        for suffix, table in self.tables.items() if self.was_run else ():
            tables.write(
                table, self.figures / "tables" / self.stem(suffix), self.sources, self.short(suffix)
            )
        return self

    def short(self, suffix: str = "") -> pd.DataFrame:
        """Return a table as people read it.

        One with the columns of the main table is shown as that is, with the varied settings.
        """
        table = self.tables[suffix]
        if not set(tables.COLUMNS) <= set(table):
            return table
        pretty = tables.pretty(table[tables.COLUMNS]).replace("nan", tables.MISSING)
        for place, name in enumerate(self.varied, start=2):
            pretty.insert(place, name.replace("_", " "), table[name].map(str))
        return pretty.join(table.drop(columns=[*tables.COLUMNS, *self.varied], errors="ignore"))

    def show(self, suffix: str = "") -> pd.DataFrame | None:
        """Return a table for the end of a cell, or say that the experiment was not run."""
        if self._missing():
            return None
        return self.short(suffix).round(3)

    def draw(self, picture: Callable[[pd.DataFrame], Figure], suffix: str = "") -> Figure | None:
        """Draw a table, write the picture and return it, or say that the experiment was not run."""
        if self._missing():
            return None
        figure = picture(self.tables[suffix])
        save(figure, self.figures / self.stem())
        return figure

    def verdicts(self, suffix: str = "tests") -> None:
        """Print what the tests allow to claim."""
        if not self._missing():
            print("\n".join(verdicts(self.tables[suffix])))

    def _missing(self) -> bool:
        if not self.was_run:
            print(": ".join(part for part in (self.name, tables.NOT_RUN, self.why) if part))
        return not self.was_run
