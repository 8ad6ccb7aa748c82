"""The experiments of params/ablations: which runs each reads, and which settings it varies.

Notebook 45 has a `section` for each.
"""

import fnmatch
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import ParameterError, RunError
from .experiment_tables import (
    SWEPT,
    Tables,
    budget_tables,
    compute_tables,
    critic_search_tables,
    factorial_tables,
    lambda_tables,
    ndk_tables,
    over_refusal_tables,
    retries_tables,
    seeds_tables,
    sweep_tables,
    tune_tables,
)
from .sections import Section
from .sources import of_runs


@dataclass(frozen=True)
class Experiment:
    """One section.

    Attributes
    ----------
    tables : callable
        From the lines to its tables.
    runs : sequence of str
        Patterns of the names of its own runs; without any of them it was not run.
    borrowed : sequence of str
        Patterns of runs of other experiments that it reads as well.
    varied : sequence of str
        Settings that tell the rows of its tables apart.
    """

    tables: Callable[[pd.DataFrame], Tables]
    runs: Sequence[str]
    borrowed: Sequence[str] = ()
    varied: Sequence[str] = ()


EXPERIMENTS = {
    "lambda": Experiment(
        lambda_tables,
        ["decode-lambda-*"],
        ["decode-ndk-*-block_size-8-keep-2"],
        ["n_samples", "lagrange_multiplier"],
    ),
    "ndk": Experiment(ndk_tables, ["decode-ndk-*"], varied=["n_samples", "block_size", "keep"]),
    "budget": Experiment(budget_tables, ["decode-budget-*"], ["decode-seeds-seed-0"], ["budget"]),
    "retries": Experiment(retries_tables, ["decode-retries-*"], varied=["diversity", "seed"]),
    "factorial": Experiment(
        factorial_tables,
        ["decode-factorial-*"],
        ["decode-seeds-*"],
        ["n_samples", "accounting", "rounds", "diversity", "seed"],
    ),
    "seeds": Experiment(seeds_tables, ["decode-seeds-*"], varied=["seed"]),
    "compute": Experiment(
        compute_tables, ["decode-compute-*"], ["decode-seeds-seed-0"], ["n_samples"]
    ),
    "over_refusal": Experiment(over_refusal_tables, ["decode-benign"]),
    "sweep": Experiment(sweep_tables, ["decode-sweep-*"], varied=SWEPT),
    "tune": Experiment(tune_tables, ["decode-tune-*"]),
    "critic_search": Experiment(
        critic_search_tables, ["decode-finals-*", "decode-shuffled-*", "decode-intermediate-*"]
    ),
}


def section(name: str, records: pd.DataFrame, figures: Path, profile: str) -> Section:
    """Make and write the tables of an experiment.

    Parameters
    ----------
    name : str
        A key of `EXPERIMENTS`.
    records : DataFrame
        Lines of the finished runs of a profile, as `igcore.report.load.load_finished` returns them;
        there may be none.
    figures : Path
        Folder of pictures, with a subfolder ``tables``.
    profile : str
        Whose runs they are.

    Returns
    -------
    Section
        Without tables when none of the experiment's own runs is there, or those that are there make
        none; it then says why.
    """
    experiment = EXPERIMENTS[name]
    lines = _matching(records, [*experiment.runs, *experiment.borrowed])
    found, why = {}, ""
    try:
        found = experiment.tables(lines) if len(_matching(records, experiment.runs)) else {}
    except (RunError, ParameterError) as error:
        # such as a reference that has not finished, which other experiments do not need
        why = str(error)
    sources = of_runs(profile, lines["run"]) if found else {}
    return Section(name, figures, found, experiment.varied, why, sources).write()


def sizes(records: pd.DataFrame) -> pd.DataFrame:
    """Return for every experiment how many of its own runs and prompts are among `records`.

    The prompts are the fewest and the most of one run.
    """
    rows = []
    for name, experiment in EXPERIMENTS.items():
        prompts = _matching(records, experiment.runs).groupby("run")["prompt_id"].nunique()
        rows.append(
            {
                "experiment": name,
                "runs": len(prompts),
                "fewest prompts": prompts.min(),
                "most prompts": prompts.max(),
            }
        )
    return pd.DataFrame(rows).astype(dict.fromkeys(["fewest prompts", "most prompts"], "Int64"))


def _matching(records: pd.DataFrame, patterns: Collection[str]) -> pd.DataFrame:
    chosen = [
        any(fnmatch.fnmatchcase(run, pattern) for pattern in patterns) for run in records["run"]
    ]
    return records[np.array(chosen, dtype=bool)].reset_index(drop=True)
