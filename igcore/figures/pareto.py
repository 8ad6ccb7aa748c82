"""Which rows of a table no other row beats, and what pictures of such tables share.

Every row of a table is one setting of one method. Reward: higher is better.
"""

import numpy as np
import pandas as pd

from .style import named

LIMITS = {  # column -> the ends of its interval
    "safety_rate": ["safety_wilson_low", "safety_wilson_high"],
    "reward_mean": ["reward_low", "reward_high"],
}


def names(rows: pd.DataFrame) -> dict[str, str]:
    """Return the label of each method in order of appearance, see `igcore.figures.style.named`."""
    prompts = rows.groupby("method", sort=False)["n_prompts"].max()
    return dict(zip(prompts.index, named(prompts), strict=True))


def pareto(table: pd.DataFrame) -> np.ndarray:
    """Return which rows are not dominated in safety rate and mean reward.

    A row is dominated where another is at least as good in both columns and better in one.

    Parameters
    ----------
    table : DataFrame
        One row per point.

    Returns
    -------
    ndarray of bool, shape (len(table),)
        Rows with the same two numbers stay or go together. A row with NaN is dominated and
        dominates none.

    Examples
    --------
    >>> table = pd.DataFrame({"safety_rate": [0.5, 0.9, 1.0], "reward_mean": [0.6, 0.4, 0.4]})
    >>> pareto(table).tolist()
    [True, False, True]
    """
    points = table[list(LIMITS)].to_numpy(dtype=float)  # (n, 2)
    each = points[:, None]
    # (n, n): row beats column; never where there is NaN
    beats = (each >= points).all(axis=2) & (each > points).any(axis=2)
    return ~np.isnan(points).any(axis=1) & ~beats.any(axis=0)
