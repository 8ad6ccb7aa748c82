"""The picture of the costs of a run, for several notebooks.

No text of prompts or responses is drawn, and no pyplot figure is opened: a notebook shows the
returned ``Figure`` as the last expression of a cell after ``%matplotlib inline``.
`igcore.report.pictures.save` writes it with the same bytes each time.
"""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import RunError
from ..report.tables import FAMILIES
from .style import INK, WIDTH, named, percent, rows_of_panels, style, styled


@styled
def budget_sweep(records: pd.DataFrame) -> Figure:
    """Draw the share of texts whose cost is at most d, for every budget d at once.

    Rows are families, each beside ``base``; two policies stand side by side.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``. The budget of the run is dashed: under another budget a
        guarded method searches otherwise. A method with fewer prompts has its n beside its name.

    Raises
    ------
    RunError
        Without records.
    """
    if not len(records):
        raise RunError("there is nothing to draw; run notebook 30_decode first")
    policies = list(records["policy"].unique())
    methods = records["method"].unique()
    families = [name for name in FAMILIES if any(m.startswith(name) for m in methods)] or ["base"]
    rows = rows_of_panels(policies, families)
    fig = Figure(figsize=(WIDTH, 0.9 + max(3.2, 1.75 * len(rows))), layout="constrained")
    axes = fig.subplots(len(rows), min(2, len(policies)), sharey=True, squeeze=False)
    first: dict[str, Axes] = {}
    for line, (pair, family) in zip(axes, rows, strict=True):
        for ax in line[len(pair) :]:
            ax.remove()
        for ax, policy in zip(line, pair, strict=False):
            _sweep_panel(ax, records[records["policy"] == policy], family)
            if first.setdefault(policy, ax) is not ax:
                ax.sharex(first[policy])  # a policy has one cost model
            ax.tick_params(labelbottom=family == families[-1])
            ax.set_title(policy if family == families[0] else "", loc="left")
            ax.set_xlabel("budget d" if family == families[-1] else "")
    fig.supylabel("share of texts with cost ≤ d", fontsize="medium")
    return fig


def _sweep_panel(ax: Axes, lines: pd.DataFrame, family: str) -> None:
    """Draw the costs of one policy's ``base`` and one family."""
    prompts = lines.groupby("method", sort=False).size()
    for method, label in zip(prompts.index, named(prompts), strict=True):
        if method == "base" or method.startswith(family):
            colour, marker = style(method)
            costs = lines.loc[lines["method"] == method, "cost"].astype(float)
            look = {"color": colour, "marker": marker, "markevery": 0.2, "ms": 5, "lw": 1.6}
            sns.ecdfplot(x=costs, ax=ax, label=label, **look)
    for budget in lines["budget"].unique():
        ax.axvline(budget, color=INK, ls="--", lw=1)
    ax.set(xlabel="", ylabel="", ylim=(0, 1.04))
    ax.grid()
    ax.yaxis.set_major_formatter(percent)
    look = {"fontsize": 10, "borderaxespad": 0.2, "labelspacing": 0.3, "edgecolor": "none"}
    ax.legend(loc="lower right", framealpha=0.9, **look)
