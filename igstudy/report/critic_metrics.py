"""Tables of the predictions of critics and value networks on test rollouts, with the outcomes."""

import math
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import ConstantInputWarning, spearmanr

from igcore.critic.latent import ENCODE
from igcore.critic.network import Critic
from igcore.critic.rollouts import Rollout, labels_of, targets
from igcore.critic.training import SharedSources
from igcore.policy import Policy
from igcore.scorers import Scorer
from igcore.scoring import checked_score

from ..baselines.re_control import ValueNetwork
from ..baselines.value_training import final_outcomes, value_source, with_rows
from .auroc import POSITIONS, auroc, calibration_error
from .critics import COLUMNS

MEMORY_GB = 4.0  # of latents; above it the policy reads the rollouts again for every critic
VALUE_OUTCOMES = ("reward", "cost")  # of a value network
VALUE_POSITIONS = (0, 8, 16, 24)
VALUE_COLUMNS = "outcome position n explained correlation correlation_within_prompt".split()


def judged_prefixes(
    critic: Critic,
    policy: Policy,
    rollouts: Sequence[Rollout],
    shared: SharedSources | None = None,
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


def expectations(
    network: ValueNetwork, policy: Policy, rollouts: Sequence[Rollout]
) -> pd.DataFrame:
    """Return a value network's expectations after every prefix of rollouts, and the outcomes.

    One row per prefix: ``prompt_id``, ``position`` (tokens of the response so far), ``reward`` and
    ``cost`` (expected), ``final_reward`` and ``final_cost`` (NaN where a scorer failed).
    """
    rollouts = with_rows(policy, rollouts)
    source, finals = value_source(policy, rollouts, memory_gb=0), final_outcomes(rollouts)
    names = [*VALUE_OUTCOMES, *(f"final_{name}" for name in VALUE_OUTCOMES)]
    frames = []
    for start in range(0, len(rollouts), ENCODE):
        index = range(start, min(start + ENCODE, len(rollouts)))
        x = source.take(index).to(network.centre.device, torch.float32)
        with torch.inference_mode():
            expected = network(x.hidden)[x.mask].cpu()  # (rows, 2)
        owners: list[int] = []
        positions: list[int] = []
        for i in index:
            n_rows = len(source.responses[i])
            first_row = len(rollouts[i].words) + 1 - n_rows  # 1 where the bare prompt has no row
            owners += [i] * n_rows
            positions += range(first_row, first_row + n_rows)
        numbers = torch.cat([expected, finals[owners]], dim=1).double().numpy()
        ids = [rollouts[i].prompt_id for i in owners]
        frame = pd.DataFrame(numbers, columns=names)
        frames.append(frame.assign(prompt_id=ids, position=positions))
    return pd.concat(frames, ignore_index=True)


def value_table(expected: pd.DataFrame, positions: Sequence[int] = VALUE_POSITIONS) -> pd.DataFrame:
    """Return how expectations agree with outcomes, by outcome and position.

    Responses that have ended are left out. At position 0 all responses to a prompt have one hidden
    state, so there is no correlation within a prompt.
    """
    rows = []
    for name in VALUE_OUTCOMES:
        for position in positions:
            here = expected[(expected["position"] == position) & expected[f"final_{name}"].notna()]
            if not len(here):
                continue
            predicted, final = here[name], here[f"final_{name}"]
            # 1 - mean squared error / variance: below 0 when the mean would predict better
            error = ((predicted - final) ** 2).mean()
            explained = 1 - float(error / final.var(ddof=0)) if final.nunique() > 1 else math.nan
            # deviations from the mean of each prompt
            means = here.groupby("prompt_id")[[name, f"final_{name}"]].transform("mean")
            deviations = predicted - means[name], final - means[f"final_{name}"]
            within = correlation(*deviations) if position else math.nan
            overall = correlation(predicted, final)
            rows.append([name, position, len(here), explained, overall, within])
    return pd.DataFrame(rows, columns=VALUE_COLUMNS)


def correlation(a: pd.Series, b: pd.Series) -> float:
    """Return Pearson's correlation; NaN where one of the two does not vary."""
    if not min(a.std(ddof=0), b.std(ddof=0)) > 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])
