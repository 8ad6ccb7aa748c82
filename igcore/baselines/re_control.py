"""The value network of RE-Control (Kong et al., 2024), and the logits of hidden states that it
moves uphill. Knows o_t, no text.

V(o_t) is what the reference policy's own continuation of a prefix is expected to end with: its
reward and its cost U_K. One network with these two outputs serves every lambda: the squared error
is least at the expected target, and the expectation of -(c_task + lambda C) = reward - lambda C is
that of the reward minus lambda times that of C.

At each token o_t alone climbs V_reward - lambda V_cost for a few gradient steps, between the final
norm and the head. Keys and values never see what it becomes, so that the next token is read as any
other.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import linear

from ..config import SearchConfig
from ..critic.files import load_network, save_network
from ..critic.spec import ValueSpec
from ..engine.engine import Steering
from ..engine.kv_cache import forward
from ..errors import PolicyError
from ..policy import Policy
from ..scorers import Scorer

WEIGHTS = "value.safetensors"


class ValueNetwork(nn.Module):
    """Three linear layers on o_t. Smooth, so that what rounding differs between batches does not
    grow from step to step.

    Attributes
    ----------
    spec : ValueSpec
    about : dict
        How it was trained, see `igcore.critic.training.fit`.
    centre, scale : Tensor (2,)
        Mean and standard deviation of reward and cost over the training rollouts; the layers work
        in these units.
    """

    def __init__(self, spec: ValueSpec, dropout: float = 0.0):
        super().__init__()
        self.spec, self.about = spec, {}
        self.layers = nn.Sequential(
            nn.Linear(spec.hidden, spec.width), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(spec.width, spec.width), nn.GELU(), nn.Dropout(dropout), nn.Linear(spec.width,
            2),
        )  # fmt: skip
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("scale", torch.ones(2))

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return expected final reward (higher is better) and cost (higher is worse), (..., 2), of
        o_t (..., H) in float32.
        """
        return self.layers(hidden) * self.scale + self.centre

    def value(self, hidden: torch.Tensor, lagrange_multiplier: float) -> torch.Tensor:
        """Return V_reward - lambda V_cost (...), higher is better, of o_t (..., H)."""
        reward, cost = self(hidden).unbind(-1)
        return reward - lagrange_multiplier * cost

    def ascend(self, hidden: torch.Tensor, settings: SearchConfig) -> torch.Tensor:
        """Return where gradient ascent on `value` leads from o_t (R, H), in float32 and on the
        network's device.

        Raises
        ------
        PolicyError
            When a row that was finite is no longer.
        """
        with torch.inference_mode(
            False
        ):  # gradients are on again, whatever the caller has switched off
            start = h = hidden.clone().to(
                self.centre.device, torch.float32
            )  # of an inference tensor only a copy has gradients
            for _ in range(settings.value_steps):
                h.requires_grad_()
                (slope,) = torch.autograd.grad(
                    self.value(h, settings.lagrange_multiplier).sum(), h
                )  # rows do not mix
                h = h.detach() + settings.value_step_size * slope
        if (start.isfinite().all(-1) & ~h.isfinite().all(-1)).any():
            raise PolicyError(
                f"{settings.value_steps} steps of value_step_size {settings.value_step_size} "
                f"took a hidden state beyond all finite "
                "numbers; lower value_step_size"
            )
        return h

    def steering(self, model, settings: SearchConfig) -> Steering:
        """Return what makes of o_t (R, H) and W o_t (R, V) the logits of the o_t that has climbed:
        W o_t + W (h - o_t).

        Parameters
        ----------
        model : transformers causal language model
            That of the policy.
        settings : SearchConfig
            Of which `value_steps`, `value_step_size` and `lagrange_multiplier` count. With 0 steps
            the logits stay what they are, bit for bit.

        Raises
        ------
        PolicyError
            When the model's logits are not its head's product with o_t. The returned callable
            raises what `ascend` raises.
        """
        if not settings.value_steps:
            return lambda hidden, logits: logits
        weight = _head(model)  # (V, H)

        def steer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            h = self.ascend(hidden, settings)
            change = linear((h - hidden.to(h)).to(weight), weight)
            return logits.float() + change.to(
                logits.device, torch.float32
            )  # smaller than half precision can add to a logit

        return steer


@torch.inference_mode()
def _head(model) -> torch.Tensor:
    """Return the head's weight W (V, H), once one token has shown that W o_t, with its bias if any,
    is what the model puts out.
    """
    head = model.get_output_embeddings()
    hidden, logits = forward(
        model, input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), logits_to_keep=0
    )
    logits, own = logits.float(), head(hidden).float()
    if (own - logits).norm() > torch.finfo(model.dtype).eps ** 0.75 * logits.norm():
        raise PolicyError(
            f"{type(model).__name__} scales or caps the product of its head and the hidden "
            f"state, so a steered hidden state has no "
            "simple logits; choose another policy or a method without a value network"
        )
    return head.weight.detach()


def save_value(network: ValueNetwork, folder: Path) -> None:
    """Write ``value.safetensors`` and ``value.json`` into a folder, see `igcore.critic.files`."""
    save_network(network, folder, "value")


def load_value(folder: Path | str, *, policy: Policy, cost: Scorer, reward: Scorer) -> ValueNetwork:
    """Load a value network for the policy and scorers that it was trained for.

    Returns
    -------
    ValueNetwork
        In evaluation mode, float32, on the policy's device.

    Raises
    ------
    ParameterError
        When it was trained for another policy, scorer or model size; the sentence names both.
    RunError
        When files are missing, damaged or do not belong together.
    """
    sizes = {"hidden": policy.model.get_output_embeddings().weight.shape[1]}
    network = load_network(
        ValueNetwork, ValueSpec, Path(folder), "value", sizes, policy, cost, reward
    )
    return network.requires_grad_(False)
