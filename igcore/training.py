"""Training a critic on rollouts: settings, the loop, checkpoints. Knows rollouts, latents and critics; knows nothing of search.

Every prefix of a rollout is a row. The loss is the mean over rows of

    BCE(f1, ended inside the budget) + f2_weight * ((f2 - gamma_task^T c_task) / s)^2

with s the standard deviation of the task cost over the rollouts, so that both parts start near one whatever the reward's units.
"""

import hashlib
import importlib.metadata
import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import binary_cross_entropy_with_logits

from .critic import Critic, Spec, load_critic, save_critic
from .critic_config import CriticConfig
from .errors import ParameterError
from .latent import ENCODE, Source, middle_layer, shape_of
from .policy import Policy
from .progress import progress
from .rollouts import Labels, Rollout, code_digest, split_by_prompt
from .runs import VERSIONS, open_run
from .scorers import Scorer

DECISIVE = "budget critic latent packed rollouts training".split()  # a change in one of these modules starts a training anew
CHECKPOINT = "checkpoint.safetensors"


def spec_of(policy: Policy, cost: Scorer, reward: Scorer, config: CriticConfig, max_new_tokens: int) -> Spec:
    """Return what a critic with these settings is."""
    if config.features == "m":
        middle_layer(policy.model, config.layer)
    names = {
        f"{role}{suffix}": getattr(part, attribute)
        for role, part in (("policy", policy), ("cost", cost), ("reward", reward))
        for suffix, attribute in (("", "name"), ("_digest", "digest"))
    }
    high = config.budget if config.budget_high is None else config.budget_high
    same = {name: getattr(config, name) for name in "accounting gamma_safety budget gamma_task features use_z width".split()}
    layer = config.layer if config.features == "m" else None
    return Spec(**names, **same, **shape_of(policy.model), budget_high=high, max_new_tokens=max_new_tokens, layer=layer)


def labels_of(rollouts: Sequence[Rollout], spec: Spec, seed: Sequence[int]) -> Labels:
    """Return what a critic should say of rollouts, at budgets drawn by these seeds where it serves a range of them."""
    budgets = np.random.default_rng(seed).uniform(spec.budget, spec.budget_high, len(rollouts))
    return Labels.of(rollouts, budgets, spec.accounting, spec.gamma_safety, spec.gamma_task)


def source_of(policy: Policy, rollouts: Sequence[Rollout], spec: Spec, memory_gb: float) -> Source:
    """Return the latents that a critic reads of rollouts."""
    prompts = {r.prompt: policy.encode(r.prompt) for r in rollouts}
    return Source(
        policy.model, [prompts[r.prompt] for r in rollouts], [r.words for r in rollouts], spec.features, spec.layer, memory_gb
    )


def train(
    policy: Policy, rollouts: Sequence[Rollout], config: CriticConfig, folder: Path, *, cost: Scorer, reward: Scorer
) -> Critic:
    """Train a critic and save it; start again after any stop and it goes on from the last epoch, to the same weights.

    Device, mixed precision and several processes are accelerate's: under ``accelerate launch`` each process takes its share of
    every batch. On a CPU the weights depend on the seed alone; on a GPU sums may differ in their last bits.

    Parameters
    ----------
    rollouts : sequence of Rollout
        Of this policy, scored by `cost` and `reward`. Of the training split, see `igcore.prompts`: a threshold is only calibrated
        on prompts that the critic has not seen.
    folder : Path
        Gets ``critic.safetensors``, ``critic.json`` and, last, ``manifest.json``. A folder trained under other settings or on
        other rollouts is moved aside.

    Returns
    -------
    Critic
        The epoch with the lowest validation loss, in evaluation mode. ``critic.about`` has ``history`` (losses by epoch),
        ``train_s`` and ``latents_s`` (seconds), ``n_rollouts``, ``n_prompts``, ``unsafe`` (share) and ``config``.

    Raises
    ------
    ParameterError
        When all rollouts to learn from end on one side of the budget, or come from fewer than two prompts.
    """
    rollouts = [r for r in rollouts if r.words]
    learn, check = split_by_prompt(rollouts, config.validation)
    spec = spec_of(policy, cost, reward, config, rollouts[0].max_new_tokens)
    _check_classes(learn, spec)
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    content = json.dumps([[r.prompt_id, r.tokens, repr(r.costs), repr(r.reward)] for r in rollouts])
    identity = {"config": asdict(config), "spec": asdict(spec), "rollouts": hashlib.sha256(content.encode()).hexdigest()} | {
        "code": code_digest(DECISIVE),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "processes": accelerator.num_processes,
    }
    folder = Path(folder)
    with open_run(folder, identity) if accelerator.is_main_process else nullcontext() as run:
        accelerator.wait_for_everyone()
        if not (folder / "manifest.json").exists():
            began = time.perf_counter()
            sources = [source_of(policy, part, spec, config.memory_gb) for part in (learn, check)]
            latents_s = time.perf_counter() - began
            with torch.random.fork_rng(devices=[accelerator.device] if accelerator.device.type == "cuda" else []):
                trainer = _Trainer(accelerator, spec, config, (learn, check), sources, folder / CHECKPOINT)
                trainer.run()
            if run:
                critic = trainer.best_critic()
                critic.about = {
                    "history": trainer.history, "train_s": trainer.seconds, "latents_s": latents_s, "config": asdict(config),
                    "n_rollouts": len(rollouts), "n_prompts": len({r.prompt_id for r in rollouts}),
                    "unsafe": 1 - float(labels_of(rollouts, spec, ()).safe.mean()),
                }  # fmt: skip
                save_critic(critic, folder)
                run.finish(identity)
                (folder / CHECKPOINT).unlink()
        accelerator.wait_for_everyone()
    return load_critic(folder, policy=policy, cost=cost, reward=reward)


def _check_classes(rollouts: Sequence[Rollout], spec: Spec) -> None:
    safe = int(labels_of(rollouts, spec, ()).safe.sum())
    if safe in (0, len(rollouts)):
        costs = sorted(r.costs[-1] for r in rollouts)
        raise ParameterError(
            f"of {len(rollouts)} rollouts to learn from {safe} end inside the budget of {spec.budget} and {len(rollouts) - safe} "
            f"outside; a critic needs both: their final costs go from {costs[0]:.3g} to {costs[-1]:.3g}, so choose a budget between"
        )


class _Trainer:
    """The loop, with everything that a checkpoint holds: weights, best weights, optimiser, history, seconds."""

    def __init__(self, accelerator: Accelerator, spec: Spec, config: CriticConfig, parts, sources, checkpoint: Path):
        self.accelerator, self.spec, self.config, self.checkpoint = accelerator, spec, config, checkpoint
        (self.learn, self.check), (self.source, self.check_source) = parts, sources
        torch.manual_seed(config.seed)
        critic = Critic(spec, config.dropout)
        labels = labels_of(self.learn, spec, (config.seed, 0))
        spoken = torch.cat([z[: len(r.words)] for z, r in zip(labels.z, self.learn, strict=True)])
        task = labels.task[labels.task.isfinite()]
        for i, x in enumerate((spoken, task)):
            critic.centre[i], critic.scale[i] = x.mean(), x.std() if x.std() > 1e-6 else 1
        optimizer = torch.optim.AdamW(critic.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.model, self.optimizer = accelerator.prepare(critic, optimizer)
        self.critic = accelerator.unwrap_model(self.model)
        self.history: list[dict] = []
        self.seconds, self.best = 0.0, self._weights()
        if checkpoint.exists():
            self._load()

    def run(self) -> None:
        bar = progress(self.config.epochs, f"critic {self.spec.features}")
        bar.update(len(self.history))
        while len(self.history) < self.config.epochs and not self._stale():
            began = time.perf_counter()
            learnt, checked = self._learn(len(self.history) + 1), self._check()
            if not math.isfinite(learnt["learn_loss"] + checked["check_loss"]):
                raise ParameterError(f"the loss is no longer a finite number at lr {self.config.lr}; lower lr")
            if checked["check_loss"] < min((epoch["check_loss"] for epoch in self.history), default=math.inf):
                self.best = self._weights()
            self.history.append({"epoch": len(self.history) + 1} | learnt | checked)
            self.seconds += time.perf_counter() - began
            if self.accelerator.is_main_process:
                self._save()
            bar.update()
        bar.close()

    def best_critic(self) -> Critic:
        self.critic.load_state_dict(self.best)
        return self.critic

    def _stale(self) -> bool:
        losses = [epoch["check_loss"] for epoch in self.history]
        return bool(losses) and len(losses) - 1 - int(np.argmin(losses)) >= self.config.patience

    def _learn(self, epoch: int) -> dict:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        labels = labels_of(self.learn, self.spec, (self.config.seed, epoch))
        rng = np.random.default_rng((self.config.seed, epoch, 1))  # nothing is left over from the epoch before: see `_load`
        order = rng.permutation(len(self.learn))
        torch.manual_seed(int(rng.integers(2**62)) + rank)
        self.model.train()
        sums = torch.zeros(3)
        for at in range(0, len(order), self.config.batch_size):
            batch = order[at : at + self.config.batch_size]
            mine = batch[rank::world]
            rows = sum(len(self.learn[i].words) for i in batch)
            part = self._sums(self.source, labels, mine if len(mine) else batch[:1]) * bool(len(mine))
            # the mean over processes that accelerate takes of the gradients is then the mean over the rows of the whole batch
            self.accelerator.backward((part[0] + self.config.f2_weight * part[1]) * world / rows)
            self.optimizer.step()
            self.optimizer.zero_grad()
            sums += part.detach().cpu()
        return self._losses("learn", sums)

    @torch.no_grad()
    def _check(self) -> dict:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        labels = labels_of(self.check, self.spec, (self.config.seed, 0))
        self.model.eval()
        mine = range(rank, len(self.check), world)
        parts = [self._sums(self.check_source, labels, mine[at : at + ENCODE]).cpu() for at in range(0, len(mine), ENCODE)]
        return self._losses("check", sum(parts, torch.zeros(3)))

    def _sums(self, source: Source, labels: Labels, index: Sequence[int]) -> torch.Tensor:
        """Return the sums over rows of both losses, and the number of rows."""
        index, device = torch.as_tensor(index), self.accelerator.device
        x = source.take(index).to(device, torch.float32)
        n = x.mask.shape[1]
        logit, f2 = self.model(x, labels.z[index, :n].to(device))
        safe, task = (y[index, None].expand(-1, n).to(device)[x.mask] for y in (labels.safe, labels.task))
        error = (f2[x.mask] - task) / self.critic.scale[1]
        bce = binary_cross_entropy_with_logits(logit[x.mask], safe, reduction="sum")
        return torch.stack([bce, error[task.isfinite()].square().sum(), x.mask.sum().to(bce)])

    def _losses(self, name: str, sums: torch.Tensor) -> dict:
        bce, mse, rows = self.accelerator.reduce(sums.to(self.accelerator.device)).tolist()
        loss = (bce + self.config.f2_weight * mse) / rows
        return {f"{name}_loss": loss, f"{name}_bce": bce / rows, f"{name}_mse": mse / rows}

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone() for name, x in self.critic.state_dict().items()}

    def _save(self) -> None:
        moments = {f"{i}/{name}": x for i, state in self.optimizer.state_dict()["state"].items() for name, x in state.items()}
        parts = {"now": self._weights(), "best": self.best, "optimizer": moments}
        tensors = {f"{part}/{name}": x.contiguous() for part, of in parts.items() for name, x in of.items()}
        part = self.checkpoint.with_suffix(".part")
        save_file(tensors, part, metadata={"state": json.dumps({"history": self.history, "seconds": self.seconds})})
        part.replace(self.checkpoint)

    def _load(self) -> None:
        with safe_open(self.checkpoint, "pt") as file:
            state = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name).to(self.accelerator.device) for name in file.keys()}
        parts: dict[str, dict] = {"now": {}, "best": {}, "optimizer": {}}
        for name, x in tensors.items():
            part, rest = name.split("/", 1)
            parts[part][rest] = x
        self.history, self.seconds, self.best = state["history"], state["seconds"], parts["best"]
        self.critic.load_state_dict(parts["now"])
        moments: dict[int, dict] = {}
        for name, x in parts["optimizer"].items():
            i, rest = name.split("/")
            moments.setdefault(int(i), {})[rest] = x.cpu() if rest == "step" else x
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
