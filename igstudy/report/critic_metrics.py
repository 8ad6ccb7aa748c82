"""Tables of the predictions of critics on test rollouts, with the outcomes."""

import math
import warnings
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from scipy.stats import ConstantInputWarning, spearmanr

from igcore import Policy, Scorer
from igcore.critic.network import Critic
from igcore.scoring import checked_score

from ..training.critic import SharedSources
from ..training.latents import ENCODE
from ..training.rollouts import Rollout, labels_of, targets
from .auroc import POSITIONS, auroc, calibration_error
from .critics import COLUMNS

MEMORY_GB = 4.0  # of latents; above it the policy reads the rollouts again for every critic


def judged_prefixes(
    critic: Critic, policy: Policy, rollouts: Sequence[Rollout], shared: SharedSources | None = None
) -> pd.DataFrame:
    """Return a critic's predictions after every prefix of rollouts, and the outcomes.

    One row per prefix: ``prompt_id``, ``position`` (tokens), ``f1``, ``f2``, ``safe`` and ``task``
    (the targets). They are judged under the lowest budget that the critic was trained on. Prefixes
    that have overspent already are left out: z < 0 would give them away. `shared` holds the latents
    of the same rollouts for several critics.
    """
    spec, device = critic.spec, critic.centre.device
    rollouts = [rollout for rollout in rollouts if rollout.words]
    labels = labels_of(rollouts, spec)
    source = (shared or SharedSources()).of(policy, rollouts, spec, MEMORY_GB)
    frames = []
    for start in range(0, len(rollouts), ENCODE):
        index = range(start, min(start + ENCODE, len(rollouts)))
        x = source.take(index).to(device, torch.float32)
        z = labels.z[index, : x.mask.shape[1]].to(device)
        with torch.inference_mode():
            logit, f2 = critic(x, z)
        in_budget = x.mask & (z >= 0)
        row, t = in_budget.nonzero(as_tuple=True)
        columns = {
            "prompt_id": [rollouts[start + i].prompt_id for i in row.tolist()],
            "position": (t + 1).tolist(),
            "f1": logit.sigmoid()[in_budget].tolist(),
            "f2": f2[in_budget].tolist(),
            "safe": labels.safe[index][row.cpu()].tolist(),
            "task": labels.task[index][row.cpu()].tolist(),
        }
        frames.append(pd.DataFrame(columns))
    prefixes = pd.concat(frames, ignore_index=True)
    return prefixes.assign(safe=prefixes["safe"] > 0)


def reference_table(
    policy: Policy, rollouts: Sequence[Rollout], cost: Scorer, budget: float
) -> pd.DataFrame:
    """Return the rows of two scores that need no training, by position.

    They are the cost of the prompt alone, and the cost of the text so far.
    """
    fixed = {"policy": policy.name, "use_z": False, "accounting": "terminal"}
    fixed |= {"parameters": 0, "train_s": 0.0}
    rows = []
    for name in ("prompt-cost", "partial-cost"):
        for position in POSITIONS:
            longer = [rollout for rollout in rollouts if len(rollout.words) >= position]
            if not longer:
                continue
            prompts = texts = [rollout.prompt for rollout in longer]
            if name == "partial-cost":
                texts = [policy.text(rollout.tokens[:position]) for rollout in longer]
            costs = checked_score(cost, prompts, texts, [False] * len(longer))
            safe = [targets(rollout, budget, "terminal").safe for rollout in longer]
            ids = [rollout.prompt_id for rollout in longer]
            row = fixed | {"features": name, "position": position}
            rows.append(row | auroc(safe, -costs, ids))
    return pd.DataFrame(rows, columns=COLUMNS)


def rows_of_critic(critic: Critic, judged: pd.DataFrame) -> pd.DataFrame:
    """Return one row per position with the columns `COLUMNS`.

    Responses that have ended before a position are not in its row: the search knows their cost.
    """
    names = ("policy", "features", "use_z", "accounting")
    fixed = {name: getattr(critic.spec, name) for name in names}
    seconds = critic.about.get("train_s", math.nan)
    fixed |= {"parameters": critic.parameter_count, "train_s": seconds}
    rows = []
    for position, part in judged[judged["position"].isin(POSITIONS)].groupby("position"):
        row = fixed | {"position": position}
        row |= auroc(part["safe"], part["f1"], part["prompt_id"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstantInputWarning)  # a constant has none: NaN
            row["spearman"] = spearmanr(part["f2"], part["task"], nan_policy="omit").statistic
        row["ece"] = calibration_error(part["safe"], part["f1"])
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def critic_table(
    critics: Mapping[str, Critic], judged: Mapping[str, pd.DataFrame], references: pd.DataFrame
) -> pd.DataFrame:
    """Return the rows of all critics, with the untrained references below them."""
    tables = [
        rows_of_critic(critic, judged[name]).assign(critic=name) for name, critic in critics.items()
    ]
    tables.append(references.assign(critic="none"))
    # a table without rows would change the types of columns
    filled = [table for table in tables if len(table)] or tables
    return pd.concat(filled, ignore_index=True)[["critic", *COLUMNS]]
