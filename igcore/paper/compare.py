"""Rows of the paper beside ours, with a verdict that both numbers of prompts support.

The paper pairs no prompts, so its numbers and ours are tested as independent samples; where the
prompts are the same, that claims too few differences rather than too many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from ..report.experiments import EXPERIMENTS
from ..report.statistics import ALPHA, bootstrap_mean, holm
from . import IDENTITY, reported, sample_sizes

AGREES, DIFFERS, NOT_RUN, UNRESOLVED = VERDICTS = (
    "agrees",
    "differs",
    "not run",
    "cannot be resolved at this n",
)
# of the interval of a difference: that it lies within +/- something is two one-sided tests at 5 %
LEVEL = 0.90
ESTIMATE = ["ours", "low", "high", "n"]
NUMBERS = ["paper", *ESTIMATE, "gap_low", "gap_high", "p", "matters"]
ROUNDED = 0.005  # half a unit in the last digit of a reported mean
# The least differences that would matter. That of rates is less than the 6.3 points that the
# paper's text says a critic adds on Alpaca-7B (94.46 against 88.14).
RATE = 0.05
SPREADS = 0.2  # standard deviations over prompts: Cohen's small effect
SECONDS = 0.25  # of the reported seconds; other machines differ by more

# start of a table's name -> experiment that sweeps as it does
SWEEPS = {"lambda": "lambda", "ndk": "ndk", "latency": "compute"}


# --- which of our runs stands in which row --------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What one run holds under one configuration: `settings` has the names of `IDENTITY`.

    Without a run there are no lines.
    """

    settings: dict
    run: str = NOT_RUN
    lines: pd.DataFrame | None = None

    def is_of(self, row: dict) -> bool:
        """Say whether this cell has every setting that a row of the paper states."""
        return all(self.settings[name] == row[name] for name in IDENTITY if pd.notna(row[name]))


def cells(table: str, records: pd.DataFrame) -> list[Cell]:
    """Return the cells of records that a table may read, see `priority`, the first choice first.

    Cells of one priority are in the order of their runs' names. A multiplier, which every record
    has, is left out where the method does not use it.
    """
    if not len(records):
        return []
    lines = records.assign(priority=[priority(table, run) for run in records["run"]])
    lines = lines[(lines["critic_control"] == "none") & lines["priority"].notna()]
    lines = lines.sort_values(["priority", "run"])  # a stable sort, as of several columns always
    result = []
    for (*values, run), cell in lines.groupby([*IDENTITY, "run"], dropna=False, sort=False):
        settings = dict(zip(IDENTITY, values, strict=True))
        if "lagrangian" not in settings["method"]:
            settings["lagrange_multiplier"] = None
        result.append(Cell(settings, run, cell))
    return result


def priority(table: str, run: str) -> int | None:
    """Return how readily a table reads a run.

    0 for a sweep made for it, 1 for a run of no experiment, None for all others.
    """
    kind = table.partition("_")[0]
    if kind in SWEEPS:
        sweep = EXPERIMENTS[SWEEPS[kind]]
        if matches(run, [f"decode-sweep-{kind}-*", *sweep.runs, *sweep.borrowed]):
            return 0
    of_experiments = [pattern for each in EXPERIMENTS.values() for pattern in each.runs]
    return None if matches(run, of_experiments) else 1


def matches(run: str, patterns: Sequence[str]) -> bool:
    """Say whether the name of a run matches one of these patterns."""
    return any(fnmatchcase(run, pattern) for pattern in patterns)


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A kind of reported number, and the fields of our records that give it.

    Attributes
    ----------
    label : str
        For people, with the unit.
    kind : str
        ``rate`` (a share of prompts), ``score`` or ``seconds``.
    reported : str
        Column of `igcore.paper.reported`.
    fields : str
        Names of the fields of our records whose sum it is.
    """

    label: str
    kind: str
    reported: str
    fields: str

    def values(self, cell: Cell) -> pd.Series:
        """Return a number for every independent draw of a cell; unknown ones are left out."""
        lines = cell.lines
        if lines is None:
            return pd.Series(dtype=float)
        if self.fields == "status":
            return (lines["status"] == "verified_safe").astype(float)
        ordered = lines.sort_values("prompt_id", ignore_index=True)
        numbers = ordered[self.fields.split()].astype(float).sum(axis=1, skipna=False)
        if self.kind == "seconds":
            return _of_groups(numbers.dropna(), int(lines["group_size"].iloc[0]))
        return numbers.dropna()


def _of_groups(seconds: pd.Series, size: int) -> pd.Series:
    """Return a number for each group of prompts decoded together, which is one draw.

    Their mean is the mean over prompts, also where the last group is smaller: a ratio of two sums
    over groups, whose linear approximation has the variance of these numbers.
    """
    groups = seconds.groupby(seconds.index // size)
    weights = groups.count() / groups.count().mean()
    return groups.mean() + (weights - 1) * (groups.mean() - seconds.mean())


MEASURES = {  # start of the names of columns -> measure
    "safety": Measure("safe %", "rate", "safety_rate", "status"),
    "reward": Measure("reward", "score", "reward_mean", "reward"),
    "cost": Measure("cost", "score", "cost_mean", "cost"),
    "generation": Measure("s generating", "seconds", "generation_seconds", "generate_s"),
    "scoring": Measure("s scoring", "seconds", "scoring_seconds", "score_s"),
    "seconds": Measure("s", "seconds", "seconds", "generate_s score_s"),
    "helpfulness": Measure("helpfulness win %", "rate", "helpfulness_rate", "helpfulness"),
    "harmlessness": Measure("harmlessness win %", "rate", "harmlessness_rate", "harmlessness"),
}


def measures_of(table: str) -> dict[str, Measure]:
    """Return the measures of a table of the paper."""
    columns = set(reported(table))
    return {name: measure for name, measure in MEASURES.items() if measure.reported in columns}


# --- ours beside the paper's ----------------------------------------------------------------------


def estimate(values: pd.Series, kind: str) -> dict[str, float]:
    """Return ``ours``, the ends of its 95 % interval ``low`` and ``high``, and ``n``.

    The interval of a rate is Wilson's, in which half a win is half a count; that of a mean is
    `igcore.report.statistics.bootstrap_mean`. NaN where n is 0.
    """
    n = len(values)
    if not n:
        low = high = math.nan
    elif kind == "rate":
        low, high = proportion_confint(values.sum(), n, method="wilson")
    else:
        low, high = bootstrap_mean(values)
    return {
        "ours": float(values.mean()),
        "low": float(low),
        "high": float(high),
        "n": n,
    }


def rates_apart(ours: float, n: int, theirs: float, size: int) -> dict[str, float]:
    """Return the interval of a difference of two independent rates, and its p value.

    The difference is ours minus the paper's. Newcombe's interval, of two Wilson ones, at `LEVEL`;
    Fisher's exact test, because rates near 100 % leave few failures to count.
    """
    here, there = ours * n, round(theirs * size)
    low, high = confint_proportions_2indep(
        here, n, there, size, method="newcomb", compare="diff", alpha=1 - LEVEL
    )
    whole = round(here)  # half a win is half a count
    p = stats.fisher_exact([[whole, n - whole], [there, size - there]]).pvalue
    return {
        "gap_low": float(low),
        "gap_high": float(high),
        "p": float(p),
    }


def means_apart(values: pd.Series, theirs: float, spread: float, size: int) -> dict[str, float]:
    """Return the interval of a difference of two independent means, and its p value.

    The difference is ours minus the paper's. Welch's test at `LEVEL`. What rounding may have added
    to the difference is taken off it for p and added to the interval. Where no spread is reported,
    the paper's mean is taken to be as uncertain as ours. Fewer than two values, or equal ones,
    settle nothing: NaN.
    """
    n, gap = len(values), float(values.mean()) - theirs
    ours = values.var(ddof=1) / n
    other, size = (ours, n) if math.isnan(spread) else (spread**2 / size, size)
    if n < 2 or not ours:
        return dict.fromkeys(("gap_low", "gap_high", "p"), math.nan)
    error = math.sqrt(ours + other)
    freedom = error**4 / (ours**2 / (n - 1) + other**2 / (size - 1))
    half = stats.t.ppf(0.5 + LEVEL / 2, freedom) * error + ROUNDED
    p = 2 * stats.t.sf(max(0.0, abs(gap) - ROUNDED) / error, freedom)
    return {
        "gap_low": gap - half,
        "gap_high": gap + half,
        "p": float(p),
    }


def with_reported(name: str, row: dict, cell: Cell, size: int) -> dict[str, float]:
    """Return a reported number, ours (see `estimate`), and how far apart they are.

    ``matters`` is the least difference that would matter. What needs a run is left out without one.
    """
    measure = MEASURES[name]
    reported, spread = row[measure.reported], row.get(f"{name}_std", math.nan)
    values = measure.values(cell)
    numbers = {"paper": reported} | estimate(values, measure.kind)
    if not len(values):
        return numbers
    if measure.kind == "rate":
        difference = rates_apart(numbers["ours"], len(values), reported, size)
        return numbers | difference | {"matters": RATE}
    numbers |= means_apart(values, reported, spread, size)
    if measure.kind == "seconds":
        return numbers | {"matters": SECONDS * reported}
    known_spread = values.std(ddof=1) if math.isnan(spread) else spread
    return numbers | {"matters": SPREADS * known_spread}


def verdict(part: pd.DataFrame) -> np.ndarray:
    """Return what may be said of each reported number, one of `VERDICTS`.

    ``differs`` where a difference is resolved, however small; ``agrees`` where none is and every
    one that would matter is excluded.

    Parameters
    ----------
    part : DataFrame
        ``run``, Holm's ``p``, the interval ``gap_low`` to ``gap_high``, and ``matters``.
    """
    excluded = (-part["matters"] < part["gap_low"]) & (part["gap_high"] < part["matters"])
    rules = [part["run"] == NOT_RUN, part["p"] <= ALPHA, excluded]
    return np.select(rules, [NOT_RUN, DIFFERS, AGREES], UNRESOLVED)


def compared(table: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return one of the paper's tables of results with our numbers beside it, row by row.

    Parameters
    ----------
    table : str
        One of `igcore.paper.TABLES`, but for `igcore.paper.HYPERPARAMETERS`.
    records : DataFrame
        Lines as `igcore.report.load.load_runs` returns them, of several runs and of any settings;
        for ``win_rates``, as `igcore.paper.report.judged` does. None at all is allowed.

    Returns
    -------
    DataFrame
        `IDENTITY` as reported, ``printed_as``, and ``run``, the run that was read. A cell must have
        all settings of the row; of several, the first of `cells` is read. For each of
        `measures_of`: ``_paper``, ``_ours``, ``_low``, ``_high`` and ``_n`` as in `estimate`
        (shares, rewards, costs, seconds; n counts groups of prompts for seconds), ``_gap_low`` and
        ``_gap_high``, the `LEVEL` interval of ours minus the paper's, ``_p``, adjusted by Holm over
        all numbers of the table, ``_matters``, and ``_verdict``, one of `VERDICTS`.
    """
    rows = reported(table)
    candidates = cells(table, records)
    configurations = rows.to_dict("records")
    chosen = []
    for row in configurations:
        fitting = [cell for cell in candidates if cell.is_of(row)]
        chosen.append(fitting[0] if fitting else Cell(row))
    names = ["win_rates"] * len(rows) if table == "win_rates" else rows["prompts"]
    sizes = sample_sizes()["n"].reindex(names).astype(int)
    parts = {}
    for name in measures_of(table):
        numbers = map(partial(with_reported, name), configurations, chosen, sizes)
        parts[name] = pd.DataFrame(numbers, columns=NUMBERS)
    p = holm(pd.concat({name: part["p"] for name, part in parts.items()}))
    result = rows[[*IDENTITY, "printed_as"]].assign(run=[cell.run for cell in chosen])
    for name, part in parts.items():
        part["p"] = p[name]
        part["verdict"] = verdict(part.assign(run=result["run"]))
        result = result.join(part.add_prefix(f"{name}_"))
    return result
