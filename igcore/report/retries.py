"""What a retry is worth, round by round.

It measures p(safe), how far a retry strays from the policy, and how many rounds an answer takes.
p(safe) is the share of a round's candidates that are within budget so far. All intervals are over
prompts, whose blocks and seeds are no new prompts.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from ..theory.finite_sample import abstention_bound
from . import statistics as metrics
from .paired import clustered

# share of a retry's samples that the bound may count, because their p(safe) is at least that of the
# reference: `paper` may ban the only safe block
COUNTED = {"none": 1.0, "sequence": 1.0, "half": 0.5, "paper": 0.0}
KEY = ["policy", "diversity"]
COLUMNS = (
    "policy diversity round n_prompts n_blocks p_safe p_safe_low p_safe_high kl kl_low kl_high "
    "perplexity answered answered_low answered_high bound"
).split()


def by_round(records: pd.DataFrame) -> pd.DataFrame:
    """Return the traces: a row per policy, diversity, prompt, seed, block and round.

    ``p_safe`` is the share of safe candidates of the row.
    """
    about = [*KEY, "prompt_id", "seed"]
    rows = [
        {name: line[name] for name in about} | step
        for line in records.to_dict("records")
        for step in line["trace"]
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(p_safe=frame["safe"] / frame["drawn"])


def rounds_needed(records: pd.DataFrame) -> pd.Series:
    """Return how many rounds a block may take for a line to be answered.

    Infinite where even all that it had gave no answer.

    A search with M rounds is this one up to the first block that finds nothing safe in M rounds, so
    the share of lines that need at most M is the rate of answers of a run with M rounds.
    """
    needed = [
        math.inf if status == "abstained" else 1 + max(step["round"] for step in trace)
        for status, trace in zip(records["status"], records["trace"], strict=True)
    ]
    return pd.Series(needed, index=records.index, dtype=float)


def answer_bound(records: pd.DataFrame, n_samples: int, rounds: float) -> float:
    """Return a lower bound on P(answer) with N M samples, the mean over prompts.

    It is 1 - sum_b (1 - p_b)^{N M}, for samples from the reference policy.

    p_b is estimated for each prompt and block b by the share of safe candidates in the first rounds
    of `records`. Few samples make the bound lower on average, because (1 - p)^{N M} is convex. See
    `igcore.theory.finite_sample.abstention_bound`.
    """
    first = by_round(records).query("round == 0")
    masses = first.groupby(["prompt_id", "block"])["p_safe"].mean()
    bounds = [
        abstention_bound(p.tolist(), n_samples, rounds)
        for _, p in masses.groupby(level="prompt_id")
    ]
    return 1 - float(np.mean(bounds))


def block_mass(records: pd.DataFrame, n_samples: int, rounds: int) -> float:
    """Return the p of a single block of which 1 - (1 - p)^{N M} is `answer_bound`."""
    return 1 - (1 - answer_bound(records, n_samples, rounds)) ** (1 / (n_samples * rounds))


def retry_table(records: pd.DataFrame) -> pd.DataFrame:
    """Return a row per policy, diversity and round: p(safe), KL, perplexity, and prompts answered.

    Parameters
    ----------
    records : DataFrame
        Lines of a guarded method that differ in diversity and seed alone.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`. ``round`` counts from 1; ``p_safe``, ``kl`` (nats per block, of the
        penalised from the reference policy) and ``perplexity`` (under the reference) are means over
        the ``n_blocks`` blocks that took that round, of ``n_prompts`` prompts. A block takes a
        further round only where the one before found nothing safe, so later rounds are those of
        harder blocks. ``answered`` is the share of prompts that would be answered with so many
        rounds and no more, see `rounds_needed`; ``bound`` is `answer_bound` over the samples that
        it may count, see `COUNTED`.
    """
    rows = []
    for (policy, diversity), lines in records.groupby(KEY, sort=False):
        steps, needed = by_round(lines), rounds_needed(lines)
        for number in range(1, int(lines["rounds"].iloc[0]) + 1):
            here = steps[steps["round"] == number - 1]
            answered = (needed <= number).astype(float).groupby(lines["prompt_id"]).mean()
            low, high = metrics.bootstrap_mean(answered)
            rounds = 1 + (number - 1) * COUNTED[diversity]
            row = {
                "policy": policy,
                "diversity": diversity,
                "round": number,
                "n_prompts": here["prompt_id"].nunique(),
                "n_blocks": len(here),
                "perplexity": here["perplexity"].mean(),
                "answered": answered.mean(),
                "answered_low": low,
                "answered_high": high,
                "bound": answer_bound(lines, int(lines["n_samples"].iloc[0]), rounds),
            }
            rows.append(row | _mean_of_blocks(here, "p_safe") | _mean_of_blocks(here, "kl"))
    return pd.DataFrame(rows, columns=COLUMNS)


def _pooled_mean(sums: np.ndarray, counts: np.ndarray, axis: int) -> np.ndarray:
    """Return the mean over the blocks of several prompts, given the sum and the count of each."""
    return sums.sum(axis) / counts.sum(axis)


def _mean_of_blocks(steps: pd.DataFrame, name: str) -> dict[str, float]:
    """Return a mean over blocks and its 95 % interval, which resamples whole prompts.

    NaN for fewer than two prompts.
    """
    of_prompts = steps.groupby("prompt_id")[name].agg(["sum", "count"])
    low = high = math.nan
    if len(of_prompts) > 1:
        low, high = stats.bootstrap(
            (of_prompts["sum"].to_numpy(), of_prompts["count"].to_numpy()),
            _pooled_mean,
            paired=True,
            vectorized=True,
            n_resamples=metrics.RESAMPLES,
            batch=metrics.BATCH,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    return {name: steps[name].mean(), f"{name}_low": float(low), f"{name}_high": float(high)}


def retry_tests(
    records: pd.DataFrame, reference: str = "none", names: Sequence[str] = ("p_safe", "kl")
) -> list[dict]:
    """Compare the rounds after the first of every diversity with those of `reference`.

    The comparison is paired by prompt.

    Returns
    -------
    list of dict
        Rows for `igcore.report.paired.corrected`. A prompt and seed counts where a block of it
        was tried again under both; its blocks and further rounds are averaged, then its seeds.
    """
    rows = []
    for policy, lines in records.groupby("policy", sort=False):
        steps = by_round(lines).query("round > 0")
        means = {
            d: cell.groupby(["prompt_id", "seed"])[list(names)].mean()
            for d, cell in steps.groupby("diversity", sort=False)
        }
        for diversity in [d for d in means if d != reference and reference in means]:
            for name in names:
                about = {
                    "policy": policy,
                    "measure": f"{name} after a retry",
                    "point": f"diversity {diversity}",
                    "reference": f"diversity {reference}",
                }
                rows.append(about | clustered(means[diversity][name] - means[reference][name]))
    return rows
