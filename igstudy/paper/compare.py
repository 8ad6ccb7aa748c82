"""Rows of the paper beside ours.

If a policy of the paper was run, a run is compared with the rows that have all of its settings.
Otherwise an embedded policy replaces it: a smaller model under another cost has other rates and
rewards, and what it can share with the paper is the order of methods, which is what the paper's
claims are about.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..report import tables
from ..report.experiments import EXPERIMENTS, RunPatterns, matches
from ..report.load import each_finished
from ..report.sources import Source, of_runs
from ..report.statistics import bootstrap_mean, wilson
from . import IDENTITY, INTEGER_TYPES, PAPER_SETTINGS, contents, measured, reported

NOT_RUN = "not run"
RAW, CHAT = "smollm2-raw", "smollm2-chat"
# policy of the paper -> the embedded one that replaces it: unaligned or aligned, as it is
STANDS_FOR = {"alpaca-7b": RAW, "vicuna-7b": RAW, "beaver-7b-v3": CHAT, "llama-3.1-8b": CHAT}
TIMED = {"latency": RAW}  # table -> the one embedded policy whose seconds are measured
ALIKE = ["policy", "prompts", "method"]  # rows that differ in their settings only
FIELDS = [  # of a line; traces of a whole profile would fill the memory
    *IDENTITY,
    *"run critic_control prompt_id group_size status reward cost generate_s score_s".split(),
]


# --- which of our runs belongs to which row -------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What one run holds under one configuration: `settings` has the names of `IDENTITY`.

    Without a run there are no lines.
    """

    settings: dict[str, Any]
    run: str = NOT_RUN
    lines: pd.DataFrame | None = None


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
    sweep = EXPERIMENTS.get(kind, RunPatterns([]))  # an experiment that sweeps as the table does
    if matches(run, [f"decode-sweep-{kind}-*", *sweep.runs, *sweep.borrowed]):
        return 0
    of_experiments = [pattern for each in EXPERIMENTS.values() for pattern in each.runs]
    return None if matches(run, ["decode-sweep-*", *of_experiments]) else 1


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperMeasure:
    """A kind of reported number, and the fields of our records that give it.

    Attributes
    ----------
    kind : str
        ``rate`` (a share of prompts), ``score`` or ``seconds``.
    reported : str
        Column of `igstudy.paper.reported`.
    fields : str
        Names of the fields of our records whose sum it is.
    """

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
    "safety": PaperMeasure("rate", "safety_rate", "status"),
    "reward": PaperMeasure("score", "reward_mean", "reward"),
    "cost": PaperMeasure("score", "cost_mean", "cost"),
    "generation": PaperMeasure("seconds", "generation_seconds", "generate_s"),
    "scoring": PaperMeasure("seconds", "scoring_seconds", "score_s"),
    "seconds": PaperMeasure("seconds", "seconds", "generate_s score_s"),
}


def measures_of(table: str) -> dict[str, PaperMeasure]:
    """Return the measures of a table of the paper."""
    columns = set(reported(table))
    return {name: measure for name, measure in MEASURES.items() if measure.reported in columns}


# --- ours beside the paper's ----------------------------------------------------------------------


def estimate(values: pd.Series, kind: str) -> dict[str, float]:
    """Return ``ours``, the ends of its 95 % interval ``low`` and ``high``, and ``n``.

    The interval of a rate is Wilson's, that of a mean is
    `igstudy.report.statistics.bootstrap_mean`; one number has none (NaN). NaN where n is 0.
    """
    n = len(values)
    if n and kind == "rate":
        low, high = wilson(int(values.sum()), n)
    else:
        low, high = bootstrap_mean(values) if n > 1 else (math.nan, math.nan)
    return {"ours": float(values.mean()), "low": float(low), "high": float(high), "n": n}


def beside(table: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return one of the paper's tables of results with our numbers beside it, row by row.

    Parameters
    ----------
    table : str
        One of `igstudy.paper.MEASURED`.
    records : DataFrame
        Lines as `igstudy.report.load.load_runs` returns them, of several runs and of any settings.
        None at all is allowed. Where a policy is the paper's, a run must have all settings of a
        row. Else the policies of `STANDS_FOR` stand for the paper's.

    Returns
    -------
    DataFrame
        A row for every row of the paper: `IDENTITY` and ``printed_as`` as reported, ``standing``
        (the policy here), ``run``, and the settings of the run, ``ours_`` and their names, see
        `nearest`. For each of `measures_of` there are ``_paper``,
        ``_ours``, ``_low``, ``_high`` and ``_n`` (shares, rewards, costs, seconds; n counts groups
        of prompts for seconds).
    """
    candidates, result = cells(table, records), []
    rows, measures = reported(table), measures_of(table)
    policies = set(records.get("policy", ()))
    is_repeated = not policies or bool(policies & set(measured()["policy"]))
    for row in rows.to_dict("records"):
        if is_repeated:
            wanted = {name: row[name] for name in IDENTITY if pd.notna(row[name])}
        else:
            standing = TIMED.get(table, STANDS_FOR[row["policy"]])
            wanted = {"policy": standing, "method": row["method"]}
        found = [cell for cell in candidates if cell.settings.items() >= wanted.items()]
        if not is_repeated:
            alike = rows[ALIKE].eq([row[name] for name in ALIKE]).all(axis=1)
            found = nearest(row, rows[alike], found)
        cell = found[0] if found else Cell({})
        made = {name: row[name] for name in [*IDENTITY, "printed_as"]}
        made |= {"standing": wanted["policy"], "run": cell.run}
        made |= {f"ours_{name}": cell.settings.get(name) for name in PAPER_SETTINGS}
        for name, measure in measures.items():
            numbers = {"paper": row[measure.reported]}
            numbers |= estimate(measure.values(cell), measure.kind)
            made |= {f"{name}_{part}": number for part, number in numbers.items()}
        result.append(made)
    types = INTEGER_TYPES | {f"ours_{name}": kind for name, kind in INTEGER_TYPES.items()}
    of_weights = dict.fromkeys(["lagrange_multiplier", "ours_lagrange_multiplier"], float)
    return pd.DataFrame(result).astype(types | of_weights)


def nearest(row: dict[str, Any], printed: pd.DataFrame, candidates: list[Cell]) -> list[Cell]:
    """Return the cells that are comparable with a row of the paper.

    A multiplier must be the row's. Of all other settings that the row states, the smallest value
    here stands for the smallest there, the next for the next, and so on: N = 4 and 8 stand for 64
    and 128.

    Parameters
    ----------
    printed : DataFrame
        The rows of this policy, prompt set and method.
    candidates : list of Cell
        Of the method and the policy that stands here.
    """
    for name in PAPER_SETTINGS:
        if pd.isna(row[name]):
            continue
        value = row[name]
        if name != "lagrange_multiplier":
            theirs = sorted(printed[name].dropna().unique())
            ours = sorted({cell.settings[name] for cell in candidates})
            place = theirs.index(value)
            value = ours[place] if place < len(ours) else None
            printed = printed[printed[name] == row[name]]
        candidates = [cell for cell in candidates if cell.settings[name] == value]
    return candidates


# --- what a profile holds -------------------------------------------------------------------------


def load(*profiles: str) -> pd.DataFrame:
    """Return the lines of the finished runs of profiles, and print why others are left out.

    The lines have the columns ``profile`` and ``run``, and neither texts nor traces.
    """
    parts = [
        lines.reindex(columns=FIELDS).assign(profile=name)
        for name in profiles
        for lines in each_finished(name)
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# --- the tables, and how people read them ---------------------------------------------------------


def short(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of a table of `beside` for people.

    They are the settings that the paper's table states, and each measure: reported, and ours with
    its interval. What no row has is left out.
    """
    about = ["policy", "prompts", "method", "standing", *contents().loc[table, "states"].split()]
    parts = "paper", "ours", "low", "high"
    numbers = [f"{name}_{part}" for name in measures_of(table) for part in parts]
    return frame[[*about, *numbers]].dropna(axis="columns", how="all")


def write(made: dict[str, pd.DataFrame], figures: Path, records: pd.DataFrame) -> None:
    """Write tables of `beside`, by name, as ``tables/paper_<table>`` below a folder.

    See `igstudy.report.tables.write`.
    """
    for table, frame in made.items():
        stem = figures / "tables" / f"paper_{table}"
        tables.write(frame, stem, sources(frame, records), short(table, frame))


def sources(frame: pd.DataFrame, records: pd.DataFrame) -> dict[str, Source]:
    """Return the runs behind a table, see `igstudy.report.sources.of_runs`.

    They are those that it names.
    """
    records = records.reindex(columns=["profile", "run"]).drop_duplicates()
    records = records[records["run"].isin(frame["run"])]
    result: dict[str, Source] = {}
    for profile, rows in records.groupby("profile"):
        result |= of_runs(profile, rows["run"])
    return result
