"""RE-Control (Kong et al., 2024), a baseline of the paper: gradient ascent on a value function.

V(o_t) is the expected reward and cost U_K of a response that the reference policy continues from a
prefix. One network with these two outputs serves every lambda, because expectations are linear:
E[-(c_task + lambda C)] = E[reward] - lambda E[C], and least squares learns expectations.

At each token, o_t takes a few gradient steps that increase V_reward - lambda V_cost, between the
final norm and the head. The KV cache stays that of the sampled tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import linear

from igcore import Policy, PolicyError, Scorer, SearchConfig
from igcore.beams import unranked
from igcore.critic.files import Network, Origin, load_network
from igcore.critic.network import Steers
from igcore.engine.kv_cache import Rows, forward
from igcore.engine.local import LocalEngine
from igcore.engine.sampling import Drawn, RowFactors, Sampling, draw
from igcore.methods import Method, one_sample
from igcore.search import Batch, guarded_beam_search
from igcore.settings import settings
from igcore.verdict import Emission

from ..settings import ReControlConfig, upcast_settings

# o_t (R, H) and the reference logits W o_t (R, V) -> the logits (R, V) to sample from
Steering = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class SteeredEngine(LocalEngine):
    """Samples from the logits that `steering` returns.

    Only sampling changes: the KV cache is still that of the sampled tokens.
    """

    steering: Steering

    def draw_next(self, state: Rows, u: torch.Tensor, factors: RowFactors) -> Drawn:
        """Sample one token per row of a state from the steered logits."""
        steered = self.steering(state.hidden, state.logits)
        tokens, _, log_q, near = draw(steered, u, factors, self.sampling)
        # log_p is that of the reference policy, not of the one that gave the token. float32: in
        # bfloat16 a log-softmax would lose digits that sum up over a response
        reference = state.logits.log_softmax(-1, dtype=torch.float32)
        index = torch.tensor(tokens, device=reference.device)
        log_p = reference.gather(1, index[:, None])[:, 0]
        return tokens, log_p.tolist(), log_q, near


def re_control(batch: Batch) -> list[Emission]:
    """Sample one response per prompt from steered logits (paper, section 6; appendix D.2).

    Returns
    -------
    list of Emission
        One per prompt, in their order.

    Raises
    ------
    PolicyError
        When gradient ascent diverges, or the policy's logits are not W o_t.
    """
    network, policy = batch.critic, batch.policy
    assert isinstance(network, Steers)  # which the method needs
    sampling = Sampling.of(batch.config)
    engine = SteeredEngine(policy.model, policy.eos_ids, policy.cache, sampling=sampling)
    engine.steering = network.steering(policy.model, batch.config)
    batch.engine = engine
    return guarded_beam_search(batch)


# --- methods --------------------------------------------------------------------------------------


def one_steered_sample(config: SearchConfig) -> ReControlConfig:
    """Return settings under which a single steered response is sampled."""
    steered: ReControlConfig = upcast_settings(ReControlConfig, one_sample(config))
    return steered


def one_sample_without_cost(config: SearchConfig) -> ReControlConfig:
    """Return the same with no weight on the cost."""
    return replace(one_steered_sample(config), lagrange_multiplier=0.0)


RE_CONTROL_LAGRANGIAN = Method(
    unranked,
    one_steered_sample,
    reads=frozenset({"critic"}),
    cost=False,
    reward=False,
    network="value network",
    search=re_control,
)
RE_CONTROL = replace(RE_CONTROL_LAGRANGIAN, settings=one_sample_without_cost)


# --- the value function ---------------------------------------------------------------------------


@settings(kw_only=True)
class ValueSpec(Origin):
    """What a value network is and what it was trained for.

    It serves any budget and accounting, so it adds no field.
    """

    KIND: ClassVar = "value network"


class ValueNetwork(Network):
    """The value network: three linear layers on o_t.

    Its activations are smooth, so that rounding differences do not grow from step to step.
    Its units are those of reward and cost.
    """

    SPEC = ValueSpec

    def __init__(self, spec: ValueSpec, dropout: float = 0.0):
        super().__init__(spec)
        self.layers = nn.Sequential(
            nn.Linear(spec.hidden, spec.width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(spec.width, spec.width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(spec.width, 2),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the expected final reward and cost (..., 2) of o_t (..., H) in float32.

        A higher reward is better, a higher cost is worse.
        """
        outcomes: torch.Tensor = self.layers(hidden)
        return outcomes * self.scale + self.centre

    def value(self, hidden: torch.Tensor, lagrange_multiplier: float) -> torch.Tensor:
        """Return V_reward - lambda V_cost (...), higher is better, of o_t (..., H)."""
        reward, cost = self.forward(hidden).unbind(-1)
        return reward - lagrange_multiplier * cost

    def ascend(self, hidden: torch.Tensor, settings: ReControlConfig) -> torch.Tensor:
        """Return the end of gradient ascent on `value` from o_t (R, H), in float32.

        The result is on the network's device.

        Raises
        ------
        PolicyError
            When a row that was finite no longer is.
        """
        # the engine runs in inference mode, which has no gradients
        with torch.inference_mode(False):
            # an inference tensor cannot have gradients, and its copy can
            start = h = hidden.clone().to(self.centre.device, torch.float32)
            for _ in range(settings.value_steps):
                h.requires_grad_()
                total = self.value(h, settings.lagrange_multiplier).sum()  # rows do not mix
                (slope,) = torch.autograd.grad(total, h)
                h = h.detach() + settings.value_step_size * slope
        if (start.isfinite().all(-1) & ~h.isfinite().all(-1)).any():
            raise PolicyError(
                f"{settings.value_steps} steps of value_step_size {settings.value_step_size} took "
                "a hidden state beyond all finite numbers; lower value_step_size"
            )
        return h

    def steering(self, model: Any, settings: ReControlConfig) -> Steering:
        """Return a function of o_t (R, H) and W o_t (R, V) that gives the steered logits (R, V).

        With h the end of the ascent from o_t these are W o_t + W (h - o_t).

        Parameters
        ----------
        model : transformers causal language model
            That of the policy.
        settings : ReControlConfig
            Only `value_steps`, `value_step_size` and `lagrange_multiplier` count. With 0 steps the
            logits do not change, bit for bit.

        Raises
        ------
        PolicyError
            When the model's logits are not W o_t. The returned function raises as `ascend` does.
        """
        weight = _head(model)  # (V, H)

        def steer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            h = self.ascend(hidden, settings)
            change = linear((h - hidden.to(h)).to(weight), weight)
            # in float32: half precision would round a small change of a large logit away
            return logits.float() + change.to(logits.device, torch.float32)

        return steer


@torch.inference_mode()
def _head(model: Any) -> torch.Tensor:
    """Return the head's weight W (V, H), after a check on one token that the logits are W o_t.

    The logits may have a bias, which steering does not change.
    """
    head = model.get_output_embeddings()
    hidden, logits = forward(
        model, input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), logits_to_keep=0
    )
    logits, own = logits.float(), head(hidden).float()
    if (own - logits).norm() > torch.finfo(model.dtype).eps ** 0.75 * logits.norm():
        raise PolicyError(
            f"{type(model).__name__} scales or caps the product of its head and the hidden state, "
            "so a steered hidden state has no simple logits; choose another policy or a method "
            "without a value network"
        )
    weight: torch.Tensor = head.weight
    return weight.detach()


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
    network = load_network(ValueNetwork, Path(folder), "value", sizes, policy, cost, reward)
    return network.requires_grad_(False)
