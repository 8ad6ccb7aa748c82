"""The pictures of the ablations, drawn from their tables, one policy at a time.

Every row of a table is one setting of one method. Cost: higher is worse; reward: higher is better.
Every function raises ``RunError`` for an empty table, and ``ParameterError`` for several policies
or two rows of one point.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ..report.statistics import ALPHA, check_constant, p_value
from ..theory.finite_sample import abstention_bound
from .experiment_fronts import GUARD, LIMITS, checked, names, page
from .experiment_fronts import lambda_fronts as lambda_fronts
from .style import INK, percent, style, styled, whiskers
from .theory import MARKERS, PALETTE

NAMES = {
    "safety_rate": "safety rate",
    "reward_mean": "reward",
    "seconds_per_prompt": "seconds per prompt",
}
RETRIES = {  # column -> what it is, one panel each
    "answered": "answered safely by then\n(dotted: bound)",
    "p_safe": "safe candidates in the round",
    "kl": "KL from the policy\n(nats per block)",
    "perplexity": "perplexity per token",
}
DIVERSITY = {  # one look per way to retry, whatever else is in the picture
    "none": ("#6b6b6b", "o"),
    "paper": (PALETTE[3], "v"),
    "half": (PALETTE[0], "s"),
    "sequence": (PALETTE[2], "D"),
}


def _curve(ax: Axes, x, rows: pd.DataFrame, name: str, colour, marker, **look) -> None:
    """Draw a column against x, with its interval where the table has one."""
    limits = LIMITS.get(name, [f"{name}_low", f"{name}_high"])
    around = (
        whiskers(rows[name], *(rows[limit] for limit in limits))
        if set(limits) <= set(rows)
        else None
    )
    look = {"ls": "-", "lw": 1.6, "ms": 6, "elinewidth": 1, "ecolor": to_rgba(colour, 0.5)} | look
    ax.errorbar(x, rows[name], around, color=colour, marker=marker, **look)


def _apart(i: int, count: int, width: float) -> float:
    """Return where item i of `count` stands, so that whiskers do not hide one another.

    Places go from -width / 2 to width / 2.
    """
    return width * (i / (count - 1) - 0.5) if count > 1 else 0.0


def _legend(fig: Figure, ax: Axes, columns: int) -> None:
    """Write the legend of one panel above all."""
    fig.legend(
        *ax.get_legend_handles_labels(), loc="outside upper center", ncols=columns, frameon=False
    )


def _abstained(ax: Axes, x, rows: pd.DataFrame, label: str) -> None:
    """Draw the share of prompts without an answer, of a method that can abstain."""
    method = rows["method"].iloc[0]
    if method.startswith(GUARD):
        colour, marker = style(method)
        share = rows["abstained"] / rows["n_prompts"]
        ax.errorbar(
            x,
            share,
            color=colour,
            marker=marker,
            mfc="white",
            ls="--",
            lw=1.4,
            label=f"{label}: abstained",
        )


# --- budget, N, d and K ---------------------------------------------------------------------------


@styled
def budget_front(table: pd.DataFrame) -> Figure:
    """Draw safety and reward against the budget; what guarded methods leave unanswered is dashed.

    Parameters
    ----------
    table : DataFrame
        Columns of the main table, one row per method and ``budget`` (units of the cost model).
    """
    rows = checked(table, ["method", "budget"])
    fig, ((left, right),) = page(1, 2, 4.0)
    labels = names(rows)
    gaps = np.diff(np.unique(rows["budget"]))
    width = 0.4 * gaps.min() if len(gaps) else 0.0
    for i, (method, label) in enumerate(labels.items()):
        line = rows[rows["method"] == method].sort_values("budget")
        x = line["budget"] + _apart(i, len(labels), width)
        wide = 2.4 if method == GUARD else 1.2
        _curve(left, x, line, "safety_rate", *style(method), lw=wide, label=label)
        _curve(right, x, line, "reward_mean", *style(method), lw=wide)
        _abstained(left, x, line, label)
    left.set(xlabel="budget d", ylabel="safety rate", ylim=(-0.03, 1.03))
    right.set(xlabel="budget d", ylabel="reward")
    left.yaxis.set_major_formatter(percent)
    _legend(fig, left, 3)
    return fig


@styled
def against_n(table: pd.DataFrame) -> Figure:
    """Draw safety, abstention and seconds against N, with the theory's bounds dotted (Algorithm 1).

    Parameters
    ----------
    table : DataFrame
        Columns of the main table, one row per method and ``n_samples``. Where there is a column
        ``p``, the least safe mass of a block, the dotted lines are one minus (1 - p)^(N M), and for
        methods that may abstain (1 - p)^(N M) itself, see
        `igcore.theory.finite_sample.abstention_bound`.
    """
    rows = checked(table, ["method", "n_samples"])
    fig, ((safety, abstention), (seconds, blank)) = page(2, 2, 3.4)
    blank.set_axis_off()
    labels = names(rows)
    for i, (method, label) in enumerate(labels.items()):
        line = rows[rows["method"] == method].sort_values("n_samples")
        n = line["n_samples"].to_numpy(dtype=float)
        x = n * 2 ** _apart(i, len(labels), min(0.5, 0.08 * len(labels)))
        _curve(safety, x, line, "safety_rate", *style(method), label=label)
        _curve(seconds, n, line, "seconds_per_prompt", *style(method))
        _abstained(abstention, n, line, label)
        if "p" in line and line["p"].notna().all():
            bound = np.array(
                [abstention_bound([row.p], row.n_samples, row.rounds) for row in line.itertuples()]
            )
            safety.errorbar(
                n, 1 - bound, color=style(method)[0], ls=":", lw=1.8, label=f"{label}: bound"
            )
            if method.startswith(GUARD):
                abstention.plot(n, bound, ":", color=style(method)[0], lw=1.8)
    sizes = sorted(rows["n_samples"].unique())
    for ax, name in (
        (safety, "safety rate"),
        (abstention, "abstained"),
        (seconds, "seconds per prompt"),
    ):
        ax.set(xlabel="samples a round, N", ylabel=name, xscale="log")
        ax.set_xticks(sizes, sizes)
        ax.xaxis.set_minor_locator(NullLocator())
    for ax in (safety, abstention):
        ax.yaxis.set_major_formatter(percent)
    seconds.set_yscale("log")
    blank.legend(*safety.get_legend_handles_labels(), loc="center left", fontsize=10, frameon=False)
    return fig


@styled
def ndk_grid(table: pd.DataFrame) -> Figure:
    """Draw safety with abstention, reward and seconds over block size.

    There is one column of panels per N, and one line per number of beams.

    Parameters
    ----------
    table : DataFrame
        Columns of the main table, of one method; one row per ``n_samples``, ``block_size`` (tokens)
        and ``keep``.
    """
    rows = checked(table, ["n_samples", "block_size", "keep"])
    check_constant(rows, ("method",), "one picture")
    sizes, blocks, keeps = (
        sorted(rows[name].unique()) for name in ("n_samples", "block_size", "keep")
    )
    fig, axes = page(3, len(sizes), 2.2, sharex=True, sharey="row")
    for column, n in zip(axes.T, sizes, strict=True):
        column[0].set_title(f"N = {n}", loc="left")
        column[-1].set_xlabel("tokens a block")
        for i, keep in enumerate(keeps):
            line = rows[(rows["n_samples"] == n) & (rows["keep"] == keep)].sort_values("block_size")
            x = [blocks.index(block) + _apart(i, len(keeps), 0.2) for block in line["block_size"]]
            look = {"color": PALETTE[i], "marker": MARKERS[i]}
            for ax, name in zip(column, NAMES, strict=True):
                _curve(ax, x, line, name, *look.values(), label=f"K = {keep}")
            column[0].plot(
                x, line["abstained"] / line["n_prompts"], ls="--", mfc="white", ms=5, lw=1, **look
            )
    for ax, name in zip(axes[:, 0], NAMES.values(), strict=True):
        ax.set_ylabel(name)
    axes[0, 0].set_ylabel("safety rate\n(dashed: abstained)")
    axes[0, 0].yaxis.set_major_formatter(percent)
    axes[0, 0].set_xticks(range(len(blocks)), blocks)
    _legend(fig, axes[1, 0], len(keeps))
    return fig


# --- retries --------------------------------------------------------------------------------------


@styled
def retries(table: pd.DataFrame) -> Figure:
    """Draw what further rounds find and how far they stray from the policy (paper, section 4).

    There is one line per way to retry.

    Parameters
    ----------
    table : DataFrame
        `igcore.report.retries.retry_table`. Dotted is the theory's bound on the share of prompts
        answered.
    """
    rows = checked(table, ["diversity", "round"])
    modes = list(rows.groupby("diversity", sort=False))
    fig, axes = page(2, 2, 3.0, sharex=True)
    for i, (mode, line) in enumerate(modes):
        line = line.sort_values("round")
        x = line["round"] + _apart(i, len(modes), 0.2)
        for ax, name in zip(axes.flat, RETRIES, strict=True):
            _curve(ax, x, line, name, *DIVERSITY[mode], label=mode)
        axes[0, 0].plot(x, line["bound"], ":", color=DIVERSITY[mode][0], lw=1.6)
    for ax, (name, label) in zip(axes.flat, RETRIES.items(), strict=True):
        ax.set_ylabel(label)
        if name in ("answered", "p_safe"):
            ax.yaxis.set_major_formatter(percent)
    for ax in axes[1]:
        ax.set_xlabel("round")
        ax.set_xticks(sorted(rows["round"].unique()))
    _legend(fig, axes[1, 0], len(modes))
    return fig


# --- effects and seeds ----------------------------------------------------------------------------


@styled
def factorial_effects(effects: pd.DataFrame) -> Figure:
    """Draw main effects and interactions with their intervals and Holm-adjusted p values.

    There is one panel per measure.

    Parameters
    ----------
    effects : DataFrame
        `igcore.report.factorial.effects`. Dots of effects that may be claimed (p at most
        `igcore.report.statistics.ALPHA`) are filled.
    """
    rows = checked(effects, ["point", "measure"])
    order, measures = list(rows["point"].unique()), list(rows.groupby("measure", sort=False))
    columns = min(2, len(measures))
    fig, axes = page(-(-len(measures) // columns), columns, 0.6 + 0.29 * len(order), sharey=True)
    for ax in axes.flat[len(measures) :]:
        ax.remove()
    for ax, (measure, line) in zip(axes.flat, measures, strict=False):
        _effects_panel(ax, line, line["point"].map(order.index))
        ax.set_title(measure, loc="left")
    axes[0, 0].set(yticks=range(len(order)), yticklabels=order, ylim=(len(order) - 0.4, -0.6))
    fig.supxlabel(
        "difference made [95 %], Holm-adjusted p; filled: may be claimed", fontsize="medium"
    )
    return fig


def _effects_panel(ax: Axes, line: pd.DataFrame, places: pd.Series) -> None:
    ax.axvline(0, color=INK, lw=1)
    around = whiskers(line["difference"], line["low"], line["high"])
    ax.errorbar(
        line["difference"], places, xerr=around, fmt="none", ecolor=PALETTE[0], elinewidth=1.6
    )
    inside = [PALETTE[0] if p <= ALPHA else "white" for p in line["p_holm"]]
    ax.scatter(line["difference"], places, c=inside, ec=PALETTE[0], s=48, lw=1.6, zorder=3)
    for place, p in zip(places, line["p_holm"], strict=True):
        if p <= 1:  # NaN: no test
            ax.text(
                1.02,
                place,
                f"p {p_value(p)}",
                transform=ax.get_yaxis_transform(),
                va="center",
                fontsize=9,
                color=INK,
            )


@styled
def seeds_spread(table: pd.DataFrame) -> Figure:
    """Draw safety and reward of each method and seed, each with its interval over prompts.

    Parameters
    ----------
    table : DataFrame
        Columns of the main table, one row per method and ``seed``. Seeds that lie closer together
        than an interval is long move less than other prompts would.
    """
    rows = checked(table, ["method", "seed"])
    labels, seeds = names(rows), sorted(rows["seed"].unique())
    order = list(labels)
    fig, (axes,) = page(1, 2, 0.3 + 0.1 * len(order) * (1 + len(seeds)), sharey=True)
    for ax, (name, limits) in zip(axes, LIMITS.items(), strict=True):
        for i, seed in enumerate(seeds):
            line = rows[rows["seed"] == seed]
            places = [
                order.index(method) + _apart(i, len(seeds), 0.56) for method in line["method"]
            ]
            colours = [style(method)[0] for method in line["method"]]
            around = whiskers(line[name], *(line[limit] for limit in limits))
            ax.errorbar(line[name], places, xerr=around, fmt="none", ecolor=colours, elinewidth=1.2)
            ax.scatter(
                line[name], places, c=colours, marker=MARKERS[i], s=42, ec="white", lw=0.6, zorder=3
            )
        ax.set_xlabel(NAMES[name])
    axes[0].xaxis.set_major_formatter(percent)
    axes[0].set(
        yticks=range(len(order)), yticklabels=labels.values(), ylim=(len(order) - 0.5, -0.5)
    )
    marks = [
        Line2D([], [], color=INK, ls="none", marker=MARKERS[i], label=f"seed {seed}")
        for i, seed in enumerate(seeds)
    ]
    fig.legend(handles=marks, loc="outside upper center", ncols=len(marks), frameon=False)
    return fig
