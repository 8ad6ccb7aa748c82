"""The Pareto fronts of a run's policies: what each lambda and each budget buys.

Records make the table, the table the picture. All points of a panel are judged under one budget, on
the same prompts but for methods that were asked fewer. Cost: higher is worse; reward: higher is
better.
"""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..beams import METHODS
from ..errors import RunError
from ..report import tables
from ..report.experiment_tables import LAMBDAS, OURS
from ..report.load import by_method, each_finished
from ..report.replay import REPLAYED, judged_under, replay_best_of_n
from .experiment_fronts import LIMITS, names
from .labels import place
from .pareto import pareto
from .style import WIDTH, percent, style, styled

# names of runs in which lambda or the budget varies
SWEEPS = ("decode-lambda-*", "decode-budget-*", "decode-sweep-lambda-*")
# method -> the setting that varies
VARIED = {method: "lagrange_multiplier" for method in METHODS if "lagrangian" in method}
VARIED[OURS] = "budget"
COLUMNS = ["panel", *tables.COLUMNS, "value"]
FRONT = "#d9d9d9"  # of all methods together, behind everything


# --- sweeps ---------------------------------------------------------------------------------------


def load_sweeps(profile: str, records: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return what the sweeps of a profile add to records, and why a run of them was left out.

    See `alike`.

    Parameters
    ----------
    profile : str
        That holds the sweeps.
    records : DataFrame
        Lines of main runs, of this profile or another (`igcore.paper.swept.MAIN`), see
        `igcore.report.tables.by_prompt_set`.
    """
    left_out: list[str] = []
    found = []
    for pattern in SWEEPS:
        runs = [alike(records, run) for run in each_finished(profile, left_out, pattern)]
        found += [lines for lines in runs if len(lines)]
    swept = pd.concat(found, ignore_index=True) if found else records.iloc[:0]
    return swept.drop_duplicates(["policy", "method", "prompt_id", *set(VARIED.values())]), left_out


def alike(records: pd.DataFrame, swept: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `swept` that differ from a method of `records` in lambda alone.

    Those of inferenceguard differ in the budget alone.

    A method that was asked fewer prompts than others of its policy is left out, and so is
    Best-of-N, which `fronts` replays.
    """
    several = swept["policy"] + " on " + swept["prompts"]
    swept = swept.assign(
        policy=swept["policy"].where(swept["policy"].isin(records["policy"]), several)
    )
    asked = records.groupby("policy")["prompt_id"].nunique()
    found = [swept.iloc[:0]]
    for (policy, method), cell in records.groupby(["policy", "method"], sort=False):
        if method == REPLAYED or method not in VARIED or len(cell) < asked[policy]:
            continue
        same, ours = [name for name in tables.CONSTANT if name != VARIED[method]], cell.iloc[0]
        of_method = (swept["policy"] == policy) & (swept["method"] == method)
        here = swept[of_method & swept["prompt_id"].isin(cell["prompt_id"])]
        rest_alike = (here[same] == ours[same]).all(axis=1)
        found.append(here[rest_alike & (here[VARIED[method]] != ours[VARIED[method]])])
    return pd.concat(found)


# --- the table ------------------------------------------------------------------------------------


def fronts(records: pd.DataFrame, sweeps: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return every method as a point, and further points where lambda or the budget varies.

    Best-of-N's are read off the samples of its run, which is exact (`igcore.report.replay`).
    Those of `sweeps` stand beside the others where they were asked the same prompts, and else in a
    panel of their own, with all methods on the prompts that all sweeps share.

    Parameters
    ----------
    records : DataFrame
        Lines of main runs, one per policy, method and prompt.
    sweeps : DataFrame, optional
        `load_sweeps`. A budget is the one the search kept; all are judged under the budget of
        `records`.

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
        See `igcore.report.tables.cells`.
    """
    if not len(records):
        raise RunError("there is no method to draw; run notebook 30_decode first")
    parts = []
    for policy, lines in records.groupby("policy", sort=False):
        swept = records.iloc[:0] if sweeps is None else sweeps[sweeps["policy"] == policy]
        shared = _shared(swept)
        if shared == set(lines["prompt_id"]):
            parts.append(_points(lines, swept).assign(panel=policy))
            continue
        parts.append(_points(lines, swept.iloc[:0]).assign(panel=policy))
        if shared:
            some, more = (part[part["prompt_id"].isin(shared)] for part in (lines, swept))
            some = some[some.groupby("method")["prompt_id"].transform("size") == len(shared)]
            parts.append(
                _points(some, more).assign(panel=f"{policy}, {len(shared)} prompts of the sweeps")
            )
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _shared(swept: pd.DataFrame) -> set[str]:
    """Return the prompts that all points of the sweeps were asked."""
    asked = swept.groupby(["method", *set(VARIED.values())])["prompt_id"].agg(set)
    return set.intersection(*asked) if len(asked) else set()


def _points(lines: pd.DataFrame, swept: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a panel."""
    main = tables.main_table(lines)
    values = [getattr(row, VARIED.get(row.method, ""), math.nan) for row in main.itertuples()]
    parts = [main.assign(value=values)]
    drawn = lines[lines["method"] == REPLAYED]
    for x in LAMBDAS if len(drawn) else ():
        if x != drawn["lagrange_multiplier"].iloc[0]:
            replayed = replay_best_of_n(drawn, int(drawn["n_samples"].iloc[0]), x)
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
    """Draw reward against safety rate, a point for every method.

    A line joins points where lambda or the budget varies.

    The line joins the points of a method that no other of its points beats in both measures; those
    that one does beat are hollow. The broad line behind is the front of all points of the panel.
    Numbers are lambda, or the budget d that the search kept; hollow points have none.

    Parameters
    ----------
    table : DataFrame
        `fronts`. A method without any text has no reward and no point. One that was asked fewer
        prompts has its n beside its name, and no part in the broad line.

    Raises
    ------
    RunError
        For an empty table.
    ParameterError
        For a method without a style.
    """
    if not len(table):
        raise RunError("there is no method to draw; run notebook 30_decode first")
    panels = list(table.groupby("panel", sort=False))
    legend = _legend(table)
    below, beside = -(-len(panels) // 2), min(2, len(panels))
    fig = Figure(
        figsize=(WIDTH, 0.5 + 0.2 * -(-len(legend) // 3) + 3.5 * below), layout="constrained"
    )
    grid, odd = fig.add_gridspec(below, beside), len(panels) % beside
    places = [grid[divmod(k, beside)] for k in range(len(panels) - odd)]
    places += [grid[below - 1, :]] * odd  # the last fills its row
    shown = []
    for at, (name, rows) in zip(places, panels, strict=True):
        ax, drawn = fig.add_subplot(at), rows[rows["reward_mean"].notna()]
        _panel(ax, drawn)
        ax.set_title(name, loc="left", fontsize=11)
        shown.append((ax, drawn))
    fig.supxlabel("safety rate (numbers: λ, or the budget d of the search)", fontsize="medium")
    fig.supylabel("reward", fontsize="medium")
    fig.legend(handles=legend, loc="outside upper center", ncols=3, fontsize=10, frameon=False)
    fig.draw_without_rendering()  # the panels have their final size
    for ax, rows in shown:
        _write_values(ax, rows)
    return fig


def _legend(table: pd.DataFrame) -> list[Line2D]:
    """Return an entry for every method, and one for the front of all."""
    looks = {}
    for _, rows in table.groupby("panel", sort=False):
        looks |= {label: style(method) for method, label in names(rows).items()}
    points = [
        Line2D([], [], color=colour, marker=mark, ms=8, ls="none", label=label)
        for label, (colour, mark) in looks.items()
    ]
    front = Line2D([], [], color=FRONT, marker="o", ms=13, lw=6, label="front of all methods")
    return [*points, front]


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    ax.grid()
    ax.margins(0.13)
    ax.xaxis.set_major_formatter(percent)
    of_all = rows[rows["n_prompts"] == rows["n_prompts"].max()]
    _join(ax, of_all, color=FRONT, marker="o", ms=17, lw=6, zorder=1)
    for method, points in rows.groupby("method", sort=False):
        colour, marker = style(method)
        _join(ax, points, color=colour, lw=1.6, zorder=2)
        look = {
            "c": [colour if kept else "white" for kept in pareto(points)],
            "marker": marker,
            "ec": colour,
            "lw": 1.2,
        }
        # ours is large, and behind what has the same numbers
        size, above = (130, 2.5) if method == OURS else (44, 3)
        ax.scatter(points["safety_rate"], points["reward_mean"], s=size, zorder=above, **look)


def _join(ax: Axes, points: pd.DataFrame, **look) -> None:
    """Draw a line through the points that no other beats, from less to more safety."""
    best = points[pareto(points)].sort_values(list(LIMITS), ascending=[True, False])
    ax.plot(best["safety_rate"], best["reward_mean"], **look)


def _write_values(ax: Axes, rows: pd.DataFrame) -> None:
    """Write lambda, or the budget of the search, beside the points of each method's front.

    Only of methods that have several points.
    """
    labels = pd.Series("", rows.index, dtype=object)
    for method, points in rows.groupby("method", sort=False):
        for k, value in points.loc[pareto(points), "value"].items() if len(points) > 1 else ():
            labels[k] = f"d = {value:g}" if VARIED[method] == "budget" else f"{value:g}"
    for text in place(ax, rows[list(LIMITS)].to_numpy(dtype=float), labels.tolist()):
        text.set_size(9)
