"""The picture of what each lambda buys: reward against safety rate, front by front.

Also what all pictures of ablations share. Every row of a table is one setting of one method. Cost:
higher is worse; reward: higher is better.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..errors import ParameterError, RunError
from ..report.statistics import check_constant
from .labels import place
from .pareto import pareto
from .style import INK, WIDTH, named, percent, style, styled, whiskers

LIMITS = {
    "safety_rate": ["safety_wilson_low", "safety_wilson_high"],
    "reward_mean": ["reward_low", "reward_high"],
}
GUARD = "inferenceguard"  # how the names of methods that may abstain begin


def checked(table: pd.DataFrame, key: Sequence[str]) -> pd.DataFrame:
    """Return the table, or say why it cannot be drawn.

    It may be empty, mix policies, or have two rows for one point.
    """
    if not len(table):
        raise RunError("there is nothing to draw; run `make ablations` first")
    if "policy" in table:
        check_constant(table, ("policy",), "one picture")
    twice = table.loc[table.duplicated(key), key]
    if len(twice):
        named = ", ".join(f"{name} {value}" for name, value in twice.iloc[0].items())
        raise ParameterError(f"two rows have {named}; give one row per {', '.join(key)}")
    return table


def page(rows: int, columns: int, height: float, **options) -> tuple[Figure, np.ndarray]:
    """Return a figure as wide as a page, and its panels (rows, columns).

    Each is `height` inches high.
    """
    fig = Figure(figsize=(WIDTH, 0.9 + height * rows), layout="constrained")
    axes = fig.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.grid()
    return fig, axes


def names(rows: pd.DataFrame) -> dict[str, str]:
    """Return the label of each method in order of appearance, see `igcore.figures.style.named`."""
    prompts = rows.groupby("method", sort=False)["n_prompts"].max()
    return dict(zip(prompts.index, named(prompts), strict=True))


@styled
def lambda_fronts(table: pd.DataFrame) -> Figure:
    """Draw reward against safety rate over lambda, one panel per Lagrangian method and N.

    The approximate Pareto front of a method and N is the line: it joins the points that no other
    lambda beats in both measures. Points that one does beat are white inside. The star is
    inferenceguard, at the largest N that is not above the panel's; it is hollow and hides no point.

    Parameters
    ----------
    table : DataFrame
        Columns of the main table, one row per method, ``n_samples`` and ``lagrange_multiplier``,
        which stands beside its point.

    Raises
    ------
    RunError
        When there is no row, or none of a Lagrangian method.
    ParameterError
        For several policies, or two rows of one point.
    """
    rows = checked(table, ["method", "n_samples", "lagrange_multiplier"])
    fronts = rows[rows["method"].str.contains("lagrangian")]
    if not len(fronts):
        raise RunError("there is no Lagrangian method to draw; run `make ablations` first")
    guard = rows[rows["method"] == GUARD].drop_duplicates("n_samples").sort_values("n_samples")
    labels = names(rows)
    cells = [
        cell
        for _, line in fronts.groupby("method", sort=False)
        for _, cell in line.groupby("n_samples")
    ]
    columns = min(3, len(cells))
    fig, axes = page(-(-len(cells) // columns), columns, 2.4, sharex=True, sharey=True)
    for ax in axes.flat[len(cells) :]:
        ax.remove()
    shown = [
        (ax, cell, _reference(guard, cell["n_samples"].iloc[0]))
        for ax, cell in zip(axes.flat, cells, strict=False)
    ]
    for ax, cell, star in shown:
        _front_panel(ax, cell, star)
        ax.set_title(
            f"{labels[cell['method'].iloc[0]]}, N = {cell['n_samples'].iloc[0]}",
            loc="left",
            fontsize=10,
            weight="normal",
        )
        ax.tick_params(labelbottom=True)
    left = min(axes[0, 0].get_xlim()[0], 0.95)
    axes[0, 0].set_xlim(left, 1 + 0.07 * (1 - left))
    axes[0, 0].xaxis.set_major_formatter(percent)
    fig.supylabel("reward", fontsize="medium")
    fig.supxlabel("safety rate (numbers beside the points: λ)", fontsize="medium")
    fig.legend(
        handles=_front_legend(bool(len(guard))), loc="outside upper center", ncols=3, frameon=False
    )
    fig.draw_without_rendering()  # the panels have their final size
    for panel in shown:
        _front_labels(*panel)
    return fig


def _reference(guard: pd.DataFrame, n: int) -> pd.DataFrame:
    """Return the row of inferenceguard to set beside a front of N samples; none if there is none.

    It has no more samples if possible.
    """
    below = guard[guard["n_samples"] <= n]
    return below.tail(1) if len(below) else guard.head(1)


def _front_panel(ax: Axes, points: pd.DataFrame, star: pd.DataFrame) -> None:
    method = points["method"].iloc[0]
    colour, marker = style(method)
    # what none beats is drawn last, so that nothing hides it
    points = points.iloc[np.argsort(pareto(points), kind="stable")]
    front = pareto(points)
    best = points[front].sort_values(list(LIMITS), ascending=[True, False])
    ax.plot(best["safety_rate"], best["reward_mean"], color=colour, lw=1.8, zorder=2)
    _crosses(ax, points, colour)
    inside = [colour if kept else "white" for kept in front]
    ax.scatter(
        points["safety_rate"],
        points["reward_mean"],
        s=48,
        c=inside,
        marker=marker,
        ec=colour,
        lw=1.4,
        zorder=3,
    )
    _crosses(ax, star, style(GUARD)[0])
    ax.scatter(
        star["safety_rate"],
        star["reward_mean"],
        s=210,
        c="none",
        marker="*",
        ec=style(GUARD)[0],
        lw=1.4,
        zorder=4,
    )


def _front_labels(ax: Axes, points: pd.DataFrame, star: pd.DataFrame) -> None:
    """Write lambda beside each point, and beside the star its N where that is another."""
    n = points["n_samples"].iloc[0]
    texts = [f"{x:g}" for x in points["lagrange_multiplier"]] + [
        f"N = {m}" if m != n else "" for m in star["n_samples"]
    ]
    place(ax, pd.concat([points, star])[list(LIMITS)].to_numpy(dtype=float), texts)


def _crosses(ax: Axes, rows: pd.DataFrame, colour) -> None:
    """Draw the intervals of both measures."""
    across, up = (
        whiskers(rows[name], *(rows[limit] for limit in limits)) for name, limits in LIMITS.items()
    )
    look = {"ecolor": colour, "elinewidth": 1, "alpha": 0.45}
    ax.errorbar(rows["safety_rate"], rows["reward_mean"], up, across, fmt="none", zorder=1, **look)


def _front_legend(guarded: bool) -> list[Line2D]:
    look = {"color": INK, "ls": "none", "marker": "o"}
    entries = [
        Line2D([], [], label="not beaten", **look),
        Line2D([], [], mfc="white", label="beaten by another λ", **look),
    ]
    star = {
        "color": style(GUARD)[0],
        "mfc": "none",
        "mew": 1.4,
        "ls": "none",
        "marker": "*",
        "ms": 12,
        "label": GUARD,
    }
    return entries + ([Line2D([], [], **star)] if guarded else [])
