"""How every picture looks: colours, markers, hatches, whiskers, legends, bars, names of methods.

`save` writes a picture: the same figure gives the same bytes.
"""

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from igcore.errors import RunError

from ..files import replace_file

RC = str(files("igstudy") / "data/pictures.mplstyle")  # whether they are drawn or written
METADATA = {"Software": None}  # matplotlib would write its own version by itself

# One hue per family (after seaborn's "colorblind"), one shade and one marker per method in all
# pictures. InferenceGuard is black: no method may have the colour of "over budget".
Marker = str | tuple[int, int, int]
DATA = files("igstudy") / "data/looks.json"
# method -> its colour, its marker, and its name for readers, after the paper's
LOOKS = json.loads(DATA.read_text(encoding="utf-8"))
STYLE: dict[str, tuple[str, Marker]] = {
    method: (colour, marker if isinstance(marker, str) else tuple(marker))
    for method, (colour, marker, _) in LOOKS.items()
}
NAMES: dict[str, str] = {method: name for method, (_, _, name) in LOOKS.items()}
# methods of a picture with one message; tables have them all
SIX = "base best-of-n-augmented beam-lagrangian rejection backtracking inferenceguard".split()
# column of the main table -> colour
OUTCOMES = {"safe": "#0173b2", "abstained": "#c9c9c9", "unsafe": "#d55e00"}
# colours that are alike in grey, or to eyes without one kind of cone
HATCHES = {  # colour of a bar -> its hatch; a bar of another colour has none
    OUTCOMES["unsafe"]: "///",
    OUTCOMES["abstained"]: "...",
}
WIDTH = 9.0  # inches: a README shows 900 pixels, so 11 points are 15 pixels
INK = "#222222"
# seaborn's "colorblind", written out: a figure in these colours need not load seaborn
PALETTE = "#0173b2 #de8f05 #029e73 #d55e00 #cc78bc #ca9161 #fbafe4 #949494 #ece133 #56b4e9".split()
MARKERS = "osD^vPX*"  # of lines that are no methods
styled = matplotlib.style.context(RC)


def save(fig: Figure, stem: Path | str) -> None:
    """Write ``stem.png``, with 200 dots per inch."""
    content = io.BytesIO()
    with matplotlib.style.context(RC):
        fig.savefig(content, format="png", dpi=200, metadata=METADATA)
    replace_file(Path(f"{stem}.png"), content.getvalue())


@contextmanager
def unless_missing() -> Iterator[None]:
    """Run a section of a notebook, or print the sentence of the ``RunError`` that stops it."""
    try:
        yield
    except RunError as error:
        print(f"not run: {error}")


def style(method: str) -> tuple[str, Marker]:
    """Return the fixed (colour, marker) of a method; a user's own method is a pink hexagon."""
    return STYLE.get(method, ("#ff4d8d", "H"))


def shown_methods(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a picture: of more than six methods, six and a user's own.

    The column ``label`` has their names for readers.
    """
    six = table["method"].isin(SIX) | ~table["method"].isin(NAMES)
    rows = table[six] if table["method"].nunique() > len(SIX) else table
    return rows.assign(label=rows["method"].map(NAMES).fillna(rows["method"]))


def percent(value: float, _position: float) -> str:
    """Write a share as a tick label."""
    return f"{100 * value:.4g}%"


def whiskers(centre: pd.Series, low: pd.Series, high: pd.Series) -> npt.NDArray[np.float64]:
    """Return the lengths (2, n) below and above the centre.

    A percentile interval need not contain its centre: then a length is 0.
    """
    lengths: npt.NDArray[np.float64] = np.clip([centre - low, high - centre], 0, None)
    return lengths


def legend_below(fig: Figure, columns: int) -> None:
    """Write one legend for all panels below them, each label once."""
    entries: dict[str, Artist] = {}
    for ax in fig.axes:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    place: Any = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    fig.legend(list(entries.values()), list(entries), **place)


def headline(fig: Figure, sentence: str) -> None:
    """Write the message of a figure above it."""
    fig.suptitle(sentence, x=0.01, ha="left", fontsize=12.5)


def stacked_bars(ax: Axes, counts: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw each row of counts as a bar of shares, with the counts that fit into their pieces.

    Pieces are hatched where their colours are alike in grey.
    """
    shares = counts.div(counts.sum(axis=1), axis=0)
    starts = shares.cumsum(axis=1) - shares
    thin = shares < 0.02 + 0.025 * counts.astype(str).map(len)
    for outcome, colour in colours.items():
        look: Any = {"color": colour, "ec": "white", "height": 0.78, "hatch": HATCHES.get(colour)}
        bars = ax.barh(counts.index, shares[outcome], left=starts[outcome], label=outcome, **look)
        texts = counts[outcome].astype(str).mask(thin[outcome], "")
        ink = INK if colour == OUTCOMES["abstained"] else "white"
        ground = [withStroke(linewidth=4, foreground=colour)]  # the numbers stand on no hatch
        look = {"color": ink, "fontsize": 10, "path_effects": ground}
        ax.bar_label(bars, texts, label_type="center", **look)
    ax.set(xlim=(0, 1), ylim=(len(counts) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(percent)


def panels(
    height: float = 4.0, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure as wide as a page, and its panels row by row, from left to right."""
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = list(fig.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes:
        ax.grid()
    return fig, axes


def policy_panels(
    table: pd.DataFrame, height: float, columns: int = 2, **options: Any
) -> tuple[Figure, list[tuple[Axes, str, pd.DataFrame]]]:
    """Return a figure with a panel of `height` inches per policy, and each with its rows.

    Raises
    ------
    RunError
        When the table is empty.
    """
    if not len(table):
        raise RunError("there is nothing to draw; run notebook 30_decode first")
    policies = list(table.groupby("policy", sort=False))
    columns = min(columns, len(policies))
    lines = -(-len(policies) // columns)
    fig, axes = panels(1 + height * lines, columns, lines, **options)
    for ax in axes[len(policies) :]:
        ax.remove()
    return fig, [(ax, policy, rows) for ax, (policy, rows) in zip(axes, policies, strict=False)]
