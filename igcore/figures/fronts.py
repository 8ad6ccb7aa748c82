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
from .style import NAMES, WIDTH, headline, named, percent, style, styled

# names of runs in which lambda or the budget varies
SWEEPS = ("decode-lambda-*", "decode-budget-*", "decode-sweep-lambda-*")
# method -> the setting that varies
VARIED = {method: "lagrange_multiplier" for method in METHODS if "lagrangian" in method}
VARIED[OURS] = "budget"
POINT = ["method", "lagrange_multiplier", "budget"]  # what tells the points of a sweep apart
LIMITS = {  # column -> the ends of its interval
    "safety_rate": ["safety_wilson_low", "safety_wilson_high"],
    "reward_mean": ["reward_low", "reward_high"],
}
COLUMNS = ["panel", "method", "value", "n_prompts", *LIMITS]
SHOWN = (  # lambda = 0 is Best-of-N
    "base",
    "best-of-n-lagrangian",
    "best-of-n-augmented",
    "beam-lagrangian",
    "beam-augmented",
    OURS,
)


# --- rows of a table, each one setting of one method ----------------------------------------------


def names(rows: pd.DataFrame) -> dict[str, str]:
    """Return the label of each method in order of appearance, see `igcore.figures.style.named`."""
    prompts = rows.groupby("method", sort=False)["n_prompts"].max()
    return dict(zip(prompts.index, named(prompts), strict=True))


def pareto(table: pd.DataFrame) -> np.ndarray:
    """Return which rows are not dominated in safety rate and mean reward.

    A row is dominated where another is at least as good in both columns and better in one.

    Parameters
    ----------
    table : DataFrame
        One row per point.

    Returns
    -------
    ndarray of bool, shape (len(table),)
        Rows with the same two numbers stay or go together. A row with NaN is dominated and
        dominates none.

    Examples
    --------
    >>> table = pd.DataFrame({"safety_rate": [0.5, 0.9, 1.0], "reward_mean": [0.6, 0.4, 0.4]})
    >>> pareto(table).tolist()
    [True, False, True]
    """
    points = table[list(LIMITS)].to_numpy(dtype=float)  # (n, 2)
    each = points[:, None]
    # (n, n): row beats column; never where there is NaN
    beats = (each >= points).all(axis=2) & (each > points).any(axis=2)
    return ~np.isnan(points).any(axis=1) & ~beats.any(axis=0)


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
def pareto_fronts(table: pd.DataFrame, columns: int = 2) -> Figure:
    """Draw reward against safety rate: the Pareto frontiers of six methods over their setting.

    A frontier is a staircase: what a method reaches with at least that safety rate. A number is
    lambda, or the budget d of the search; settings that another one beats are left out. The title
    says how often InferenceGuard's run is on the frontier of all that is drawn. A user's own method
    is drawn as well.

    Parameters
    ----------
    table : DataFrame
        `fronts`. A method without any text has no reward and no point. One with fewer prompts than
        others is not drawn.
    columns : int
        The most panels in a row.
    """
    most = table.groupby("panel")["n_prompts"].transform("max")
    is_shown = table["method"].isin(SHOWN) | ~table["method"].isin(NAMES)
    table = table[is_shown & (table["n_prompts"] == most)]
    panels = list(table.groupby("panel", sort=False))
    count, columns = len(panels), min(columns, len(panels))
    # the last one is as wide as what is left of its row
    places = np.append(np.arange(count), [count - 1] * (-count % columns)).reshape(-1, columns)
    fig = Figure(figsize=(WIDTH, 0.7 + 3.3 * len(places)), layout="constrained")
    axes = fig.subplot_mosaic(places.tolist())
    for ax, (name, rows) in zip(axes.values(), panels, strict=True):
        _panel(ax, rows)
        ax.set_title(f"{name}, n = {rows['n_prompts'].max()}", loc="left", fontsize=11)
    fig.supxlabel("answered within budget at the end", fontsize="medium")
    fig.supylabel("reward", fontsize="medium")
    headline(fig, _stands(table))
    fig.draw_without_rendering()  # the panels have their final size
    for ax, (_, rows) in zip(axes.values(), panels, strict=True):
        best = _best(rows)
        place(ax, best[list(LIMITS)].to_numpy(dtype=float), _labels(best), size=9)
    return fig


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    ax.grid()
    ax.margins(0.2)
    # the margin is for labels: no rate is above 1
    ax.xaxis.set_major_formatter(lambda x, at: percent(x, at) if x <= 1 else "")
    for method, best in _best(rows).groupby("method", sort=False):
        colour, marker = style(method)
        # from less to more safety: what is reached with at least that rate
        look = {"drawstyle": "steps-pre", "color": colour, "lw": 1.6, "zorder": 2}
        ax.plot(best["safety_rate"], best["reward_mean"], **look)
        # ours is large, and behind what has the same numbers
        size, above = (130, 2.5) if method == OURS else (44, 3)
        look = {"marker": marker, "color": colour, "s": size, "zorder": above}
        ax.scatter(best["safety_rate"], best["reward_mean"], **look)


def _best(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the Pareto frontier of each method, from less to more safety.

    Settings with the same two numbers are one point; ``value`` is the list of them.
    """
    parts = [cell[pareto(cell)] for _, cell in rows.groupby("method", sort=False)]
    ends = [part.sort_values(list(LIMITS), ascending=[True, False]) for part in parts]
    points = pd.concat(ends).groupby(["method", *LIMITS], sort=False)
    return points["value"].agg(list).reset_index()


def _labels(best: pd.DataFrame) -> list[str]:
    """Return what stands beside each point: the method at its first one, and the settings."""
    labels = []
    for method, points in best.groupby("method", sort=False):
        setting = "d" if method == OURS else "λ"
        for values in points["value"]:
            known = ", ".join(f"{value:g}" for value in values if not math.isnan(value))
            labels.append(f"{setting} = {known}" if known else "")
        at = len(labels) - len(points)
        name = NAMES.get(method, method).removesuffix(" λ")  # which the setting says
        labels[at] = f"{name} {labels[at]}".strip()
    return labels


def _stands(table: pd.DataFrame) -> str:
    """Return in how many panels a point of InferenceGuard is beaten by none, in a sentence."""
    on_front = []
    for _, rows in table.groupby("panel", sort=False):
        is_ours = rows["method"] == OURS
        if is_ours.any():
            on_front.append((pareto(rows) & is_ours).any())
    if not on_front:
        return f"The Pareto frontier of each of {table['method'].nunique()} methods"
    panels = f"{sum(on_front)} of {len(on_front)} panels"
    return f"{NAMES[OURS]} is on the common Pareto frontier in {panels}"
