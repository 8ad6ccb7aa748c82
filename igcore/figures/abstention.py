"""How often nothing safe is found among n samples, beside what theory says of it.

Records make the table, the table the picture. Cost: higher is worse; a sample whose cost is unknown
is not safe.
"""

from math import comb

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from statsmodels.stats.proportion import proportion_confint

from ..errors import RunError
from ..report import statistics as metrics
from ..report.experiment_tables import OURS
from ..report.replay import REPLAYED, unsafe_samples
from ..theory.finite_sample import abstention_bound
from .style import WIDTH, percent, style, styled, whiskers

OBSERVED, BOUND = "observed", "bound"
LABELS = {  # curve -> what it is, in the order of the legend
    OBSERVED: "n whole answers: none is safe",
    BOUND: "bound: mean of (1 − p)ⁿ, p from other samples",
    OURS: f"{OURS}: abstained, n = N M a block",
}
COLUMNS = ["policy", "curve", "samples", "n_prompts", "share", "low", "high"]


def abstention_table(records: pd.DataFrame) -> pd.DataFrame:
    """Return the share of prompts for which n whole answers hold none that is safe.

    The share is there as it was observed, and as theory bounds it.

    The samples of Best-of-N are independent. The first half of those of a prompt estimates its p,
    the chance of a safe answer; the other half says how often n of them hold no safe one. So no
    sample is on both sides. On average over samples the bound of an estimated p is above that of
    the true one, because (1 - p)^n is convex in p.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``; of a policy without `REPLAYED`, or with a single sample,
        nothing can be said.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`, a row per policy, curve and number of samples. ``observed``: the mean
        over ``n_prompts`` prompts of the share of all subsets of n samples without a safe one, with
        a 95 % Wilson interval, which is too wide rather than too narrow for shares that are neither
        0 nor 1. ``bound``: the mean over prompts of (1 - p)^n
        (`igcore.theory.finite_sample.abstention_bound` for one block); it has no interval.
        ``inferenceguard``: its abstentions, where it was run, at the N M samples that a block may
        take.

    Raises
    ------
    ParameterError
        When a setting that must be one varies in a policy.
    """
    rows = []
    for policy, lines in records.groupby("policy", sort=False):
        drawn, guarded = (lines[lines["method"] == method] for method in (REPLAYED, OURS))
        if not len(drawn) or drawn["n_samples"].iloc[0] < 2:
            continue
        metrics.check_constant(
            drawn, ["n_samples", "budget", "prompts"], f"policy {policy}, method {REPLAYED}"
        )
        unsafe = unsafe_samples(drawn)
        n_prompts, n = unsafe.shape
        found = [
            (OBSERVED, k, *_of_prompts(nothing_safe(unsafe[:, n // 2 :], k)))
            for k in range(1, n - n // 2 + 1)
        ]
        most = n
        if len(guarded):
            draws = int(guarded["n_samples"].iloc[0] * guarded["rounds"].iloc[0])
            most = max(n, draws)
            abstained = (guarded["status"] == "abstained").to_numpy(dtype=float)
            found.append((OURS, draws, *_of_prompts(abstained)))
        p = 1 - unsafe[:, : n // 2].mean(axis=1)  # (prompts,)
        bounds = [
            np.mean([abstention_bound([mass], k) for mass in p.tolist()])
            for k in range(1, most + 1)
        ]
        found += [
            (BOUND, k, n_prompts, bound, np.nan, np.nan) for k, bound in enumerate(bounds, start=1)
        ]
        rows += [(policy, *row) for row in found]
    return pd.DataFrame(rows, columns=COLUMNS)


def nothing_safe(unsafe: np.ndarray, n: int) -> np.ndarray:
    """Return the share of the subsets of `n` samples that hold no safe one, for each row (rows, N).

    Its expectation is (1 - p)^n, without bias.
    """
    return np.array([comb(int(u), n) / comb(unsafe.shape[1], n) for u in unsafe.sum(axis=1)])


def _of_prompts(shares: np.ndarray) -> tuple[int, float, float, float]:
    """Return the number of prompts, their mean share and its interval."""
    low, high = proportion_confint(shares.sum(), len(shares), method="wilson")
    return len(shares), float(shares.mean()), float(low), float(high)


@styled
def abstention(table: pd.DataFrame) -> Figure:
    """Draw the share of prompts without a safe answer against the number of samples.

    There is one panel per policy.

    Parameters
    ----------
    table : DataFrame
        `abstention_table`: squares are observed, dotted is the bound, the star is what the guarded
        search left unanswered.

    Raises
    ------
    RunError
        For an empty table.
    """
    if not len(table):
        raise RunError(
            f"there are no samples of {REPLAYED} to count; decode it with notebook 30_decode first"
        )
    policies = list(table.groupby("policy", sort=False))
    below, beside = -(-len(policies) // 2), min(2, len(policies))
    fig = Figure(figsize=(WIDTH, 1.2 + 3.0 * below), layout="constrained")
    axes = fig.subplots(below, beside, squeeze=False, sharey=True).flat
    for ax in axes[len(policies) :]:
        ax.remove()
    for ax, (policy, rows) in zip(axes, policies, strict=False):
        _panel(ax, rows)
        ax.set_title(policy, loc="left")
    fig.axes[0].set_ylim(bottom=-0.02)  # shared by all, once all are drawn
    fig.supxlabel("samples n (logarithmic)", fontsize="medium")
    fig.supylabel("prompts without a safe answer", fontsize="medium")
    entries = {
        label: handle
        for ax in fig.axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    shown = [label for label in LABELS.values() if label in entries]
    fig.legend(
        [entries[label] for label in shown],
        shown,
        loc="outside upper center",
        ncols=2,
        frameon=False,
    )
    return fig


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    observed, bound, guarded = (rows[rows["curve"] == curve] for curve in (OBSERVED, BOUND, OURS))
    colour, marker = style("best-of-n")
    ax.grid()
    look = {"color": colour, "elinewidth": 1, "lw": 1.6}
    _curve(ax, observed, fmt=f"-{marker}", ms=6, label=LABELS[OBSERVED], **look)
    ax.plot(bound["samples"], bound["share"], ":", color=colour, lw=2, label=LABELS[BOUND])
    if len(guarded):
        colour, marker = style(OURS)
        _curve(ax, guarded, fmt=marker, ms=14, color=colour, elinewidth=1, label=LABELS[OURS])
    ticks = [2**k for k in range(int(bound["samples"].max()).bit_length())]
    ax.set_xscale("log")
    ax.set_xticks(ticks, ticks)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(percent)


def _curve(ax: Axes, rows: pd.DataFrame, **look) -> None:
    ax.errorbar(
        rows["samples"], rows["share"], whiskers(rows["share"], rows["low"], rows["high"]), **look
    )
