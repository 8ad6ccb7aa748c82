"""Does a critic raise the share of safe candidates when only finished answers have a cost?

Two arms of an experiment are compared, paired. An arm is a label that the caller adds to the lines
of a run, such as ``critic``, ``shuffled`` or ``best-of-n-augmented``.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from ..errors import ParameterError, unknown_name
from . import statistics as metrics
from .paired import reward

ARMS = {"inferenceguard-critic": "critic"}  # method -> arm, where they differ
COLUMNS = (
    "n_samples arm reference measure n_pairs n_prompts mean_arm mean_reference difference low high "
    "low_one_sided"
).split()


def arms(records: pd.DataFrame) -> pd.DataFrame:
    """Return lines with a column ``arm``: the control of the critic, or else the method.

    The lines are those of `igcore.report.load.load_runs`.
    """
    arm = records["method"].replace(ARMS)
    return records.assign(
        arm=arm.where(records["critic_control"] == "none", records["critic_control"])
    )


def experiment(records: pd.DataFrame, hardest: Collection[str]) -> pd.DataFrame:
    """Return `comparison_table` of all `PAIRS` whose arms these records have.

    Parameters
    ----------
    records : DataFrame
        As from `arms`.
    hardest : collection of str
        Ids of the prompts on which safe finals and rewards are compared, for there a policy needs
        help; that an answer was given and safe is compared on all prompts that both arms were
        given.
    """
    tables = []
    for pair, measures in PAIRS.items():
        prompts = set.intersection(
            *(set(records.loc[records["arm"] == arm, "prompt_id"]) for arm in pair)
        )
        for measure in measures:
            chosen = prompts if measure == "answered_safely" else prompts.intersection(hardest)
            if chosen:
                lines = records[records["prompt_id"].isin(chosen)]
                tables.append(comparison_table(lines, [pair], measures=[measure]))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def safe_final_share(record: Mapping) -> float:
    """Return the share of the candidates finished in a search that were within budget.

    NaN when none finished.

    Raises
    ------
    ParameterError
        When a round did not count them, as where a method does not look at the cost.
    """
    finals, safe = (
        [step.get(name) for step in record["trace"]] for name in ("finals", "safe_finals")
    )
    if None in finals + safe:
        raise ParameterError(
            f"method {record['method']!r} did not count its safe finished candidates: it "
            f"does not look at the cost, or its run is "
            "too old; leave out the measure 'safe_finals', or decode again"
        )
    return sum(safe) / sum(finals) if sum(finals) else math.nan


def _safe_finals(lines: pd.DataFrame) -> pd.Series:
    return pd.Series(
        [safe_final_share(line) for line in lines.to_dict("records")],
        index=lines.index,
        dtype=float,
    )


def _answered_safely(lines: pd.DataFrame) -> pd.Series:
    return (
        (lines["status"] != "abstained") & (lines["cost"].astype(float) <= lines["budget"])
    ).astype(float)


MEASURES = {  # name -> one number for each line; NaN: the line has none
    "safe_finals": _safe_finals,
    # an abstention is no answer, and an unknown cost not inside the budget
    "answered_safely": _answered_safely,
    "reward": reward,
}


def compare(
    records: pd.DataFrame,
    arm: str,
    reference: str,
    *,
    what: str,
    n_samples: int,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict:
    """Compare two arms on one measure, paired by prompt and seed.

    The seeds of a prompt are averaged first. Every prompt then counts the same, in the means as in
    the bootstrap: more seeds give steadier prompts, not more of them.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl`` with a column ``arm``.
    what : str
        A key of `MEASURES`.
    confidence : float
        Of the two-sided percentile interval (``low``, ``high``) and of the one-sided bound
        ``low_one_sided``, each by itself.
    resamples, seed : int
        Resamples of whole prompts, and the seed that draws them.

    Returns
    -------
    dict
        The fields `COLUMNS`; ``difference`` is arm minus reference. All is over the ``n_pairs``
        pairs where both have a number: a reward where both answered, a share of safe finals where a
        candidate of both finished. NaN stands for a mean over no pair and for bounds from fewer
        than two prompts.

    Raises
    ------
    ParameterError
        For an unknown arm, measure or status; a pair that occurs twice, or in one arm only; safe
        finals that were not counted; a method that varies within an arm, or a policy or budget
        between them.
    """
    if what not in MEASURES:
        raise unknown_name("measure", what, MEASURES)
    if not 0 < confidence < 1 or resamples < 1:
        raise ParameterError(
            f"confidence is {confidence}, resamples {resamples}; give 0 < confidence < 1 and "
            f"resamples >= 1"
        )
    ours, theirs = (_cell(records, name, n_samples) for name in (arm, reference))
    metrics.check_constant(
        pd.concat([ours, theirs]),
        ("policy", "budget"),
        f"arms {arm} and {reference}, n_samples = {n_samples}",
    )
    _check_same_pairs(ours, theirs)
    values = pd.DataFrame(
        {"mean_arm": MEASURES[what](ours), "mean_reference": MEASURES[what](theirs)}
    ).dropna()
    prompts = values.groupby(level="prompt_id").mean()  # (P, 2)
    gains = prompts["mean_arm"] - prompts["mean_reference"]
    quantiles = [(1 - confidence) / 2, (1 + confidence) / 2, 1 - confidence]
    names = n_samples, arm, reference, what, len(values), len(prompts)
    numbers = (
        *prompts.mean().tolist(),
        float(gains.mean()),
        *_bounds(gains.to_numpy(), quantiles, resamples, seed),
    )
    return dict(zip(COLUMNS, names + numbers, strict=True))


def _arm(records: pd.DataFrame, arm: str) -> pd.DataFrame:
    if arm not in set(records["arm"]):
        raise unknown_name(
            "arm", arm, set(map(str, records["arm"])), hint=" (the arms of these records)"
        )
    return records[records["arm"] == arm]


def _cell(records: pd.DataFrame, arm: str, n_samples: int) -> pd.DataFrame:
    """Return the lines of an arm by prompt and seed."""
    lines, where = _arm(records, arm), f"arm {arm}, n_samples = {n_samples}"
    lines = lines[lines["n_samples"] == n_samples].set_index(["prompt_id", "seed"]).sort_index()
    if not len(lines):
        raise ParameterError(
            f"there is no record of {where}; decode it, or choose an n_samples that the arm has"
        )
    for status in set(lines["status"]) - set(metrics.STATUSES):
        raise unknown_name("status", status, metrics.STATUSES)
    metrics.check_constant(lines, ("method",), where)
    for prompt_id, seed in lines.index[lines.index.duplicated()]:
        raise ParameterError(
            f"prompt {prompt_id!r} with seed {seed} occurs twice in {where}; give every line once"
        )
    return lines


def _check_same_pairs(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    for has, lacks in ((ours, theirs), (theirs, ours)):
        for prompt_id, seed in (missing := has.index.difference(lacks.index)):
            names = "arm {!r} lacks {} of the pairs of {!r}".format(
                lacks["arm"].iloc[0], len(missing), has["arm"].iloc[0]
            )
            raise ParameterError(
                f"{names}, such as prompt {prompt_id!r} with seed {seed}; decode these, or "
                f"leave them out of both"
            )


def _bounds(
    gains: np.ndarray, quantiles: Sequence[float], resamples: int, seed: int
) -> list[float]:
    """Return quantiles of the mean gain over resampled prompts.

    A single prompt says nothing about others.
    """
    if len(gains) < 2:
        return [math.nan] * len(quantiles)
    how = {
        "n_resamples": resamples,
        "batch": metrics.BATCH,
        "method": "percentile",
        "rng": np.random.default_rng(seed),
    }
    return np.quantile(
        stats.bootstrap((gains,), np.mean, **how).bootstrap_distribution, quantiles
    ).tolist()


def comparison_table(
    records: pd.DataFrame,
    pairs: Iterable[tuple[str, str]],
    *,
    measures: Sequence[str] = tuple(MEASURES),
    **how,
) -> pd.DataFrame:
    """Return `compare` for pairs of (arm, reference): every shared n_samples, and every measure.

    The columns are `COLUMNS`.

    `how` is ``confidence``, ``resamples`` and ``seed`` of `compare`, whose errors are raised. Arms
    must share an n_samples.
    """
    rows = []
    for pair in pairs:
        shared = set.intersection(
            *(set(_arm(records, name)["n_samples"].tolist()) for name in pair)
        )
        if not shared:
            raise ParameterError(
                f"arms {pair[0]!r} and {pair[1]!r} share no n_samples; decode both with the "
                f"same one"
            )
        rows += [
            compare(records, *pair, what=what, n_samples=n, **how)
            for n in sorted(shared)
            for what in measures
        ]
    return pd.DataFrame(rows, columns=COLUMNS)


def tried(records: pd.DataFrame) -> pd.DataFrame:
    """Return what each setting of a search gave: means of `MEASURES` over its lines.

    NaN is left out.

    Parameters
    ----------
    records : DataFrame
        Lines of runs that differ in ``n_samples``, ``keep`` and ``block_size`` alone, of prompts
        that nothing is reported of.
    """
    values = pd.DataFrame({name: measure(records) for name, measure in MEASURES.items()})
    by = [records[name] for name in ("n_samples", "keep", "block_size")]
    return (
        values.groupby(by)
        .mean()
        .assign(n_prompts=records.groupby(by)["prompt_id"].nunique())
        .reset_index()
    )


# what the experiment compares, and by which measures: safe finals are counted alike under terminal
# accounting only
PAIRS = {
    ("critic", "best-of-n-augmented"): tuple(MEASURES),
    ("shuffled", "best-of-n-augmented"): tuple(MEASURES),
    ("critic", "shuffled"): tuple(MEASURES),
    ("inferenceguard", "best-of-n-augmented"): ("answered_safely", "reward"),
}
