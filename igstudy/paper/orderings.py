"""Whether methods have the paper's order here: rank correlations with their intervals."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from ..report import paired
from ..report import statistics as metrics
from . import MAIN, reported
from .compare import STANDS_FOR, cells

Numbers = npt.NDArray[np.float64]
ORDERING_COLUMNS = "paper_policy paper_prompts policy measure n_methods spearman low high".split()
ORDERING_MEASURES = {  # measure -> printed column, and ours
    "safety": ("safety_rate", paired.is_safe),
    "reward": ("reward_mean", paired.reward),
}
FEWEST = 3  # methods


def orderings(records: pd.DataFrame) -> pd.DataFrame:
    """Return the agreement of our order of methods with the paper's.

    It has the columns `ORDERING_COLUMNS`. There is a row for each policy and prompt set of the
    paper, each policy here that may be compared with it, and each measure.

    Parameters
    ----------
    records : DataFrame
        See `igstudy.paper.compare.beside`.
    """
    rows = []
    for theirs, policy, printed, by_method in _comparable(records):
        for name, (column, measure) in ORDERING_MEASURES.items():
            ours = {
                method: measure(by_method[method].set_index("prompt_id"))
                for method in printed["method"]
            }
            found = agreement(printed[column].to_numpy(), pd.DataFrame(ours).to_numpy(float))
            rows.append([*theirs, policy, name, len(printed), *found.values()])
    return pd.DataFrame(rows, columns=ORDERING_COLUMNS)


def _comparable(
    records: pd.DataFrame,
) -> Iterator[tuple[Any, str, pd.DataFrame, dict[str, pd.DataFrame]]]:
    """Yield the paper's policy and prompts, ours, the printed rows, and our lines by method."""
    for table in MAIN:
        ours = cells(table, records)
        for theirs, printed in reported(table).groupby(["policy", "prompts"], sort=False):
            policy, prompts = theirs
            for named in ({"policy": policy, "prompts": prompts}, {"policy": STANDS_FOR[policy]}):
                by_method = {
                    cell.settings["method"]: cell.lines
                    for cell in reversed(ours)  # the first choice last
                    if cell.settings.items() >= named.items()
                }
                both = printed[printed["method"].isin(list(by_method))]
                if len(both) >= FEWEST:
                    yield theirs, named["policy"], both, by_method


def agreement(theirs: Numbers, ours: Numbers) -> dict[str, float]:
    """Return the rank correlation of printed means with ours, and its 95 % interval.

    Parameters
    ----------
    theirs : ndarray, shape (n_methods,)
        Printed means.
    ours : ndarray, shape (n_prompts, n_methods)
        Values of our prompts, NaN where a method has none. The interval resamples prompts, the same
        for all methods.
    """
    n, known = len(ours), np.isfinite(ours)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), metrics.RESAMPLES)
    counts = np.vstack([np.ones((1, n)), drawn])  # the first is the sample itself
    with np.errstate(invalid="ignore"):  # a resample may lack all prompts of a method: NaN
        means = (counts @ np.where(known, ours, 0.0)) / (counts @ known)
        ranks, reference = stats.rankdata(means, axis=1), stats.rankdata(theirs)
        ranks -= ranks.mean(axis=1, keepdims=True)
        reference -= reference.mean()
        lengths = np.linalg.norm(ranks, axis=1) * np.linalg.norm(reference)
        found = ranks @ reference / lengths  # Pearson's, of ranks; NaN where all are equal
    ends = [(1 - metrics.CONFIDENCE) / 2, (1 + metrics.CONFIDENCE) / 2]
    resampled = found[1:][np.isfinite(found[1:])]
    low, high = np.quantile(resampled, ends) if len(resampled) else (np.nan, np.nan)
    return {"spearman": float(found[0]), "low": float(low), "high": float(high)}
