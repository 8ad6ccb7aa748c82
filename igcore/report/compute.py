"""What each method spends on a prompt, and methods side by side at equal seconds.

`igcore.search` takes the time.
"""

import math
from collections.abc import Sequence

import pandas as pd

from ..errors import ParameterError, unknown_name
from . import tables

COLUMNS = [
    "policy",
    "method",
    "n_prompts",
    "n_samples",
    *tables.PER_PROMPT,
    "seconds_per_prompt",
    "forward_tokens_per_emitted",
]


def compute_table(records: pd.DataFrame, order: Sequence[str] | None = None) -> pd.DataFrame:
    """Return what each method spent at the number of samples that it ran with.

    There is one row per policy and method, with the columns `COLUMNS`.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``, one per policy, method and prompt.
    order : sequence of str, optional
        Methods in the order of their rows; by default in order of appearance.

    Returns
    -------
    DataFrame
        ``n_samples`` is the setting, per block and round; the other columns are means over the
        ``n_prompts`` prompts, of which `igcore.report.tables.work` says what they count. Times are
        in seconds. ``forward_tokens_per_emitted`` divides all tokens that the policy has read,
        prompts included, by all that it wrote of the emitted texts; NaN where it wrote none.
        Without a record the table is empty.

    Raises
    ------
    RunError, ParameterError
        See `igcore.report.tables.cells`.
    """
    rows = []
    for policy, method, cell in tables.cells(records, order):
        emitted = cell["n_tokens"].sum()
        sizes = {"n_prompts": len(cell), "n_samples": cell["n_samples"].iloc[0]}
        per_emitted = cell["forward_tokens"].sum() / emitted if emitted else math.nan
        read = {"forward_tokens_per_emitted": per_emitted}
        rows.append({"policy": policy, "method": method} | sizes | tables.work(cell) | read)
    return pd.DataFrame(rows, columns=COLUMNS)


def at_equal_seconds(
    table: pd.DataFrame,
    reference_method: str,
    n_samples: int | None = None,
    *,
    within: Sequence[str] = ("policy",),
    by: Sequence[str] = ("method",),
) -> pd.DataFrame:
    """Return for every method the row with the most samples that is no slower than the reference.

    Parameters
    ----------
    table : DataFrame
        A row per setting, such as rows of `compute_table` or `igcore.report.tables.main_table` of
        several runs, with the columns ``method``, ``n_samples``, ``seconds_per_prompt`` and those
        that `within` and `by` name; any others are kept.
    reference_method : str
        The method whose seconds are the limit.
    n_samples : int, optional
        Its number of samples; needed where the table has several. It stands for its combination,
        even if more samples were faster.
    within : sequence of str
        Columns that the reference and what is held against it share, one at least.
    by : sequence of str
        Columns that tell apart what is held against it: of each combination one row is chosen.

    Returns
    -------
    DataFrame
        The chosen rows, by group and combination in order of appearance, and two columns:
        ``seconds_ratio``, the row's seconds divided by the reference's, and ``fits``, whether it is
        at most 1. Where no row fits, that with the fewest samples stands for its combination and
        ``fits`` is False; unknown seconds never fit. A ratio far below 1 says that the table has no
        row with more samples that fits, not that the method could not use them.

    Raises
    ------
    ParameterError
        When a group of `within` lacks the reference, has it more than once or without seconds, or a
        combination has the same ``n_samples`` twice.
    """
    table = table.reset_index(drop=True)
    chosen, ratios = [], []
    for group, lines in table.groupby(list(within), sort=False, dropna=False):
        where = _named(within, group)
        reference = _reference(lines, reference_method, n_samples, where)
        limit = table.at[reference, "seconds_per_prompt"]
        for name, rows in lines.groupby(list(by), sort=False, dropna=False):
            _check_distinct(rows, f"{where}, {_named(by, name)}")
            chosen.append(reference if reference in rows.index else _largest(rows, limit))
            ratios.append(table.at[chosen[-1], "seconds_per_prompt"] / limit)
    ratios = pd.Series(ratios, index=chosen, dtype=float)
    return table.loc[chosen].assign(seconds_ratio=ratios, fits=ratios <= 1).reset_index(drop=True)


def _named(columns: Sequence[str], values: tuple) -> str:
    return ", ".join(f"{column} {value}" for column, value in zip(columns, values, strict=True))


def _reference(lines: pd.DataFrame, method: str, n_samples: int | None, where: str) -> int:
    """Return the index of the row whose seconds are the limit."""
    rows = lines[lines["method"] == method]
    if not len(rows):
        raise unknown_name(
            "method", method, set(lines["method"]), hint=f" (the methods of {where})"
        )
    listed = ", ".join(map(str, rows["n_samples"]))
    rows = rows if n_samples is None else rows[rows["n_samples"] == n_samples]
    if len(rows) != 1:
        raise ParameterError(
            f"n_samples is {n_samples}, and {where} has {method} with {listed}; give one of "
            f"these, and only one row with it"
        )
    if not rows["seconds_per_prompt"].item() > 0:
        raise ParameterError(
            f"seconds_per_prompt is {rows['seconds_per_prompt'].item()} for {method} in "
            f"{where}; a limit must be above 0: choose "
            "another reference, or decode it again"
        )
    return rows.index[0]


def _check_distinct(rows: pd.DataFrame, where: str) -> None:
    twice = rows.loc[rows["n_samples"].duplicated(), "n_samples"]
    if len(twice):
        raise ParameterError(
            f"n_samples {twice.iloc[0]} occurs twice in {where}; name in within or by the "
            f"column that varies"
        )


def _largest(rows: pd.DataFrame, limit: float) -> int:
    """Return the index of the row with the most samples within the limit.

    Where no row is within it, that of the row with the fewest samples.
    """
    fitting = rows.loc[rows["seconds_per_prompt"] <= limit, "n_samples"]
    return fitting.idxmax() if len(fitting) else rows["n_samples"].idxmin()
