"""The safety state along the answers of a run, method beside method.

Records make the quartiles per block, these the picture.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import RunError
from ..report.tables import FAMILIES
from ..scorers import Scorer, checked_score
from .style import INK, OUTCOMES, WIDTH, rows_of_panels, style, styled

# column -> quantile over prompts
SHARES = {"lowest": 0.0, "low": 0.25, "median": 0.5, "high": 0.75}
COLUMNS = ["policy", "family", "method", "tokens", "n", *SHARES]


def paths(records: pd.DataFrame, cost: Scorer | None = None) -> pd.DataFrame:
    """Return the safety state z along every answer that the policy wrote.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``. Abstentions have no path: nothing of the policy was emitted.
    cost : Scorer, optional
        The cost model of the run, to read every answer again on the grid that all methods share
        (``grid_ends``): z is the budget less the peak of the cost so far. Without it z is that of
        ``z_trace``, at the ends of the method's own blocks: a method that judges whole answers has
        z at their end only.

    Returns
    -------
    DataFrame
        ``policy``, ``method``, ``prompt_id``, ``tokens`` (0, then the ends of blocks; the last
        block ends at the longest answer allowed) and ``z`` (units of the cost; below zero the
        budget is broken; minus infinity where it cannot be read). An answer that ended early stays
        at its last z.

    Raises
    ------
    RunError
        When no record has an answer, or `cost` does not find the peak that a record states.
    """
    written = records[records["response"].notna() & (records["n_tokens"] > 0)]
    if not len(written):
        raise RunError("there is no answer to follow; run notebook 30_decode first")
    if cost is None:
        traces = written["z_trace"].map(partial(np.array, dtype=float))
    else:
        traces = _read_again(written, cost)
    frames = []
    for (policy, method), lines in written.groupby(["policy", "method"], sort=False):
        step = int(lines["block_size" if cost is None else "grid_size"].max())
        longest = int(lines["max_new_tokens"].max())
        ends = np.minimum(np.arange(-(-longest // step) + 1) * step, longest)  # 0, step, 2 step ...
        for k, id_ in lines["prompt_id"].items():
            z = traces[k]
            z = np.nan_to_num(np.append(z, np.full(len(ends) - len(z), z[-1])), nan=-np.inf)
            about = {"policy": policy, "method": method, "prompt_id": id_}
            frames.append(pd.DataFrame(about | {"tokens": ends, "z": z}))
    return pd.concat(frames, ignore_index=True)


def _read_again(lines: pd.DataFrame, cost: Scorer) -> pd.Series:
    """Return z_0, z_1, ... of each line on the common grid; the index is that of the lines."""
    spans = [(line.Index, end) for line in lines.itertuples() for end in line.grid_ends]
    prompt, text = lines["prompt"].to_dict(), lines["response"].to_dict()
    ended = [end == len(text[k]) for k, end in spans]
    found = checked_score(
        cost, [prompt[k] for k, _ in spans], [text[k][:end] for k, end in spans], ended
    )
    scores = pd.Series(found).groupby([k for k, _ in spans]).agg(list)
    traces = {}
    for line in lines.itertuples():
        peak = np.maximum.accumulate(np.append(0.0, scores[line.Index]))  # a NaN stays
        stated = np.nan if pd.isna(line.peak_cost) else max(0.0, line.peak_cost)
        if not np.isclose(peak[-1], stated, atol=1e-6, equal_nan=True):
            raise RunError(
                f"the peak cost of prompt {line.prompt_id}, {line.method}, is {stated}, but "
                f"{cost.name!r} finds {peak[-1]}; give the cost model of the run, "
                f"{line.cost_scorer!r}"
            )
        traces[line.Index] = line.budget - peak
    return pd.Series(traces)


def bands(found: pd.DataFrame) -> pd.DataFrame:
    """Return where the safety state of each method lies, by family and on the same prompts.

    Parameters
    ----------
    found : DataFrame
        `paths`.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`: a row per policy, family, method and number of tokens. ``base`` stands in
        every family; the statistics are over the ``n`` prompts to which all methods of a family
        gave an answer. Quantiles are values of answers.
    """
    rows = []
    for policy, lines in found.groupby("policy", sort=False):
        for family, methods in _families(lines["method"].unique()):
            here = lines[lines["method"].isin(methods)]
            answered = here.groupby("prompt_id")["method"].nunique() == len(methods)
            here = here[here["prompt_id"].isin(answered.index[answered])]
            for (method, tokens), cell in here.groupby(["method", "tokens"], sort=False):
                quantiles = np.quantile(
                    cell["z"], list(SHARES.values()), method="inverted_cdf"
                ).tolist()
                rows.append([policy, family, method, tokens, len(cell), *quantiles])
    return pd.DataFrame(rows, columns=COLUMNS)


def _families(methods: np.ndarray) -> Iterator[tuple[str, list[str]]]:
    """Yield (family, its methods), base in each of them, or alone."""
    base = [method for method in methods if method == "base"]
    families = {
        name: [method for method in methods if method.startswith(name)] for name in FAMILIES
    }
    found = [(name, base + members) for name, members in families.items() if members]
    yield from found or [("base", base)]


@styled
def trajectories(table: pd.DataFrame, budget: float) -> Figure:
    """Draw the safety state by tokens: the median of each method, and the band of its quartiles.

    Dotted is the lowest of all answers.

    Rows are families, two policies stand side by side. What falls lower than one budget below zero
    leaves the panel.

    Parameters
    ----------
    table : DataFrame
        `bands`.
    budget : float
        d, where every path starts.

    Raises
    ------
    RunError
        For an empty table.
    """
    if not len(table):
        raise RunError(
            "no prompt was answered by all methods of a family; decode more prompts with "
            "notebook 30_decode"
        )
    policies = list(table["policy"].unique())
    families = [name for name in (*FAMILIES, "base") if (table["family"] == name).any()]
    rows = rows_of_panels(policies, families)
    fig = Figure(figsize=(WIDTH, 0.9 + 1.85 * len(rows)), layout="constrained")
    ratios = [3] * min(2, len(policies)) + [2]  # the names of the methods stand at the right
    axes = fig.subplots(
        len(rows), len(ratios), sharex=True, sharey=True, squeeze=False, width_ratios=ratios
    )
    for line, (pair, family) in zip(axes, rows, strict=True):
        cells = [
            table[(table["policy"] == policy) & (table["family"] == family)] for policy in pair
        ]
        for ax, policy, cell in zip(line, pair, cells, strict=False):
            _panel(ax, cell)
            ax.set_title(policy if family == families[0] else "", loc="left")
            ax.set_xlabel("tokens of the answer" if family == families[-1] else "")
        for ax in line[len(pair) :]:
            ax.set_axis_off()
        curves = {
            label: curve
            for ax in line
            for curve, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        line[-1].legend(
            curves.values(),
            curves,
            loc="center left",
            borderaxespad=0,
            handlelength=1.6,
            frameon=False,
        )
    axes[0, 0].set_ylim(*_limits(table, budget))
    fig.supylabel("safety state z (below 0 the budget is broken)", fontsize="medium")
    return fig


def _limits(table: pd.DataFrame, budget: float) -> tuple[float, float]:
    """Return one budget below zero, and the highest quartile.

    With a budget of zero the quartiles say how much is much.
    """
    quartiles = table[["low", "high"]].to_numpy()
    scale = budget or np.abs(quartiles[np.isfinite(quartiles)]).max(initial=0) or 1
    return -1.08 * scale, max(budget, quartiles.max()) + 0.08 * scale


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the methods of one family."""
    ax.grid()
    ax.axhline(0, color=OUTCOMES["unsafe"], lw=1.5)
    for method, line in rows.groupby("method", sort=False):
        colour, marker = style(method)
        ax.fill_between(line["tokens"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)
        ax.plot(line["tokens"], line["lowest"], ":", color=colour, lw=1.4)
        every = max(1, len(line) // 5)
        marks = {"marker": marker, "markevery": every, "ms": 5}
        ax.plot(line["tokens"], line["median"], color=colour, lw=1.8, label=method, **marks)
    if len(rows):
        box = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 2}
        look = {"ha": "right", "size": 10, "color": INK, "bbox": box}
        ax.text(0.98, 0.04, f"n = {rows['n'].max()}", transform=ax.transAxes, **look)
