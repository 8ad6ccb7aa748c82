"""Points of a grid: a method under one value of each setting that varies.

A main table has a row for every point. A test compares a point with the one that has other
settings, on the prompts and seeds that both have.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..linefile import SETTINGS
from . import paired, tables
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
    table = below(*parts).astype(dict.fromkeys(tables.INTEGER_SETTINGS, "Int64"))
    # a replay has no peak costs
    of_path = ["peak_safety_rate", "word_safety_rate", "broken_between_blocks"]
    table.loc[table["peak_cost_mean"].isna(), of_path] = np.nan
    return by_method(table)


def below(*frames: pd.DataFrame) -> pd.DataFrame:
    """Return frames below one another; a value that one of them lacks is None."""
    return pd.DataFrame([line for frame in frames for line in frame.to_dict("records")])


def arm_of(point: dict[str, Any]) -> str:
    """Return the name of a point: ``beam-lagrangian, n samples 8``."""
    settings = [f", {name.replace('_', ' ')} {point[name]}" for name in point if name != "method"]
    return f"{point['method']}{''.join(settings)}"


def compared(
    lines: pd.DataFrame, varied: Sequence[str], other: dict[str, Any], **only: list[Any]
) -> list[dict[str, Any]]:
    """Compare points with those that have `other` settings, see `igstudy.report.paired.paired`.

    All points are compared, or `only` those with one of these values of a setting.
    """
    points = lines[["method", *varied]].to_dict("records")
    pairs: dict[tuple[str, str], None] = {}  # each once, in order of appearance
    for point in points:
        if point | other != point and all(point[name] in only[name] for name in only):
            pairs[arm_of(point), arm_of(point | other)] = None
    return paired.paired(lines.assign(arm=[arm_of(point) for point in points]), list(pairs))


def tested(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of `compared` as a table with adjusted p values."""
    return paired.corrected(rows)[paired.TEST_COLUMNS]


def standard(
    lines: pd.DataFrame, varied: Sequence[str], other: dict[str, Any]
) -> dict[str, pd.DataFrame]:
    """Return the main table of a grid and, as ``tests``, all points against those with `other`."""
    apart = [name for name in varied if name != "seed"]
    return {"": point_table(lines, varied), "tests": tested(compared(lines, apart, other))}
