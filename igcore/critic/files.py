"""Networks as files: finished ones, and what a training needs to go on after a stop. Knows tensors,
nothing of losses or data.

A finished network is ``<name>.safetensors`` with a ``<name>.json`` that says what it is; nothing is
pickled.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from torch import nn

from ..config import from_mapping
from ..errors import ParameterError, RunError

Weights = dict[str, torch.Tensor]


def weights_of(network: nn.Module) -> Weights:
    """Return a copy of all weights and buffers."""
    return {name: x.detach().clone() for name, x in network.state_dict().items()}


def save_checkpoint(
    path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, best: Weights, state: dict
) -> None:
    """Write weights, the best ones so far, the optimiser's moments and `state` (JSON values),
    atomically.
    """
    moments = {
        f"{i}/{name}": x
        for i, of in optimizer.state_dict()["state"].items()
        for name, x in of.items()
    }
    parts = {"now": weights_of(network), "best": best, "optimizer": moments}
    tensors = {
        f"{part}/{name}": x.contiguous() for part, of in parts.items() for name, x in of.items()
    }
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"state": json.dumps(state)})
    part.replace(path)


def load_checkpoint(
    path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Weights, dict]:
    """Put weights and moments back where they were; return the best weights and the state that
    `save_checkpoint` was given.
    """
    with safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}
    parts: dict[str, Weights] = {"now": {}, "best": {}, "optimizer": {}}
    for name, x in tensors.items():
        part, rest = name.split("/", 1)
        parts[part][rest] = x
    network.load_state_dict(parts["now"])
    moments: dict[int, Weights] = {}
    for name, x in parts["optimizer"].items():
        i, rest = name.split("/")
        moments.setdefault(int(i), {})[rest] = x.cpu() if rest == "step" else x
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return parts["best"], state


def save_network(network: nn.Module, folder: Path, name: str) -> None:
    """Write the two files of a network that has ``spec``, ``about`` and ``parameter_count``."""
    data = save({key: x.detach().cpu().contiguous() for key, x in network.state_dict().items()})
    more = {
        "parameters": network.parameter_count,
        "sha256": hashlib.sha256(data).hexdigest(),
        "about": network.about,
    }
    said = json.dumps(asdict(network.spec) | more, indent=1, allow_nan=False) + "\n"
    for file, content in ((f"{name}.safetensors", data), (f"{name}.json", said.encode())):
        part = folder / f"{file}.part"
        part.write_bytes(content)
        part.replace(folder / file)


def load_network(
    make: Callable, kind: type, folder: Path, name: str, sizes: dict[str, int], policy, cost, reward
) -> nn.Module:
    """Make a network of the two files that `save_network` wrote, for the policy and scorers that it
    was trained for.

    Parameters
    ----------
    make : callable
        Turns a spec into the untrained network.
    kind : type
        Of the spec, see `igcore.critic.spec.Origin`.
    sizes : dict of str to int
        Fields of the spec that must be those of the policy's model.

    Returns
    -------
    Module
        In evaluation mode, float32, on the policy's device.

    Raises
    ------
    ParameterError
        When it was trained for another policy, scorer or model size; the sentence names both.
    RunError
        When files are missing, damaged or do not belong together.
    """
    values, weights, about = read_network(folder, name, kind.KIND)
    spec = from_mapping(kind, values)
    spec.check_scorers(policy, cost, reward)
    for field, size in sizes.items():
        if (made := getattr(spec, field)) != size:
            raise ParameterError(
                f"the {kind.KIND} in {folder} reads a model with {field} {made}, but that of "
                f"policy {policy.name!r} has {size}; "
                f"train a {kind.KIND} for it"
            )
    with torch.device("meta"):
        network = make(spec)
    network.load_state_dict(weights, assign=True)
    network.about = about
    return network.to(policy.model.device).eval()


def read_network(folder: Path, name: str, kind: str) -> tuple[dict, Weights, dict]:
    """Return the fields of ``spec``, the weights and ``about`` of the two files; `kind` is what a
    sentence calls the network.

    Raises
    ------
    RunError
        When files are missing, damaged or do not belong together.
    """
    weights, said = folder / f"{name}.safetensors", folder / f"{name}.json"
    try:
        values, data = json.loads(said.read_text(encoding="utf-8")), weights.read_bytes()
        digest, about, _ = (values.pop(key) for key in ("sha256", "about", "parameters"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RunError(
            f"no {kind} can be read from {folder} ({type(error).__name__}: {error}); train it again"
        ) from error
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise RunError(
            f"{weights} is damaged: its sha256 is {found[:12]}..., not {digest[:12]}...; "
            f"train it again"
        )
    return values, load(data), about
