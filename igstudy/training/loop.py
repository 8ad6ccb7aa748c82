"""The loop that trains any network on rollouts: epochs, validation, checkpoints, resume.

An objective, such as `igstudy.training.critic.CriticObjective`, has the network, labels and losses.
"""

import hashlib
import io
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save
from torch import Tensor

from igcore import ParameterError, Policy
from igcore.critic.files import Network
from igcore.files import DIGITS, digest_of
from igcore.progress import progress

from ..files import replace_file
from .config import TrainingConfig
from .latents import ENCODE, Source
from .rollouts import Rollout, split_by_prompt

Losses = dict[str, float]  # epoch, the loss and its terms, by name


def fit(objective: Any, policy: Policy, rollouts: Sequence[Rollout], folder: Path) -> None:
    """Train a network and save it.

    Training can be stopped at any time: the next start in the same folder, with the same settings
    and rollouts, resumes after the last epoch and gives the same weights. accelerate handles device
    and mixed precision. On a CPU the weights depend on the seed alone; on a GPU sums may differ in
    their last bits, and dropout has other random numbers.

    Parameters
    ----------
    objective
        An object with the attributes and methods of `igstudy.training.critic.CriticObjective`. It
        saves the network of the epoch with the lowest validation loss, whose ``about`` has
        ``history`` (losses by epoch), ``train_s`` and ``latents_s`` (seconds), ``n_rollouts``,
        ``n_prompts`` and ``config``.
    rollouts : sequence of Rollout
        Of two prompts or more; each has at least one row.
    folder : Path
        Gets the network's files, and until then a checkpoint.
    """
    config = objective.config
    # by prompt: rollouts of one prompt are alike, and a network that has learnt some of them would
    # look better on the others than it is
    parts = split_by_prompt(rollouts, config.validation)
    # named by all that the weights depend on: a checkpoint of another training is never resumed
    depends = [asdict(config), asdict(objective.spec), list(map(repr, rollouts))]
    checkpoint = folder / f"checkpoint-{digest_of(depends)[:DIGITS]}.pt"
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    began = time.perf_counter()
    sources = [objective.source(policy, part) for part in parts]
    latents_s = time.perf_counter() - began
    cuda = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # the user's random state stays as it is
        trainer = _Trainer(accelerator, objective, parts, sources, checkpoint)
        network = trainer.run()
    network.about = {
        "history": trainer.history,
        "train_s": trainer.seconds,
        "latents_s": latents_s,
        "config": asdict(config),
        "n_rollouts": len(rollouts),
        "n_prompts": len({r.prompt_id for r in rollouts}),
    }
    objective.save(network, rollouts, folder)
    checkpoint.unlink()  # only now: if training stops before, the next start needs it


@dataclass(eq=False)
class _Trainer:
    """The loop and the state that a checkpoint saves: weights, best weights, optimiser, history."""

    accelerator: Accelerator
    objective: Any
    parts: Sequence[Sequence[Rollout]]
    sources: Sequence[Source]
    checkpoint: Path

    def __post_init__(self) -> None:
        self.config: TrainingConfig = self.objective.config
        # training and validation; the fields of validation begin with "check"
        self.learn, self.check = self.parts
        self.labels, self.check_labels = (self.objective.labels(part) for part in self.parts)
        self.source, self.check_source = self.sources
        torch.manual_seed(self.config.seed)  # of the initial weights
        network = self.objective.network(self.learn)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay
        )
        self.network: Network
        self.network, self.optimizer = self.accelerator.prepare(network, optimizer)
        weights = list(self.objective.weights.values())
        self.weights = torch.tensor(weights, device=self.accelerator.device)
        self.history: list[Losses] = []  # losses by epoch
        self.seconds = 0.0
        # a copy, because the optimiser changes the weights in place
        self.best = self._weights()
        if self.checkpoint.exists():  # an earlier start was stopped
            self._resume()

    def run(self) -> Network:
        """Return the network of the best epoch."""
        bar = progress(self.config.epochs, self.objective.name)
        bar.update(len(self.history))
        while len(self.history) < self.config.epochs and not self._stale():
            self._epoch()
            bar.update()
        bar.close()
        self.network.load_state_dict(self.best)  # of the epoch with the lowest validation loss
        return self.network

    def _stale(self) -> bool:
        """True if validation has not fallen for `patience` epochs."""
        losses = [epoch["check_loss"] for epoch in self.history]
        # argmin is the first epoch of the lowest loss: an equal loss later is no progress
        return bool(losses) and len(losses) - 1 - int(np.argmin(losses)) >= self.config.patience

    def _epoch(self) -> None:
        """Train on all training rollouts once, validate, and write a checkpoint."""
        began = time.perf_counter()
        learnt, checked = self._learn(len(self.history) + 1), self._check()
        # else NaN would end training in silence, with the best weights before it
        if not math.isfinite(learnt["learn_loss"] + checked["check_loss"]):
            raise ParameterError(
                f"the loss is no longer a finite number at lr {self.config.lr}; lower lr"
            )
        lowest = min((epoch["check_loss"] for epoch in self.history), default=math.inf)
        if checked["check_loss"] < lowest:
            self.best = self._weights()
        self.history.append({"epoch": len(self.history) + 1} | learnt | checked)
        self.seconds += time.perf_counter() - began
        self._save()

    def _weights(self) -> dict[str, Tensor]:
        """Return a copy of all weights and buffers of the network."""
        return {name: x.detach().clone() for name, x in self.network.state_dict().items()}

    def _save(self) -> None:
        """Write the checkpoint, atomically."""
        # into memory first: a stop while the file is written must not leave half of it
        content = io.BytesIO()
        saved = {"now": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved |= {"best": self.best, "history": self.history, "seconds": self.seconds}
        torch.save(saved, content)
        replace_file(self.checkpoint, content.getvalue())

    def _resume(self) -> None:
        """Continue from the checkpoint of an earlier start."""
        # weights_only: a pickle could run code. map_location: the earlier start may have had a GPU;
        # both load_state_dict move the tensors to where the network is
        saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self.network.load_state_dict(saved["now"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.best, self.history, self.seconds = (saved[k] for k in ("best", "history", "seconds"))

    def _learn(self, epoch: int) -> Losses:
        """Take one step per batch, in an order that the epoch seeds; return the mean losses."""
        # seeded by the epoch, so that a resumed training goes on as if it had never stopped
        rng = np.random.default_rng((self.config.seed, epoch, 1))
        order = rng.permutation(len(self.learn)).tolist()
        torch.manual_seed(int(rng.integers(2**62)))  # of dropout
        self.network.train()
        sums = torch.zeros(len(self.weights) + 1)  # the terms of the loss, and the number of rows
        for start in range(0, len(order), self.config.batch_size):
            batch = order[start : start + self.config.batch_size]
            # a row is a prefix: long responses have more rows, and each row weighs the same
            rows = sum(len(self.source.responses[i]) for i in batch)
            part = self._sums(self.source, self.labels, batch)
            self.accelerator.backward((self.weights * part[:-1]).sum() / rows)
            self.optimizer.step()
            self.optimizer.zero_grad()
            # sums and not means: a mean of means would weigh a short last batch too much. detach:
            # else the graphs of all batches stay in memory
            sums += part.detach().cpu()
        return self._means("learn", sums)

    @torch.no_grad()
    def _check(self) -> Losses:
        """Return the mean losses of the validation rollouts."""
        self.network.eval()  # without dropout
        rollouts = range(len(self.check))
        sums = torch.zeros(len(self.weights) + 1)
        for start in range(0, len(rollouts), ENCODE):
            batch = rollouts[start : start + ENCODE]
            sums += self._sums(self.check_source, self.check_labels, batch).cpu()
        return self._means("check", sums)

    def _sums(self, source: Source, labels: Any, rollouts: Sequence[int]) -> Tensor:
        """Return the sum over rows of each term of the loss, and the number of rows."""
        index = torch.as_tensor(rollouts)
        # float32, as in a search (`Critic.judge`): the policy may be in bfloat16
        x = source.take(rollouts).to(self.accelerator.device, torch.float32)
        parts = self.objective.losses(self.network, x, labels, index)
        return torch.stack([*parts, x.mask.sum().to(parts[0])])

    def _means(self, name: str, sums: Tensor) -> Losses:
        """Return the loss and its terms as means over the rows."""
        *parts, rows = sums.tolist()
        losses = {f"{name}_loss": 0.0}
        for (part, weight), total in zip(self.objective.weights.items(), parts, strict=True):
            mean = total / rows
            losses[f"{name}_loss"] += weight * mean
            losses[f"{name}_{part}"] = mean
        return losses


def save_network(network: Network, folder: Path, name: str) -> None:
    """Write the two files of a network."""
    # safetensors and not pickle, which can run code when it is loaded
    data = save({name: x.cpu().contiguous() for name, x in network.state_dict().items()})
    description = asdict(network.spec) | {
        "parameters": network.parameter_count,
        "sha256": hashlib.sha256(data).hexdigest(),
        "about": network.about,
    }
    # allow_nan: other readers of JSON refuse NaN
    text = json.dumps(description, indent=1, allow_nan=False) + "\n"
    # the description last: it holds the hash of the weights, so that a stop between the two leaves
    # a pair that does not load, and not new weights under an old description
    replace_file(folder / f"{name}.safetensors", data)
    replace_file(folder / f"{name}.json", text)
