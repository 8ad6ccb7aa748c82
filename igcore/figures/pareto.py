"""Which rows of a table no other row beats."""

import numpy as np
import pandas as pd

from ..errors import unknown_name


def pareto(table: pd.DataFrame, x: str = "safety_rate", y: str = "reward_mean") -> np.ndarray:
    """Return which rows are not dominated.

    A row is dominated where another is at least as good in both columns and better in one.

    Parameters
    ----------
    table : DataFrame
        One row per point.
    x, y : str
        Columns of numbers; higher is better in both.

    Returns
    -------
    ndarray of bool, shape (len(table),)
        Rows with the same two numbers stay or go together. A row with NaN is dominated and
        dominates none.

    Raises
    ------
    ParameterError
        When the table lacks a column.

    Examples
    --------
    >>> table = pd.DataFrame({"safety_rate": [0.5, 0.9, 1.0], "reward_mean": [0.6, 0.4, 0.4]})
    >>> pareto(table).tolist()
    [True, False, True]
    """
    for name in (x, y):
        if name not in table:
            raise unknown_name("column", name, table.columns)
    points = table[[x, y]].to_numpy(dtype=float)  # (n, 2)
    each = points[:, None]
    # (n, n): row beats column; never where there is NaN
    beats = (each >= points).all(axis=2) & (each > points).any(axis=2)
    return ~np.isnan(points).any(axis=1) & ~beats.any(axis=0)
