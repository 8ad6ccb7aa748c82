"""Where the code follows the paper and where it does not, as a table that is checked.

``igstudy/paper/data/fidelity.csv`` has a row for every statement of the paper: where it is printed,
the code it became, and whether that is ``faithful``, ``repaired`` (the printed form has a fault),
an ``option`` (another choice is the default) or ``not run``. A row may say which setting its files
have; then `wrong_settings` compares.
"""

from fnmatch import fnmatch
from functools import reduce
from pathlib import Path
from typing import Any

import pandas as pd

from igserve.yamlfile import read_yaml
from igstudy.paper import read
from igstudy.runs.paramfiles import defaults_of, kind_of

KINDS_OF_ROWS = ("faithful", "repaired", "option", "not run")
PAGE_COLUMNS = ["printed", "where", "here", "verdict", "why"]


def fidelity() -> pd.DataFrame:
    """Return the table; a cell without text is empty."""
    return read("fidelity").fillna("")


def wrong_settings(params: Path) -> list[str]:
    """Return a sentence for every file of a folder that does not have the setting of its row.

    A row without a value says that its files leave the setting out, or set it to null.
    """
    found = []
    for row in fidelity().to_dict("records"):
        wanted = row["value"].split() or [""] * len(row["setting"].split())
        files = [path for path in sorted(params.glob("*.yaml")) if fnmatch(path.stem, row["files"])]
        if row["files"] and not files:
            found.append(f"{row['printed']}: no file of {params} is called {row['files']}")
        for path in files:
            given = read_yaml(path)
            whole = defaults_of(kind_of(path)) | given
            for name, value in zip(row["setting"].split(), wanted, strict=True):
                has = _value(whole if value else given, name)
                if has != value:
                    found.append(f"{path}: {name} is {has or 'not set'}, not {value or 'left out'}")
    return found


def _value(settings: dict[str, Any], name: str) -> str:
    """Return the value of a setting, whose parts a dot joins, as text, or nothing."""
    value = reduce(lambda part, key: (part or {}).get(key), name.split("."), settings)
    return "" if value is None else str(value)


def page() -> str:
    """Return the table as Markdown, part by part."""
    table = fidelity()
    names = table["code"].str.split().map(lambda names: ", ".join(f"`{name}`" for name in names))
    table = table.assign(here=names.str.replace("igcore.", "", regex=False))
    parts = [
        f"## {part.capitalize()}\n\n{rows[PAGE_COLUMNS].to_markdown(index=False)}"
        for part, rows in table.groupby("part", sort=False)
    ]
    counts = table["verdict"].value_counts()
    summary = ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in KINDS_OF_ROWS)
    return "\n\n".join([f"{len(table)} statements: {summary}.", *parts])
