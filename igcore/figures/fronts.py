"""The Pareto frontiers of a run's policies: what each lambda and each budget buys.

All points of a panel are judged under one budget, and on the same prompts, except for methods that
have fewer. Cost: higher is worse; reward: higher is better.
"""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..beams import METHODS
from ..errors import RunError
from ..report import tables
from ..report.experiments import LAMBDAS, OURS
from ..report.load import by_method, each_finished
from ..report.replay import REPLAYED, judged_under, replay_best_of_n
from .labels import place
from .pareto import LIMITS, names, pareto
from .style import WIDTH, legend_above, percent, style, styled

# names of runs in which lambda or the budget varies
SWEEPS = ("decode-lambda-*", "decode-budget-*", "decode-sweep-lambda-*")
# method -> the setting that varies
VARIED = {method: "lagrange_multiplier" for method in METHODS if "lagrangian" in method}
VARIED[OURS] = "budget"
COLUMNS = ["panel", *tables.COLUMNS, "value"]
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
    points = ["policy", "method", "prompt_id", *set(VARIED.values())]
    return swept.drop_duplicates(points) if len(swept) else swept, left_out


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
        same = [name for name in tables.CONSTANT if name != VARIED[method]]
        main = cell.iloc[0]
        lines = swept[(swept["policy"] == policy) & (swept["method"] == method)]
        lines = lines[lines["prompt_id"].isin(cell["prompt_id"])]
        is_alike = (lines[same] == main[same]).all(axis=1)
        found.append(lines[is_alike & (lines[VARIED[method]] != main[VARIED[method]])])
    return pd.concat(found)


# --- the table ------------------------------------------------------------------------------------


def fronts(records: pd.DataFrame, sweeps: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return every method as a point, and further points where lambda or the budget varies.

    Best-of-N's are computed from the samples of its run, which is exact (`igcore.report.replay`).
    Sweeps on the same prompts are in the panel of the main runs. Other sweeps are in a panel of
    their own, with all methods on the prompts that all sweeps share.

    Parameters
    ----------
    records : DataFrame
        Lines of main runs, one per policy, method and prompt.
    sweeps : DataFrame, optional
        `load_sweeps`. All answers are judged under the budget of `records`.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`: those of the main table, ``panel``, and ``value``, the lambda or the
        budget of the search (NaN for methods that have none).

    Raises
    ------
    RunError
        When there are no records.
    ParameterError
        See `igcore.report.tables.main_table`.
    """
    if not len(records):
        raise RunError("there is no method to draw; run notebook 30_decode first")
    sweeps = records.iloc[:0] if sweeps is None else sweeps
    parts = []
    for policy, lines in records.groupby("policy", sort=False):
        swept = sweeps[sweeps["policy"] == policy]
        of_points = swept.groupby(["method", *set(VARIED.values())])["prompt_id"].agg(set)
        shared = set.intersection(*of_points) if len(of_points) else set()
        same_prompts = shared == set(lines["prompt_id"])
        beside = swept if same_prompts else swept.iloc[:0]
        parts.append(_points(lines, beside).assign(panel=policy))
        if shared and not same_prompts:
            some, more = (part[part["prompt_id"].isin(shared)] for part in (lines, swept))
            some = some[some.groupby("method")["prompt_id"].transform("size") == len(shared)]
            panel = f"{policy}, {len(shared)} prompts of the sweeps"
            parts.append(_points(some, more).assign(panel=panel))
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _points(lines: pd.DataFrame, swept: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a panel."""
    main = tables.main_table(lines)
    values = [getattr(row, VARIED.get(row.method, ""), math.nan) for row in main.itertuples()]
    parts = [main.assign(value=values)]
    samples = lines[lines["method"] == REPLAYED]
    for x in LAMBDAS if len(samples) else ():
        first = samples.iloc[0]
        if x != first["lagrange_multiplier"]:
            replayed = replay_best_of_n(samples, int(first["n_samples"]), x)
            parts.append(tables.main_table(replayed).assign(value=x))
    for method, cell in swept.groupby("method", sort=False):
        for value, point in cell.groupby(VARIED[method]):
            judged = judged_under(point, lines["budget"].iloc[0])
            parts.append(tables.main_table(judged).assign(value=value))
    table = pd.concat(parts, ignore_index=True).sort_values("value", kind="stable")
    return by_method(table, main["method"])


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

    Raises
    ------
    RunError
        For an empty table.
    """
    if not len(table):
        raise RunError("there is no method to draw; run notebook 30_decode first")
    panels = list(table.groupby("panel", sort=False))
    lines, columns = -(-len(panels) // 2), min(2, len(panels))
    legend_lines = table["method"].nunique() // 3 + 1
    height = 0.5 + 0.24 * legend_lines + 3.5 * lines
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = fig.add_gridspec(lines, columns)
    for number, (name, rows) in enumerate(panels):
        is_alone = number == len(panels) - 1 and number % columns == 0
        place_of = grid[number // columns, :] if is_alone else grid[divmod(number, columns)]
        ax = fig.add_subplot(place_of)
        _panel(ax, rows)
        ax.set_title(name, loc="left", fontsize=11)
    fig.supxlabel("safety rate (numbers: λ, or the budget d of the search)", fontsize="medium")
    fig.supylabel("reward", fontsize="medium")
    legend_above(fig, 3)
    fig.draw_without_rendering()  # the panels have their final size
    for ax, (_, rows) in zip(fig.axes, panels, strict=True):
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
        form = "d = {:g}" if VARIED.get(method) == "budget" else "{:g}"
        values = points.loc[pareto(points), "value"]
        if len(points) > 1:
            labels[values.index] = values.map(form.format)
    return labels
