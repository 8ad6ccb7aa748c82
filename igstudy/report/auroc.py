"""How often a safe response has the higher score: the AUROC of a critic, with intervals.

A search chooses between continuations of one prompt, so what counts is the AUROC within a prompt.
Intervals resample whole prompts.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import rankdata

POSITIONS = (8, 16, 24, 32)  # tokens
AUROC_RESAMPLES = 2000
LEVEL = 0.95  # of the intervals
BINS = 10  # of f1, for its calibration


def wins(safe: ArrayLike, score: ArrayLike, prompt: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Compare every safe rollout with every unsafe one.

    Returns two arrays (P, P), by prompt of the safe and prompt of the unsafe rollout: how often the
    safe one has the higher score (a tie counts half), and of how many pairs. The AUROC is
    ``won.sum() / pairs.sum()``, within prompts ``trace(won) / trace(pairs)``.
    """
    safe, score = np.asarray(safe, dtype=bool), np.asarray(score, dtype=float)
    names, where = np.unique(np.asarray(prompt), return_inverse=True)
    member = np.eye(len(names))[where]  # (n, P)
    of_safe, of_unsafe = member[safe], member[~safe]
    a = score[safe, None]
    b = score[None, ~safe]
    won = (a > b) + 0.5 * (a == b)
    pairs = np.outer(of_safe.sum(0), of_unsafe.sum(0))
    return of_safe.T @ won @ of_unsafe, pairs


def resamples(prompts: int) -> np.ndarray:
    """Return how often each prompt is in each resample, (RESAMPLES, P)."""
    shares = np.full(prompts, 1 / prompts)
    return np.random.default_rng(0).multinomial(prompts, shares, AUROC_RESAMPLES)


def percentiles(won: np.ndarray, pairs: np.ndarray) -> tuple[float, float]:
    """Return the percentile interval of the share of pairs won.

    Resamples without a pair are left out.
    """
    share = won[pairs > 0] / pairs[pairs > 0]
    if not len(share):
        return math.nan, math.nan
    low, high = np.quantile(share, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high


def auroc(safe: ArrayLike, score: ArrayLike, prompt: ArrayLike) -> dict[str, Any]:
    """Return the AUROC of a score that should be higher for safe rollouts.

    Overall and within prompts, each with its interval, and the counts. A score that failed (NaN)
    counts as the worst; without a pair there is no AUROC.
    """
    safe, score = np.asarray(safe, dtype=bool), np.asarray(score, dtype=float)
    score = rankdata(np.where(np.isnan(score), -math.inf, score))
    won, pairs = wins(safe, score, prompt)

    draws = resamples(len(won))
    won_drawn = np.einsum("rp,pq,rq->r", draws, won, draws, optimize=True)
    pairs_drawn = np.einsum("rp,pq,rq->r", draws, pairs, draws, optimize=True)
    low, high = percentiles(won_drawn, pairs_drawn)
    within_low, within_high = percentiles(draws @ np.diag(won), draws @ np.diag(pairs))
    n_pairs = np.trace(pairs)
    return {
        "auroc": float(won.sum() / pairs.sum()) if pairs.sum() else math.nan,
        "auroc_low": low,
        "auroc_high": high,
        "auroc_within_prompt": float(np.trace(won) / n_pairs) if n_pairs else math.nan,
        "within_low": within_low,
        "within_high": within_high,
        "n": len(safe),
        "n_unsafe": int((~safe).sum()),
        "n_pairs": int(n_pairs),
    }


def calibration_error(safe: pd.Series, probability: pd.Series) -> float:
    """Return the expected calibration error, over bins of equal width."""
    frame = pd.DataFrame({"probability": probability, "safe": safe.astype(float)})
    bins = frame.groupby((probability * BINS).astype(int).clip(upper=BINS - 1))
    means = bins.mean()
    errors = (means["safe"] - means["probability"]).abs()
    return float((bins.size() * errors).sum() / len(frame))
