"""Files of networks: trained ones, and checkpoints from which a stopped training resumes.

A trained network is ``<name>.safetensors`` with its specification in ``<name>.json``.
"""

import hashlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load, save
from torch import nn

from ..errors import ParameterError, RunError
from ..files import replace_file
from ..policy import Policy
from ..scorers import Scorer
from .spec import Origin

Weights = dict[str, torch.Tensor]
N = TypeVar("N", bound="Network")


class Network(nn.Module):
    """A network that is trained on rollouts.

    Attributes
    ----------
    spec : Origin
        What it is and what it was trained for.
    about : dict
        How it was trained, see `igcore.critic.loop.fit`.
    centre, scale : Tensor (2,)
        Mean and standard deviation of its inputs or outputs over the training rollouts; the layers
        work in these units.
    """

    SPEC: ClassVar[type[Origin]]
    spec: Any
    centre: torch.Tensor
    scale: torch.Tensor

    def __init__(self, spec: Any):
        super().__init__()
        self.spec = spec
        self.about: dict[str, Any] = {}
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("scale", torch.ones(2))

    @property
    def parameter_count(self) -> int:
        """Number of weights and biases."""
        return sum(p.numel() for p in self.parameters())


def weights_of(network: nn.Module) -> Weights:
    """Return a copy of all weights and buffers."""
    return {name: x.detach().clone() for name, x in network.state_dict().items()}


# --- checkpoints ----------------------------------------------------------------------------------


def save_checkpoint(
    path: Path,
    network: Network,
    optimizer: torch.optim.Optimizer,
    best: Weights,
    state: dict[str, Any],
) -> None:
    """Write weights, the best ones so far, the optimiser and `state` (JSON values), atomically."""
    content = io.BytesIO()
    saved = {"now": network.state_dict(), "best": best, "optimizer": optimizer.state_dict()}
    torch.save(saved | {"state": state}, content)
    replace_file(path, content.getvalue())


def load_checkpoint(
    path: Path, network: Network, optimizer: torch.optim.Optimizer
) -> tuple[Weights, dict[str, Any]]:
    """Restore weights and optimiser; return the best weights and the `state`."""
    # weights_only runs no code of the file; both load_state_dict move tensors where they belong
    saved = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict(saved["now"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["best"], saved["state"]


# --- finished networks ----------------------------------------------------------------------------


def weights_file(network: nn.Module) -> bytes:
    """Return the content of the safetensors file of a network."""
    weights = {name: x.detach().cpu().contiguous() for name, x in network.state_dict().items()}
    return save(weights)


def save_network(network: Network, folder: Path, name: str) -> None:
    """Write the two files of a network."""
    data = weights_file(network)
    description = asdict(network.spec) | {
        "parameters": network.parameter_count,
        "sha256": hashlib.sha256(data).hexdigest(),
        "about": network.about,
    }
    text = json.dumps(description, indent=1, allow_nan=False) + "\n"
    replace_file(folder / f"{name}.safetensors", data)
    replace_file(folder / f"{name}.json", text)


def load_network(
    network_type: type[N],
    folder: Path,
    name: str,
    sizes: dict[str, int],
    policy: Policy,
    cost: Scorer,
    reward: Scorer | None,
) -> N:
    """Load a network that `save_network` wrote, for the policy and scorers of its training.

    Parameters
    ----------
    network_type : type
        Class of the network.
    sizes : dict of str to int
        Fields of the spec that must agree with the policy's model.
    policy, cost, reward
        Those of its training; a reward model is checked when given.

    Returns
    -------
    Network
        In evaluation mode, float32, on the policy's device.

    Raises
    ------
    ParameterError
        When it was trained for another policy, scorer or model size; the sentence names both.
    RunError
        When files are missing, damaged or do not belong together.
    """
    kind = network_type.SPEC.KIND
    path = folder / f"{name}.safetensors"
    try:
        fields = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        data = path.read_bytes()
        digest, training, _ = (fields.pop(key) for key in ("sha256", "about", "parameters"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RunError(
            f"no {kind} can be read from {folder} ({type(error).__name__}: {error}); train it again"
        ) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise RunError(f"{path} is damaged: its sha256 is not {digest[:12]}; train it again")
    spec = network_type.SPEC(**fields)
    spec.check_scorers(policy.trained, cost, reward)
    for field, size in sizes.items():
        if (trained := getattr(spec, field)) != size:
            raise ParameterError(
                f"the {kind} in {folder} reads a model with {field} {trained}, but that of "
                f"policy {policy.name!r} has {size}; train a {kind} for it"
            )
    with torch.device("meta"):  # initialise no weights: they are replaced at once
        network = network_type(spec)
    network.load_state_dict(load(data), assign=True)
    network.about = training
    return network.to(policy.model.device).eval()
