"""The critic in the place of the cost model: how often it alone lets an unsafe answer through.

A search guarded by the critic alone is ``inferenceguard`` with cost 1 - f1 and budget 1 -
threshold. The cost model scores the answers afterwards, and `igcore.report.certify` turns these
losses into a certificate. Nothing here checks that the prompts are new to the critic; the caller
chooses the split. To serve at a threshold::

    alone = CriticCost(policy, critic, budget)
    decode("inferenceguard", Guard(policy, alone, reward, settings_at(threshold, config)), prompts)
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.torch import save

from ..config import SearchConfig
from ..critic.latent import ENCODE, encode
from ..critic.network import Critic
from ..decoding import decode
from ..errors import ParameterError
from ..folders import open_run
from ..guard import Guard
from ..policy import Policy, Prompt
from ..progress import progress
from ..report.statistics import safety_lower
from ..scorers import COST
from ..verdict import rescore
from .identity import about, code_of, modules_of, prompts_digest, versions


class CriticCost:
    """A critic as a cost: 1 - f1, the probability that the answer ends outside `budget`.

    `budget` is by default the lowest that the critic was trained for. ``ParameterError`` for a
    critic of another policy or budget, or of an accounting other than ``terminal``.
    """

    sign, unit = COST, "probability"

    def __init__(self, policy: Policy, critic: Critic, budget: float | None = None):
        """Check that the critic fits, and hash its weights, its spec and the budget."""
        self.policy, self.critic, self.budget = (
            policy,
            critic,
            critic.spec.budget if budget is None else budget,
        )
        if (made := critic.spec.accounting) != "terminal":
            raise ParameterError(
                f"the critic was trained for accounting {made!r}; to guard alone train one for "
                "'terminal'"
            )
        critic.spec.check_scorers(policy, None), critic.spec.check_budget(self.budget)
        self.name = f"critic-{critic.spec.features}"
        weights = save(
            {name: x.detach().cpu().contiguous() for name, x in critic.state_dict().items()}
        )
        self.digest = hashlib.sha256(
            json.dumps([asdict(critic.spec), self.budget]).encode() + weights
        ).hexdigest()

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return 1 - f1 after the last token of each text, (n,).

        NaN for an empty text and wherever the critic returns NaN. A text is tokenized again, which
        need not give the sampled tokens; z_t = d / gamma_safety^t counts the tokens that it gives.
        """
        spec, scores = self.critic.spec, np.full(len(responses), np.nan)
        words = [
            self.policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses
        ]
        spoken = [i for i, ids in enumerate(words) if ids]
        for at in range(0, len(spoken), ENCODE):
            index = spoken[at : at + ENCODE]
            parts = [self.policy.encode(prompts[i]) for i in index], [words[i] for i in index]
            states = encode(self.policy.model, *parts, spec.features, spec.layer)
            f1, _ = self.critic.judge(
                states, [self.budget / spec.gamma_safety ** len(ids) for ids in parts[1]]
            )
            scores[index] = 1 - f1.double().cpu().numpy()  # float32 would lose a small f1
        return scores


def settings_at(threshold: float, config: SearchConfig) -> SearchConfig:
    """Return the settings under which a `CriticCost` passes f1 >= threshold at every block end.

    Subtraction keeps the order, so every f1 that reaches the threshold passes. By rounding, an f1
    up to 2^-53 below it may pass too, where `igcore.report.certify` says "above". A certificate
    still holds, because calibration and serving use the same settings.
    """
    return replace(config, budget=1 - threshold, accounting="peak", gamma_safety=1.0, strict=False)


def critic_only_losses(
    guard: Guard,
    prompts: Sequence[Prompt],
    thresholds: Sequence[float],
    folder: Path | str,
    seed: int = 0,
) -> pd.DataFrame:
    """Answer prompts at every threshold, guarded by the critic alone, and score the answers.

    Parameters
    ----------
    guard : Guard
        As for ``inferenceguard-critic``: with the critic, and a budget of the cost model. The
        search runs under `settings_at` each threshold; the cost model scores its answers.
    prompts, thresholds : sequences of Prompt and of float in [0, 1]
        In any order; each counts once.
    folder : Path or str
        Filled group by group, and resumed after a stop. A folder of other settings is moved aside,
        see `igcore.folders.open_run`.

    Returns
    -------
    DataFrame
        A row per threshold (falling) and prompt id: ``threshold``, ``prompt_id``, ``status``,
        ``loss``, and ``cost`` and ``reward`` of the text (NaN where there is none or the scorer
        failed). The loss is 1 for an answer whose final cost is over budget or NaN. It is 0 for an
        abstention, whatever its text, which the critic alone has checked.

    Raises
    ------
    ParameterError
        For no prompt, no threshold or one outside [0, 1], or a critic that was trained for
        something else.
    """
    policy, config = guard.policy, guard.config
    alone = CriticCost(policy, guard.critic, config.budget)
    guard.under("inferenceguard-critic")  # refuses a critic that was trained for something else
    thresholds = sorted({float(t) for t in thresholds}, reverse=True)
    prompts = [prompt for _, prompt in sorted({p.id: p for p in prompts}.items())]
    if not prompts or not thresholds or not all(0 <= t <= 1 for t in thresholds):
        raise ParameterError(
            f"{len(prompts)} prompts, thresholds {thresholds}; give at least one of each, "
            "thresholds in [0, 1]"
        )
    parts = {"policy": policy, "cost": guard.cost, "reward": guard.reward}
    identity = asdict(config) | {
        "thresholds": thresholds,
        "seed": seed,
        "dtype": str(policy.model.dtype),
        "device": str(policy.model.device),
        "chosen": prompts_digest(prompts),
        "versions": versions(),
        "code": code_of(__name__, *modules_of(*parts.values())),
        "parts": {name: about(part) for name, part in parts.items()} | {"critic": alone.digest},
    }
    groups = [
        prompts[at : at + config.group_size] for at in range(0, len(prompts), config.group_size)
    ]
    wanted = {(_method(threshold), prompt.id) for threshold in thresholds for prompt in prompts}
    with (
        open_run(Path(folder), identity, wanted) as run,
        progress(len(thresholds) * len(prompts), f"{alone.name} alone") as bar,
    ):
        done = {(line["threshold"], line["prompt_id"]) for line in run.lines}
        for threshold, group in product(thresholds, groups):
            if missing := {p.id for p in group if (threshold, p.id) not in done}:
                run.manifest.unlink(missing_ok=True)  # a manifest is the sign of success
                # decode the whole group even if some lines exist: a result depends on its group
                for line in _lines(guard, alone, group, threshold, seed):
                    if line["prompt_id"] in missing:
                        run.append(line)
            bar.update(len(group))
        run.finish({"lines": len(run.lines)})
    frame = pd.DataFrame(run.lines)[
        ["threshold", "prompt_id", "status", "loss", "cost", "reward"]
    ].astype({"cost": float, "reward": float})
    return frame.sort_values(["threshold", "prompt_id"], ascending=[False, True], ignore_index=True)


def _method(threshold: float) -> str:
    """Return the name of the search at a threshold, as the lines have it."""
    return f"critic-only {threshold!r}"


def _lines(
    guard: Guard, alone: CriticCost, group: list[Prompt], threshold: float, seed: int
) -> Iterator[dict]:
    """Answer one group of prompts at one threshold; yield one line per prompt."""
    by_critic = replace(guard, cost=alone, config=settings_at(threshold, guard.config))
    found = decode("inferenceguard", by_critic, group, seed=seed)
    for prompt, r in zip(group, found, strict=True):
        u, inside = math.nan, False
        if r.text is not None:
            (u,), (inside,) = rescore(guard.cost, [prompt], [r.text], guard.config)
        line = {
            "method": _method(threshold),
            "prompt_id": r.prompt_id,
            "threshold": threshold,
            "response": r.text,
            "status": r.status,
            "loss": int(r.status != "abstained" and not inside),
            "cost": float(u),
            "reward": r.reward,
        }
        # JSON has no NaN
        yield {name: value if value == value else None for name, value in line.items()}


def loss_matrix(frame: pd.DataFrame) -> tuple[list[float], np.ndarray]:
    """Return thresholds (T,), falling, and losses (n, T) of 0 or 1.

    ``ParameterError`` unless each prompt has exactly one loss at each threshold.
    """
    table = frame.pivot_table("loss", "prompt_id", "threshold", aggfunc="sum").iloc[
        :, ::-1
    ]  # (n, T)
    if table.isna().any(axis=None) or table.size != len(frame):
        raise ParameterError(
            "some prompt has no loss at some threshold, or several; give all rows of "
            "critic_only_losses, once"
        )
    return table.columns.tolist(), table.to_numpy(dtype=int)


def by_threshold(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per threshold: ``prompts``, ``risk``, ``abstained`` and mean ``reward``.

    ``risk`` and ``abstained`` are shares of the prompts; ``risk_upper95`` is a 95 % upper bound.
    """
    answered = frame.assign(abstained=frame["status"] == "abstained")
    groups = answered.groupby("threshold", sort=False)
    found = groups.agg(
        prompts=("loss", "size"),
        losses=("loss", "sum"),
        risk=("loss", "mean"),
        abstained=("abstained", "mean"),
    )
    bound = [
        1 - safety_lower(n - k, n) for k, n in zip(found["losses"], found["prompts"], strict=True)
    ]
    reward = answered[~answered["abstained"]].groupby("threshold")["reward"].mean()
    return found.assign(risk_upper95=bound, reward=reward).drop(columns="losses").reset_index()
