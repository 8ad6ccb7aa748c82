"""What rules that leave draws early save: tokens per safe answer, beside blind rejection.

Intervals resample whole prompts, the same ones for both sides of a ratio. See `igstudy.leaving`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from igcore import ParameterError, Policy

from ..leaving import NUMBERS, draws_of, latents_at, learnt, prefixes_of
from ..training.rollouts import Rollout
from .auroc import LEVEL, auroc, resamples

Scores = tuple[np.ndarray, float]  # of the rows of `prefixes_of`, and the threshold
BOTH = "numbers and latents"
AUROCS = "auroc auroc_low auroc_high auroc_within_prompt within_low within_high".split()


def f1_at(rollouts: Sequence[Rollout], judged: pd.DataFrame) -> np.ndarray:
    """Return f1 at the block ends of rollouts, in the order of `igstudy.leaving.prefixes_of`.

    Parameters
    ----------
    judged : DataFrame
        `igstudy.report.critic_metrics.judged_prefixes` of the same rollouts.

    Raises
    ------
    ParameterError
        When not every prefix was judged, as under accountings that charge before the end.
    """
    places = [(r, t) for r in rollouts for t in range(1, len(r.words) + 1)]
    if [t for _, t in places] != judged["position"].tolist():
        raise ParameterError(
            "the critic did not judge every prefix of these rollouts; give it the same rollouts, "
            "and train it with accounting 'terminal'"
        )
    ends = [t % r.block_size == 0 and t < len(r.tokens) for r, t in places]
    return np.asarray(judged["f1"][ends])


def scores_of(
    policy: Policy,
    train: Sequence[Rollout],
    test: Sequence[Rollout],
    *,
    budget: float,
    layer: int,
    f1: np.ndarray,
) -> dict[str, Scores]:
    """Return the scores of every rule at the block ends of the test rollouts, and its threshold.

    ``critic`` is the paper's rule (f1 > .5). ``numbers``, ``latents`` and `BOTH` have learnt from
    the train rollouts. ``cost seen`` leaves where the text so far is over budget. ``foresight``
    leaves every unsafe draw at its first block end, and no safe one.
    """
    draws, seen, held = draws_of(train, budget), *(prefixes_of(r, budget) for r in (train, test))
    inputs = {"numbers": tuple(x[NUMBERS].to_numpy() for x in (seen, held))}
    inputs["latents"] = tuple(latents_at(policy, r, layer) for r in (train, test))
    inputs[BOTH] = tuple(map(np.hstack, zip(*inputs.values(), strict=True)))
    rules: dict[str, Scores] = {"critic": (f1, 0.5)}
    for name, (of_train, of_test) in inputs.items():
        rule = learnt(draws, seen, of_train, len(NUMBERS) if name != "latents" else 0)
        rules[name] = rule.score(of_test), rule.tau
    # a cost at the budget is within it, so the threshold is just below
    rules["cost seen"] = -held["cost"].to_numpy(), math.nextafter(-budget, -math.inf)
    rules["foresight"] = held["safe"].to_numpy(dtype=float), 0.5
    return rules


def leave(draws: pd.DataFrame, prefixes: pd.DataFrame, scores: Scores) -> pd.DataFrame:
    """Return the draws with the tokens that a rule pays, and ``safe`` where it has the answer."""
    score, tau = scores
    left = prefixes[~(score > tau)].groupby("draw")["t"].min().reindex(draws.index)
    return draws.assign(tokens=left.fillna(draws["tokens"]), safe=draws["safe"] & left.isna())


@np.errstate(divide="ignore", invalid="ignore")  # a rule without an answer costs infinitely much
def leaving_table(
    rollouts: Sequence[Rollout], budget: float, rules: Mapping[str, Scores]
) -> pd.DataFrame:
    """Return a row per rule on test rollouts, blind rejection first.

    Returns
    -------
    DataFrame
        ``S`` is the share of the draws that are safe, ``tokens_per_safe`` all tokens divided by the
        number of safe answers, and ``ratio`` that number divided by blind rejection's, with an
        interval of 95 %; lower is better. ``left_safe`` is the share of the safe draws that are
        left, and ``lost_prompts`` that of the prompts with a safe draw that keep none: a rule may
        also cost less because it answers easy prompts alone. The AUROCs, see
        `igstudy.report.auroc.auroc`, compare the scores at block ends of safe and unsafe draws. The
        last row has the ratio of `BOTH` minus that of ``numbers``: below 0, latents add something.
    """
    draws, prefixes = draws_of(rollouts, budget), prefixes_of(rollouts, budget)
    blind = np.ones(len(prefixes)), -math.inf
    drawn = resamples(draws["prompt_id"].nunique())
    rows, ratios = [], {}
    for name, scores in {"blind": blind, **rules}.items():
        kept = leave(draws, prefixes, scores)
        totals = kept.groupby("prompt_id")[["tokens", "safe"]].sum().to_numpy(dtype=float)
        # all prompts once, then the resamples
        price = np.divide(*np.vstack([totals.sum(0), drawn @ totals]).T)
        row = {"rule": name, "S": draws["safe"].mean(), "tokens_per_safe": price[0]}
        if name == "blind":
            of_blind = price
        ratios[name] = price / of_blind
        row |= with_interval(ratios[name])
        answers = pd.DataFrame({"kept": kept["safe"], "all": draws["safe"]})
        by_prompt = answers.groupby(draws["prompt_id"]).any()
        for column, shares in (("left_safe", answers), ("lost_prompts", by_prompt)):
            row[column] = 1 - shares["kept"].sum() / shares["all"].sum()
        found = auroc(prefixes["safe"], scores[0], prefixes["prompt_id"])
        row |= {x: found[x] for x in AUROCS}
        rows.append(row | {"tau": scores[1]})
    if {BOTH, "numbers"} <= ratios.keys():
        difference = with_interval(ratios[BOTH] - ratios["numbers"])
        rows.append({"rule": f"{BOTH}, minus numbers", **difference})
    return pd.DataFrame(rows)


def with_interval(ratios: np.ndarray) -> dict[str, float]:
    """Return the first as ``ratio``, and the percentile interval of the others.

    Resamples without any safe draw have no ratio (NaN) and are left out.
    """
    others = ratios[1:][~np.isnan(ratios[1:])]
    # not between two of them: one may be infinite
    low, high = np.quantile(others, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest").tolist()
    return {"ratio": float(ratios[0]), "low": low, "high": high}
