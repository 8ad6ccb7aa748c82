"""How well a critic tells safe from unsafe, by position.

A search only ever chooses between continuations of one prompt, so what counts is the AUROC *within*
a prompt; overall a critic may look good by knowing which prompts are hard.
"""

import math
import warnings
from collections.abc import Mapping, Sequence

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
from .calibration import bins_of, calibration_error

POSITIONS = (8, 16, 24, 32)
RESAMPLES = 2000
COLUMNS = (
    "policy features use_z position auroc auroc_low auroc_high auroc_within_prompt spearman ece "
    "parameters train_s within_low within_high n n_unsafe n_pairs accounting"
).split()
SPEC = ("policy", "features", "use_z", "accounting")  # of a critic, in its rows
REFERENCES = ("prompt-cost", "partial-cost")  # cost of the prompt alone, and of the text so far
RELIABILITY = "position probability safe low high n n_prompts".split()


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
    a, b = score[safe, None], score[None, ~safe]
    won = member[safe].T @ ((a > b) + 0.5 * (a == b)) @ member[~safe]
    return won, np.outer(member[safe].sum(0), member[~safe].sum(0))


def auroc(
    safe: Sequence[bool],
    score: Sequence[float],
    prompt: Sequence[str],
    seed: int = 0,
    confidence: float = 0.95,
) -> dict:
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
    both = 0 < safe.sum() < len(safe)
    draws = _draws(len(won), seed)
    overall = [np.einsum("rp,pq,rq->r", draws, x, draws, optimize=True) for x in (won, pairs)]
    within = [draws @ np.diag(x) for x in (won, pairs)]
    low, high = _interval(*overall, confidence)
    within_low, within_high = _interval(*within, confidence)
    of_one, n_pairs = np.trace(won), np.trace(pairs)  # won and all pairs within a prompt
    return {
        "auroc": float(roc_auc_score(safe, score)) if both else math.nan,
        "auroc_low": low,
        "auroc_high": high,
        "auroc_within_prompt": float(of_one / n_pairs) if n_pairs else math.nan,
        "within_low": within_low,
        "within_high": within_high,
        "n": len(safe),
        "n_unsafe": int((~safe).sum()),
        "n_pairs": int(n_pairs),
    }


def within_difference(
    a: pd.DataFrame, b: pd.DataFrame, seed: int = 0, confidence: float = 0.95
) -> pd.DataFrame:
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
    for position in sorted(set(a["position"]) & set(POSITIONS)):
        here = a["position"] == position
        counts = [
            wins(x.loc[here, "safe"], x.loc[here, "f1"], x.loc[here, "prompt_id"]) for x in (a, b)
        ]
        gain, pairs = np.diag(counts[0][0] - counts[1][0]), np.diag(counts[0][1])  # (P,)
        draws = _draws(len(pairs), seed)
        low, high = _interval(draws @ gain, draws @ pairs, confidence)
        difference = float(gain.sum() / pairs.sum()) if pairs.sum() else math.nan
        rows.append({"position": position, "difference": difference, "low": low, "high": high})
    return pd.DataFrame(rows)


def _draws(prompts: int, seed: int) -> np.ndarray:
    """Return how often each prompt stands in each resample, (RESAMPLES, P)."""
    return np.random.default_rng(seed).multinomial(
        prompts, np.full(prompts, 1 / prompts), RESAMPLES
    )


def _interval(won: np.ndarray, pairs: np.ndarray, confidence: float) -> tuple[float, float]:
    share = won[pairs > 0] / pairs[pairs > 0]
    if not len(share):
        return math.nan, math.nan
    low, high = np.quantile(share, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return low, high


def reliability_table(judged: pd.DataFrame, positions: Sequence[int] = POSITIONS) -> pd.DataFrame:
    """Return `igcore.report.calibration.reliability` at each position, with intervals.

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
    for position in positions:
        here = judged[judged["position"] == position]
        for _, part in here.groupby(bins_of(here["f1"])):
            of_prompt = part.groupby("prompt_id").size()
            effective, share = of_prompt.sum() ** 2 / (of_prompt**2).sum(), part["safe"].mean()
            low, high = proportion_confint(share * effective, effective, method="wilson")
            rows.append([position, part["f1"].mean(), share, low, high, len(part), len(of_prompt)])
    return pd.DataFrame(rows, columns=RELIABILITY)


def judgements(
    critic: Critic, policy: Policy, rollouts: Sequence[Rollout], budget: float | None = None
) -> pd.DataFrame:
    """Return what a critic says of every prefix of rollouts, and what came of them.

    Parameters
    ----------
    budget : float, optional
        By default the lowest that the critic was trained on.

    Returns
    -------
    DataFrame
        One row per prefix: ``prompt_id``, ``position`` (tokens), ``f1``, ``f2``, ``safe`` and
        ``task`` (the targets). Prefixes that have overspent already are left out, as a search does
        not ask about them: z < 0 would give them away.

    Raises
    ------
    ParameterError
        For a budget that the critic was not trained on.
    """
    spec = critic.spec
    budget = spec.budget if budget is None else budget
    spec.check_budget(budget)
    rollouts = [r for r in rollouts if r.words]
    labels = Labels.of(
        rollouts, [budget] * len(rollouts), spec.accounting, spec.gamma_safety, spec.gamma_task
    )
    source, device = source_of(policy, rollouts, spec, memory_gb=0), critic.centre.device
    frames = []
    for at in range(0, len(rollouts), ENCODE):
        index = range(at, min(at + ENCODE, len(rollouts)))
        x = source.take(index).to(device, torch.float32)
        z = labels.z[index, : x.mask.shape[1]].to(device)
        with torch.inference_mode():
            logit, f2 = critic(x, z)
        asked = x.mask & (z >= 0)
        row, t = (y.tolist() for y in asked.nonzero(as_tuple=True))
        values = {"f1": logit.sigmoid()[asked].tolist(), "f2": f2[asked].tolist()}
        ids = [rollouts[at + i].prompt_id for i in row]
        targets_ = {name: getattr(labels, name)[index][row].tolist() for name in ("safe", "task")}
        frames.append(
            pd.DataFrame({"prompt_id": ids, "position": [i + 1 for i in t], **values, **targets_})
        )
    found = pd.concat(frames, ignore_index=True)
    return found.assign(safe=found["safe"] > 0)


def critic_table(
    critic: Critic, judged: pd.DataFrame, positions: Sequence[int] = POSITIONS
) -> pd.DataFrame:
    """Return one row per position with the columns `COLUMNS`.

    Parameters
    ----------
    judged : DataFrame
        From `judgements`. Responses that have ended before a position are not in its row: the
        search knows their cost.
    """
    fixed = {name: getattr(critic.spec, name) for name in SPEC}
    fixed |= {
        "parameters": critic.parameter_count,
        "train_s": critic.about.get("train_s", math.nan),
    }
    rows = []
    for position in positions:
        here = judged[judged["position"] == position]
        if len(here):
            row = fixed | {"position": position}
            row |= auroc(here["safe"], here["f1"], here["prompt_id"])
            row["spearman"] = _spearman(here["f2"], here["task"])
            row["ece"] = calibration_error(here["safe"], here["f1"])
            rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def reference_table(
    policy: Policy,
    rollouts: Sequence[Rollout],
    cost: Scorer,
    budget: float,
    accounting: str = "terminal",
    positions: Sequence[int] = POSITIONS,
) -> pd.DataFrame:
    """Return the rows of `REFERENCES`: two scores that need no training.

    They are the cost of the prompt alone, and the cost of the text so far.
    """
    fixed = {"policy": policy.name, "use_z": False, "accounting": accounting}
    fixed |= {"parameters": 0, "train_s": 0.0}
    rows = []
    for name in REFERENCES:
        for position in positions:
            here = [r for r in rollouts if len(r.words) >= position]
            if not here:
                continue
            prompts = [r.prompt for r in here]
            partial = [policy.text(r.tokens[:position]) for r in here]
            texts = prompts if name == "prompt-cost" else partial
            costs = checked_score(cost, prompts, texts, [False] * len(here))
            safe = [targets(r, budget, accounting).safe for r in here]
            row = fixed | {"features": name, "position": position}
            rows.append(row | auroc(safe, -costs, [r.prompt_id for r in here]))
    return pd.DataFrame(rows, columns=COLUMNS)


def _spearman(a: pd.Series, b: pd.Series) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)  # a constant has none: NaN
        return float(spearmanr(a, b, nan_policy="omit").statistic)


def safe_final_share(record: Mapping) -> float:
    """Return the share of the complete candidates of a search that were within budget.

    It is NaN when there were none.

    Raises
    ------
    ParameterError
        When a round did not count them, as where a method does not look at the cost.
    """
    counts = [(step.get("finals"), step.get("safe_finals")) for step in record["trace"]]
    if any(None in pair for pair in counts):
        raise ParameterError(
            f"method {record['method']!r} did not count its safe complete candidates: it does not "
            f"look at the cost, or its run is too old; leave out this measure, or decode again"
        )
    complete = sum(finals for finals, _ in counts)
    return sum(safe for _, safe in counts) / complete if complete else math.nan
