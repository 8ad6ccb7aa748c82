"""The pictures of the audit of the paper's tables."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..report.statistics import ALPHA
from .style import INK, OUTCOMES, WIDTH, styled

FIT, OTHER = OUTCOMES["safe"], "#9a9a9a"
VERDICTS = {
    "is higher": OUTCOMES["safe"],
    "under some pairings": "#de8f05",
    "cannot be resolved": "#6b6b6b",
}
MARKERS = {"is higher": "o", "under some pairings": "D", "cannot be resolved": "s"}
SMALLEST = 1e-8  # p value at which the axis ends


@styled
def denominators(
    curves: dict[str, pd.DataFrame], found: pd.DataFrame, stated: dict[str, int]
) -> Figure:
    """Draw how many of the printed percentages every denominator fits, a panel for each group.

    Parameters
    ----------
    curves : dict of str to DataFrame
        Group -> `igcore.paper.denominators.curve`.
    found : DataFrame
        `igcore.paper.denominators.denominators`: the best n of each group gets its number, filled
        where it is implied.
    stated : dict of str to int
        Group -> number of prompts in the text, dashed where it lies on the axis.
    """
    fig = Figure(figsize=(WIDTH, 0.9 + 1.9 * len(curves)), layout="constrained")
    axes = fig.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    found = found.set_index("percentages")
    for ax, (name, curve) in zip(axes, curves.items(), strict=True):
        row = found.loc[name]
        ax.plot(curve["n"], curve["fits"], color=OTHER, lw=0.6, label="rates that n fits")
        ax.plot(curve["n"], curve["by_chance"], color=INK, lw=1.6, label="expected by chance")
        face = FIT if row["implied"] else "white"
        ax.scatter(row["n"], row["fits"], s=60, color=face, ec=FIT, lw=1.5, zorder=3)
        note = f"n = {row['n']}: {row['fits']} of {row['rates']}" + (
            "" if row["implied"] else ", as chance would have it"
        )
        right = row["n"] < curve["n"].max() / 2
        ax.annotate(
            note,
            (row["n"], row["fits"]),
            xytext=(8 if right else -8, 6),
            textcoords="offset points",
            ha="left" if right else "right",
        )
        if stated.get(name, np.inf) <= curve["n"].max():
            ax.axvline(stated[name], color=OUTCOMES["unsafe"], ls="--", lw=1.4)
            side = "right" if stated[name] > curve["n"].max() / 2 else "left"
            look = {"color": "#8f3f00", "transform": ax.get_xaxis_transform(), "ha": side}
            ax.text(stated[name], 0.03, f" text: {stated[name]} ", **look)
        ax.set_ylim(0, 1.25 * max(row["fits"], curve["fits"].max()))
        ax.set_title(name, loc="left")
        ax.set_ylabel("rates")
        ax.grid()
    axes[-1].set(xlabel="denominator n (prompts)", xlim=(0, curve["n"].max()))
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return fig


@styled
def resolution(resolved: pd.DataFrame) -> Figure:
    """Draw the Holm-adjusted p values of every comparison, from the best pairing to the worst.

    Parameters
    ----------
    resolved : DataFrame
        `igcore.paper.resolution.resolve`. A bar that lies left of the line at 5 % is a difference
        whatever the pairing, one that lies right of it is none. p values below 1e-8 end at the
        edge.
    """
    fig = Figure(figsize=(WIDTH, 1.3 + 0.5 * len(resolved)), layout="constrained")
    ax = fig.subplots()
    seen = set()
    for place, row in enumerate(resolved.itertuples()):
        kind = next(name for name in VERDICTS if row.verdict.endswith(name))
        ends = np.clip([row.best, row.worst], SMALLEST, 1)
        ax.plot(ends, [place, place], color=VERDICTS[kind], lw=5, solid_capstyle="butt", alpha=0.45)
        ax.scatter(ends, [place, place], color=VERDICTS[kind], marker="|", s=120, lw=2)
        label = (
            None if kind in seen else kind.replace("is higher", "one is higher under every pairing")
        )
        look = {"color": VERDICTS[kind], "marker": MARKERS[kind], "ec": "white", "clip_on": False}
        ax.scatter(max(row.unpaired, SMALLEST), place, s=48, zorder=3, label=label, **look)
        seen.add(kind)
    labels = [
        f"{row.what}: {row.where}\n{row.method} {100 * row.rate:.4g} %, {row.other} "
        f"{100 * row.other_rate:.4g} %"
        for row in resolved.itertuples()
    ]
    ax.set_yticks(range(len(labels)), labels, fontsize=9)
    ax.axvline(ALPHA, color=OUTCOMES["unsafe"], lw=1.5)
    ax.text(
        ALPHA,
        1.005,
        f"{100 * ALPHA:g} %",
        color="#8f3f00",
        ha="center",
        transform=ax.get_xaxis_transform(),
    )
    ax.set(
        xscale="log",
        xlim=(SMALLEST, 1.6),
        ylim=(len(labels) - 0.4, -0.6),
        xlabel="p value after Holm (bar: every pairing, marker: unpaired test)",
    )
    ax.grid(axis="x")
    fig.legend(loc="outside upper center", ncols=3, frameon=False)
    return fig
