"""What stands for the paper's rows where other policies were run, and whether in the same order.

A smaller model under another cost has other rates and rewards. What it can share with the paper is
the order of methods, which is what the paper's claims are about.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from ..report import paired
from ..report.statistics import CONFIDENCE, RESAMPLES
from . import IDENTITY, MAIN, SETTINGS, WHOLE, measured, reported
from .compare import Cell, cells, estimate, measures_of

EMBEDDED = RAW, CHAT = "smollm2-raw", "smollm2-chat"
# policy of the paper -> the embedded one that stands for it: unaligned or aligned, as it is
STANDS_FOR = {"alpaca-7b": RAW, "vicuna-7b": RAW, "beaver-7b-v3": CHAT, "llama-3.1-8b": CHAT}
TIMED = {"latency": RAW}  # table -> the one embedded policy whose seconds are measured
# higher is better: an abstention is not safe, and has no reward
MEASURED: dict[str, tuple[str, paired.Measure]] = {  # measure -> column of the paper, and of ours
    "safety": ("safety_rate", paired.is_safe),
    "reward": ("reward_mean", paired.reward),
}
FEWEST = 3  # methods of which an order says something


# --- row by row -----------------------------------------------------------------------------------


def has_policies_of_the_paper(records: pd.DataFrame) -> bool:
    """Say whether records are of the paper's policies; without any record they are."""
    return not len(records) or bool(set(records["policy"]) & set(measured()["policy"]))


def standing_in(table: str, records: pd.DataFrame, policies: Sequence[str]) -> pd.DataFrame:
    """Return one of the paper's tables of results, and the runs that stand for its rows here.

    Parameters
    ----------
    table, records
        As in `compared`.
    policies : sequence of str
        Those that were run. Each stands for all of the paper's; where there are none but embedded
        ones, those of `STANDS_FOR` do.

    Returns
    -------
    DataFrame
        A row for every row of the paper and policy that stands for its own: `IDENTITY` and
        ``printed_as`` as reported, ``standing`` (the policy), ``run``, and the settings of the run,
        ``ours_`` and their names, see `nearest`. For each of `measures_of` there are ``_paper``,
        ``_ours``, ``_low``, ``_high`` and ``_n``. No verdict: other models, prompts and costs have
        other numbers, and what may agree is their order, see `orderings`.
    """
    candidates = cells(table, records)
    rows, measures, result = reported(table), measures_of(table), []
    embedded = set(policies) <= set(EMBEDDED)
    for row in rows.to_dict("records"):
        same = rows[["policy", "prompts", "method"]] == [
            row["policy"],
            row["prompts"],
            row["method"],
        ]
        standing = [TIMED.get(table, STANDS_FOR[row["policy"]])] if embedded else policies
        for policy in standing:
            wanted = {"policy": policy, "method": row["method"]}
            of_method = [cell for cell in candidates if cell.settings.items() >= wanted.items()]
            cell = nearest(row, rows[same.all(axis=1)], of_method) or Cell(wanted)
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


# --- the order of methods -------------------------------------------------------------------------


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
