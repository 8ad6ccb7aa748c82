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
from functools import partial
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
from ..scorers import COST
from ..verdict import rescore
from .identity import models_identity


class CriticCost:
    """A critic as a cost: 1 - f1, the probability that the answer ends outside `budget`.

    `budget` is by default the lowest that the critic was trained for. ``ParameterError`` for a
    critic of another policy or budget, or of an accounting other than ``terminal``.
    """

    sign, unit = COST, "probability"

    def __init__(self, policy: Policy, critic: Critic, budget: float | None = None):
        """Check that the critic fits, and hash its weights, its spec and the budget."""
        self.policy, self.critic, spec = policy, critic, critic.spec
        self.budget = spec.budget if budget is None else budget
        if spec.accounting != "terminal":
            raise ParameterError(
                f"the critic was trained for accounting {spec.accounting!r}; to guard alone train "
                "one for 'terminal'"
            )
        spec.check_scorers(policy, None)
        spec.check_budget(self.budget)
        self.name = f"critic-{spec.features}"
        weights = {name: x.detach().cpu().contiguous() for name, x in critic.state_dict().items()}
        settings = json.dumps([asdict(spec), self.budget])
        self.digest = hashlib.sha256(settings.encode() + save(weights)).hexdigest()

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return 1 - f1 after the last token of each text, (n,).

        NaN for an empty text and wherever the critic returns NaN. A text is tokenized again, which
        need not give the sampled tokens; z_t = d / gamma_safety^t counts the tokens that it gives.
        """
        spec, scores = self.critic.spec, np.full(len(responses), np.nan)
        tokenize = partial(self.policy.tokenizer, add_special_tokens=False)
        words = [tokenize(text)["input_ids"] for text in responses]
        spoken = [i for i, ids in enumerate(words) if ids]
        for at in range(0, len(spoken), ENCODE):
            index = spoken[at : at + ENCODE]
            ids = [words[i] for i in index]
            prefixes = [self.policy.encode(prompts[i]) for i in index]
            states = encode(self.policy.model, prefixes, ids, spec.features, spec.layer)
            z = [self.budget / spec.gamma_safety ** len(tokens) for tokens in ids]
            f1, _ = self.critic.judge(states, z)
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
    models = {"policy": policy, "cost": guard.cost, "reward": guard.reward}
    known = models_identity(models, prompts, __name__)
    known["parts"]["critic"] = alone.digest
    order = ("dtype", "device", "chosen", "versions", "code", "parts")
    identity = asdict(config) | {"thresholds": thresholds, "seed": seed}
    identity |= {name: known[name] for name in order}
    size = config.group_size
    groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    threshold_of = {f"critic-only {threshold!r}": threshold for threshold in thresholds}
    wanted = set(product(threshold_of, [prompt.id for prompt in prompts]))

    def lines_of(method: str, group: Sequence[Prompt]) -> Iterator[dict]:
        """Yield the lines of a group at the threshold of a method."""
        for line in _lines(guard, alone, group, threshold_of[method], seed):
            yield {"method": method} | line

    with open_run(Path(folder), identity, wanted) as run:
        run.fill(list(product(threshold_of, groups)), lines_of, f"{alone.name} alone")
        run.finish({"lines": len(run.lines)})
    names = ["threshold", "prompt_id", "status", "loss", "cost", "reward"]
    frame = pd.DataFrame(run.lines)[names].astype({"cost": float, "reward": float})
    return frame.sort_values(["threshold", "prompt_id"], ascending=[False, True], ignore_index=True)


def _lines(
    guard: Guard, alone: CriticCost, group: Sequence[Prompt], threshold: float, seed: int
) -> Iterator[dict]:
    """Answer one group of prompts at one threshold; yield one line per prompt."""
    by_critic = replace(guard, cost=alone, config=settings_at(threshold, guard.config))
    responses = decode("inferenceguard", by_critic, group, seed=seed)
    for prompt, r in zip(group, responses, strict=True):
        u, inside = math.nan, False
        if r.text is not None:
            (u,), (inside,) = rescore(guard.cost, [prompt], [r.text], guard.config)
        line = {
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
