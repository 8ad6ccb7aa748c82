"""Rows of the paper beside ours.

Where a policy of the paper was run, a run stands beside the rows that have all of its settings.
Else another policy stands for it: a smaller model under another cost has other rates and rewards,
and what it can share with the paper is the order of methods, which is what the paper's claims are
about.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
from statsmodels.stats.proportion import proportion_confint

from ..report import tables
from ..report.experiments import EXPERIMENTS, LAMBDAS, SIZES
from ..report.load import each_finished
from ..report.replay import REPLAYED, replay_best_of_n
from ..report.sources import of_runs
from ..report.statistics import bootstrap_mean
from . import IDENTITY, MEASURED, SETTINGS, WHOLE, measured, reported, stated_settings, swept

NOT_RUN = "not run"
EMBEDDED = RAW, CHAT = "smollm2-raw", "smollm2-chat"
# policy of the paper -> the embedded one that stands for it: unaligned or aligned, as it is
STANDS_FOR = {"alpaca-7b": RAW, "vicuna-7b": RAW, "beaver-7b-v3": CHAT, "llama-3.1-8b": CHAT}
TIMED = {"latency": RAW}  # table -> the one embedded policy whose seconds are measured
ALIKE = ["policy", "prompts", "method"]  # rows that differ in their settings only
FIELDS = [  # of a line; traces of a whole profile would fill the memory
    *IDENTITY,
    *"run critic_control prompt_id group_size status reward cost generate_s score_s".split(),
]
SYMBOLS = {"n_samples": "N", "block_size": "d", "keep": "K", "lagrange_multiplier": "lambda"}
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
    return None if matches(run, ["decode-sweep-*", *of_experiments]) else 1


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


def beside(table: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return one of the paper's tables of results with our numbers beside it, row by row.

    Parameters
    ----------
    table : str
        One of `igcore.paper.MEASURED`.
    records : DataFrame
        Lines as `igcore.report.load.load_runs` returns them, of several runs and of any settings.
        None at all is allowed. Where a policy is the paper's, a run must have all settings of a
        row. Else each policy stands for all of the paper's; where there are none but embedded ones,
        those of `STANDS_FOR` do.

    Returns
    -------
    DataFrame
        A row for every row of the paper and policy that stands for its own: `IDENTITY` and
        ``printed_as`` as reported, ``standing`` (the policy), ``run``, and the settings of the run,
        ``ours_`` and their names, see `nearest`. For each of `measures_of` there are ``_paper``,
        ``_ours``, ``_low``, ``_high`` and ``_n`` (shares, rewards, costs, seconds; n counts groups
        of prompts for seconds).
    """
    candidates = cells(table, records)
    policies = list(records["policy"].unique()) if len(records) else []
    rows, measures, result = reported(table), measures_of(table), []
    is_repeated = not policies or bool(set(policies) & set(measured()["policy"]))
    is_embedded = set(policies) <= set(EMBEDDED)
    for row in rows.to_dict("records"):
        if is_repeated:
            standing = [row["policy"]]
        elif is_embedded:
            standing = [TIMED.get(table, STANDS_FOR[row["policy"]])]
        else:
            standing = policies
        for policy in standing:
            if is_repeated:
                found = next((cell for cell in candidates if cell.is_of(row)), None)
            else:
                alike = rows[ALIKE].eq([row[name] for name in ALIKE]).all(axis=1)
                wanted = {"policy": policy, "method": row["method"]}
                of_method = [cell for cell in candidates if cell.settings.items() >= wanted.items()]
                found = nearest(row, rows[alike], of_method)
            cell = found or Cell({})
            made = {name: row[name] for name in [*IDENTITY, "printed_as"]}
            made |= {"standing": policy, "run": cell.run}
            made |= {f"ours_{name}": cell.settings.get(name) for name in SETTINGS}
            for name, measure in measures.items():
                numbers = {"paper": row[measure.reported]}
                numbers |= estimate(measure.values(cell), measure.kind)
                made |= {f"{name}_{part}": number for part, number in numbers.items()}
            result.append(made)
    types = WHOLE | {f"ours_{name}": kind for name, kind in WHOLE.items()}
    of_weights = dict.fromkeys(["lagrange_multiplier", "ours_lagrange_multiplier"], float)
    return pd.DataFrame(result).astype(types | of_weights)


def nearest(row: dict, printed: pd.DataFrame, candidates: Sequence[Cell]) -> Cell | None:
    """Return the cell that stands for a row of the paper, None where there is none.

    A multiplier must be the row's. Of all other settings that the row states, the smallest value
    here stands for the smallest there, the next for the next, and so on: N = 4 and 8 stand for 64
    and 128.

    Parameters
    ----------
    printed : DataFrame
        The rows of this policy, prompt set and method.
    candidates : sequence of Cell
        Of the method and the policy that stands here, the first choice first.
    """
    for name in SETTINGS:
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
    return candidates[0] if candidates else None


# --- what a profile holds -------------------------------------------------------------------------


def load(profile: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the lines of the finished runs of a profile, and why others are left out.

    The lines have the columns ``profile`` and ``run``. Those of the profile for which this one
    sweeps (`swept.MAIN`) come first.
    """
    left_out: list[str] = []
    profiles = [swept.MAIN[profile], profile] if profile in swept.MAIN else [profile]
    return _below([decoded(name, left_out) for name in profiles]), left_out


def decoded(profile: str, left_out: list[str]) -> pd.DataFrame:
    """Return the lines of all finished decode runs, without their texts and traces.

    Of Best-of-N's sweep it returns every point.
    """
    parts = [replayed(lines) for lines in each_finished(profile, left_out)]
    return _below([part.reindex(columns=FIELDS).assign(profile=profile) for part in parts])


def replayed(lines: pd.DataFrame) -> pd.DataFrame:
    """Return a run as all the points that are read off it.

    Only the experiment that reads the sweep of Best-of-N off one run has several; any other is
    returned as it is.
    """
    of_sweep = matches(lines["run"].iloc[0], EXPERIMENTS["lambda"].runs)
    if not of_sweep or set(lines["method"]) != {REPLAYED}:
        return lines
    sizes = [n for n in SIZES if n <= lines["n_samples"].min()]
    return _below([replay_best_of_n(lines, n, multiplier) for n in sizes for multiplier in LAMBDAS])


def _below(parts: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


# --- the tables, and how people read them ---------------------------------------------------------


def paper_tables(records: pd.DataFrame, names: Sequence[str] = MEASURED) -> dict[str, pd.DataFrame]:
    """Return tables of `igcore.paper.MEASURED` by name, see `beside`."""
    return {table: beside(table, records) for table in names}


def short(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of `paper_tables` as people read it, all cells text.

    The method has the settings that the paper's table states, printed / ours where these differ. A
    measure has one column: the reported number / ours with its 95 % interval. Rates are in per
    cent. What no run has is left out.
    """
    measures = measures_of(table)
    settings = [_setting(name, frame) for name in stated_settings(table)]
    named = [", ".join(filter(None, texts)) for texts in zip(*settings, strict=True)]
    methods = [
        f"{method} ({setting})" if setting else method
        for method, setting in zip(frame["method"], named or [""] * len(frame), strict=True)
    ]
    n = frame[f"{next(iter(measures))}_n"].astype(str)
    shown = {
        "system": frame["policy"] + " on " + frame["prompts"],
        "method": pd.Series(methods, frame.index, dtype=object),
        "ours": frame["standing"] + ", n " + n,
    }
    for name, measure in measures.items():
        if frame[f"{name}_ours"].notna().any():
            shown[f"{measure.label}: paper / ours [95 %]"] = _paper_and_ours(name, measure, frame)
    return pd.DataFrame(shown)


def _setting(name: str, frame: pd.DataFrame) -> list[str]:
    """Return a setting of each row as text; empty where the row has none."""
    numbers = frame[name].astype(float).map("{:g}".format)
    if name != "lagrange_multiplier":
        ours = frame[f"ours_{name}"].astype(float).map(" / {:g}".format)
        numbers += ours.where(frame[f"ours_{name}"].notna(), "")
    return (f"{SYMBOLS[name]} " + numbers).where(frame[name].notna(), "").tolist()


def _paper_and_ours(name: str, measure: Measure, frame: pd.DataFrame) -> pd.Series:
    """Return the reported number and ours of each row as one text."""
    times, digits = (100, 1) if measure.kind == "rate" else (1, 3)
    numbers = frame[[f"{name}_ours", f"{name}_low", f"{name}_high"]] * times
    texts = [
        f"{ours:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
        for ours, low, high in numbers.to_numpy()
    ]
    is_there = frame[f"{name}_ours"].notna()
    ours = pd.Series(texts, frame.index, dtype=object).where(is_there, tables.MISSING)
    ours = ours.where(frame["run"] != NOT_RUN, NOT_RUN)
    paper = (frame[f"{name}_paper"] * times).map("{:g}".format)
    return paper.where(frame[f"{name}_paper"].notna(), tables.MISSING) + " / " + ours


def write(made: dict[str, pd.DataFrame], figures: Path, records: pd.DataFrame) -> list[Path]:
    """Write tables of `paper_tables` as ``tables/paper_<table>`` below a folder.

    See `igcore.report.tables.write`.
    """
    paths = []
    for table, frame in made.items():
        stem = figures / "tables" / f"paper_{table}"
        paths += tables.write(frame, stem, sources(frame, records), short(table, frame))
    return paths


def sources(frame: pd.DataFrame, records: pd.DataFrame) -> dict[str, dict]:
    """Return the runs of which a table was made, see `igcore.report.sources.of_runs`.

    They are those that it names, or all where it names none, as a table of orders does.
    """
    records = records.reindex(columns=["profile", "run"]).drop_duplicates()
    if "run" in frame:
        records = records[records["run"].isin(frame["run"])]
    result = {}
    for profile, rows in records.groupby("profile"):
        result |= of_runs(profile, rows["run"])
    return result
