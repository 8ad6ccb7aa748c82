"""Points of a grid: a method under one value of each setting that varies.

A main table has a row for every point.
"""

from collections.abc import Sequence

import pandas as pd

from ..linefile import SETTINGS
from . import tables
from .load import by_method
from .statistics import check_constant


def point_table(lines: pd.DataFrame, varied: Sequence[str]) -> pd.DataFrame:
    """Return the main table of all points of a grid, and the varied settings that it lacks.

    Raises
    ------
    ParameterError
        When another setting of a method varies.
    """
    for method, of_method in lines.groupby("method", sort=False):
        fixed = [name for name in SETTINGS if name in lines and name not in varied]
        check_constant(of_method, fixed, f"method {method}")
    parts = []
    for values, of_point in lines.groupby(list(varied), sort=True):
        point = dict(zip(varied, values, strict=True))
        more = {name: value for name, value in point.items() if name not in tables.MAIN_COLUMNS}
        parts.append(tables.main_table(of_point).assign(**more))
    rows = [row for part in parts for row in part.to_dict("records")]
    return by_method(pd.DataFrame(rows).astype(dict.fromkeys(tables.INTEGER_SETTINGS, "Int64")))
