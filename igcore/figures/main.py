"""The pictures of a run, drawn from tables and records.

No text of prompts or responses is rendered, and no pyplot figure is opened: a notebook shows the
returned ``Figure`` as the last expression of a cell after ``%matplotlib inline``. `save` writes it
with the same bytes each time.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from ..errors import ParameterError, RunError
from ..report.pictures import RC as RC
from ..report.pictures import save as save
from ..report.tables import FAMILIES
from .labels import spread
from .style import (
    INK,
    OUTCOMES,
    STYLE,
    WIDTH,
    named,
    percent,
    rows_of_panels,
    style,
    styled,
    whiskers,
)

LABEL = 0.26  # inches from one label of `tradeoff` to the next


def _policies(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return (policy, its rows) in order of appearance."""
    if not len(table):
        raise RunError("there is nothing to draw; run notebook 30_decode first")
    for method in table["method"].unique():
        style(method)
    return list(table.groupby("policy", sort=False))


@styled
def tradeoff(main: pd.DataFrame) -> Figure:
    """Draw reward against safety rate with seconds per prompt as colour (trade-off figure).

    There is one panel per policy.

    Parameters
    ----------
    main : DataFrame
        `igcore.report.tables.main_table`. Whiskers are its Wilson and bootstrap intervals. A method
        that emitted no text has no reward (higher is better): the panel's title names it. A method
        that was asked fewer prompts has its n beside its name.

    Raises
    ------
    RunError
        For an empty table.
    ParameterError
        For a method without a style.
    """
    panels = _policies(main)
    seconds = main["seconds_per_prompt"].clip(lower=1e-3)
    norm = LogNorm(seconds.min() / 1.05, seconds.max() * 1.05)
    heights = [max(2.7, LABEL * (len(rows) + 1)) for _, rows in panels]
    fig = Figure(figsize=(WIDTH, 1.5 + sum(heights) + 0.3 * len(panels)), layout="constrained")
    axes = fig.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, height, (policy, rows) in zip(axes, heights, panels, strict=True):
        silent = [f"{count} abstained" if count else "" for count in rows["abstained"]]
        labels = pd.Series(named(rows.set_index("method")["n_prompts"], silent), rows.index)
        _tradeoff_panel(ax, rows[rows["reward_mean"].notna()], labels, norm, gap=LABEL / height)
        missing = ", ".join(rows.loc[rows["reward_mean"].isna(), "method"])
        ax.set_title(policy + (f" (nothing emitted: {missing})" if missing else ""), loc="left")
    # room for the marker of a rate of 100 %, none for a tick above it
    left = axes[0].get_xlim()[0]
    axes[0].set_xlim(left, 1 + 0.02 * (1 - left))
    axes[-1].set_xlabel("safety rate (prompts with a verified-safe text)")
    room = 0.5 / fig.get_figheight()  # inches
    bar = fig.colorbar(
        ScalarMappable(norm), ax=list(axes), location="bottom", aspect=45, fraction=room, pad=room
    )
    ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(seconds.min(), seconds.max(), 5)})
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.set_label("seconds per prompt (logarithmic)")
    return fig


def _tradeoff_panel(
    ax: Axes, rows: pd.DataFrame, labels: pd.Series, norm: LogNorm, gap: float
) -> None:
    """Draw the points, and to the right of the panel each method's marker and label.

    A line joins label and point.
    """
    ax.grid()
    ax.set_ylabel("reward")
    ax.xaxis.set_major_formatter(percent)
    safety, reward = rows["safety_rate"], rows["reward_mean"]
    across = whiskers(safety, rows["safety_wilson_low"], rows["safety_wilson_high"])
    up = whiskers(reward, rows["reward_low"], rows["reward_high"])
    look = {"fmt": "none", "ecolor": "#b8b8b8", "elinewidth": 1}
    ax.errorbar(safety, reward, up, across, zorder=1, **look)
    ax.set_ylim(ax.get_ylim())
    places = spread(reward.to_numpy(), ax.get_ylim(), gap)
    for (k, row), place in zip(rows.iterrows(), places, strict=True):
        colour, marker = style(row["method"])
        point = (row["safety_rate"], row["reward_mean"])
        seconds = {"c": [row["seconds_per_prompt"]], "norm": norm}
        look = seconds | {"marker": marker, "ec": INK, "lw": 0.7}
        ax.scatter(*point, s=85, zorder=4, **look)
        ax.scatter(1.045, place, s=60, transform=ax.transAxes, clip_on=False, **look)
        ax.text(1.065, place, labels[k], transform=ax.transAxes, va="center", color=INK)
        line = {"arrowstyle": "-", "color": colour, "lw": 1, "ls": ":", "shrinkA": 0, "shrinkB": 0}
        ax.annotate(
            "", point, xytext=(1.03, place), textcoords="axes fraction", arrowprops=line, zorder=2
        )


@styled
def distributions(records: pd.DataFrame) -> Figure:
    """Draw the reward and the cost of every emitted text, one row per method.

    Panels are policy x {reward, cost}.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``. The budget is a line in the panel of the cost (higher is
        worse). A method that was asked fewer prompts has its n beside its name.
    """
    panels = _policies(records)
    heights = [0.6 + 0.36 * lines["method"].nunique() for _, lines in panels]
    fig = Figure(figsize=(WIDTH, 0.9 + sum(heights)), layout="constrained")
    axes = fig.subplots(
        len(panels), 2, sharey="row", sharex="col", squeeze=False, height_ratios=heights
    )
    for row, (policy, lines) in zip(axes, panels, strict=True):
        prompts = _prompts(lines)
        for ax, name in zip(row, ("reward", "cost"), strict=True):
            _distribution_panel(ax, lines, name, list(prompts.index))
        row[0].set_yticks(range(len(prompts)), named(prompts))
        row[0].set_ylim(len(prompts) - 0.45, -0.55)
        over = {"transform": row[1].get_xaxis_transform(), "ha": "center"}
        for budget in lines["budget"].unique():
            row[1].axvline(budget, color=OUTCOMES["unsafe"], lw=1.5)
            row[1].text(budget, 1.02, f"budget {budget:g}", color=OUTCOMES["unsafe"], **over)
        row[0].set_title(policy, loc="left")
    for ax, label in zip(
        axes[-1], ("reward (higher is better)", "cost (higher is worse)"), strict=True
    ):
        ax.set_xlabel(label)
    return fig


def _prompts(lines: pd.DataFrame) -> pd.Series:
    """Return the number of records by method, in order of appearance."""
    return lines.groupby("method", sort=False).size()


def _distribution_panel(ax: Axes, lines: pd.DataFrame, name: str, methods: Sequence[str]) -> None:
    emitted = (
        lines.assign(value=lines[name].astype(float))
        .dropna(subset="value")
        .sort_values("prompt_id")
    )
    palette = {method: style(method)[0] for method in methods}
    violins = {"cut": 0, "density_norm": "width", "inner": None, "linewidth": 0.8, "width": 0.9}
    sns.violinplot(
        emitted,
        x="value",
        y="method",
        hue="method",
        order=methods,
        palette=palette,
        legend=False,
        ax=ax,
        alpha=0.35,
        **violins,
    )
    for height, method in enumerate(methods):
        values = emitted.loc[emitted["method"] == method, "value"].to_numpy()
        golden = np.arange(len(values)) * 0.618034 % 1  # even, and the same each time
        places = height + 0.4 * (golden - 0.5)
        ax.scatter(values, places, s=7, color=palette[method], lw=0, zorder=2, rasterized=True)
        if len(values):
            line = [height - 0.38, height + 0.38]
            ax.plot([np.median(values)] * 2, line, color=INK, lw=2, zorder=3)
    ax.grid(axis="x")
    ax.set(xlabel="", ylabel="")


@styled
def safety_state(traces: dict[str, Sequence[float]], budget: float, strict: bool = False) -> Figure:
    """Draw z_t of one or more answers block by block (paper, section 3.1).

    Below zero the budget is broken.

    Parameters
    ----------
    traces : dict of str to sequence of float
        Label -> z_0, z_1, ...; z_0 is the budget. NaN, None and minus infinity (an unreadable
        score) are drawn on the lower edge. The name of a method gets its fixed colour and marker.
        Labels are drawn too: never pass text of prompts or responses.
    budget : float
        d, in units of the cost model.
    strict : bool
        Whether z = 0 is unsafe too.

    Raises
    ------
    ParameterError
        When there is no trace, or one does not start at `budget`.
    """
    if not traces:
        raise ParameterError("traces is empty; give at least one answer's z_trace under a label")
    traces = {label: np.array(trace, dtype=float) for label, trace in traces.items()}
    for label, trace in traces.items():
        if not len(trace) or trace[0] != budget:
            raise ParameterError(
                f"trace {label!r} is {trace.tolist()}; give numbers that start at z_0 = {budget}"
            )
        trace[np.isnan(trace)] = -np.inf
    levels = np.concatenate([[0, budget], *traces.values()])
    low, high = levels[np.isfinite(levels)].min(), levels[np.isfinite(levels)].max()
    margin = 0.1 * (high - low) or 1
    floor, ceiling = low - 2 * margin, high + margin
    fig = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = fig.subplots()
    ax.axhspan(floor, 0, color=OUTCOMES["unsafe"], alpha=0.12, lw=0)
    ax.axhline(0, color=OUTCOMES["unsafe"], lw=1.5)
    unsafe = f"unsafe: z {'≤' if strict else '<'} 0"
    ax.text(0.01, 0.04, unsafe, color="#8f3f00", transform=ax.transAxes)
    colours, markers = map(itertools.cycle, (sns.color_palette("colorblind"), "os^vD"))
    others = zip(colours, markers, strict=False)
    for label, trace in traces.items():
        colour, marker = STYLE.get(label) or next(others)
        look = {"marker": marker, "ms": 13 if marker == "*" else 8, "mec": "white", "lw": 2}
        drawn = np.maximum(trace, floor)
        ax.plot(drawn, color=colour, label=label, clip_on=False, zorder=3, **look)
    ax.set(xlabel="block", ylabel="safety state z", ylim=(floor, ceiling))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    fig.legend(loc="outside upper center", ncols=2, frameon=False)
    return fig


@styled
def budget_sweep(records: pd.DataFrame) -> Figure:
    """Draw the share of emitted texts whose cost stays inside a budget, for every budget at once.

    Panels are family x policy, with base in each of them: fifteen curves on top of each other could
    not be told apart. Two policies stand side by side.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``. The budget of the run is dashed: guarded methods would search
        otherwise under another. A method that was asked fewer prompts has its n beside its name.
    """
    panels = dict(_policies(records))
    known = records["method"].unique()
    families = [name for name in FAMILIES if any(method.startswith(name) for method in known)]
    families = families or ["base"]
    rows = rows_of_panels(list(panels), families)
    fig = Figure(figsize=(WIDTH, 0.9 + max(3.2, 1.75 * len(rows))), layout="constrained")
    axes = fig.subplots(len(rows), min(2, len(panels)), sharey=True, squeeze=False)
    first: dict[str, Axes] = {}
    for line, (beside, family) in zip(axes, rows, strict=True):
        for ax, policy in itertools.zip_longest(line, beside):
            if policy is None:
                ax.set_axis_off()
                continue
            prompts = _prompts(panels[policy])
            labels = zip(prompts.index, named(prompts), strict=True)
            shown = {m: label for m, label in labels if m == "base" or m.startswith(family)}
            _sweep_panel(ax, panels[policy], shown)
            if first.setdefault(policy, ax) is not ax:
                ax.sharex(first[policy])  # a policy has one cost model
            ax.tick_params(labelbottom=family == families[-1])
            ax.set_title(policy if family == families[0] else "", loc="left")
            ax.set_xlabel("budget d" if family == families[-1] else "")
    fig.supylabel("share of texts with cost ≤ d", fontsize="medium")
    return fig


def _sweep_panel(ax: Axes, lines: pd.DataFrame, labels: dict[str, str]) -> None:
    for method, label in labels.items():
        costs = lines.loc[lines["method"] == method, "cost"].astype(float)
        colour, marker = style(method)
        sns.ecdfplot(
            x=costs, ax=ax, color=colour, marker=marker, markevery=0.2, ms=5, lw=1.6, label=label
        )
    for budget in lines["budget"].unique():
        ax.axvline(budget, color=INK, ls="--", lw=1)
    ax.set(xlabel="", ylabel="", ylim=(0, 1.04))
    ax.grid()
    ax.yaxis.set_major_formatter(percent)
    ax.legend(
        loc="lower right",
        fontsize=10,
        borderaxespad=0.2,
        labelspacing=0.3,
        framealpha=0.9,
        edgecolor="none",
    )


@styled
def rates(main: pd.DataFrame) -> Figure:
    """Draw the counts (safe, abstained, unsafe) of each method as a stacked bar.

    There is one panel per policy.

    Parameters
    ----------
    main : DataFrame
        `igcore.report.tables.main_table`. Bars are shares of ``n_prompts``; the count of a thin
        piece stands beside the bar. A method that was asked fewer prompts has its n beside its
        name.
    """
    panels = _policies(main)
    fig = Figure(
        figsize=(WIDTH, 1.1 + sum(0.5 + 0.36 * len(rows) for _, rows in panels)),
        layout="constrained",
    )
    ratios = [len(rows) + 1 for _, rows in panels]
    axes = fig.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for ax, (policy, rows) in zip(axes, panels, strict=True):
        _rates_panel(ax, rows)
        ax.set_title(policy, loc="left")
    axes[-1].set_xlabel("share of prompts (counts in the bars)")
    fig.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper right",
        ncols=len(OUTCOMES),
        frameon=False,
    )
    return fig


def _rates_panel(ax: Axes, rows: pd.DataFrame) -> None:
    places = np.arange(len(rows))
    start = np.zeros(len(rows))
    beside = [[] for _ in places]
    for outcome, colour in OUTCOMES.items():
        share = (rows[outcome] / rows["n_prompts"]).to_numpy()
        ax.barh(places, share, left=start, color=colour, ec="white", height=0.78, label=outcome)
        for place, count in zip(places, rows[outcome], strict=True):
            if share[place] >= 0.05:
                ink = INK if outcome == "abstained" else "white"
                middle = start[place] + share[place] / 2
                ax.text(middle, place, count, ha="center", va="center", color=ink)
            elif count:
                beside[place].append(f"{count} {outcome}")
        start = start + share
    for place, counts in zip(places, beside, strict=True):
        ax.text(1.01, place, ", ".join(counts), va="center", color=INK)
    ax.set(yticks=places, yticklabels=named(rows.set_index("method")["n_prompts"]))
    ax.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(percent)
