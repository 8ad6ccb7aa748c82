"""The paper's ten tables for a profile: its runs are read, set beside the print, and written.

`igcore.paper.compare` and `igcore.paper.hyperparameters` make the numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..errors import RunError
from ..folders import root
from ..judge import JudgeParams
from ..judge.spec import ASPECTS
from ..report import tables
from ..report.experiment_tables import LAMBDAS, SIZES
from ..report.experiments import EXPERIMENTS
from ..report.load import each_finished, load_runs
from ..report.replay import REPLAYED, replay_best_of_n
from ..report.sources import of_runs
from ..report.verdicts import pairs_of, questions_of, read, verdicts
from . import IDENTITY, SETTINGS, TABLES, contents, swept
from . import hyperparameters as hyper
from .cells import matches
from .compare import (
    NOT_RUN,
    UNRESOLVED,
    VERDICTS,
    Measure,
    claims,
    compared,
    measures_of,
    ours_like,
)

READ = [  # of a line; traces of a whole profile would fill the memory
    *IDENTITY,
    *("run", "critic_control", "prompt_id"),
    *("group_size", "rounds", "max_new_tokens", "value_steps", "value_step_size"),
    *("status", "reward", "cost", "generate_s", "score_s"),
]
BASELINE = "base"  # of the printed win rates
POINTS = {"win": 1.0, "tie": 0.5, "loss": 0.0}
SYMBOLS = {"n_samples": "N", "block_size": "d", "keep": "K", "lagrange_multiplier": "lambda"}


# --- what a profile holds -------------------------------------------------------------------------


@dataclass
class Found:
    """What was run.

    Attributes
    ----------
    decoded, judged, critics : DataFrame
        Of the functions of these names, with the columns ``profile`` and ``run``; each may be
        empty.
    left_out : list of str
        Why something was not read.
    """

    decoded: pd.DataFrame
    judged: pd.DataFrame
    critics: pd.DataFrame
    left_out: list[str]


def load(profile: str) -> Found:
    """Read the finished runs of a profile; what has not finished is left out.

    Those of the profile for which it sweeps (`swept.MAIN`) come first.
    """
    left_out: list[str] = []
    profiles = [name for name in (swept.MAIN.get(profile), profile) if name]
    lines = _below([decoded(name, left_out) for name in profiles])
    verdicts_of = _below([judged(name, left_out) for name in profiles])
    return Found(lines, verdicts_of, critics(profile), left_out)


def decoded(profile: str, left_out: list[str]) -> pd.DataFrame:
    """Return the lines of all finished decode runs, without their texts and traces.

    Of Best-of-N's sweep it returns every point.
    """
    parts = []
    for lines in each_finished(profile, left_out):
        parts.append(replayed(lines).reindex(columns=READ).assign(profile=profile))
    return _below(parts)


def replayed(lines: pd.DataFrame) -> pd.DataFrame:
    """Return a run as all the points that are read off it.

    Only the experiment that reads the sweep of Best-of-N off one run has several; any other is
    returned as it is.
    """
    of_sweep = matches(lines["run"].iloc[0], EXPERIMENTS["lambda"].runs)
    if not of_sweep or set(lines["method"]) != {REPLAYED}:
        return lines
    drawn = [n for n in SIZES if n <= lines["n_samples"].min()]
    return _below([replay_best_of_n(lines, n, multiplier) for n in drawn for multiplier in LAMBDAS])


def judged(profile: str, left_out: list[str]) -> pd.DataFrame:
    """Return a line for every pair of answers that was judged against the base model.

    It has `IDENTITY`, and points for each aspect.

    Points are 1 for a win, .5 for a tie and 0 for a loss; NaN where the reply could not be read.
    ``run`` is the judge's, and ``pattern`` says which runs it read.
    """
    parts = []
    for manifest in sorted((root() / "runs" / profile / "judge").glob("*/manifest.json")):
        try:
            parts.append(_judged(profile, manifest))
        except RunError as error:
            left_out.append(str(error))
    return _below(parts)


def _judged(profile: str, manifest: Path) -> pd.DataFrame:
    params = JudgeParams(**json.loads(manifest.read_text(encoding="utf-8"))["params"])
    if params.baseline != BASELINE:
        raise RunError(
            f"{manifest.parent} compares answers with {params.baseline}; the paper's table "
            f"does so with {BASELINE}"
        )
    lines = load_runs(profile, pattern=params.pattern)
    pairs, scores = pairs_of(lines, params), read(manifest.with_name("verdicts.jsonl"))
    if questions_of(pairs).keys() - scores.keys():
        raise RunError(
            f"answers that {manifest.parent} has judged were decoded anew; run notebook 60 "
            f"with its parameters again"
        )
    said = verdicts(pairs, scores, dict.fromkeys(ASPECTS, params.run))
    key = ["policy", "prompts", "method", "prompt_id"]
    points = (
        said.assign(points=said["verdict"].map(POINTS))
        .pivot(index=key, columns="aspect", values="points")
        .reset_index()
    )
    about = {"profile": profile, "run": f"judge {params.run}", "pattern": params.pattern}
    return points.merge(lines[[*key, *SETTINGS, "critic_control"]].assign(**about), on=key)


def critics(profile: str) -> pd.DataFrame:
    """Return the settings of every critic of the finished runs of notebook 20, a row each."""
    folders = [
        path.parent for path in (root() / "runs" / profile / "critics").glob("*/*/critic.json")
    ]
    finished = sorted(folder for folder in folders if (folder.parent / "manifest.json").exists())
    configs = [
        json.loads((folder / "params.json").read_text(encoding="utf-8"))["config"]
        for folder in finished
    ]
    about = [{"profile": profile, "run": f"critics/{folder.parent.name}"} for folder in finished]
    return pd.DataFrame([config | one for config, one in zip(configs, about, strict=True)])


def _below(parts: list[pd.DataFrame]) -> pd.DataFrame:
    found = [part for part in parts if len(part)]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


# --- the tables, and how people read them ---------------------------------------------------------


def paper_tables(found: Found, names: Sequence[str] = TABLES) -> dict[str, pd.DataFrame]:
    """Return tables of `igcore.paper.TABLES` by name.

    They stand beside the print where a policy of the paper's was run; else they are ours alone.
    """
    beside = claims(found.decoded)
    made = {}
    for table in names:
        lines = _records(table, found)
        if table in hyper.TABLES:
            settings = hyper.settings(table, lines)
            made[table] = settings if beside else settings.drop(columns=["paper", "verdict"])
        elif beside:
            made[table] = compared(table, lines)
        else:
            policies = list(dict.fromkeys(found.decoded["policy"]))
            made[table] = ours_like(table, lines, policies)
    return made


def _records(table: str, found: Found) -> pd.DataFrame:
    others = {"win_rates": found.judged, "critic_hyperparameters": found.critics}
    return others.get(table, found.decoded)


def short(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of `paper_tables` as people read it, all cells text.

    It has the settings that the print states; rates are in per cent.

    Of each measure the printed number, ours with its 95 % interval, and the verdict in a word, one
    beside the other.
    """
    if table in hyper.TABLES:
        return frame.rename(columns={"printed_as": "name"})
    states = contents().set_index("table").loc[table, "states"].split()
    parts = [frame[["policy", "prompts", "method"]].astype(object).fillna(tables.MISSING)]
    parts += [frame[name].map(_setting).rename(SYMBOLS[name]) for name in states]
    for place, (name, measure) in enumerate(measures_of(table).items()):
        prefix = f"{name}_"
        of = frame.filter(regex=f"^{prefix}")
        of = of.set_axis([column.removeprefix(prefix) for column in of], axis=1)
        if not place:
            parts.append(of["n"].astype(str))
        parts += _for_people(measure, of, frame["run"])
    return pd.concat(parts, axis=1)


def _setting(value: float) -> str:
    return tables.MISSING if pd.isna(value) else f"{value:g}"


def _for_people(measure: Measure, of: pd.DataFrame, run: pd.Series) -> list[pd.Series]:
    times, digits = (100, 1) if measure.is_rate else (1, 3)
    ends = (of[["ours", "low", "high"]] * times).to_numpy()
    ours = pd.Series(
        [f"{x:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" for x, low, high in ends]
    )
    ours = ours.where(of["ours"].notna(), tables.MISSING)
    if "verdict" not in of:
        return [ours.where(run != NOT_RUN, NOT_RUN).rename(f"{measure.label} [95 %]")]
    paper = (of["paper"] * times).map("{:g}".format).rename(f"{measure.label}, paper")
    return [paper, ours.rename("ours [95 %]"), of["verdict"].replace(UNRESOLVED, "unresolved")]


def counts(made: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return how many numbers of each table got which verdict.

    Of tables without verdicts, how many rows were run and were not.
    """
    rows = []
    for table, frame in made.items():
        said = frame[[name for name in frame if name.endswith("verdict")]].stack()
        run = frame["ours" if "ours" in frame else "run"]
        if len(said):
            of = {verdict: int((said == verdict).sum()) for verdict in VERDICTS}
        else:
            of = {"run": int((run != NOT_RUN).sum()), NOT_RUN: int((run == NOT_RUN).sum())}
        rows.append({"table": table, "rows": len(frame)} | of)
    return pd.DataFrame(rows)


def write(made: dict[str, pd.DataFrame], figures: Path, found: Found) -> list[Path]:
    """Write the tables made of what was found as ``tables/paper_<table>`` below a folder.

    See `igcore.report.tables.write`.
    """
    paths = []
    for table, frame in made.items():
        stem = figures / "tables" / f"paper_{table}"
        paths += tables.write(frame, stem, sources(table, frame, found), short(table, frame))
    return paths


def sources(table: str, frame: pd.DataFrame, found: Found) -> dict[str, dict]:
    """Return the runs of which a table was made, see `igcore.report.sources.of_runs`.

    They are those that it names, or all where it names none.

    Verdicts of a judge have the runs whose answers it read beside it.
    """
    read = _records(table, found).reindex(columns=["profile", "run", "pattern"]).drop_duplicates()
    named = read[read["run"].isin(frame["run"])] if "run" in frame else read
    made = {}
    for profile, of in named.groupby("profile"):
        folders = of["run"].str.replace("^judge ", "judge/", regex=True)
        made |= of_runs(profile, [*folders, *of["pattern"].dropna()])
    return made
