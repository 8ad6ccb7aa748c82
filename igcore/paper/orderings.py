"""Do methods stand in the paper's order? Rank correlations of its numbers with ours.

A smaller model under another cost has other rates and rewards. What it can share with the paper is
the order of methods, which is what the paper's claims are about.
"""

import numpy as np
import pandas as pd
from scipy import stats

from ..report import paired
from ..report.statistics import CONFIDENCE, RESAMPLES
from . import MAIN, reported
from .compare import CHAT, RAW, Cell, cells

# the embedded policy that stands for each of the paper's: unaligned or aligned, as it is
STANDS_FOR = {"alpaca-7b": RAW, "vicuna-7b": RAW, "beaver-7b-v3": CHAT, "llama-3.1-8b": CHAT}
# higher is better: an abstention is not safe, and has no reward
MEASURED: dict[str, tuple[str, paired.Measure]] = {  # measure -> column of the paper, and of ours
    "safety": ("safety_rate", paired.is_safe),
    "reward": ("reward_mean", paired.reward),
}
FEWEST = 3  # methods of which an order says something


def orderings(records: pd.DataFrame) -> pd.DataFrame:
    """Return how far methods stand in the paper's order.

    Parameters
    ----------
    records : DataFrame
        Lines as `igcore.report.load.load_runs` returns them.

    Returns
    -------
    DataFrame
        A row for every policy and prompt set of the paper's main tables, each of `MEASURED`, and
        every policy here that stands for the paper's: ``n_methods`` that both have, ``spearman``,
        the rank correlation of their means, and the ends ``low`` and ``high`` of its 95 %
        interval, which resamples our prompts. The paper's numbers are taken as they are printed.
    """
    rows = []
    for table in MAIN:
        ours = cells(table, records)
        for (policy, prompts), printed in reported(table).groupby(
            ["policy", "prompts"], sort=False
        ):
            for named in ({"policy": policy, "prompts": prompts}, {"policy": STANDS_FOR[policy]}):
                of_methods = {
                    cell.settings["method"]: cell for cell in reversed(ours) if _is(cell, named)
                }
                both = printed[printed["method"].isin(list(of_methods))]
                if len(both) < FEWEST:
                    continue
                for name, (column, measure) in MEASURED.items():
                    values = {
                        method: measure(of_methods[method].lines.set_index("prompt_id"))
                        for method in both["method"]
                    }
                    row = {"paper_policy": policy, "paper_prompts": prompts, **named}
                    row |= {"measure": name, "n_methods": len(both)}
                    found = agreement(both[column].to_numpy(), pd.DataFrame(values).to_numpy(float))
                    rows.append(row | found)
    columns = "paper_policy paper_prompts policy measure n_methods spearman low high".split()
    return pd.DataFrame(rows, columns=columns)


def agreement(theirs: np.ndarray, ours: np.ndarray) -> dict[str, float]:
    """Return the rank correlation of printed means (M,) and the means of our prompts, (n, M).

    A prompt without a value is NaN. The interval resamples prompts, the same for all methods.
    """
    n, known = len(ours), np.isfinite(ours)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    counts = np.vstack([np.ones((1, n)), drawn])  # the first is the sample itself
    with np.errstate(invalid="ignore"):  # a resample may lack all prompts of a method: NaN
        means = (counts @ np.where(known, ours, 0.0)) / (counts @ known)
        ranks = _centred(stats.rankdata(means, axis=1, nan_policy="propagate"))
        reference = _centred(stats.rankdata(theirs)[None])[0]
        lengths = np.linalg.norm(ranks, axis=1) * np.linalg.norm(reference)
        found = ranks @ reference / lengths  # Pearson's, of ranks; NaN where all are equal
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    resampled = found[1:][np.isfinite(found[1:])]
    low, high = np.quantile(resampled, ends) if len(resampled) else (np.nan, np.nan)
    return {"spearman": float(found[0]), "low": float(low), "high": float(high)}


def _centred(ranks: np.ndarray) -> np.ndarray:
    return ranks - ranks.mean(axis=1, keepdims=True)


def _is(cell: Cell, named: dict) -> bool:
    return all(cell.settings[name] == value for name, value in named.items())
