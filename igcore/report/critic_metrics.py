"""How well a critic tells safe from unsafe, by position.

A search only ever chooses between continuations of one prompt, so what counts is the AUROC *within*
a prompt; overall a critic may look good by knowing which prompts are hard.
"""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import ConstantInputWarning, rankdata, spearmanr
from sklearn.metrics import roc_auc_score
from statsmodels.stats.proportion import proportion_confint

from ..critic.latent import ENCODE
from ..critic.network import Critic
from ..critic.rollouts import Labels, Rollout, targets
from ..critic.training import source_of
from ..errors import ParameterError
from ..policy import Policy
from ..scorers import Scorer, checked_score

POSITIONS = (8, 16, 24, 32)
RESAMPLES = 2000
LEVEL = 0.95  # of the intervals
BINS = 10
COLUMNS = (
    "policy features use_z position auroc auroc_low auroc_high auroc_within_prompt spearman ece "
    "parameters train_s within_low within_high n n_unsafe n_pairs accounting"
).split()
SPEC = ("policy", "features", "use_z", "accounting")  # of a critic, in its rows
REFERENCES = ("prompt-cost", "partial-cost")  # cost of the prompt alone, and of the text so far
RELIABILITY = "position probability safe low high n n_prompts".split()


# --- AUROC ----------------------------------------------------------------------------------------


def wins(
    safe: Sequence[bool], score: Sequence[float], prompt: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Compare every safe rollout with every unsafe one.

    Returns
    -------
    won, pairs : ndarrays (P, P)
        By prompt of the safe and prompt of the unsafe rollout: how often the safe one has the
        higher score (a tie counts half), and of how many pairs. The AUROC is ``won.sum() /
        pairs.sum()``, within prompts ``trace(won) / trace(pairs)``.
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


def auroc(safe: Sequence[bool], score: Sequence[float], prompt: Sequence[str]) -> dict:
    """Return the AUROC of a score that should be higher for safe rollouts.

    Returns
    -------
    dict
        ``auroc`` and ``auroc_within_prompt`` (the share of pairs of one safe and one unsafe rollout
        of the same prompt that are ordered rightly, over all pairs) with percentile intervals from
        resampling whole prompts, and counts. NaN where there is no pair.
    """
    safe, score = np.asarray(safe, dtype=bool), np.asarray(score, dtype=float)
    score = rankdata(np.where(np.isnan(score), -math.inf, score))  # one that failed is the worst
    won, pairs = wins(safe, score, prompt)
    has_both = 0 < safe.sum() < len(safe)
    draws = _draws(len(won))
    all_won, all_pairs = (
        np.einsum("rp,pq,rq->r", draws, counts, draws, optimize=True) for counts in (won, pairs)
    )
    low, high = _interval(all_won, all_pairs)
    within_low, within_high = _interval(draws @ np.diag(won), draws @ np.diag(pairs))
    n_pairs = np.trace(pairs)
    return {
        "auroc": float(roc_auc_score(safe, score)) if has_both else math.nan,
        "auroc_low": low,
        "auroc_high": high,
        "auroc_within_prompt": float(np.trace(won) / n_pairs) if n_pairs else math.nan,
        "within_low": within_low,
        "within_high": within_high,
        "n": len(safe),
        "n_unsafe": int((~safe).sum()),
        "n_pairs": int(n_pairs),
    }


def within_difference(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Compare two critics by their AUROC within prompts, on the same prefixes.

    Parameters
    ----------
    a, b : DataFrame
        `judgements` of the same rollouts.

    Returns
    -------
    DataFrame
        By ``position``: ``difference`` (of `a` over `b`), with a percentile interval from
        resampling whole prompts, the same ones for both.

    Raises
    ------
    ParameterError
        When they judge different prefixes, or count different ones as safe.
    """
    same = ["prompt_id", "position", "safe"]
    if not a[same].equals(b[same]):
        raise ParameterError(
            "the two critics judge different prefixes or outcomes; compare critics of one "
            "accounting and budget"
        )
    rows = []
    for position, of_a in a[a["position"].isin(POSITIONS)].groupby("position"):
        of_b = b.loc[of_a.index]
        won, pairs = wins(of_a["safe"], of_a["f1"], of_a["prompt_id"])
        won_by_b, _ = wins(of_b["safe"], of_b["f1"], of_b["prompt_id"])
        gain, pairs = np.diag(won - won_by_b), np.diag(pairs)  # (P,)
        draws = _draws(len(pairs))
        low, high = _interval(draws @ gain, draws @ pairs)
        difference = float(gain.sum() / pairs.sum()) if pairs.sum() else math.nan
        rows.append([position, difference, low, high])
    return pd.DataFrame(rows, columns=["position", "difference", "low", "high"])


def _draws(prompts: int) -> np.ndarray:
    """Return how often each prompt stands in each resample, (RESAMPLES, P)."""
    shares = np.full(prompts, 1 / prompts)
    return np.random.default_rng(0).multinomial(prompts, shares, RESAMPLES)


def _interval(won: np.ndarray, pairs: np.ndarray) -> tuple[float, float]:
    share = won[pairs > 0] / pairs[pairs > 0]
    if not len(share):
        return math.nan, math.nan
    low, high = np.quantile(share, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high


# --- calibration ----------------------------------------------------------------------------------


def reliability(safe: pd.Series, probability: pd.Series) -> pd.DataFrame:
    """Return one row per bin of equal width that is not empty, the data of a reliability diagram.

    Columns: the mean ``probability``, the share of ``safe``, and ``n``.
    """
    frame = pd.DataFrame({"probability": probability, "safe": safe.astype(float)})
    bins = frame.groupby(_bins_of(probability))
    return bins.mean().assign(n=bins.size()).reset_index(drop=True)


def calibration_error(safe: pd.Series, probability: pd.Series) -> float:
    """Return the expected calibration error.

    It is the mean of |share of safe - mean probability| over the bins, weighted by their size.
    """
    table = reliability(safe, probability)
    errors = (table["safe"] - table["probability"]).abs()
    return float((table["n"] * errors).sum() / table["n"].sum())


def _bins_of(probability: pd.Series) -> pd.Series:
    return (probability * BINS).astype(int).clip(upper=BINS - 1)


def reliability_table(judged: pd.DataFrame) -> pd.DataFrame:
    """Return `reliability` at each position, with intervals.

    The columns are `RELIABILITY`, the data of a diagram with whiskers.

    Rollouts of one prompt are alike. The Wilson intervals (95 %) take them for wholly alike, that
    is for as many independent ones as Kish's effective number of prompts (sum m)^2 / sum m^2, m
    being the rollouts of a prompt in the bin: they may be too long for the dependence, and are not
    too short for it.

    Parameters
    ----------
    judged : DataFrame
        From `judgements`.
    """
    rows = []
    judged = judged[judged["position"].isin(POSITIONS)]
    for (position, _), part in judged.groupby(["position", _bins_of(judged["f1"])]):
        of_prompt = part.groupby("prompt_id").size()
        effective = len(part) ** 2 / (of_prompt**2).sum()
        share = part["safe"].mean()
        low, high = proportion_confint(share * effective, effective, method="wilson")
        rows.append([position, part["f1"].mean(), share, low, high, len(part), len(of_prompt)])
    return pd.DataFrame(rows, columns=RELIABILITY)


# --- tables ---------------------------------------------------------------------------------------


def judgements(
    critic: Critic, policy: Policy, rollouts: Sequence[Rollout], budget: float | None = None
) -> pd.DataFrame:
    """Return what a critic says of every prefix of rollouts, and what came of them.

    They are judged under `budget`, by default the lowest that the critic was trained on.

    Returns
    -------
    DataFrame
        One row per prefix: ``prompt_id``, ``position`` (tokens), ``f1``, ``f2``, ``safe`` and
        ``task`` (the targets). Prefixes that have overspent already are left out, as a search does
        not ask about them: z < 0 would give them away.
    """
    spec, device = critic.spec, critic.centre.device
    rollouts = [r for r in rollouts if r.words]
    budget = spec.budget if budget is None else budget
    spec.check_budget(budget)
    budgets = [budget] * len(rollouts)
    labels = Labels.of(rollouts, budgets, spec.accounting, spec.gamma_safety, spec.gamma_task)
    source = source_of(policy, rollouts, spec, memory_gb=0)
    frames = []
    for at in range(0, len(rollouts), ENCODE):
        index = range(at, min(at + ENCODE, len(rollouts)))
        x = source.take(index).to(device, torch.float32)
        z = labels.z[index, : x.mask.shape[1]].to(device)
        with torch.inference_mode():
            logit, f2 = critic(x, z)
        judged = x.mask & (z >= 0)
        row, t = judged.nonzero(as_tuple=True)
        columns = {
            "prompt_id": [rollouts[at + i].prompt_id for i in row.tolist()],
            "position": (t + 1).tolist(),
            "f1": logit.sigmoid()[judged].tolist(),
            "f2": f2[judged].tolist(),
            "safe": labels.safe[index][row.cpu()].tolist(),
            "task": labels.task[index][row.cpu()].tolist(),
        }
        frames.append(pd.DataFrame(columns))
    result = pd.concat(frames, ignore_index=True)
    return result.assign(safe=result["safe"] > 0)


def critic_table(critic: Critic, judged: pd.DataFrame) -> pd.DataFrame:
    """Return one row per position with the columns `COLUMNS`.

    Parameters
    ----------
    judged : DataFrame
        From `judgements`. Responses that have ended before a position are not in its row: the
        search knows their cost.
    """
    fixed = {name: getattr(critic.spec, name) for name in SPEC}
    fixed["parameters"] = critic.parameter_count
    fixed["train_s"] = critic.about.get("train_s", math.nan)
    rows = []
    for position, part in judged[judged["position"].isin(POSITIONS)].groupby("position"):
        row = fixed | {"position": position}
        row |= auroc(part["safe"], part["f1"], part["prompt_id"])
        row["spearman"] = _spearman(part["f2"], part["task"])
        row["ece"] = calibration_error(part["safe"], part["f1"])
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def reference_table(
    policy: Policy,
    rollouts: Sequence[Rollout],
    cost: Scorer,
    budget: float,
) -> pd.DataFrame:
    """Return the rows of `REFERENCES`: two scores that need no training.

    They are the cost of the prompt alone, and the cost of the text so far.
    """
    fixed = {"policy": policy.name, "use_z": False, "accounting": "terminal"}
    fixed |= {"parameters": 0, "train_s": 0.0}
    rows = []
    for name in REFERENCES:
        for position in POSITIONS:
            longer = [r for r in rollouts if len(r.words) >= position]
            if not longer:
                continue
            prompts = texts = [r.prompt for r in longer]
            if name == "partial-cost":
                texts = [policy.text(r.tokens[:position]) for r in longer]
            costs = checked_score(cost, prompts, texts, [False] * len(longer))
            safe = [targets(r, budget, "terminal").safe for r in longer]
            row = fixed | {"features": name, "position": position}
            rows.append(row | auroc(safe, -costs, [r.prompt_id for r in longer]))
    return pd.DataFrame(rows, columns=COLUMNS)


def _spearman(a: pd.Series, b: pd.Series) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)  # a constant has none: NaN
        return float(spearmanr(a, b, nan_policy="omit").statistic)
