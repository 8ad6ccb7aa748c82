"""Training a critic on rollouts: its losses, labels and specification.

Every prefix of a rollout is a row. A critic's loss is the mean over rows of

    BCE(f1, ended within budget) + f2_weight * ((f2 - gamma_task^T c_task) / s)^2

with s the standard deviation of the task cost over the rollouts, so that both terms start near one
in any unit of the reward. The loop, `igstudy.training.loop`, trains other networks as well.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from igcore import ParameterError, Policy, Scorer
from igcore.critic.files import Network
from igcore.critic.latent import Latents, shape_of
from igcore.critic.network import Critic, Spec, load_critic

from .config import CriticConfig
from .latents import Source
from .loop import fit, save_network
from .rollouts import Labels, Rollout, labels_of, split_by_prompt

# --- what a critic learns -------------------------------------------------------------------------


def bce_loss(logit: Tensor, safe: Tensor) -> Tensor:
    """Return J_1, the binary cross-entropy of f1, summed over rows (paper, section 5.2).

    Parameters
    ----------
    logit : Tensor (rows,)
        f1 = sigmoid(logit), the probability that the response ends within budget.
    safe : Tensor (rows,)
        1 where it does, 0 where it does not; in the paper the sign of z_T.
    """
    # a sum, because the loop takes the mean over the rows of a batch or a whole epoch. From logits:
    # log(sigmoid(x)) alone would be -infinity for a confident mistake
    return binary_cross_entropy_with_logits(logit, safe, reduction="sum")


def mse_loss(f2: Tensor, task: Tensor, scale: Tensor) -> Tensor:
    """Return J_2, the squared error of f2, summed over rows (paper, section 5.2).

    Parameters
    ----------
    f2, task : Tensor (rows,)
        Predicted and true gamma_task^T c_task, higher is worse. Rows with a true value of NaN,
        because the reward model failed, are left out.
    scale : Tensor ()
        Unit of the error: the standard deviation of the task cost.
    """
    error = (f2 - task) / scale
    # selected and not multiplied by 0: 0 * NaN is NaN, in the loss and in its gradient
    return error[task.isfinite()].square().sum()


def spec_of(
    policy: Policy, cost: Scorer, reward: Scorer, config: CriticConfig, max_new_tokens: int
) -> Spec:
    """Return the specification of a critic with these settings."""
    values: dict[str, Any] = {f.name: getattr(config, f.name, None) for f in fields(Spec)}
    values |= names_of(policy, cost, reward) | shape_of(policy.model)
    values["max_new_tokens"] = max_new_tokens
    # as `Method.settings_under`: the other accountings are charged at the ends of blocks alone. A
    # search compares its settings with these
    if config.accounting != "peak":
        values["checks"] = "block"
    # trained for one budget; a spec may hold a range
    values["budget_high"] = config.budget
    if config.features != "m":  # not read, and so no difference between two critics
        values["layer"] = None
    return Spec(**values)


def names_of(policy: Policy, cost: Scorer, reward: Scorer) -> dict[str, Any]:
    """Return names and hashes, as `igcore.critic.files.Origin` has them."""
    names: dict[str, Any] = {}
    for role, part in (("policy", policy), ("cost", cost), ("reward", reward)):
        names[role] = part.name
        names[f"{role}_digest"] = part.digest
    return names


class SharedSources:
    """The latents of several critics; critics with the same features share them."""

    def __init__(self) -> None:
        self.made: dict[Hashable, Source] = {}

    def of(
        self, policy: Policy, rollouts: Sequence[Rollout], spec: Spec, memory_gb: float
    ) -> Source:
        """Return the latents of rollouts that one of the critics reads."""
        # budget and accounting are not in the key: latents depend on texts and features alone
        texts = tuple((r.prompt, tuple(r.words)) for r in rollouts)
        read = spec.features, spec.layer, memory_gb
        key = texts, read
        if key not in self.made:
            # a prompt is encoded once for all its rollouts
            encoded = {r.prompt: policy.encode(r.prompt) for r in rollouts}
            prompts = [encoded[r.prompt] for r in rollouts]
            responses = [r.words for r in rollouts]
            self.made[key] = Source(policy.model, prompts, responses, *read)
        return self.made[key]


def set_units(network: Network, numbers: Sequence[Tensor]) -> None:
    """Set a network's units, the mean and standard deviation of each of these tensors."""
    for i, x in enumerate(numbers):
        std = x.std()
        network.centre[i] = x.mean()
        network.scale[i] = std if std > 1e-6 else 1  # z of a single budget does not vary


@dataclass(frozen=True)
class CriticObjective:
    """The network, labels and losses of a critic, for `igstudy.training.loop.fit`.

    Attributes
    ----------
    spec, config
        Specification of the network, and settings of its training.
    shared : SharedSources
        Holds the latents.
    """

    spec: Spec
    config: CriticConfig
    shared: SharedSources

    @property
    def name(self) -> str:
        """Label of the progress bar."""
        return f"critic {self.spec.features}"

    @property
    def weights(self) -> dict[str, float]:
        """Terms of the loss and their weights."""
        return {"bce": 1.0, "mse": self.config.f2_weight}

    def source(self, policy: Policy, rollouts: Sequence[Rollout]) -> Source:
        """Return the latents that the network reads; every position of a response is a row."""
        return self.shared.of(policy, rollouts, self.spec, self.config.memory_gb)

    def network(self, rollouts: Sequence[Rollout]) -> Critic:
        """Return an untrained network in the units of these rollouts, its buffer ``scale``."""
        critic = Critic(self.spec, self.config.dropout)
        labels = self.labels(rollouts)
        # without the padding of z, whose zeros would shift the mean, and failed rewards
        z = [row[: len(r.words)] for row, r in zip(labels.z, rollouts, strict=True)]
        task = labels.task[labels.task.isfinite()]
        set_units(critic, [torch.cat(z), task])
        return critic

    def labels(self, rollouts: Sequence[Rollout]) -> Labels:
        """Return the labels of rollouts."""
        return labels_of(rollouts, self.spec)

    def losses(self, network: Critic, x: Latents, labels: Labels, index: Tensor) -> list[Tensor]:
        """Return each term of the loss, summed over the rows of the rollouts `index`.

        `x` are their latents.
        """
        mask = x.mask  # (B, n)
        # labels are as long as the longest rollout of all, a batch as its own longest
        n = mask.shape[1]
        z = labels.z[index, :n].to(mask.device)
        logit, f2 = network(x, z)  # (B, n) each
        # the label of a rollout is that of all its prefixes: (B,) -> (B, n) -> (rows,)
        safe = labels.safe[index, None].expand(-1, n).to(mask.device)
        task = labels.task[index, None].expand(-1, n).to(mask.device)
        bce = bce_loss(logit[mask], safe[mask])
        mse = mse_loss(f2[mask], task[mask], network.scale[1])
        return [bce, mse]

    def save(self, critic: Critic, rollouts: Sequence[Rollout], folder: Path) -> None:
        """Write the critic's files, with the share of these rollouts that is unsafe."""
        critic.about["unsafe"] = 1 - float(labels_of(rollouts, self.spec).safe.mean())
        save_network(critic, folder, "critic")


# --- training -------------------------------------------------------------------------------------


def train(
    policy: Policy,
    rollouts: Sequence[Rollout],
    config: CriticConfig,
    folder: Path,
    *,
    cost: Scorer,
    reward: Scorer,
    shared: SharedSources | None = None,
) -> Critic:
    """Train a critic and save it, see `igstudy.training.loop.fit`.

    Parameters
    ----------
    rollouts : sequence of Rollout
        Of this policy, scored by `cost` and `reward`, on prompts of the training split (see
        `igstudy.prompts`): a threshold is calibrated on prompts that the critic has not seen.
    folder : Path
        Gets ``critic.safetensors`` and ``critic.json``.
    shared : SharedSources, optional
        For several critics of the same rollouts.

    Returns
    -------
    Critic
        In evaluation mode. ``critic.about`` has the entries of `fit` and ``unsafe``, the share of
        unsafe rollouts.

    Raises
    ------
    ParameterError
        When all training rollouts end on one side of the budget, or come from fewer than two
        prompts.
    """
    rollouts = [r for r in rollouts if r.words]  # an end token at once leaves no prefix to judge
    spec = spec_of(policy, cost, reward, config, rollouts[0].max_new_tokens)
    # the same split as in `fit`. Labels of one kind teach nothing: f1 would become a constant
    learn, _ = split_by_prompt(rollouts, config.validation)
    safe = int(labels_of(learn, spec).safe.sum())
    if safe in (0, len(learn)):
        costs = sorted(r.costs[-1] for r in learn)
        raise ParameterError(
            f"of {len(learn)} rollouts to learn from {safe} end within the budget of "
            f"{spec.budget}; choose a budget between {costs[0]:.3g} and {costs[-1]:.3g}"
        )
    objective = CriticObjective(spec, config, shared or SharedSources())
    fit(objective, policy, rollouts, Path(folder))
    # from its files, so that what is used is what was saved
    return load_critic(folder, policy=policy, cost=cost, reward=reward)
