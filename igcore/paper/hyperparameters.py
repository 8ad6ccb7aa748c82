"""The two printed tables of hyperparameters beside the settings that our runs had.

A printed value is a choice and no measurement, so no statistics decide: it ``agrees`` when it is
among the values that were run.
"""

from collections.abc import Iterable, Iterator

import pandas as pd

from . import IDENTITY, printed
from .cells import Cell, cells, readable
from .compare import AGREES, DIFFERS, NOT_RUN

TABLES = ("hyperparameters", "critic_hyperparameters")
# columns of the print
METHOD_SETTINGS = (
    *("block_size", "n_samples", "rounds", "max_new_tokens", "keep"),
    *("value_steps", "value_step_size"),
)


def settings(table: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return a printed table of hyperparameters in long form, with the values of our runs.

    Parameters
    ----------
    table : str
        One of `TABLES`.
    records : DataFrame
        For ``hyperparameters``, lines as `igcore.report.load.load_runs` returns them; for
        ``critic_hyperparameters``, a row of settings for each critic, as
        `igcore.paper.report.critics` returns them.

    Returns
    -------
    DataFrame
        A row per printed value: ``printed_as``, ``setting`` (its name here), ``paper``, ``ours``,
        all values that were run of a family of methods or of the critics, as text, and ``verdict``.
        K is given as a share of N where it is one.
    """
    rows = _of_methods(records) if table == "hyperparameters" else _of_critics(records)
    return pd.DataFrame(
        [
            {"printed_as": name, "setting": of, "paper": paper} | _beside(paper, ours)
            for name, of, paper, ours in rows
        ]
    )


def _of_methods(records: pd.DataFrame) -> Iterator[tuple[str, str, str, list[str]]]:
    found = {
        id(cell): cell
        for table in ("main", "lambda", "ndk", "latency")
        for cell in readable(table, cells(records))
    }
    for row in printed("hyperparameters").to_dict("records"):
        of = [cell for cell in found.values() if cell.about["method"].startswith(row["family"])]
        for name in METHOD_SETTINGS:
            if pd.notna(row[name]):
                yield row["printed_as"], name, row[name], [_setting(cell, name) for cell in of]


def _setting(cell: Cell, name: str) -> str:
    if name == "block_size" and cell.about["method"].startswith("re-control"):
        return "1"  # the record counts its answer as one block, but every token is steered
    if name == "keep" and cell.about["n_samples"] % cell.about["keep"] == 0:
        return f"N/{cell.about['n_samples'] // cell.about['keep']}"
    return f"{(cell.about if name in IDENTITY else cell.lines.iloc[0])[name]:g}"


def _of_critics(critics: pd.DataFrame) -> Iterator[tuple[str, str, str, list[str]]]:
    for row in printed("critic_hyperparameters").itertuples():
        yield (
            row.printed_as,
            row.setting,
            f"{row.value:g}",
            [f"{value:g}" for value in critics.get(row.setting, ())],
        )


def _number(value: str) -> float:
    """Return the number in a value such as ``8`` or ``N/4``."""
    return float(value.removeprefix("N/"))


def _beside(paper: str, values: Iterable[str]) -> dict[str, str]:
    ours = sorted(set(values), key=_number)
    verdict = NOT_RUN if not ours else AGREES if set(paper.split()) <= set(ours) else DIFFERS
    return {"ours": " ".join(ours) or NOT_RUN, "verdict": verdict}
