"""How every picture looks: colours, markers, whiskers and the names of methods."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib
import numpy as np
import pandas as pd

from ..errors import RunError, unknown_name
from ..report.pictures import RC

# One hue per family (seaborn's "colorblind"), one shade and one marker per method, whatever else is
# in the picture.
STYLE: dict[str, tuple[str, str | tuple]] = {
    "base": ("#6b6b6b", "o"),
    "best-of-n": ("#0173b2", "s"),
    "best-of-n-lagrangian": ("#56b4e9", "^"),
    "best-of-n-augmented": ("#02406b", "D"),
    "beam-lagrangian": ("#de8f05", "v"),
    "beam-lagrangian-freq": ("#f2c46d", "<"),
    "beam-augmented": ("#8a5a00", "X"),
    "args": ("#029e73", "p"),
    "args-lagrangian": ("#7bd3b5", ">"),
    "args-cost": ("#01553e", "h"),
    "re-control": ("#cc78bc", "d"),
    "re-control-lagrangian": ("#7d3a70", "8"),
    "inferenceguard": ("#d55e00", "*"),
    "inferenceguard-critic": ("#8b2500", "P"),
    "inferenceguard-mix": ("#ff9e6b", (4, 1, 45)),
}
# column of the main table -> colour
OUTCOMES = {"safe": "#0173b2", "abstained": "#c9c9c9", "unsafe": "#d55e00"}
WIDTH = 9.0  # inches: a README shows 900 pixels, so 11 points are 15 pixels
INK = "#222222"
styled = matplotlib.rc_context(RC)


@contextmanager
def unless_missing() -> Iterator[None]:
    """Do what follows, or print which runs it lacks.

    For a section of a notebook; it prints the one sentence of their ``RunError``.
    """
    try:
        yield
    except RunError as error:
        print(f"not run: {error}")


def style(method: str) -> tuple[str, str | tuple]:
    """Return the fixed (colour, marker) of a method, or raise ``ParameterError``."""
    if method not in STYLE:
        raise unknown_name("method", method, STYLE)
    return STYLE[method]


def rows_of_panels(
    policies: Sequence[str], families: Sequence[str], beside: int = 2
) -> list[tuple[list[str], str]]:
    """Return (policies side by side, family) for each row of a figure of policies by families.

    What is too wide goes below.
    """
    several = [list(policies[i : i + beside]) for i in range(0, len(policies), beside)]
    return list(itertools.product(several, families))


def percent(value: float, _position: int) -> str:
    """Write a share as a tick label."""
    return f"{100 * value:.4g}%"


def whiskers(centre: pd.Series, low: pd.Series, high: pd.Series) -> np.ndarray:
    """Return the lengths (2, n) below and above the centre.

    A percentile interval need not hold its centre: then a length is 0.
    """
    return np.clip([centre - low, high - centre], 0, None)


def named(prompts: pd.Series, notes: Sequence[str] = ()) -> list[str]:
    """Return the name of each method, with n where it was asked fewer prompts, and a note.

    `prompts` holds their number by method; `notes` has one text per method, or is empty.
    """
    fewer = [f"n = {n}" if n < prompts.max() else "" for n in prompts]
    asides = [
        ", ".join(filter(None, pair))
        for pair in zip(fewer, notes or itertools.repeat(""), strict=False)
    ]
    return [
        f"{method} ({aside})" if aside else method
        for method, aside in zip(prompts.index, asides, strict=True)
    ]
