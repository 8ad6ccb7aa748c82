"""Where the code follows the paper and where it does not, as a table that tests check.

``igstudy/paper/data/fidelity.csv`` has a row for every statement of the paper: where it is printed,
the code it became, and whether that is ``faithful``, ``repaired`` (the printed form has a fault),
an ``option`` (another choice is the default) or ``not run``. A row may say which setting its files
in ``params/paper`` have.
"""

import pandas as pd

from igstudy.paper import read

KINDS_OF_ROWS = ("faithful", "repaired", "option", "not run")
PAGE_COLUMNS = ["printed", "where", "here", "verdict", "why"]


def fidelity() -> pd.DataFrame:
    """Return the table; a cell without text is empty."""
    return read("fidelity").fillna("")


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
