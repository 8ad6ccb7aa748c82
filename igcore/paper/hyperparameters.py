"""The paper's two tables of hyperparameters beside the settings that our runs had."""

from collections.abc import Iterable

import pandas as pd

from . import IDENTITY, reported
from .compare import AGREES, DIFFERS, NOT_RUN, SWEEPS, Cell, cells

METHOD_SETTINGS = (
    "block_size n_samples rounds max_new_tokens keep value_steps value_step_size"
).split()


def hyperparameters(table: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return a table of hyperparameters in long form, with the values of our runs.

    A reported value is a choice and no measurement, so no statistics decide: it ``agrees`` when it
    is among the values that were run.

    Parameters
    ----------
    table : str
        One of `igcore.paper.HYPERPARAMETERS`.
    records : DataFrame
        For ``hyperparameters``, lines as `igcore.report.load.load_runs` returns them; for
        ``critic_hyperparameters``, a row of settings for each critic, as
        `igcore.paper.report.critics` returns them.

    Returns
    -------
    DataFrame
        A row per reported value: ``printed_as``, ``setting`` (its name here), ``paper``, ``ours``,
        all values that were run of a family of methods or of the critics, as text, and ``verdict``.
        K is given as a share of N where it is one.
    """
    rows = reported(table)
    result = []
    if table == "critic_hyperparameters":
        for row in rows.itertuples():
            ours = [f"{value:g}" for value in records.get(row.setting, ())]
            result.append(_setting_row(row.printed_as, row.setting, f"{row.value:g}", ours))
        return pd.DataFrame(result)
    kinds = ("main", *SWEEPS)
    decoded = [cell for kind in kinds for cell in cells(kind, records)]
    rows = rows.set_index(["family", "printed_as"])[METHOD_SETTINGS].stack().dropna()
    for (family, name, setting), value in rows.items():
        of_family = [cell for cell in decoded if cell.settings["method"].startswith(family)]
        ours = [_setting_text(cell, setting) for cell in of_family]
        result.append(_setting_row(name, setting, value, ours))
    return pd.DataFrame(result)


def _setting_text(cell: Cell, name: str) -> str:
    settings = cell.lines.iloc[0] if name not in IDENTITY else cell.settings
    if name == "block_size" and cell.settings["method"].startswith("re-control"):
        return "1"  # the record counts its answer as one block, but every token is steered
    if name == "keep" and settings["n_samples"] % settings["keep"] == 0:
        return f"N/{settings['n_samples'] // settings['keep']}"
    return f"{settings[name]:g}"


def _setting_row(name: str, setting: str, paper: str, values: Iterable[str]) -> dict[str, str]:
    ours = sorted(set(values), key=_number)
    if not ours:
        verdict = NOT_RUN
    elif set(paper.split()) <= set(ours):
        verdict = AGREES
    else:
        verdict = DIFFERS
    row = {"printed_as": name, "setting": setting, "paper": paper}
    return row | {"ours": " ".join(ours) or NOT_RUN, "verdict": verdict}


def _number(value: str) -> float:
    """Return the number in a value such as ``8`` or ``N/4``."""
    return float(value.removeprefix("N/"))
