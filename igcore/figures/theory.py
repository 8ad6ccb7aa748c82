"""The pictures of the theory notebook, drawn from arrays.

One function per section, each of which returns a ``Figure`` as those of `igcore.figures.main` do.
Costs: higher is worse.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..theory.constrained import Outcomes, best_safe, hull
from ..theory.mdp import Augmented
from .style import INK, OUTCOMES, WIDTH, styled

PALETTE = sns.color_palette("colorblind").as_hex()
SAFE, UNSAFE, UNKNOWN = OUTCOMES["safe"], OUTCOMES["unsafe"], OUTCOMES["abstained"]
MARKERS = "osD^vPX*"


def panels(
    height: float = 4.0, columns: int = 1, rows: int = 1, **options
) -> tuple[Figure, list[Axes]]:
    """Return a figure as wide as a page, and its panels row by row, from left to right."""
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = list(fig.subplots(rows, columns, squeeze=False, **options).flat)
    for ax in axes:
        ax.grid()
    return fig, axes


def _whole_steps(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


@styled
def prefix_tree(mdp: Augmented) -> Figure:
    """Draw the states of a small augmented MDP by time and remaining budget (paper, section 3.1).

    Unsafe ones are orange.

    Parameters
    ----------
    mdp : Augmented
        A prefix tree; `z` must be the budget without discount for the axis to be in units of the
        cost model.
    """
    fig, (ax,) = panels(4.4)
    time = np.array([len(name) for name, _ in mdp.names])
    z = mdp.z.astype(float)
    across = time + 0.5 * _spread(time)
    for s, a in np.argwhere(mdp.allowed):
        y = mdp.child[s, a]
        ax.plot([across[s], across[y]], [z[s], z[y]], color="#c4c4c4", lw=0.8, zorder=1)
    ends = ~mdp.allowed.any(axis=1) & mdp.safe
    for label, where, colour in (
        ("prefix", mdp.safe & ~ends, "white"),
        ("finished within budget", ends, SAFE),
        ("over budget, absorbing", ~mdp.safe, UNSAFE),
    ):
        ax.scatter(
            across[where], z[where], s=34, color=colour, ec=INK, lw=0.8, label=label, zorder=2
        )
    ax.axhline(0, color=UNSAFE, lw=1.5)
    ax.set(xlabel="time t (tokens)", ylabel="remaining budget z (cost units)")
    _whole_steps(ax)
    fig.legend(loc="outside upper center", ncols=3, frameon=False)
    return fig


def _spread(groups: np.ndarray) -> np.ndarray:
    """Return evenly spaced places in (-0.5, 0.5) for the members of each group, in their order."""
    order = np.array([(groups[:i] == g).sum() for i, g in enumerate(groups)])
    return (order + 0.5) / np.array([(groups == g).sum() for g in groups]) - 0.5


@styled
def identities(
    z: Sequence[float], omega: Sequence[float], from_one: Sequence[float], budget: float
) -> Figure:
    """Draw z_t against omega_{t-1}, with the sum from 0 and the paper's sum from 1.

    The paper's is that of the equation for z_{t+1}.

    Parameters
    ----------
    z, omega, from_one : sequence of float, length T + 1
        z_t; gamma^t z_t, the remaining budget; the remaining budget whose sum starts at k = 1; all
        in cost units.
    """
    fig, (ax,) = panels()
    for label, row, colour, marker in (
        ("scaled budget $z_t$", z, PALETTE[2], "s"),
        ("remaining budget $\\omega_{t-1}$, sum from 0", omega, SAFE, "o"),
        ("the paper's sum from 1", from_one, UNSAFE, "^"),
    ):
        ax.plot(row, color=colour, marker=marker, mec="white", lw=2, label=label)
    ax.axhline(budget, color=INK, lw=1, ls=":")
    ax.text(len(z) - 1, budget, "budget d ", ha="right", va="bottom", color=INK)
    ax.axhline(0, color=UNSAFE, lw=1)
    ax.set(xlabel="time t (tokens)", ylabel="budget (cost units)")
    _whole_steps(ax)
    fig.legend(loc="outside upper center", ncols=3, frameon=False)
    return fig


@styled
def accounting(totals: Mapping[str, Mapping[str, float]], budget: float) -> Figure:
    """Draw the total of each accounting for each sequence of prefix scores, as a table.

    Parameters
    ----------
    totals : mapping of sequence label to (mapping of accounting to total)
        In units of the cost model.
    budget : float
        d; totals above it are orange.
    """
    fig, (ax,) = panels(1.2 + 0.55 * len(totals))
    columns = list(next(iter(totals.values())))
    ax.grid(False)
    for row, (_, line) in enumerate(totals.items()):
        for column, name in enumerate(columns):
            over = line[name] > budget
            ax.add_patch(_tile(column, row, UNSAFE if over else SAFE))
            ax.text(
                column,
                row,
                f"{line[name]:g}",
                ha="center",
                va="center",
                color=INK,
                weight="bold" if over else "normal",
            )
    ax.set(
        xlim=(-0.5, len(columns) - 0.5),
        ylim=(len(totals) - 0.5, -0.5),
        xlabel="accounting (how a score becomes a cost)",
    )
    ax.set_ylabel("prefix scores $U_1 … U_4$")
    ax.set_xticks(range(len(columns)), [name.replace("_", "\n") for name in columns])
    ax.set_yticks(range(len(totals)), totals)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(
        f"total cost; orange and bold: over the budget d = {budget:g}", loc="left", weight="normal"
    )
    return fig


def _tile(x: float, y: float, colour: str) -> Rectangle:
    return Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, color=colour, alpha=0.28, lw=0)


@styled
def value_iteration_error(errors: Sequence[float], closed_form: Sequence[float]) -> Figure:
    """Draw the sup error of value iteration and gamma^h n / (1 - gamma), which it equals.

    See the paper's appendix, Theorem on Bellman.
    """
    fig, (ax,) = panels()
    ax.plot(closed_form, color=INK, lw=1.5, label="$\\gamma^h n / (1 - \\gamma)$")
    ax.plot(
        errors,
        color=SAFE,
        ls="none",
        marker="o",
        mfc="none",
        mew=1.5,
        label="$\\max_s |v_h(s) - V^{*,n}(s)|$",
    )
    ax.set(xlabel="sweep h", ylabel="error (units of the task cost)", yscale="log")
    fig.legend(loc="outside upper center", ncols=2, frameon=False)
    return fig


@styled
def truncation(
    n: np.ndarray, curves: np.ndarray, limits: np.ndarray, thresholds: np.ndarray
) -> Figure:
    """Draw V^{*,n} of some states against n; each becomes flat at its n* (paper, Theorem 1(b)).

    Parameters
    ----------
    n : ndarray, shape (G,)
        Cost of an unsafe step, in units of the task cost; above 0, because both axes are
        logarithmic.
    curves : ndarray, shape (G, S)
        V^{*,n}(s) of at most 8 states.
    limits, thresholds : ndarray, shape (S,)
        V^{*,inf}(s) and n*(s).
    """
    fig, (ax,) = panels()
    for i, (limit, star) in enumerate(zip(limits, thresholds, strict=True)):
        ax.plot(n, curves[:, i], color=PALETTE[i], lw=2)
        style = {"marker": MARKERS[i], "ms": 9, "mec": "white", "ls": "none"}
        ax.plot(star, limit, color=PALETTE[i], label=f"n* = {star:.4f}", zorder=3, **style)
    ax.set(
        xlabel="cost n of an unsafe step (units of the task cost)",
        ylabel="$V^{*,n}$ (units of the task cost)",
    )
    ax.set(xscale="log", yscale="log", xlim=(n[0], n[-1]))
    fig.legend(loc="outside upper center", ncols=len(limits), frameon=False)
    return fig


@styled
def latent(broken: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw from how many states a critic's greedy policy can break the budget (Theorem 1(c)).

    There is a bar for each thing the critic sees.

    Parameters
    ----------
    broken : mapping of what the critic sees to (violating states, states)
    """
    fig, (ax,) = panels(0.9 + 0.45 * len(broken))
    ax.grid(axis="y", visible=False)
    for row, (count, states) in enumerate(broken.values()):
        ax.barh(row, count, color=UNSAFE, height=0.7)
        ax.text(count, row, f"  {count} of {states}", va="center", color=INK)
    ax.set_yticks(range(len(broken)), broken)
    ax.set(
        xlabel="states from which the critic's policy breaks the budget",
        ylabel="what the critic sees",
    )
    ax.set_xlim(0, 1.2 * max(1, *(count for count, _ in broken.values())))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    return fig


@styled
def lagrangian_gap(found: Outcomes, budget: float, mixture: np.ndarray) -> Figure:
    """Draw all trajectories by safety and task cost, and the three optima (Theorem 2).

    The hull is what some lambda picks.

    Parameters
    ----------
    found : Outcomes
        Every trajectory.
    budget : float
        d, in units of the cost model.
    mixture : ndarray, shape (L,)
        `igcore.theory.constrained.expectation_optimum`.
    """
    fig, (ax,) = panels(4.6)
    task, cost = found.task.astype(float), found.cost.astype(float)
    ax.axvspan(budget, cost.max() * 1.1 + 0.1, color=UNSAFE, alpha=0.1, lw=0)
    ax.axvline(budget, color=UNSAFE, lw=1.5)
    ax.scatter(cost, task, s=16, color="#8a8a8a", lw=0, zorder=2, label="trajectory")
    corners = hull(found)
    ax.plot(
        cost[corners],
        task[corners],
        color=PALETTE[1],
        marker="v",
        ms=8,
        mec="white",
        zorder=3,
        label="what some λ picks",
    )
    chosen = best_safe(found, budget)
    ax.plot(
        cost[chosen],
        task[chosen],
        color=SAFE,
        marker="*",
        ms=19,
        mec="white",
        ls="none",
        zorder=5,
        label="augmented optimum",
    )
    used = np.flatnonzero(mixture > 1e-9)
    mean = mixture @ cost, mixture @ task
    for i in used:
        ax.annotate(
            f"{mixture[i]:.2f}",
            (cost[i], task[i]),
            xytext=(8, 8),
            textcoords="offset points",
            color=INK,
        )
    label = f"optimum in expectation, P(violation) = {mixture[cost > budget].sum():.2f}"
    ax.plot(*mean, color=UNSAFE, marker="X", ms=12, mec="white", ls="none", zorder=4, label=label)
    ax.set(
        xlabel="total safety cost (cost units); d at the line",
        ylabel="task cost (minus the reward)",
    )
    ax.set_xlim(right=cost.max() * 1.1 + 0.1)
    fig.legend(loc="outside upper center", ncols=2, frameon=False)
    return fig


@styled
def abstention(
    draws: np.ndarray, curves: Mapping[float, np.ndarray], deltas: Sequence[float]
) -> Figure:
    """Draw the bound on P(abstain) against N M for some safe masses p (Algorithm 1).

    Marks are where it first meets a level.

    Parameters
    ----------
    draws : ndarray of int, shape (G,)
        N M, samples a block.
    curves : mapping of p to ndarray, shape (G,)
        `igcore.theory.finite_sample.abstention_bound`.
    deltas : sequence of float
        Levels to mark.
    """
    fig, (ax,) = panels()
    for i, (p, bound) in enumerate(curves.items()):
        reached = [k for k in (np.argmax(bound <= delta) for delta in deltas) if k]
        style = {"marker": MARKERS[i], "ms": 8, "mec": "white", "markevery": reached}
        ax.plot(draws, bound, color=PALETTE[i], lw=2, label=f"p = {p:g}", **style)
    for delta in deltas:
        ax.axhline(delta, color=INK, lw=0.8, ls=":")
        ax.text(draws[0], delta, f" δ = {delta:g}", va="bottom", color=INK)
    ax.set(
        xlabel="samples a block, N M (logarithmic)",
        ylabel="bound on P(abstain)",
        xscale="log",
        yscale="log",
    )
    ax.set(ylim=(min(deltas) / 3, 1.2), xlim=(draws[0], draws[-1]))
    fig.legend(loc="outside upper center", ncols=len(curves), frameon=False)
    return fig


@styled
def certificate(
    base_rates: np.ndarray, precision: np.ndarray, prompts: np.ndarray, upper: np.ndarray
) -> Figure:
    """Draw what a fallible scorer's acceptance means, and what no violation in n prompts means.

    Together they say what a certificate can promise.

    Parameters
    ----------
    base_rates, precision : ndarray, shape (G,)
        Share of truly safe blocks among those drawn, and among those accepted.
    prompts, upper : ndarray, shape (H,)
        n, and the upper bound of the violation rate after no violation in n prompts.
    """
    fig, (left, right) = panels(3.8, 2)
    left.plot(base_rates, precision, color=SAFE, lw=2)
    left.set(
        xlabel="share of safe blocks drawn",
        ylabel="share of safe blocks accepted",
        xscale="log",
        ylim=(0, 1.02),
    )
    right.plot(prompts, upper, color=UNSAFE, lw=2)
    right.set(
        xlabel="prompts without a violation, n",
        ylabel="violation rate, upper bound",
        xscale="log",
        yscale="log",
    )
    return fig
