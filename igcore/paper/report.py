"""The paper's tables of results for a profile: its runs are read, set beside them, and written.

`igcore.paper.compare` makes the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..report import tables
from ..report.experiments import EXPERIMENTS, LAMBDAS, SIZES
from ..report.load import each_finished
from ..report.replay import REPLAYED, replay_best_of_n
from ..report.sources import of_runs
from . import IDENTITY, MEASURED, stated_settings, swept
from .compare import NOT_RUN, Measure, beside, matches, measures_of

FIELDS = [  # of a line; traces of a whole profile would fill the memory
    *IDENTITY,
    *"run critic_control prompt_id group_size status reward cost generate_s score_s".split(),
]
SYMBOLS = {"n_samples": "N", "block_size": "d", "keep": "K", "lagrange_multiplier": "lambda"}


# --- what a profile holds -------------------------------------------------------------------------


@dataclass
class Results:
    """What was run.

    Attributes
    ----------
    decoded : DataFrame
        As `decoded` returns it, with the columns ``profile`` and ``run``; may be empty.
    left_out : list of str
        Why something was not read.
    """

    decoded: pd.DataFrame
    left_out: list[str]


def load(profile: str) -> Results:
    """Read the finished runs of a profile; what has not finished is left out.

    The runs of the profile for which this one sweeps (`swept.MAIN`) come first.
    """
    left_out: list[str] = []
    profiles = [swept.MAIN[profile], profile] if profile in swept.MAIN else [profile]
    return Results(_below([decoded(name, left_out) for name in profiles]), left_out)


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


def paper_tables(results: Results, names: Sequence[str] = MEASURED) -> dict[str, pd.DataFrame]:
    """Return tables of `igcore.paper.MEASURED` by name, see `igcore.paper.compare.beside`."""
    return {table: beside(table, results.decoded) for table in names}


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


def write(made: dict[str, pd.DataFrame], figures: Path, results: Results) -> list[Path]:
    """Write tables of `paper_tables` as ``tables/paper_<table>`` below a folder.

    See `igcore.report.tables.write`.
    """
    paths = []
    for table, frame in made.items():
        stem = figures / "tables" / f"paper_{table}"
        paths += tables.write(frame, stem, sources(frame, results), short(table, frame))
    return paths


def sources(frame: pd.DataFrame, results: Results) -> dict[str, dict]:
    """Return the runs of which a table was made, see `igcore.report.sources.of_runs`.

    They are those that it names, or all where it names none, as a table of orders does.
    """
    records = results.decoded.reindex(columns=["profile", "run"]).drop_duplicates()
    if "run" in frame:
        records = records[records["run"].isin(frame["run"])]
    result = {}
    for profile, rows in records.groupby("profile"):
        result |= of_runs(profile, rows["run"])
    return result
