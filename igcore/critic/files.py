"""Trained networks: their specification and their files.

A trained network is ``<name>.safetensors`` with its specification in ``<name>.json``.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load
from torch import nn

from ..config import SearchConfig
from ..errors import ParameterError, RunError, one_line
from ..policy import Policy
from ..scorers import Scorer
from ..settings import settings

N = TypeVar("N", bound="Network")


@settings(kw_only=True)
class Origin:
    """The policy, scorers and sizes that a network was trained for.

    Attributes
    ----------
    policy, policy_digest, cost, cost_digest, reward, reward_digest : str
        Names and hashes; the network is valid for no others.
    max_new_tokens : int
        Length T at which the rollouts were finished.
    hidden, width : int
        Size of the policy's hidden state, and of the network's layers.
    """

    KIND: ClassVar = "network"  # its name in messages
    # settings that must be the same in search and training: the targets depend on them
    SAME: ClassVar[tuple[str, ...]] = ("max_new_tokens",)

    policy: str
    policy_digest: str
    cost: str
    cost_digest: str
    reward: str
    reward_digest: str
    max_new_tokens: int
    hidden: int
    width: int

    def check_scorers(self, policy: Policy, cost: Scorer, reward: Scorer | None = None) -> None:
        """Raise ``ParameterError`` unless it was trained for these, by name and hash.

        The reward is checked if given.
        """
        # a network for other weights has the right shape and wrong predictions: nothing else shows
        # the mistake
        for role, part in (("policy", policy), ("cost", cost), ("reward", reward)):
            if part is None:
                continue
            name, digest = getattr(self, role), getattr(self, f"{role}_digest")
            # a scorer that is a user's function may have no digest: then its name alone counts
            undigested = role != "policy" and not (part.digest and digest)
            if part.name != name or part.digest != digest and not undigested:
                raise ParameterError(
                    f"the {self.KIND} was trained for {role} {name!r} of hash {digest[:12]!r}, not "
                    f"for {part.name!r} of hash {part.digest[:12]!r}; give it that {role}, or "
                    f"train a {self.KIND} for this one"
                )

    def check_settings(self, method: str, settings: SearchConfig) -> None:
        """Raise ``ParameterError`` unless it was trained for the settings of a method."""
        for name in self.SAME:
            trained, value = getattr(self, name), getattr(settings, name)
            if value != trained:
                raise ParameterError(
                    f"the {self.KIND} was trained for {name} {trained!r}, but {method!r} runs with "
                    f"{value!r}; set {name} to {trained!r} where the method leaves it open, or "
                    f"train a {self.KIND} for this one"
                )


class Network(nn.Module):
    """A network that is trained on rollouts.

    Attributes
    ----------
    spec : Origin
        Its sizes, and the models and settings it was trained for.
    about : dict
        The record of its training, see `igstudy.training.loop.fit`.
    centre, scale : Tensor (2,)
        Mean and standard deviation of its inputs or outputs over the training rollouts; the layers
        work in these units.
    """

    SPEC: ClassVar[type[Origin]]
    spec: Origin
    centre: torch.Tensor
    scale: torch.Tensor

    def __init__(self, spec: Origin):
        super().__init__()
        self.spec = spec
        self.about: dict[str, Any] = {}
        # buffers: saved and moved with the weights, and never trained. The subclass says what the
        # two entries are; for a critic they are z and f2
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("scale", torch.ones(2))

    @property
    def parameter_count(self) -> int:
        """Number of weights and biases."""
        return sum(p.numel() for p in self.parameters())


# --- files ----------------------------------------------------------------------------------------


def load_network(
    network_type: type[N],
    folder: Path,
    name: str,
    sizes: dict[str, int],
    policy: Policy,
    cost: Scorer,
    reward: Scorer | None,
) -> N:
    """Load a network for the policy and scorers of its training; `igstudy.training` writes it.

    Parameters
    ----------
    network_type : type
        Class of the network.
    sizes : dict of str to int
        Fields of the spec that must agree with the policy's model.
    policy, cost, reward
        Those of its training; a reward model is checked if given.

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
            f"no {kind} can be read from {folder} ({one_line(error)}); train it again"
        ) from error
    # hashed before the tensors are read, so that a damaged file is never interpreted
    if hashlib.sha256(data).hexdigest() != digest:
        raise RunError(f"{path} is damaged: its sha256 is not {digest[:12]}; train it again")
    spec = network_type.SPEC(**fields)
    spec.check_scorers(policy, cost, reward)
    # the sizes as well: a wrong one would only fail in the first search, inside a matrix product
    for field, size in sizes.items():
        if (trained := getattr(spec, field)) != size:
            raise ParameterError(
                f"the {kind} in {folder} reads a model with {field} {trained}, but that of "
                f"policy {policy.name!r} has {size}; train a {kind} for it"
            )
    # on "meta" no memory is taken and no weight initialised; `assign` then puts the loaded tensors
    # in place, since nothing can be copied into a meta tensor
    with torch.device("meta"):
        network = network_type(spec)
    network.load_state_dict(load(data), assign=True)
    network.about = training
    return network.to(policy.model.device).eval()
