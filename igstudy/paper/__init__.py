"""The tables of the paper as data, each row under the names used here.

Notebook 70 computes what follows from the numbers. Every row has a ``tex_line``: a line of the
LaTeX source of arXiv 2502.01208 (version 2), its files joined in the order in which the main file
reads them.
"""

from collections.abc import Collection
from importlib.resources import files

import pandas as pd

from igcore.errors import unknown_name

TABLES = (
    *"main_alpaca_beaver main_vicuna main_llama lambda_alpaca_beaver lambda_vicuna ndk".split(),
    *"win_rates latency".split(),
)
MAIN = TABLES[:3]
MEASURED = (*TABLES[:6], "latency")  # tables of safety rates
PAPER_SETTINGS = ["n_samples", "block_size", "keep", "lagrange_multiplier"]
INTEGER_TYPES = dict.fromkeys(PAPER_SETTINGS[:3], "Int64")
IDENTITY = ["policy", "prompts", "method", *PAPER_SETTINGS]
# ends the names of columns of percentages as text: "94.0" has one decimal more than "94"
AS_TEXT = "_printed"
_PERCENTAGES = [f"{name}{AS_TEXT}" for name in ("safety", "helpfulness", "harmlessness")]
_TYPES = INTEGER_TYPES | dict.fromkeys(_PERCENTAGES, str) | {"lagrange_multiplier": float}


def reported(table: str) -> pd.DataFrame:
    """Return one table of the paper, a row per row of the paper, in its order.

    Parameters
    ----------
    table : str
        One of `TABLES`.

    Returns
    -------
    DataFrame
        ``table``, the paper's ``label``, and the columns `IDENTITY`: keys of
        `igcore.POLICIES` and `igcore.METHODS`, the prompt set, and the settings as a run
        here records them. A setting is missing where the paper reports none or where it does not
        apply; Best-of-N answers in one block, although the paper gives a sample width for it. Block
        size and kept beams are those of ``tab:hyperparameters`` (d = 32, K = N/4) unless the row
        says otherwise: `contents` says which settings a table states itself. Every percentage is
        there as text (``safety_printed``) and as a share (``safety_rate``). Rewards (higher is
        better) and their standard deviations over prompts, costs (higher is worse) and seconds per
        prompt are floats; ``printed_as`` is the method's name in the paper.

    Raises
    ------
    ParameterError
        For an unknown table.
    """
    if table not in TABLES:
        raise unknown_name("table of the paper", table, TABLES)
    rows = read("reported").query("table == @table").reset_index(drop=True)
    # a table has no column of what it does not print
    rows = rows[[name for name in rows if name in IDENTITY or rows[name].notna().any()]]
    for name in rows.filter(like=AS_TEXT):
        rows[name.removesuffix(AS_TEXT) + "_rate"] = rows[name].astype(float).div(100).round(6)
    rows.insert(1, "label", contents().loc[table, "label"])
    return rows


def contents() -> pd.DataFrame:
    """Return label and title of each of `TABLES`, and the settings that rows or caption state."""
    return read("tables").fillna("").set_index("table")


def measured(tables: tuple[str, ...] = MEASURED) -> pd.DataFrame:
    """Return several tables of the paper below one another."""
    return pd.concat([reported(table) for table in tables], ignore_index=True)


def read(name: str) -> pd.DataFrame:
    """Return a file of ``data``.

    ``reported`` has the rows of `TABLES` one below another, and ``tables`` a row for each of these.
    ``statements`` has numbers that the text states: the sizes of the test sets, and the budget.
    ``fidelity`` says what became of each statement, see ``docs.fidelity``.
    ``theory`` lists theorems, lemmas, definitions and assumptions in the paper's order.
    """
    types = str if name == "fidelity" else _TYPES
    with (files(__package__) / f"data/{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, dtype=types)


def of_paper(names: Collection[str]) -> list[str]:
    """Return those of `MEASURED` whose comparison with runs is among names of tables.

    From the runs of a profile alone, a table that another profile sweeps would lose rows or cells.
    So ``profile.yaml`` names it for one notebook, in one profile, see `igstudy.runs.profiles.Made`.
    """
    return [table for table in MEASURED if f"paper_{table}" in names]
