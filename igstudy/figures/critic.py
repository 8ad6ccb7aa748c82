"""The pictures of critics, drawn from tables."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from igcore.errors import RunError

from .style import INK, MARKERS, PALETTE, headline, legend_below, policy_panels, styled, whiskers

GREY = "#9a9a9a"
REFERENCES = {
    "prompt-cost": ("cost of the prompt alone", ":"),
    "partial-cost": ("cost model on the text so far", "--"),
}


def look_of(number: int) -> dict[str, Any]:
    """Return colour and marker of a critic, by its number, for a line with whiskers."""
    colour = PALETTE[number % len(PALETTE)]
    marker = MARKERS[number % len(MARKERS)]
    return {"color": colour, "marker": marker, "ms": 5, "lw": 1.2, "elinewidth": 1}


@styled
def auroc_by_position(table: pd.DataFrame) -> Figure:
    """Draw the AUROC of f1 within prompts by position, with its 95 % intervals.

    There is one panel per policy, and a line per critic. The title names the best one.

    Parameters
    ----------
    table : DataFrame
        Rows of ``critic.csv``. The dotted and dashed grey lines need no training.

    Raises
    ------
    RunError
        When it is empty.
    """
    if not len(table):
        raise RunError("there are no critics to draw; run notebook 20_train_critic first")
    fig, axes = policy_panels(table, 3.4, 3, sharey=True)
    names = [name for name in table["critic"].unique() if name != "none"]
    for ax, policy, rows in axes:
        for features, (label, line) in REFERENCES.items():
            known = rows[rows["features"] == features]
            ax.plot(known["position"], known["auroc_within_prompt"], line, color=GREY, label=label)
        for name, trained in rows[rows["critic"] != "none"].groupby("critic", sort=False):
            number = names.index(name)
            # a little aside, so that whiskers do not hide one another
            across = trained["position"] + 0.35 * (number - (len(names) - 1) / 2)
            centre = trained["auroc_within_prompt"]
            around = whiskers(centre, trained["within_low"], trained["within_high"])
            ax.errorbar(across, centre, around, label=name, **look_of(number))
        ax.axhline(0.5, color=INK, lw=0.8)
        ax.set_title(policy)
        ax.set(xlabel="tokens of the response", xticks=sorted(rows["position"].unique()))
    fig.supylabel("AUROC of f1 within a prompt", fontsize="medium")
    legend_below(fig, 3)
    headline(fig, _best(table))
    return fig


def _best(table: pd.DataFrame) -> str:
    """Return a sentence on the critic that ranks best at the last position of the table."""
    trained = table[(table["critic"] != "none") & table["auroc_within_prompt"].notna()]
    if not len(trained):
        return "No critic was trained that has pairs to rank"
    last = trained[trained["position"] == trained["position"].max()].reset_index()
    best = last.loc[last["auroc_within_prompt"].idxmax()]
    tokens = best["position"]
    by_cost = table[(table["features"] == "partial-cost") & (table["position"] == tokens)]
    sentence = f"After {tokens} tokens the critic “{best['critic']}” ranks "
    sentence += f"{best['auroc_within_prompt']:.0%} of pairs rightly"
    if len(by_cost):
        sentence += f", the cost model itself {by_cost['auroc_within_prompt'].max():.0%}"
    return sentence
