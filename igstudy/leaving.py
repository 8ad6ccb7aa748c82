"""Rules that leave a draw before its end, where a cost exists at the end of an answer only.

Blind rejection draws whole answers until one is within budget at its end. A rule looks at the end
of every block and leaves a draw that looks hopeless: the tokens up to there are paid, and the draw
gives no answer. Draws are independent, so whole rollouts say what every rule costs, and no search
has to run.

A rule is a score and a threshold. A higher score is better. A draw is left at the first block end
where its score is not above the threshold; a score of NaN never is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from igcore import Policy
from igcore.critic.latent import latents

from .training.latents import ENCODE, encode
from .training.rollouts import Rollout, targets

NUMBERS = ["z", "cost", "slope", "depth"]
# C of the regression for latents: a smaller one is a larger penalty. That of `NUMBERS` is 1
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FOLDS = 5  # over prompts


# --- draws and their block ends -------------------------------------------------------------------


def draws_of(rollouts: Sequence[Rollout], budget: float) -> pd.DataFrame:
    """Return a row per rollout: ``prompt_id``, ``tokens`` (how many), and ``safe``.

    A rollout is safe if its whole text is within budget; a cost of NaN is not.
    """
    rows = [(r.prompt_id, len(r.tokens), targets(r, budget).safe) for r in rollouts]
    return pd.DataFrame(rows, columns=["prompt_id", "tokens", "safe"])


def prefixes_of(rollouts: Sequence[Rollout], budget: float) -> pd.DataFrame:
    """Return a row per rollout and block end before its last token, in their order.

    Returns
    -------
    DataFrame
        ``draw`` is the row in `draws_of`, whose columns are here, too; ``t`` is the number of
        tokens so far. The others are numbers that a cost model gives on the way. ``z`` is the
        budget minus the highest cost so far at a check, ``cost`` that of the text so far, ``slope``
        how much it has risen since the block end before, per token, and ``depth`` is t /
        `max_new_tokens`. A first block end has slope 0. They are NaN where the scorer failed.
    """
    frames = []
    for draw, r in enumerate(rollouts):
        ends = np.arange(r.block_size, len(r.tokens), r.block_size)
        cost = np.array(r.costs[:-1])
        columns = {
            "draw": draw,
            "t": ends,
            "z": budget - np.maximum.accumulate(r.worst[:-1]),  # a NaN stays to the end
            "cost": cost,
            "slope": np.diff(cost, prepend=cost[:1]) / r.block_size,
            "depth": ends / r.max_new_tokens,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True).join(draws_of(rollouts, budget), on="draw")


def latents_at(policy: Policy, rollouts: Sequence[Rollout], layer: int) -> np.ndarray:
    """Return the running mean and maximum of a middle layer, (rows of `prefixes_of`, 2 H).

    The states of `ENCODE` rollouts at most are in memory at once.
    """
    longer = [r for r in rollouts if len(r.tokens) > r.block_size]
    found = []
    for start in range(0, len(longer), ENCODE):
        batch = longer[start : start + ENCODE]
        prompts = [policy.encode(r.prompt) for r in batch]
        states = encode(policy.model, prompts, [r.words for r in batch], "m", layer)
        for r, x in zip(batch, latents(states, "m").middle.float(), strict=True):  # (n, H)
            last = torch.arange(r.block_size, len(r.tokens), r.block_size, device=x.device) - 1
            mean = x.cumsum(0)[last] / (last + 1)[:, None]
            found.append(torch.cat([mean, x.cummax(0).values[last]], dim=-1).cpu().numpy())
    return np.concatenate(found)


# --- rules that are learnt ------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A logistic regression and the threshold of its score, the probability of a safe end.

    Attributes
    ----------
    model : Pipeline
    tau : float
        A draw is left where its score is at most this.
    """

    model: Pipeline
    tau: float

    def score(self, x: np.ndarray) -> np.ndarray:
        """Return the scores (rows,) of inputs (rows, columns); NaN where one is not finite."""
        readable = np.isfinite(x).all(axis=1)
        found = np.full(len(x), math.nan)
        if readable.any():
            found[readable] = self.model.predict_proba(x[readable])[:, 1]
        return found


def learnt(draws: pd.DataFrame, prefixes: pd.DataFrame, x: np.ndarray, n_numbers: int) -> Rule:
    """Return a rule that has learnt from the block ends of draws and their inputs (rows, columns).

    The first `n_numbers` columns are `NUMBERS`, and the others latents. Strength of the penalty on
    latents and threshold are chosen on predictions for prompts that the model has not seen. The
    strength is that of the lowest log loss.
    """
    readable = np.isfinite(x).all(axis=1)
    seen, safe, groups = x[readable], prefixes["safe"][readable], prefixes["prompt_id"][readable]
    folds = list(GroupKFold(FOLDS).split(seen, groups=groups))
    # under one penalty for all, a thousand latents would drown the numbers that they are added to
    are_numbers = np.arange(x.shape[1]) < n_numbers
    tried = []
    for strength in STRENGTHS:
        widths = np.where(are_numbers, 1, strength**0.5)  # a penalty is on the squared weights
        widen = FunctionTransformer(partial(np.multiply, widths))
        model = make_pipeline(StandardScaler(), widen, LogisticRegression(max_iter=1000))
        held = cross_val_predict(model, seen, safe, cv=folds, method="predict_proba")[:, 1]
        tried.append((log_loss(safe, held), model, held))
    _, model, held = min(tried, key=lambda one: one[0])
    score = np.full(len(x), math.nan)
    score[readable] = held
    return Rule(model.fit(seen, safe), cheapest_threshold(draws, prefixes, score))


def cheapest_threshold(draws: pd.DataFrame, prefixes: pd.DataFrame, score: np.ndarray) -> float:
    """Return the score as threshold that makes the fewest tokens per safe answer.

    It is -infinity where no threshold costs less than leaving nothing but scores of NaN.
    """
    rows = prefixes.assign(score=np.where(np.isnan(score), -math.inf, score))
    of_draw = rows.groupby("draw")
    # from its lowest score so far on, a threshold leaves the draw here or before
    rows["tau"] = of_draw["score"].cummin()
    after = of_draw["t"].shift(-1)
    # a threshold that reaches a row saves the tokens up to the next one, and the last row's answer
    rows["saved"] = after.fillna(rows["tokens"]) - rows["t"]
    rows["lost"] = after.isna() & rows["safe"]
    changes = rows.groupby("tau")[["saved", "lost"]].sum()
    changes = changes.reindex(changes.index.union([-math.inf]), fill_value=0).cumsum()
    answers = draws["safe"].sum() - changes["lost"]
    price = (draws["tokens"].sum() - changes["saved"]) / answers.where(answers > 0)
    return float(price.fillna(math.inf).idxmin())
