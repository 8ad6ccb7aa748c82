"""Training a network on rollouts: the losses of the critic, then the loop and its checkpoints.

Every prefix of a rollout is a row. A critic's loss is the mean over rows of

    BCE(f1, ended inside the budget) + f2_weight * ((f2 - gamma_task^T c_task) / s)^2

with s the standard deviation of the task cost over the rollouts, so that both parts start near one
whatever the reward's units. Knows rollouts and latents, nothing of search; what a value network
learns is in `igcore.baselines.value_training`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..errors import ParameterError
from ..folders import digest_of, open_run
from ..policy import Policy
from ..progress import progress
from ..scorers import Scorer
from .config import CriticConfig
from .files import load_checkpoint, save_checkpoint, weights_of
from .latent import ENCODE, Latents, Source, middle_layer, shape_of
from .network import Critic, Spec, load_critic, save_critic
from .rollouts import Labels, Rollout, split_by_prompt

# --- what a critic learns -------------------------------------------------------------------------


def bce_loss(logit: torch.Tensor, safe: torch.Tensor) -> torch.Tensor:
    """Return J_1 of the paper summed over rows: binary cross-entropy of f1 (section 4.2).

    Parameters
    ----------
    logit : Tensor (rows,)
        f1 = sigmoid(logit), the probability that the response ends inside the budget.
    safe : Tensor (rows,)
        1 where it does, 0 where it does not; the paper asks for the sign of z_T.
    """
    return binary_cross_entropy_with_logits(logit, safe, reduction="sum")


def mse_loss(f2: torch.Tensor, task: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return J_2 of the paper summed over rows: the squared error of f2 (section 4.2).

    Parameters
    ----------
    f2, task : Tensor (rows,)
        Predicted and true gamma_task^T c_task, higher is worse. Rows whose truth is NaN, because
        the reward model failed, are left out.
    scale : Tensor ()
        Unit of the error: the standard deviation of the task cost.
    """
    error = (f2 - task) / scale
    return error[task.isfinite()].square().sum()


def spec_of(
    policy: Policy, cost: Scorer, reward: Scorer, config: CriticConfig, max_new_tokens: int
) -> Spec:
    """Return what a critic with these settings is."""
    layer = config.layer if config.features == "m" else None
    if config.features == "m":
        middle_layer(policy.model, layer)  # raises unless the model has it
    return Spec(
        **names_of(policy, cost, reward),
        **shape_of(policy.model),
        max_new_tokens=max_new_tokens,
        accounting=config.accounting,
        gamma_safety=config.gamma_safety,
        budget=config.budget,
        budget_high=config.budget if config.budget_high is None else config.budget_high,
        gamma_task=config.gamma_task,
        features=config.features,
        layer=layer,
        use_z=config.use_z,
        width=config.width,
    )


def names_of(policy: Policy, cost: Scorer, reward: Scorer) -> dict[str, str]:
    """Return names and hashes, as `igcore.critic.spec.Origin` has them."""
    names = {}
    for role, part in (("policy", policy), ("cost", cost), ("reward", reward)):
        names |= {role: part.name, f"{role}_digest": part.digest}
    return names


def labels_of(rollouts: Sequence[Rollout], spec: Spec, seed: Sequence[int]) -> Labels:
    """Return what a critic should say of rollouts.

    Where it serves a range of budgets, each rollout has one that this seed draws.
    """
    budgets = np.random.default_rng(seed).uniform(spec.budget, spec.budget_high, len(rollouts))
    return Labels.of(rollouts, budgets, spec.accounting, spec.gamma_safety, spec.gamma_task)


def source_of(policy: Policy, rollouts: Sequence[Rollout], spec: Spec, memory_gb: float) -> Source:
    """Return the latents that a critic reads of rollouts."""
    encoded = {r.prompt: policy.encode(r.prompt) for r in rollouts}
    prompts, responses = [encoded[r.prompt] for r in rollouts], [r.words for r in rollouts]
    return Source(policy.model, prompts, responses, spec.features, spec.layer, memory_gb)


@dataclass(frozen=True)
class CriticObjective:
    """What a critic learns. `fit` takes any object with these names.

    Attributes
    ----------
    spec, config
        What the network is, and how it is trained.
    name : str
        Of the progress bar.
    weights : dict of str to float
        The parts of the loss and their weights.
    """

    spec: Spec
    config: CriticConfig

    @property
    def name(self) -> str:
        return f"critic {self.spec.features}"

    @property
    def weights(self) -> dict[str, float]:
        return {"bce": 1.0, "mse": self.config.f2_weight}

    def source(self, policy: Policy, rollouts: Sequence[Rollout]) -> Source:
        """Return the latents that the network reads; every position of a response is a row."""
        return source_of(policy, rollouts, self.spec, self.config.memory_gb)

    def network(self, rollouts: Sequence[Rollout]) -> Critic:
        """Return an untrained network in the units of these rollouts, its buffer ``scale``."""
        critic = Critic(self.spec, self.config.dropout)
        labels = self.labels(rollouts, 0)
        z = torch.cat([row[: len(r.words)] for row, r in zip(labels.z, rollouts, strict=True)])
        task = labels.task[labels.task.isfinite()]
        for i, x in enumerate((z, task)):
            critic.centre[i] = x.mean()
            critic.scale[i] = x.std() if x.std() > 1e-6 else 1  # one budget: z does not vary
        return critic

    def labels(self, rollouts: Sequence[Rollout], draw: int) -> Labels:
        """Return what the network should say; epoch n learns from draw n, validation is draw 0."""
        return labels_of(rollouts, self.spec, (self.config.seed, draw))

    def losses(
        self, model, scale: torch.Tensor, x: Latents, labels: Labels, index: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return each part of the loss, summed over the rows of the rollouts `index`.

        `x` are their latents, and `scale` the units of the network.
        """
        n, device = x.mask.shape[1], x.mask.device
        logit, f2 = model(x, labels.z[index, :n].to(device))  # (B, n) each
        # the label of a rollout is that of all its prefixes
        safe = labels.safe[index, None].expand(-1, n).to(device)
        task = labels.task[index, None].expand(-1, n).to(device)
        return [
            bce_loss(logit[x.mask], safe[x.mask]),
            mse_loss(f2[x.mask], task[x.mask], scale[1]),
        ]

    def save(self, critic: Critic, rollouts: Sequence[Rollout], folder: Path) -> None:
        """Write the critic's files, with the share of these rollouts that is unsafe."""
        critic.about["unsafe"] = 1 - float(labels_of(rollouts, self.spec, ()).safe.mean())
        save_critic(critic, folder)


# --- training -------------------------------------------------------------------------------------


def train(
    policy: Policy,
    rollouts: Sequence[Rollout],
    config: CriticConfig,
    folder: Path,
    *,
    cost: Scorer,
    reward: Scorer,
    identity: Mapping | None = None,
) -> Critic:
    """Train a critic and save it, see `fit`.

    Parameters
    ----------
    rollouts : sequence of Rollout
        Of this policy, scored by `cost` and `reward`. Of the training split, see
        `igcore.models.prompts`: a threshold is only calibrated on prompts that the critic has not
        seen.
    folder : Path
        Gets ``critic.safetensors``, ``critic.json`` and, last, ``manifest.json``.
    identity : mapping, optional
        See `fit`.

    Returns
    -------
    Critic
        In evaluation mode. ``critic.about`` has besides what `fit` notes ``unsafe``, the share of
        the rollouts.

    Raises
    ------
    ParameterError
        When all rollouts to learn from end on one side of the budget, or come from fewer than two
        prompts.
    """
    rollouts = [r for r in rollouts if r.words]
    spec = spec_of(policy, cost, reward, config, rollouts[0].max_new_tokens)
    _check_classes(split_by_prompt(rollouts, config.validation)[0], spec)
    fit(CriticObjective(spec, config), policy, rollouts, Path(folder), identity)
    return load_critic(folder, policy=policy, cost=cost, reward=reward)


def fit(
    objective,
    policy: Policy,
    rollouts: Sequence[Rollout],
    folder: Path,
    identity: Mapping | None = None,
) -> None:
    """Train a network and save it.

    Start it again after any stop and it goes on from the last epoch, to the same weights. Device,
    mixed precision and several processes are accelerate's: under ``accelerate launch`` each process
    takes its share of every batch. On a CPU the weights depend on the seed alone; on a GPU sums may
    differ in their last bits.

    Parameters
    ----------
    objective
        See `CriticObjective`. It saves the network of the epoch with the lowest validation loss,
        whose ``about`` has ``history`` (losses by epoch), ``train_s`` and ``latents_s`` (seconds),
        ``n_rollouts``, ``n_prompts`` and ``config``.
    rollouts : sequence of Rollout
        With at least one row each, of two prompts or more.
    folder : Path
        Gets, last, ``manifest.json``. One that was trained under other settings or on other
        rollouts is moved aside.
    identity : mapping, optional
        What else the weights depend on, as JSON values, such as digests of code: a resume compares
        it, too.
    """
    config = objective.config
    parts = split_by_prompt(rollouts, config.validation)
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    content = [[r.prompt_id, r.tokens, repr(r.costs), repr(r.reward)] for r in rollouts]
    params = dict(identity or {}) | {
        "config": asdict(config),
        "spec": asdict(objective.spec),
        "rollouts": digest_of(content),
        "processes": accelerator.num_processes,
    }
    # one process alone writes; the others wait until it has opened the folder, and until it is done
    with open_run(folder, params) if accelerator.is_main_process else nullcontext() as run:
        accelerator.wait_for_everyone()
        if not (folder / "manifest.json").exists():
            began = time.perf_counter()
            sources = [objective.source(policy, part) for part in parts]
            latents_s = time.perf_counter() - began
            cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
            with torch.random.fork_rng(devices=cuda):  # the user's random state stays as it is
                checkpoint = folder / "checkpoint.safetensors"
                trainer = _Trainer(accelerator, objective, parts, sources, checkpoint)
                network = trainer.run()
            if run:
                network.about = {
                    "history": trainer.history,
                    "train_s": trainer.seconds,
                    "latents_s": latents_s,
                    "config": asdict(config),
                    "n_rollouts": len(rollouts),
                    "n_prompts": len({r.prompt_id for r in rollouts}),
                }
                objective.save(network, rollouts, folder)
                run.finish(params)
                checkpoint.unlink()
        accelerator.wait_for_everyone()


def _check_classes(rollouts: Sequence[Rollout], spec: Spec) -> None:
    """Raise ``ParameterError`` where all rollouts end on one side of the lowest budget."""
    safe = int(labels_of(rollouts, spec, ()).safe.sum())
    if safe in (0, len(rollouts)):
        costs = sorted(r.costs[-1] for r in rollouts)
        raise ParameterError(
            f"of {len(rollouts)} rollouts to learn from {safe} end inside the budget of "
            f"{spec.budget} and {len(rollouts) - safe} outside; a critic needs both: their final "
            f"costs go from {costs[0]:.3g} to {costs[-1]:.3g}, so choose a budget between"
        )


class _Trainer:
    """The loop, with all that a checkpoint holds: weights, best weights, optimiser, history."""

    def __init__(self, accelerator: Accelerator, objective, parts, sources, checkpoint: Path):
        self.accelerator, self.objective, self.config = accelerator, objective, objective.config
        self.checkpoint = checkpoint
        (self.learn, self.check), (self.source, self.check_source) = parts, sources
        torch.manual_seed(self.config.seed)
        network = objective.network(self.learn)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        self.model, self.optimizer = accelerator.prepare(network, optimizer)
        self.network = accelerator.unwrap_model(self.model)
        weights = list(objective.weights.values())
        self.weights = torch.tensor(weights, device=accelerator.device)
        self.history: list[dict] = []  # losses by epoch
        self.seconds = 0.0
        self.best = weights_of(self.network)
        if checkpoint.exists():
            self.best, state = load_checkpoint(
                checkpoint, self.network, self.optimizer, accelerator.device
            )
            self.history, self.seconds = state["history"], state["seconds"]

    def run(self) -> nn.Module:
        """Return the network of the best epoch."""
        bar = progress(self.config.epochs, self.objective.name)
        bar.update(len(self.history))
        while len(self.history) < self.config.epochs and not self._stale():
            self._epoch()
            bar.update()
        bar.close()
        self.network.load_state_dict(self.best)
        return self.network

    def _stale(self) -> bool:
        """Say whether validation has not fallen for `patience` epochs."""
        losses = [epoch["check_loss"] for epoch in self.history]
        return bool(losses) and len(losses) - 1 - int(np.argmin(losses)) >= self.config.patience

    def _epoch(self) -> None:
        """Learn from all rollouts once, look at the others, and write a checkpoint."""
        began = time.perf_counter()
        learnt, checked = self._learn(len(self.history) + 1), self._check()
        if not math.isfinite(learnt["learn_loss"] + checked["check_loss"]):
            raise ParameterError(
                f"the loss is no longer a finite number at lr {self.config.lr}; lower lr"
            )
        lowest = min((epoch["check_loss"] for epoch in self.history), default=math.inf)
        if checked["check_loss"] < lowest:
            self.best = weights_of(self.network)
        self.history.append({"epoch": len(self.history) + 1} | learnt | checked)
        self.seconds += time.perf_counter() - began
        if self.accelerator.is_main_process:
            state = {"history": self.history, "seconds": self.seconds}
            save_checkpoint(self.checkpoint, self.network, self.optimizer, self.best, state)

    def _learn(self, epoch: int) -> dict:
        """Take one step per batch, in an order that the epoch decides; return the mean losses."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        labels = self.objective.labels(self.learn, epoch)
        # seeded by the epoch, so that a resumed training goes on as if it had never stopped
        rng = np.random.default_rng((self.config.seed, epoch, 1))
        order = rng.permutation(len(self.learn))
        torch.manual_seed(int(rng.integers(2**62)) + rank)  # of dropout
        self.model.train()
        sums = torch.zeros(len(self.weights) + 1)
        for at in range(0, len(order), self.config.batch_size):
            batch = order[at : at + self.config.batch_size]
            mine = batch[rank::world]
            rows = sum(len(self.source.responses[i]) for i in batch)
            # a process without a share takes part in the step all the same, with weight 0
            part = self._sums(self.source, labels, mine if len(mine) else batch[:1])
            part = part * bool(len(mine))
            # the mean over processes that accelerate takes of the gradients is then the mean over
            # the rows of the whole batch
            self.accelerator.backward((self.weights * part[:-1]).sum() * world / rows)
            self.optimizer.step()
            self.optimizer.zero_grad()
            sums += part.detach().cpu()
        return self._means("learn", sums)

    @torch.no_grad()
    def _check(self) -> dict:
        """Return the mean losses of the validation rollouts."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        labels = self.objective.labels(self.check, 0)
        self.model.eval()
        mine = range(rank, len(self.check), world)
        sums = torch.zeros(len(self.weights) + 1)
        for at in range(0, len(mine), ENCODE):
            sums += self._sums(self.check_source, labels, mine[at : at + ENCODE]).cpu()
        return self._means("check", sums)

    def _sums(self, source: Source, labels, index: Sequence[int]) -> torch.Tensor:
        """Return the sums over rows of all parts of the loss, and the number of rows."""
        index = torch.as_tensor(index)
        x = source.take(index).to(self.accelerator.device, torch.float32)
        parts = self.objective.losses(self.model, self.network.scale, x, labels, index)
        return torch.stack([*parts, x.mask.sum().to(parts[0])])

    def _means(self, name: str, sums: torch.Tensor) -> dict:
        """Return the loss and its parts as means over the rows of all processes."""
        *parts, rows = self.accelerator.reduce(sums.to(self.accelerator.device)).tolist()
        weights = self.objective.weights
        means = {part: x / rows for part, x in zip(weights, parts, strict=True)}
        loss = sum(weight * means[part] for part, weight in weights.items())
        return {f"{name}_loss": loss} | {f"{name}_{part}": x for part, x in means.items()}
