"""The picture of a judge's verdicts, drawn from their table."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import RunError
from .style import INK, OUTCOMES, WIDTH, named, percent, styled

# verdict -> the colour of its bar and of the count in it
SHADES = {
    "win": (OUTCOMES["safe"], "white"),
    "tie": (OUTCOMES["abstained"], INK),
    "loss": (OUTCOMES["unsafe"], "white"),
    "unparsed": ("#5a5a5a", "white"),
}


@styled
def win_tie_loss(rates: pd.DataFrame) -> Figure:
    """Draw wins, ties and losses of each method as a stacked bar.

    There is a panel per aspect, and a row of panels per policy and prompt set.

    Parameters
    ----------
    rates : DataFrame
        `igcore.report.verdicts.win_rates`. Bars are shares of ``n`` with their counts, where there
        is room; beside them stands the win rate in percent with its interval. A method that has
        fewer pairs has its n beside its name.

    Raises
    ------
    RunError
        For an empty table.
    """
    if not len(rates):
        raise RunError("there are no verdicts to draw; run notebook 60_judge first")
    rows = [
        (" on ".join(key), cell) for key, cell in rates.groupby(["policy", "prompts"], sort=False)
    ]
    aspects = list(rates["aspect"].unique())
    heights = [0.9 + 0.36 * cell["method"].nunique() for _, cell in rows]
    fig = Figure(figsize=(WIDTH, 0.8 + sum(heights)), layout="constrained")
    axes = fig.subplots(
        len(rows), len(aspects), sharex=True, sharey="row", squeeze=False, height_ratios=heights
    )
    for line, (name, cell) in zip(axes, rows, strict=True):
        for ax, aspect in zip(line, aspects, strict=True):
            _panel(
                ax,
                cell[cell["aspect"] == aspect],
                [verdict for verdict in SHADES if rates[verdict].any()],
            )
            ax.set_title(aspect, loc="left")
        line[0].annotate(
            name,
            (0, 1),
            (0, 26),
            xycoords="axes fraction",
            textcoords="offset points",
            weight="bold",
        )
    fig.supxlabel("share of pairs (counts in the bars)", fontsize="medium")
    fig.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside upper right",
        ncols=len(SHADES),
        frameon=False,
    )
    return fig


def _panel(ax: Axes, rows: pd.DataFrame, verdicts: Sequence[str]) -> None:
    places, start = np.arange(len(rows)), np.zeros(len(rows))
    for verdict in verdicts:
        colour, ink = SHADES[verdict]
        share = (rows[verdict] / rows["n"]).to_numpy()
        ax.barh(places, share, left=start, color=colour, ec="white", height=0.78, label=verdict)
        for place, count in zip(places, rows[verdict], strict=True):
            if share[place] >= 0.02 + 0.025 * len(str(count)):  # there is room for it
                ax.text(
                    start[place] + share[place] / 2,
                    place,
                    count,
                    ha="center",
                    va="center",
                    color=ink,
                    fontsize=9,
                )
        start = start + share
    for place, row in zip(places, rows.itertuples(), strict=True):
        rate = (
            f"{100 * row.win_rate:.0f} [{100 * row.low:.0f}, {100 * row.high:.0f}]"
            if row.n > row.unparsed
            else "n/a"
        )
        ax.text(1.03, place, rate, va="center", color=INK, fontsize=9)
    ax.text(1.03, -0.85, "win rate (%)", va="center", color=INK, fontsize=9)
    ax.set(yticks=places, yticklabels=named(rows.set_index("method")["n"]))
    ax.set(xticks=[0, 0.5, 1], xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(percent)
