"""Formulas for how long a run takes and how much memory it needs.

A forward pass moves the weights and the KV cache through the device's memory once and multiplies
every token by every weight::

    seconds = max(max(bytes / bandwidth, operations / peak) / efficiency, layers * layer_s)

Left out: attention's own products (1 % at the paper's lengths), the gradient steps of RE-Control,
loading, and the tokens saved when a response ends early.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from operator import itemgetter

import torch

from ...beams import method_of, settings_of
from ...config import SearchConfig
from ...critic.config import TrainingConfig
from ...critic.latent import FEATURES
from ...engine.device import GIB
from ...engine.memory import CRITIC_ROWS, SHARE, batch_size, critic_bytes
from ..critic_params import CriticParams
from .shapes import NetworkSize, Shape

# bytes for every parameter in training: itself, its gradient and two moments of AdamW, in float32
TRAINED = 4 * 4
BACKWARD = 3  # operations of a forward and a backward pass, in forward passes
TEXTS = 32  # texts that a scorer without a KV cache encodes at a time


@dataclass(frozen=True)
class Device:
    """What a data sheet says of one device.

    Attributes
    ----------
    memory : float
        GiB that a program can use.
    bandwidth : float
        Memory bandwidth, bytes a second.
    peak, peak_float32 : float
        Dense matrix products in half precision and in float32, operations a second.
    """

    memory: float
    bandwidth: float
    peak: float
    peak_float32: float

    def peak_of(self, dtype: torch.dtype) -> float:
        """Return the operations per second of products in a dtype."""
        return self.peak_float32 if dtype == torch.float32 else self.peak


DEVICES = {
    "a100-80gb": Device(79, 2.04e12, 312e12, 19.5e12),
    "h100-80gb": Device(79, 3.35e12, 989e12, 67e12),
    "h200": Device(139, 4.8e12, 989e12, 67e12),
}


@dataclass(frozen=True)
class Assumed:
    """The assumptions of an estimate.

    Attributes
    ----------
    device : Device
    efficiency : float
        Share of bandwidth and peak that is reached.
    layer_s : float
        Least seconds per layer, however little work it has: its kernels are started one by one.
    prompt_tokens, longest_prompt : int
        Tokens of a prompt, on average (time) and at most (memory).
    """

    device: Device
    efficiency: float = 0.5
    layer_s: float = 0.4e-3
    prompt_tokens: int = 128
    longest_prompt: int = 512

    def forward_s(
        self, shape: Shape, tokens: float, held: float = 0, layers: int | None = None
    ) -> float:
        """Return the seconds of one forward pass of new tokens over a KV cache of `held` tokens.

        Parameters
        ----------
        layers : int, optional
            How many of the model's layers run; by default all.
        """
        n = shape.config.num_hidden_layers
        share = 1 if layers is None else layers / n
        moved = shape.multiplied * shape.dtype.itemsize + (held + tokens) * shape.token
        work = 2 * shape.multiplied * tokens
        busy = (
            max(moved / self.device.bandwidth, work / self.device.peak_of(shape.dtype))
            / self.efficiency
        )
        return share * max(busy, n * self.layer_s)

    def network_s(self, network: NetworkSize, tokens: float, half: bool = False) -> float:
        """Return the seconds in which a critic or a value network reads tokens, once each."""
        peak = self.device.peak if half else self.device.peak_float32
        return (
            max(4 * network.parameters / self.device.bandwidth, network.operations * tokens / peak)
            / self.efficiency
        )


@dataclass(frozen=True)
class Reader:
    """The language model of one or two scorers, and which of ``cost`` and ``reward`` it gives."""

    shape: Shape
    roles: tuple[str, ...]


@dataclass(frozen=True)
class System:
    """What one run holds in memory at once."""

    policy: Shape
    readers: tuple[Reader, ...] = ()
    critic: NetworkSize | None = None


# --- time -----------------------------------------------------------------------------------------


def batches(prompts: int, group: int, most: int) -> Counter:
    """Return how many batches of which size a run decodes.

    Prompts form groups of `group`, which are cut into batches of at most `most`.
    """
    groups = [min(group, prompts - at) for at in range(0, prompts, group)]
    return Counter(min(most, n - at) for n in groups for at in range(0, n, most))


def search_s(
    system: System, method: str, config: SearchConfig, prompts: int, assumed: Assumed
) -> tuple[float, float]:
    """Return the seconds of a batch of prompts: the part outside rounds, and one round per block.

    The policy and every scorer prefill the prompts once. The policy reads a candidate's tokens one
    step at a time; each scorer that the method uses reads them in one pass a block. A scorer that
    the method does not use reads the answers alone, and the cost model reads them once more in the
    final check.
    """
    settings, how = settings_of(method, config), method_of(method)
    length, block = settings.max_new_tokens, settings.block_size
    rows, texts = prompts * settings.n_samples, assumed.prompt_tokens * prompts
    # ARGS considers many tokens, and its policy reads only the one that it takes
    drawing = prompts if method.startswith("args") else rows
    policy = system.policy

    def passes(shape: Shape, of: int, steps: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of forward passes of `of` rows, given as (first token, tokens)."""
        held = ((n, shape.held(prompts, of, assumed.prompt_tokens, start)) for start, n in steps)
        return sum(assumed.forward_s(shape, of * n, context) for n, context in held)

    once = assumed.forward_s(policy, texts) + sum(
        assumed.forward_s(reader.shape, texts) for reader in system.readers
    )
    a_round = passes(policy, drawing, [(t, 1) for t in range(length - 1)])
    ends = [0, *range(block, length, block), length]
    by_block = (
        [(0, length)] if how.final_only else [(start, end - start) for start, end in pairwise(ends)]
    )
    for reader in system.readers:
        if any(getattr(how, role) for role in reader.roles):
            a_round += passes(reader.shape, rows, by_block)
        else:
            once += passes(reader.shape, prompts, [(0, length)])
        if "cost" in reader.roles:
            once += assumed.forward_s(reader.shape, texts + prompts * length)
    if how.asks_critic:  # it has no cache: at every block end it reads all tokens so far again
        a_round += sum(assumed.network_s(system.critic, rows * end) for end in ends[1:-1])
    return once, a_round


def decode_s(
    system: System, method: str, config: SearchConfig, prompts: int, most: int, assumed: Assumed
) -> tuple[float, float]:
    """Return the seconds of answering prompts by one method in batches of at most `most`.

    Two numbers: with one round in every block, and with all rounds.
    """
    rounds = settings_of(method, config).rounds
    found = [
        (n, *search_s(system, method, config, size, assumed))
        for size, n in batches(prompts, config.group_size, most).items()
    ]
    return sum(n * (once + one) for n, once, one in found), sum(
        n * (once + rounds * one) for n, once, one in found
    )


def drawn(method: str, config: SearchConfig, prompts: int) -> tuple[int, int]:
    """Return the tokens that a method samples or considers, with one round a block and with all."""
    settings = settings_of(method, config)
    tokens = prompts * settings.n_samples * settings.max_new_tokens
    return tokens, tokens * settings.rounds


def rollouts_s(system: System, params: CriticParams, prompts: int, assumed: Assumed) -> float:
    """Return the seconds of sampling rollouts and scoring them.

    The cost model reads every prefix from the start, the reward model the whole response.
    """
    n, length, size = params.n_rollouts, params.max_new_tokens, assumed.prompt_tokens
    total = 0.0
    for batch, count in batches(prompts, params.group_size, params.group_size).items():
        rows = batch * n
        steps = ((rows, system.policy.held(batch, rows, size, t)) for t in range(length - 1))
        seconds = assumed.forward_s(system.policy, batch * size) + sum(
            assumed.forward_s(system.policy, *step) for step in steps
        )
        total += count * seconds
    ends = {
        "cost": [*range(params.block_size, length, params.block_size), length],
        "reward": [length],
    }
    for reader in system.readers:
        texts = [size + end for role in reader.roles for end in ends[role]]
        total += (
            prompts
            * n
            / TEXTS
            * sum(assumed.forward_s(reader.shape, TEXTS * tokens) for tokens in texts)
        )
    return total


def training_s(
    policy: Shape,
    network: NetworkSize,
    config: TrainingConfig,
    rollouts: int,
    length: int,
    assumed: Assumed,
) -> tuple[float, float]:
    """Return the seconds of training a network: of the fewest epochs, and of all.

    The fewest are those after which its patience may end. The policy's features are computed again
    in every epoch, except where they fit the memory that training may hold.
    """
    passes, batch = (
        rollouts / config.batch_size,
        config.batch_size * (assumed.prompt_tokens + length),
    )
    encode = passes * assumed.forward_s(policy, batch, layers=network.layers)
    learn = (1 - config.validation) * BACKWARD + config.validation
    epoch = learn * assumed.network_s(
        network, rollouts * length, half=config.mixed_precision == "bf16"
    )
    held = latent_bytes(policy, network.features) * rollouts * length <= config.memory_gb * GIB
    fewest = min(config.epochs, config.patience + 1)
    return tuple(
        (1 if held else epochs) * encode + epochs * epoch for epochs in (fewest, config.epochs)
    )


# --- memory ---------------------------------------------------------------------------------------


def latent_bytes(policy: Shape, features: str) -> int:
    """Return the bytes of what a network reads of one token.

    `igcore.critic.latent.token_bytes` does the same for a loaded model.
    """
    states = sum(part in ("hidden", "middle") for part in FEATURES[features])
    return (
        states * policy.config.hidden_size * policy.dtype.itemsize
        + ("keys" in FEATURES[features]) * policy.token
    )


def prompt_bytes(
    system: System, method: str, config: SearchConfig, assumed: Assumed
) -> dict[str, int]:
    """Return the bytes that a method plans for one prompt, by the engine's own formula.

    `igcore.guard.decode` plans with the same numbers.

    Returns
    -------
    dict
        ``keys_values`` and ``logits`` of the policy, ``critic``, and ``session_0``, ``session_1``
        for the readers.
    """
    settings, longest = settings_of(method, config), assumed.longest_prompt
    logits = system.policy.logits_bytes(settings)
    reads = method_of(method).asks_critic and system.critic.reads_keys
    return {
        "keys_values": system.policy.search_bytes(settings, longest) - logits,
        "logits": logits,
        "critic": critic_bytes(
            system.policy.model, min(CRITIC_ROWS, settings.n_samples), settings.max_new_tokens
        )
        if reads
        else 0,
    } | {
        f"session_{i}": reader.shape.session_bytes(settings, longest)
        for i, reader in enumerate(system.readers)
    }


def training_bytes(policy: Shape, network: NetworkSize, config: TrainingConfig, length: int) -> int:
    """Return the bytes of training a network: numbers, optimiser state, and a batch's tensors."""
    batch = critic_bytes(policy.model, config.batch_size, length) if network.reads_keys else 0
    return TRAINED * network.parameters + batch


def loads(system: System, fixed: int, needed: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Return the bytes of weights, and of one prompt, that each model needs, the policy first.

    `fixed` bytes, the weights of networks, lie beside the policy. So does all that a prompt needs
    besides the scorers' sessions.
    """
    weights = [system.policy.weights + fixed, *(reader.shape.weights for reader in system.readers)]
    sessions = [needed[f"session_{i}"] for i in range(len(system.readers))]
    return weights, [sum(needed.values()) - sum(sessions), *sessions]


def splits(
    system: System, fixed: int, needed: Mapping[str, int], device: Device
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield for 1, 2, ... devices how many prompts fit at most, and the device of each model.

    The policy comes first. No model is cut, so there are no more devices than models. See `loads`
    for the arguments.
    """
    weights, prompt = loads(system, fixed, needed)
    for n in range(1, len(weights) + 1):
        places = [(0, *rest) for rest in product(range(n), repeat=len(weights) - 1)]
        yield max(
            ((fitting(weights, prompt, place, device), place) for place in places),
            key=itemgetter(0),
        )


def free_bytes(weights: Sequence[int], place: Sequence[int], here: int, device: Device) -> int:
    """Return the bytes left on one device beside the models that stand on it."""
    return int(device.memory * GIB) - sum(
        w for w, at in zip(weights, place, strict=True) if at == here
    )


def fitting(
    weights: Sequence[int], prompt: Sequence[int], place: Sequence[int], device: Device
) -> int:
    """Return how many prompts fit on a placement of models; 0 where not even one does.

    Parameters
    ----------
    weights, prompt : sequences of int
        See `loads`.
    place : sequence of int
        Device of each model.
    """
    found = []
    for here in set(place):
        free, needed = (
            free_bytes(weights, place, here, device),
            sum(p for p, at in zip(prompt, place, strict=True) if at == here),
        )
        found.append(batch_size(needed, free, None) if needed <= SHARE * free else 0)
    return min(found)
