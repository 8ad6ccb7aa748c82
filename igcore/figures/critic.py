"""The pictures of a critic, drawn from tables."""

import itertools
from collections.abc import Mapping

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from ..errors import RunError
from ..report.calibration import reliability
from .main import INK, WIDTH, styled, whiskers
from .theory import MARKERS, panels

GREY = "#9a9a9a"
FEWEST = 5  # prompts behind a dot
REFERENCES = {
    "prompt-cost": ("cost of the prompt alone", ":"),
    "partial-cost": ("cost model on the text so far", "--"),
}


def _colour(number: int) -> tuple:
    return sns.color_palette("colorblind")[number % 10]


@styled
def training_curves(histories: Mapping[str, list[dict]]) -> Figure:
    """Draw the loss of each critic by epoch, and mark the epoch that was kept.

    Solid is the loss on the validation prompts, dotted that on the prompts it learns from.

    Parameters
    ----------
    histories : mapping of str to list of dict
        ``critic.about["history"]`` by name.
    """
    fig, (ax,) = panels()
    for i, (name, history) in enumerate(histories.items()):
        frame = pd.DataFrame(history)
        ax.plot(frame["epoch"], frame["learn_loss"], ":", color=_colour(i))
        ax.plot(frame["epoch"], frame["check_loss"], color=_colour(i), label=name)
        best = frame.loc[frame["check_loss"].idxmin()]
        ax.plot(
            best["epoch"], best["check_loss"], MARKERS[i % len(MARKERS)], color=_colour(i), ms=8
        )
    ax.set(xlabel="epoch", ylabel="loss (nats + weighted squared error)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(frameon=False)
    return fig


@styled
def reliability_diagram(judged: pd.DataFrame, positions: tuple[int, ...] = (8, 16, 32)) -> Figure:
    """Draw how often prefixes end within budget against what f1 said of them.

    Dots are sized by the number of prefixes.

    Parameters
    ----------
    judged : DataFrame
        `igcore.report.critic_metrics.judgements`.
    """
    fig, (ax,) = panels()
    ax.plot([0, 1], [0, 1], color=GREY, lw=1, label="calibrated")
    for i, position in enumerate(p for p in positions if (judged["position"] == p).any()):
        here = judged[judged["position"] == position]
        bins = reliability(here["safe"], here["f1"])
        ax.plot(bins["probability"], bins["safe"], color=_colour(i), lw=1)
        sizes = 12 + 300 * bins["n"] / bins["n"].sum()
        ax.scatter(
            bins["probability"],
            bins["safe"],
            s=sizes,
            color=_colour(i),
            alpha=0.8,
            label=f"after {position} tokens",
        )
    ax.set(
        xlabel="f1: probability of ending inside the budget",
        ylabel="share that did",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )
    ax.legend(frameon=False, loc="upper left")
    return fig


@styled
def reliability_by_position(table: pd.DataFrame) -> Figure:
    """Draw how often prefixes end within budget against what f1 said, with 95 % intervals.

    Panels are policy x position, with a line per critic; on the diagonal f1 means what it says.
    Bins of fewer than `FEWEST` prompts are left out.

    Parameters
    ----------
    table : DataFrame
        `igcore.runs.critic_run.load_reliability`.

    Raises
    ------
    RunError
        When it is empty.
    """
    if not len(table):
        raise RunError("there is no reliability to draw; run notebook 20_train_critic first")
    policies, positions, names = (
        list(table[name].unique()) for name in ("policy", "position", "critic")
    )
    fig = Figure(figsize=(WIDTH, 1.1 + 2.05 * len(policies)), layout="constrained")
    axes = fig.subplots(len(policies), len(positions), sharex=True, sharey=True, squeeze=False)
    for (policy, position), ax in zip(
        itertools.product(policies, positions), axes.flat, strict=True
    ):
        ax.grid()
        ax.plot([0, 1], [0, 1], color=GREY, lw=1, label="calibrated")
        here = table[
            (table["policy"] == policy)
            & (table["position"] == position)
            & (table["n_prompts"] >= FEWEST)
        ]
        for name, rows in here.groupby("critic", sort=False):
            i = names.index(name)
            around = whiskers(rows["safe"], rows["low"], rows["high"])
            look = {
                "fmt": f"-{MARKERS[i % len(MARKERS)]}",
                "color": _colour(i),
                "ms": 5,
                "lw": 1.2,
                "elinewidth": 1,
            }
            ax.errorbar(rows["probability"], rows["safe"], around, **look, label=name)
        ax.set(xlim=(-0.03, 1.05), ylim=(-0.03, 1.05), aspect="equal")
        ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        ax.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        if policy == policies[0]:
            ax.set_title(f"{position} tokens", weight="normal", size=11)
    for policy, ax in zip(policies, axes[:, 0], strict=True):
        ax.set_ylabel(policy, weight="bold")
    fig.supxlabel("f1: probability of ending inside the budget", fontsize="medium")
    fig.supylabel("share that did", fontsize="medium")
    entries = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    fig.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=5, frameon=False
    )
    return fig


@styled
def auroc_by_position(table: pd.DataFrame) -> Figure:
    """Draw the AUROC of f1 within prompts by position, with its 95 % intervals.

    There is one panel per policy, and a line per critic.

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
    policies = list(table.groupby("policy", sort=False))
    beside = min(3, len(policies))
    below = -(-len(policies) // beside)
    fig, axes = panels(1 + 3.4 * below, beside, below, sharey=True)
    names = [name for name in table["critic"].unique() if name != "none"]
    for ax in axes[len(policies) :]:
        ax.set_axis_off()
    for ax, (policy, rows) in zip(axes, policies, strict=False):
        for features, (label, line) in REFERENCES.items():
            here = rows[rows["features"] == features]
            ax.plot(here["position"], here["auroc_within_prompt"], line, color=GREY, label=label)
        for name, here in rows[rows["critic"] != "none"].groupby("critic", sort=False):
            i = names.index(name)
            across = here["position"] + 0.35 * (i - (len(names) - 1) / 2)
            centre = here["auroc_within_prompt"]
            around = whiskers(centre, here["within_low"], here["within_high"])
            ax.errorbar(
                across,
                centre,
                around,
                fmt=f"-{MARKERS[i % len(MARKERS)]}",
                color=_colour(i),
                ms=5,
                lw=1.2,
                label=name,
            )
        ax.axhline(0.5, color=INK, lw=0.8)
        ax.set(
            title=policy, xlabel="tokens of the response", xticks=sorted(rows["position"].unique())
        )
    for ax in axes[::beside]:
        ax.set_ylabel("AUROC of f1 within a prompt")
    entries = {
        label: handle
        for ax in axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    fig.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=3, frameon=False
    )
    return fig


@styled
def shift(judged: pd.DataFrame, searched: pd.DataFrame) -> Figure:
    """Draw f1 of rollouts and of the beams that a search keeps, by position.

    Searched text is not what the critic was trained on.

    Parameters
    ----------
    judged : DataFrame
        `igcore.report.critic_metrics.judgements` of rollouts.
    searched : DataFrame
        `igcore.runs.critic_run.CriticRun.searched`. The line is the share of its finals that are
        within budget.
    """
    fig, (ax,) = panels()
    at = sorted(searched["position"].unique())
    parts = {"rollouts": judged[judged["position"].isin(at)], "kept by the search": searched}
    sides = zip((-0.2, 0.2), (GREY, _colour(0)), parts.items(), strict=True)
    for aside, colour, (name, part) in sides if at else ():  # a search of one block asks no critic
        ax.boxplot(
            [part.loc[part["position"] == position, "f1"] for position in at],
            positions=[k + aside for k in range(len(at))],
            widths=0.36,
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": colour},
            medianprops={"color": INK},
            flierprops={"ms": 2},
            label=name,
        )
    ax.axhline(
        parts["rollouts"]["safe"].mean(), color=GREY, ls="--", label="rollouts inside the budget"
    )
    ax.axhline(
        searched.groupby("prompt_id")["safe"].first().mean(),
        color=_colour(0),
        ls="--",
        label="finals inside the budget",
    )
    ax.set(xlabel="tokens of the response", ylabel="f1", xticks=range(len(at)), xticklabels=at)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return fig


@styled
def search_differences(table: pd.DataFrame) -> Figure:
    """Draw what each arm gains over its reference, with 95 % intervals; one panel per measure.

    Parameters
    ----------
    table : DataFrame
        `igcore.report.critic_search.comparison_table`.

    Raises
    ------
    RunError
        When it is empty.
    """
    if not len(table):
        raise RunError(
            "there are no arms to compare; decode both arms of a pair with notebook 30_decode first"
        )
    measures = list(table.groupby("measure", sort=False))
    pairs = list(dict.fromkeys(zip(table["arm"], table["reference"], strict=True)))
    fig, axes = panels(1.6 + 0.55 * len(pairs), len(measures), sharey=True)
    sizes = sorted(table["n_samples"].unique())
    for ax, (measure, rows) in zip(axes, measures, strict=True):
        for i, n in enumerate(sizes):
            here = rows[rows["n_samples"] == n]
            places = [
                pairs.index(pair) + 0.24 * (i - (len(sizes) - 1) / 2)
                for pair in zip(here["arm"], here["reference"], strict=True)
            ]
            around = whiskers(here["difference"], here["low"], here["high"])
            ax.errorbar(
                here["difference"],
                places,
                xerr=around,
                fmt=MARKERS[i],
                color=_colour(i),
                label=f"N = {n}",
            )
        ax.axvline(0, color=INK, lw=0.8)
        ax.set(title=measure.replace("_", " "), xlabel="difference")
    axes[0].set(
        yticks=range(len(pairs)),
        yticklabels=[f"{arm}\nagainst {reference}" for arm, reference in pairs],
    )
    axes[0].invert_yaxis()
    fig.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper right",
        ncols=len(sizes),
        frameon=False,
    )
    return fig
