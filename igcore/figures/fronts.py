"""The Pareto frontiers of a run's policies: what each lambda and each budget buys.

All points of a panel are judged under one budget, and on the same prompts, except for methods that
have fewer. Cost: higher is worse; reward: higher is better.
"""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..beams import METHODS
from ..report import statistics as metrics
from ..report import tables
from ..report.experiments import LAMBDAS, OURS
from ..report.load import each_finished
from ..report.paired import is_safe
from ..report.replay import REPLAYED, judged_under, replay_best_of_n
from .labels import place
from .pareto import LIMITS, names, pareto
from .style import WIDTH, legend_below, percent, style, styled

# names of runs in which lambda or the budget varies
SWEEPS = ("decode-lambda-*", "decode-budget-*", "decode-sweep-lambda-*")
# method -> the setting that varies
VARIED = {method: "lagrange_multiplier" for method in METHODS if "lagrangian" in method}
VARIED[OURS] = "budget"
POINT = ["method", "lagrange_multiplier", "budget"]  # what tells the points of a sweep apart
COLUMNS = ["panel", "method", "value", "n_prompts", *LIMITS]
FRONT = "#d9d9d9"  # the frontier of all methods, behind everything


# --- sweeps ---------------------------------------------------------------------------------------


def load_sweeps(profile: str, records: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return what the sweeps of a profile add to records, and why a run of them was left out.

    Parameters
    ----------
    profile : str
        The profile of the sweeps.
    records : DataFrame
        Lines of main runs, of this profile or another (`igcore.paper.swept.MAIN`), see
        `igcore.report.tables.by_prompt_set`.
    """
    left_out: list[str] = []
    found = [records.iloc[:0]]
    for pattern in SWEEPS:
        found += [alike(records, run) for run in each_finished(profile, left_out, pattern)]
    swept = pd.concat(found, ignore_index=True)
    # two experiments may share a point
    return swept.drop_duplicates(["policy", "prompt_id", *POINT]), left_out


def alike(records: pd.DataFrame, swept: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `swept` that differ from a method of `records` in one setting alone.

    That is lambda, and of inferenceguard the budget. Methods that have fewer prompts than others of
    their policy are left out, and so is Best-of-N, which `fronts` replays.
    """
    by_set = swept["policy"] + " on " + swept["prompts"]
    is_known = swept["policy"].isin(records["policy"])
    swept = swept.assign(policy=swept["policy"].where(is_known, by_set))
    n_prompts = records.groupby("policy")["prompt_id"].nunique()
    found = [swept.iloc[:0]]
    for (policy, method), cell in records.groupby(["policy", "method"], sort=False):
        if method == REPLAYED or method not in VARIED or len(cell) < n_prompts[policy]:
            continue
        main, varied = cell.iloc[0], VARIED[method]
        same = [name for name in ["policy", "method", *tables.CONSTANT] if name != varied]
        is_alike = (swept[same] == main[same]).all(axis=1) & (swept[varied] != main[varied])
        is_shared = swept["prompt_id"].isin(cell["prompt_id"])
        found.append(swept[is_alike & is_shared])
    return pd.concat(found)


# --- the table ------------------------------------------------------------------------------------


def fronts(records: pd.DataFrame, sweeps: pd.DataFrame) -> pd.DataFrame:
    """Return every method as a point, and further points where lambda or the budget varies.

    Best-of-N's are computed from the samples of its run, which is exact (`igcore.report.replay`).
    Sweeps on the same prompts are in the panel of the main runs. Other sweeps are in a panel of
    their own, with all methods on the prompts that all sweeps share.

    Parameters
    ----------
    records : DataFrame
        Lines of main runs, one per policy, method and prompt.
    sweeps : DataFrame
        `load_sweeps`. All answers are judged under the budget of `records`.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`: ``value`` is the lambda or the budget of the search (NaN for methods that
        have none), rate and mean are over the prompts of the point.

    Raises
    ------
    RunError
        See `igcore.report.statistics.check_records`.
    ParameterError
        When a setting is not constant in a method.
    """
    metrics.check_records(records)
    points = []
    for policy, lines in records.groupby("policy", sort=False):
        swept = sweeps[sweeps["policy"] == policy]
        prompts_of_points = swept.groupby(POINT)["prompt_id"].agg(set)
        shared = set.intersection(*prompts_of_points) if len(prompts_of_points) else set()
        if shared == set(lines["prompt_id"]):
            points += _points(policy, lines, swept)
            continue
        points += _points(policy, lines, swept.iloc[:0])
        if shared:
            some = lines[lines["prompt_id"].isin(shared)]
            is_whole = some.groupby("method")["prompt_id"].transform("size") == len(shared)
            swept = swept[swept["prompt_id"].isin(shared)]
            panel = f"{policy}, {len(shared)} prompts of the sweeps"
            points += _points(panel, some[is_whole], swept)
    return pd.DataFrame(points, columns=COLUMNS)


def _points(panel: str, lines: pd.DataFrame, swept: pd.DataFrame) -> list[dict]:
    """Return the points of a panel, by method and value."""
    points = []
    for method, cell in lines.groupby("method", sort=False):
        metrics.check_constant(cell, tables.CONSTANT, f"{panel}, method {method}")
        main, varied = cell.iloc[0], VARIED.get(method)
        answers = {main[varied] if varied else math.nan: cell}  # value -> lines
        if method == REPLAYED:
            for x in sorted({*LAMBDAS} - {*answers}):
                answers[x] = replay_best_of_n(cell, int(main["n_samples"]), x)
        elif varied:
            for value, point in swept[swept["method"] == method].groupby(varied):
                answers[value] = judged_under(point, main["budget"])
        for value in sorted(answers):
            of_value = answers[value]
            point = {
                "panel": panel,
                "method": method,
                "value": value,
                "n_prompts": len(of_value),
                "safety_rate": is_safe(of_value).mean(),
                "reward_mean": of_value["reward"].astype(float).mean(),
            }
            points.append(point)
    return points


# --- the picture ----------------------------------------------------------------------------------


@styled
def pareto_fronts(table: pd.DataFrame) -> Figure:
    """Draw reward against safety rate, a point for every method and value of its setting.

    A thin line is the Pareto frontier of one method over lambda or the budget; other settings of
    the method are hollow. The broad line is the frontier of all methods. Numbers are lambda, or the
    budget d of the search; hollow points have none.

    Parameters
    ----------
    table : DataFrame
        `fronts`. A method without any text has no reward and no point. One with fewer prompts has
        its n beside its name, and no part in the broad line.
    """
    panels = list(table.groupby("panel", sort=False))
    count, columns = len(panels), min(2, len(panels))
    # two side by side; the last one is as wide as the page where it is alone
    places = np.append(np.arange(count), [count - 1] * (-count % columns)).reshape(-1, columns)
    legend_lines = table["method"].nunique() // 3 + 1
    height = 0.5 + 0.24 * legend_lines + 3.5 * len(places)
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = fig.subplot_mosaic(places.tolist())
    for ax, (name, rows) in zip(axes.values(), panels, strict=True):
        _panel(ax, rows)
        ax.set_title(name, loc="left", fontsize=11)
    fig.supxlabel("safety rate (numbers: λ, or the budget d of the search)", fontsize="medium")
    fig.supylabel("reward", fontsize="medium")
    legend_below(fig, 3)
    fig.draw_without_rendering()  # the panels have their final size
    for ax, (_, rows) in zip(axes.values(), panels, strict=True):
        points = rows[list(LIMITS)].to_numpy(dtype=float)
        place(ax, points, _values(rows).tolist(), size=9)
    return fig


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    ax.grid()
    ax.margins(0.13)
    ax.xaxis.set_major_formatter(percent)
    of_all = rows[rows["n_prompts"] == rows["n_prompts"].max()]
    look = {"color": FRONT, "marker": "o", "ms": 13, "lw": 6}
    _frontier(ax, of_all, label="Pareto frontier of all methods", zorder=1, **look)
    labels = names(rows)
    for method, points in rows.groupby("method", sort=False):
        colour, marker = style(method)
        _frontier(ax, points, color=colour, lw=1.6, zorder=2)
        best = pareto(points)
        # ours is large, and behind what has the same numbers
        size, above = (130, 2.5) if method == OURS else (44, 3)
        look = {"marker": marker, "ec": colour, "lw": 1.2, "s": size, "zorder": above}
        for part, inside in ((points[best], colour), (points[~best], "white")):
            ax.scatter(part["safety_rate"], part["reward_mean"], c=inside, **look)
        ax.plot([], [], color=colour, marker=marker, ms=8, ls="none", label=labels[method])


def _frontier(ax: Axes, points: pd.DataFrame, **look) -> None:
    """Draw a line through the points that no other dominates, from less to more safety."""
    best = points[pareto(points)].sort_values(list(LIMITS), ascending=[True, False])
    ax.plot(best["safety_rate"], best["reward_mean"], **look)


def _values(rows: pd.DataFrame) -> pd.Series:
    """Return lambda, or the budget of the search, of the points on each method's frontier.

    It is empty for other points, and for methods with a single point.
    """
    labels = pd.Series("", rows.index, dtype=object)
    for method, points in rows.groupby("method", sort=False):
        if len(points) > 1:
            form = "d = {:g}" if VARIED[method] == "budget" else "{:g}"
            values = points.loc[pareto(points), "value"]
            labels[values.index] = values.map(form.format)
    return labels
