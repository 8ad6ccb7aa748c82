"""The pictures of the notebooks to learn from: costs and the safety state, word by word."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from igcore.budget import trace
from igcore.scorers import Scorer
from igcore.scoring import word_ends

from .style import INK, OUTCOMES, legend_below, panels, style, styled

WITHIN, OVER, GREY = OUTCOMES["safe"], OUTCOMES["unsafe"], "#6b6b6b"


def side_by_side(texts: Mapping[str, str]) -> str:
    """Return texts as HTML, in columns beside each other, each under its name."""
    look = 'style="text-align: left; vertical-align: top; width: 50%"'
    names = "".join(f"<th {look}>{escape(name)}</th>" for name in texts)
    shown = "".join(f"<td {look}>{escape(text)}</td>" for text in texts.values())
    return f"<table><tr>{names}</tr><tr>{shown}</tr></table>"


def costs_at_words(cost: Scorer, prompt: str, text: str) -> np.ndarray:
    """Return the cost of an answer up to the end of each of its words, and of the whole, (k,)."""
    ends = [*word_ends(text), len(text)]
    beginnings = [text[:end] for end in ends]
    finished = [beginning == text for beginning in beginnings]
    return np.asarray(cost.score([prompt] * len(ends), beginnings, finished), dtype=float)


def states_at_words(cost: Scorer, prompt: str, text: str, budget: float) -> np.ndarray:
    """Return the safety state z before an answer and after each of its words, under ``peak``."""
    costs = costs_at_words(cost, prompt, text)
    return np.asarray(budget - np.maximum.accumulate([0, *costs]))


@styled
def draw_states(states: Mapping[str, np.ndarray]) -> Figure:
    """Draw z of several answers word by word; the band below zero is over budget.

    Values far over budget and failed scores are drawn on the lower edge.
    """
    states = {name: np.where(np.isnan(z), -np.inf, z) for name, z in states.items()}
    levels = np.concatenate([[0, 1], *states.values()])
    high = levels.max()
    low = max(levels[np.isfinite(levels)].min(), -10 * high)
    margin = 0.1 * (high - low)
    floor = low - 2 * margin
    fig, (ax,) = panels(3.2)
    ax.axhspan(floor, 0, color=OVER, alpha=0.12, lw=0)
    ax.axhline(0, color=OVER, lw=1.5)
    ax.text(0.01, 0.04, "over budget: z < 0", color="#8f3f00", transform=ax.transAxes)
    for name, z in states.items():
        colour, marker = style(name)
        ax.plot(np.maximum(z, floor), color=colour, marker=marker, ms=6, mec="white", label=name)
    held = [name for name, z in states.items() if min(z) >= 0]
    title = f"Within budget at the end of every word: {', '.join(held) or 'none'}"
    ax.set(xlabel="word", ylabel="safety state z", ylim=(floor, high + margin))
    ax.set_title(title, loc="left")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(fig, 4)
    return fig


def ledger(scores: Sequence[float], accounting: str) -> list[float]:
    """Return what each prefix score costs under an accounting."""
    totals = [state.total for state in trace(scores, 0, accounting)]
    return [after - before for before, after in pairwise(totals)]


@styled
def draw_ledgers(scores: Sequence[float], budget: float, accountings: Sequence[str]) -> Figure:
    """Draw the cost of each step and the budget left, one panel per accounting."""
    fig, axes = panels(3.2, len(accountings), sharey=True)
    for ax, name in zip(axes, accountings, strict=True):
        left = [state.z for state in trace(scores, budget, name)]
        steps = range(len(left))
        costs = ledger(scores, name)
        ax.axhspan(min(0, budget - max(scores)) - 1, 0, color=OVER, alpha=0.12, lw=0)
        ax.bar(steps[1:], costs, width=0.5, color=GREY, alpha=0.55, label="cost of the step")
        ax.plot(steps, left, "o-", color=WITHIN, lw=2, mec="white", ms=8, label="budget left")
        kept = "kept" if left[-1] >= 0 else "broken"
        ax.set(title=f"{name}: a budget of {budget:g} is {kept}", xlabel="step k", xticks=steps)
    fig.supylabel("units of the cost", fontsize=11)
    legend_below(fig, 2)
    return fig


@styled
def draw_costs(costs: np.ndarray, budget: float) -> Figure:
    """Draw the cost after every word, and the worst so far; the band above is over budget."""
    words = np.arange(1, len(costs) + 1)
    worst = np.maximum.accumulate(costs)
    top = 1.15 * max(worst[-1], budget, 0.1)
    fig, (ax,) = panels(3.2)
    ax.axhspan(budget, top, color=OVER, alpha=0.12, lw=0)
    ax.step(words, worst, where="mid", color=INK, lw=2, label="peak: the worst cost so far")
    ax.plot(words, costs, "o-", color=WITHIN, ms=5, label="cost of the text so far")
    ax.set(xlabel="words", ylabel="cost", ylim=(-0.03 * top, top))
    ax.set_title(f"The final cost is {costs[-1]:.3g}, the highest at a word {worst[-1]:.3g}")
    legend_below(fig, 2)
    return fig


@styled
def draw_jumps(
    points: Sequence[float], functions: Mapping[str, Callable[[Any], float]], **labels: str
) -> Figure:
    """Draw step functions of one number, a panel each; a dot is the value at a point.

    Parameters
    ----------
    points : sequence
        Where the functions may jump, in rising order. A dot is orange where the function *jumps
        up*: there its value is above that just before or just after the point.
    functions : mapping
        By the title of the panel.
    labels
        ``xlabel`` and ``ylabel``.
    """
    edge = points[-1] / 4
    ends = [0, *points, points[-1] + edge]
    fig, axes = panels(3.2, len(functions), sharey=True)
    for ax, (title, value) in zip(axes, functions.items(), strict=True):
        between = [value((left + right) / 2) for left, right in pairwise(ends)]
        ax.hlines(between, ends[:-1], ends[1:], color=WITHIN, lw=2)
        for x, before, after in zip(points, between, between[1:], strict=False):
            jumps_up = value(x) > min(before, after)
            ax.plot(x, value(x), "o", color=OVER if jumps_up else WITHIN, mec="white", ms=8)
        ax.set(title=title, **labels)
    return fig
