"""The 2^4 experiment: what the pathwise check, a retry, its penalty and a critic each change.

It also tests what they change together. A cell is one choice of the four, decoded with the same
prompts and seeds.
"""

from itertools import combinations

import numpy as np
import pandas as pd

from ..errors import RunError
from .paired import MEASURES, clustered, corrected

FACTORS = {  # factor -> column of a record, its value without and with the factor
    "pathwise check": ("accounting", "terminal", "peak"),
    "retry": ("rounds", 1, 2),
    "penalty": ("diversity", "none", "half"),
    "critic": ("method", "inferenceguard", "inferenceguard-mix"),
}
CELL = [column for column, _, _ in FACTORS.values()]


def expand(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with every line without retries twice: with the penalty, and without.

    The penalty changes nothing there.
    """
    column, *values = FACTORS["penalty"]
    once = records["rounds"] == 1
    return pd.concat(
        [records[~once], *(records[once].assign(**{column: value}) for value in values)],
        ignore_index=True,
    )


def effects(records: pd.DataFrame) -> pd.DataFrame:
    """Return the main effects of `FACTORS` and their interactions in pairs.

    A main effect is the mean difference with minus without the factor, over all choices of the
    others and all seeds. An interaction is half of what the second factor adds to the effect of the
    first. Differences are taken within prompt and seed and averaged by prompt, so that intervals
    and tests are over prompts; a reward counts where all cells of a difference answered. Without a
    retry the penalty changes nothing, so its main effect is half its effect on retries, and equals
    its interaction with the retry.

    Parameters
    ----------
    records : DataFrame
        All 16 cells with the same prompts and seeds, see `expand`.

    Returns
    -------
    DataFrame
        Columns `paired.COLUMNS`: ``point`` is a factor or two joined by " x ", ``reference`` is
        empty. Holm adjusts over the ten effects on a measure.

    Raises
    ------
    RunError
        When a prompt and seed lacks a cell, or has one twice.
    """
    rows = []
    for policy, lines in records.groupby("policy", sort=False):
        for measure in MEASURES:
            values, index = _cells(lines, measure)
            for chosen in [
                *combinations(range(len(FACTORS)), 1),
                *combinations(range(len(FACTORS)), 2),
            ]:
                name = " x ".join(list(FACTORS)[i] for i in chosen)
                about = {"policy": policy, "measure": measure, "point": name, "reference": ""}
                rows.append(about | clustered(pd.Series(_contrast(values, chosen), index=index)))
    return corrected(rows)


def _cells(lines: pd.DataFrame, measure: str) -> tuple[np.ndarray, pd.MultiIndex]:
    """Return a measure of every cell, (pairs, 2, 2, 2, 2), and the prompt and seed of each pair."""
    levels = [[without, with_] for _, without, with_ in FACTORS.values()]
    columns = pd.MultiIndex.from_product(levels, names=CELL)
    keyed = lines.assign(value=MEASURES[measure](lines))
    keyed = keyed.set_index(["prompt_id", "seed", *CELL])["value"]
    twice = keyed.index[keyed.index.duplicated()]
    if len(twice):
        raise RunError(f"a line of the factorial is there twice: {twice[0]}; give every run once")
    index = keyed.index.droplevel(CELL).unique().sort_values()
    wanted = pd.MultiIndex.from_tuples(
        [(*pair, *cell) for pair in index for cell in columns], names=keyed.index.names
    )
    if len(missing := wanted.difference(keyed.index)):
        raise RunError(
            f"the factorial lacks {len(missing)} lines, such as {missing[0]}; decode all its "
            f"cells with the same prompts"
        )
    return keyed.reindex(wanted).to_numpy().reshape(len(index), *[2] * len(CELL)), index


def _contrast(values: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
    """Return for each pair (n,) the effect of one factor, or the interaction of two.

    NaN where no difference of it is known.
    """
    for place, axis in enumerate(chosen):
        values = np.diff(values, axis=axis + 1)  # (n, ...), length 1 along the axis
        values = values / (2 if place else 1)
    return pd.DataFrame(values.reshape(len(values), -1)).mean(axis=1).to_numpy()
