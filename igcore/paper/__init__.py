"""The paper's printed tables as data, each row under the names used here.

`igcore.paper.audit`, `igcore.paper.text` and `igcore.paper.resolution` compute what follows from
the numbers. Every row has a ``tex_line``: a line of the LaTeX source of arXiv 2502.01208 (version
2), its files joined in the order in which the main file reads them.
"""

from functools import cache
from importlib.resources import files

import pandas as pd

from ..errors import unknown_name

TABLES = (
    "main_alpaca_beaver",
    "main_vicuna",
    "main_llama",
    "lambda_alpaca_beaver",
    "lambda_vicuna",
    "ndk",
    "win_rates",
    "latency",
    "hyperparameters",
    "critic_hyperparameters",
)
MAIN, LAMBDA = TABLES[:3], TABLES[3:5]
MEASURED = (*TABLES[:6], "latency")  # tables of safety rates
SETTINGS = ["n_samples", "block_size", "keep", "lagrange_multiplier"]
IDENTITY = ["policy", "prompts", "method", *SETTINGS]
# ends the names of columns of percentages as text: "94.0" has one decimal more than "94"
PRINTED = "_printed"
_TEXT = {"hyperparameters": str, "statements": {"value": str}}  # lists, formulas and printed digits
_TYPES = {
    **dict.fromkeys(["n_samples", "block_size", "keep"], "Int64"),
    **dict.fromkeys(
        [f"{name}{PRINTED}" for name in ("safety", "helpfulness", "harmlessness")], str
    ),
    "lagrange_multiplier": float,
}


def printed(table: str) -> pd.DataFrame:
    """Return one printed table, a row per printed row, in the order of print.

    Parameters
    ----------
    table : str
        One of `TABLES`.

    Returns
    -------
    DataFrame
        ``table``, the paper's ``label``, and for all but the two tables of hyperparameters
        `IDENTITY`: keys of `igcore.POLICIES` and `igcore.METHODS`, the prompt set, and the settings
        as a run here records them. A setting is missing where the paper prints none or where it
        does not apply; Best-of-N answers in one block, whatever sample width is printed for it.
        Block size and kept beams are those of ``tab:hyperparameters`` (d = 32, K = N/4) unless the
        row says otherwise: `contents` says which settings a table states itself. Every percentage
        is there as text (``safety_printed``) and as a share (``safety_rate``). Rewards (higher is
        better) and their standard deviations over prompts, costs (higher is worse) and seconds per
        prompt are floats; ``printed_as`` is the method's name in the paper.

    Raises
    ------
    ParameterError
        For an unknown table.
    """
    if table not in TABLES:
        raise unknown_name("table of the paper", table, TABLES)
    rows = _read(table).copy()
    for name in [name for name in rows if name.endswith(PRINTED)]:
        rows[name.removesuffix(PRINTED) + "_rate"] = rows[name].astype(float).div(100).round(6)
    label = contents().set_index("table").loc[table, "label"]
    return pd.concat(
        [pd.DataFrame({"table": table, "label": label}, index=rows.index), rows], axis=1
    )


def contents() -> pd.DataFrame:
    """Return the list of `TABLES`: label, title, the settings they state, and the label's line.

    Rows or caption state the settings.
    """
    return _read("tables").fillna({"states": ""})


def statements() -> pd.DataFrame:
    """Return sentences of the text that a table can confirm, with what they say in numbers.

    ``kind`` says how to check them.
    """
    return _read("statements").fillna("")


def symbols() -> pd.DataFrame:
    """Return what the paper calls by each symbol, a row per place."""
    return _read("symbols").copy()


def measured(tables: tuple[str, ...] = MEASURED) -> pd.DataFrame:
    """Return several printed tables below one another."""
    return pd.concat([printed(table) for table in tables], ignore_index=True)


@cache
def _read(name: str) -> pd.DataFrame:
    with (files(__package__) / f"data/{name}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, dtype=_TEXT.get(name, _TYPES)).astype({"tex_line": int})
