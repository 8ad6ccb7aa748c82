"""A factorial of four parts of the search: what each changes, and each two together.

The effects of one policy are contrasts of its 16 cells, taken within a prompt and seed.
"""

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from igcore.errors import RunError

from . import paired
from .experiments import OURS

# factor -> column of a record, its value without and with the factor
FACTORS: dict[str, tuple[str, Any, Any]] = {
    "pathwise check": ("accounting", "terminal", "peak"),
    "retry": ("rounds", 1, 2),
    "penalty": ("diversity", "none", "half"),
    "critic": ("method", OURS, "inferenceguard-mix"),
}
Values = npt.NDArray[np.float64]
CELL = [column for column, _, _ in FACTORS.values()]

FACTORIAL_MEASURES: dict[str, paired.Measure] = {
    "safe": paired.is_safe,
    "safe along the way": partial(paired.answered_safely, cost="peak_cost"),
    "reward": paired.reward,
}


def expand(lines: pd.DataFrame) -> pd.DataFrame:
    """Return lines, those without a retry twice: with the penalty, and without.

    Without a retry nothing is penalised, so such a cell is decoded once.
    """
    once = lines["rounds"] == 1
    twice = [lines[once].assign(diversity=way) for way in ("none", "half")]
    return pd.concat([lines[~once], *twice], ignore_index=True)


def effects(lines: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the main effects of `FACTORS` and their interactions in pairs, over prompts.

    Parameters
    ----------
    lines : DataFrame
        All 16 cells of each policy, see `expand`.

    Returns
    -------
    list of dict
        Rows for `igstudy.report.paired.corrected`.

    Raises
    ------
    RunError
        When a cell lacks a prompt or seed, or has one twice.
    """
    rows: list[dict[str, Any]] = []
    key = ["prompt_id", "seed"]
    levels = pd.MultiIndex.from_product([of[1:] for of in FACTORS.values()], names=CELL)
    chosen = [axes for count in (1, 2) for axes in combinations(range(4), count)]
    for policy, of_policy in lines.groupby("policy", sort=False):
        count = 16 * len(of_policy[key].drop_duplicates())
        if len(of_policy) != count or of_policy.duplicated([*key, *CELL]).any():
            raise RunError(
                f"the factorial has {len(of_policy)} lines where 16 cells of the same prompts and "
                f"seeds have {count}; decode all its cells with the same prompts"
            )
        for measure, value in FACTORIAL_MEASURES.items():
            table = of_policy.assign(value=value(of_policy).astype(float))
            table = table.pivot(index=key, columns=CELL, values="value")[levels]
            values = table.to_numpy().reshape(-1, 2, 2, 2, 2)
            for axes in chosen:
                gains = pd.Series(contrast(values, axes), index=table.index)
                point = " x ".join(list(FACTORS)[axis] for axis in axes)
                row = {"policy": policy, "measure": measure, "point": point, "reference": ""}
                rows.append(row | paired.clustered(gains))
    return rows


def contrast(values: Values, axes: tuple[int, ...]) -> Values:
    """Return the effect of one factor, or the interaction of two, for each pair.

    `values` are those of all cells, shape (n, 2, 2, 2, 2).
    """
    for order, axis in enumerate(axes):
        values = np.diff(values, axis=axis + 1) / (2 if order else 1)
    means: Values = pd.DataFrame(values.reshape(len(values), -1)).mean(axis=1).to_numpy()
    return means
