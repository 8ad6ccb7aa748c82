"""Training the value network of RE-Control on rollouts of the reference policy.

Every prefix of a rollout is a row, from the prompt alone (its o_t decides the first token) to the
whole response. The target of each row is the outcome of its own rollout (Monte Carlo), and the loss
is the mean over rows of

    ((V_reward - reward) / s_reward)^2 + ((V_cost - U_K) / s_cost)^2

with s the standard deviations over the rollouts. RE-Control's public code bootstraps instead: it
makes consecutive values agree. It ties the first value to the outcome, where its paper ties the
last one. Monte Carlo targets leave no such choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from igcore import Policy, Scorer
from igcore.critic.latent import Latents
from igcore.settings import Rows, Weight, settings

from ..training.config import TrainingConfig
from ..training.critic import mse_loss, names_of, set_units
from ..training.latents import Source
from ..training.loop import fit, save_network
from ..training.rollouts import Rollout
from .re_control import ValueNetwork, ValueSpec, load_value


@settings(kw_only=True)
class ValueConfig(TrainingConfig):
    """Settings of a value network and its training; the defaults suit the embedded policies.

    RE-Control's public code has width 4096, lr 1.0e-4, 100 epochs and batches of 512.

    Attributes
    ----------
    n_prompts : int, optional
        Train and validate on the rollouts of at most this many prompts, the first by id; by default
        all. Fewer save time, because o_t takes a pass through all layers of the policy.
    """

    width: Rows = 128
    lr: Weight = 3e-4
    n_prompts: Annotated[int, Field(ge=2)] | None = None


@dataclass(frozen=True)
class ValueObjective:
    """What a value network learns, see `igstudy.training.critic.CriticObjective`."""

    spec: ValueSpec
    config: ValueConfig
    name = "value network"
    weights = {"reward": 1.0, "cost": 1.0}

    def source(self, policy: Policy, rollouts: Sequence[Rollout]) -> Source:
        """Return o_t of every prefix, see `value_source`."""
        return value_source(policy, rollouts, self.config.memory_gb)

    def network(self, rollouts: Sequence[Rollout]) -> ValueNetwork:
        """Return an untrained network in the units of these rollouts."""
        network = ValueNetwork(self.spec, self.config.dropout)
        reward, cost = final_outcomes(rollouts).unbind(-1)
        set_units(network, [reward[reward.isfinite()], cost[cost.isfinite()]])
        return network

    def labels(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return final reward and cost (N, 2), see `final_outcomes`."""
        return final_outcomes(rollouts)

    def losses(
        self, network: ValueNetwork, x: Latents, labels: torch.Tensor, index: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the squared errors of reward and cost, summed over the rows of these rollouts."""
        value = network(x.hidden)[x.mask]  # (rows, 2)
        # the outcome of a rollout is the target of all its prefixes
        of_prefixes = labels[index, None].expand(-1, x.mask.shape[1], -1)
        target = of_prefixes.to(x.mask.device)[x.mask]  # (rows, 2)
        return [
            mse_loss(value[:, 0], target[:, 0], network.scale[0]),
            mse_loss(value[:, 1], target[:, 1], network.scale[1]),
        ]

    def save(self, network: ValueNetwork, rollouts: Sequence[Rollout], folder: Path) -> None:
        """Write the network's files."""
        save_network(network, folder, "value")


def final_outcomes(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return final reward and cost of rollouts, (N, 2), NaN where a scorer failed."""
    rows = [[r.reward, r.costs[-1]] for r in rollouts]
    return torch.tensor(rows, dtype=torch.float32)


def with_rows(policy: Policy, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that have at least one row, see `value_source`."""
    # an empty response to a prompt of one token has none
    return [r for r in rollouts if r.words or len(policy.encode(r.prompt)) > 1]


def of_first(rollouts: Sequence[Rollout], n_prompts: int | None) -> list[Rollout]:
    """Return the rollouts of the first prompts by id; of all when `n_prompts` is None."""
    ids = sorted({r.prompt_id for r in rollouts})
    chosen = set(ids[:n_prompts])
    return [r for r in rollouts if r.prompt_id in chosen]


def value_source(policy: Policy, rollouts: Sequence[Rollout], memory_gb: float) -> Source:
    """Return o_t of every prefix, that of the prompt alone first.

    A prompt of one token has no row of its own.
    """
    # the prompt's last token moves to the response: its o_t decides the first token, and only the
    # o_t of response tokens are returned
    encoded = {r.prompt: policy.encode(r.prompt) for r in rollouts}
    prompts, responses = [], []
    for r in rollouts:
        ids = encoded[r.prompt]
        cut = max(1, len(ids) - 1)  # a prompt must keep one token
        prompts.append(ids[:cut])
        responses.append(ids[cut:] + r.words)
    return Source(policy.model, prompts, responses, "o", None, memory_gb)


def train_value(
    policy: Policy,
    rollouts: Sequence[Rollout],
    config: ValueConfig,
    folder: Path,
    *,
    cost: Scorer,
    reward: Scorer,
) -> ValueNetwork:
    """Train a value network and save it, see `igstudy.training.loop.fit`.

    Parameters
    ----------
    rollouts : sequence of Rollout
        Of this policy, scored by `cost` and `reward`, on prompts of the training split. Empty
        responses count as well: they are about the prompt alone.
    folder : Path
        Gets ``value.safetensors`` and ``value.json``.

    Returns
    -------
    ValueNetwork
        In evaluation mode; ``about`` says how it was trained.

    Raises
    ------
    ParameterError
        When the rollouts come from fewer than two prompts.
    """
    rollouts = with_rows(policy, of_first(rollouts, config.n_prompts))
    spec = ValueSpec(
        **names_of(policy, cost, reward),
        hidden=policy.model.get_output_embeddings().weight.shape[1],
        width=config.width,
        max_new_tokens=rollouts[0].max_new_tokens,
    )
    fit(ValueObjective(spec, config), policy, rollouts, folder)
    return load_value(folder, policy=policy, cost=cost, reward=reward)
