"""How many prompts fit into memory at once, given the sizes of a model and the search settings."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ParameterError, PolicyError
from ..settings import MOST
from .agreement import supports_shared_prefix
from .device import GIB, all_bytes, device_of, free_bytes, out_of_memory
from .prepack import missing_bytes

T = TypeVar("T")
R = TypeVar("R")
PLANNED_SHARE = 0.8  # share of free memory that is planned for; the rest is for activations
CHECKS = 32  # checks of a scorer whose last tokens are read together
CRITIC_ROWS = 8  # candidates that a critic of keys and values reads at a time
log = logging.getLogger("igcore")


def kv_bytes(
    model: PreTrainedModel, prompts: int, prompt_tokens: int, rows: int, capacity: int
) -> int:
    """Return the bytes of the KV cache of prompts and of `rows` slots of `capacity` new tokens.

    sum over layers of 2 * key heads * head_dim, * bytes per number
        * (prompts * prompt_tokens + rows * capacity)
    """
    config = model.config.get_text_config(decoder=True)
    # layers of several sizes are listed one by one, by versions of transformers that know them
    layers = getattr(config, "per_layer_config", [config] * config.num_hidden_layers)
    per_token: int = sum(map(_kv_width, layers)) * model.dtype.itemsize
    return per_token * (prompts * prompt_tokens + rows * capacity)


def _kv_width(layer: PreTrainedConfig) -> int:
    """Return how many numbers of keys and values a layer keeps for a token."""
    query_heads: int = getattr(layer, "num_attention_heads", None) or 1
    # grouped-query attention keeps fewer key heads than it has query heads; models without it do
    # not name them. `or`: some configs have the name and None
    key_heads: int = getattr(layer, "num_key_value_heads", None) or query_heads
    head_dim: int = getattr(layer, "head_dim", None) or layer.hidden_size // query_heads
    return 2 * key_heads * head_dim  # keys and values


def cached_tokens(config: Any) -> list[tuple[int, int]]:
    """Return the tokens after a prompt that are cached at the moments that need most.

    Each moment has the tokens that the policy keeps, and those that a scorer keeps. With N samples,
    K beams, T new tokens, M rounds, and s and s' where the last block and the one before begin::

        while the last block is sampled   N T + K s          (M - 1) N T + K s
        while it is scored                K s                M N T + K s
        while the one before is scored    N s + K s' + K s   M N s + K s'

    The policy does not read the end of the last block, and the last K s are of failed rounds.
    """
    n, keep, rounds, length = config.n_samples, config.keep, config.rounds, config.max_new_tokens
    last = max(0, length - config.block_size)
    before = max(0, last - config.block_size)
    failed = keep * last if rounds > 1 else 0
    moments = [
        (n * length + keep * last, (rounds - 1) * n * length + keep * last),
        (keep * last, rounds * n * length + keep * last),
        (n * last + keep * before + failed, rounds * n * last + keep * before),
    ]
    # a search with steps back has one answer, which it copies
    return [(max(policy, 2 * length), max(scorer, 2 * length)) for policy, scorer in moments]


def search_bytes(
    model: PreTrainedModel, config: Any, prompt_tokens: int, cache: str = "auto"
) -> list[int]:
    """Return the bytes to plan for the search for one prompt at each moment of `cached_tokens`.

    These are the KV cache of the prompt (twice, because a retry of some prompts copies theirs), the
    KV cache and o_t of the cached tokens, and the logits of the candidates, with their
    probabilities in float32::

        kv_bytes(2 prompts of prompt_tokens) + cached tokens * (bytes of keys, values and o_t)
            + n_samples * vocabulary * (bytes per number + 4)

    With transformers' own cache every row has the prompt, and twice, because each step copies the
    cache.
    """
    text = model.config.get_text_config(decoder=True)
    # the logits and probabilities of all candidates exist at once while a token is sampled
    drawn = config.n_samples * getattr(text, "vocab_size", 0) * (model.dtype.itemsize + 4)
    if cache == "shared" or (cache == "auto" and supports_shared_prefix(model)):
        prompt = kv_bytes(model, 2, prompt_tokens, 0, 0) + drawn
        return [prompt + _slab_bytes(model, new) for new, _ in cached_tokens(config)]
    # every row has its prompt, and a step needs the original beside the copy
    rows = 2 * (config.n_samples + 2 * config.keep)
    kv = kv_bytes(model, 0, 0, rows, prompt_tokens + config.max_new_tokens)
    return [kv + drawn for _ in cached_tokens(config)]


def _slab_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of keys, values and o_t of tokens after a prompt."""
    hidden: int = model.config.get_text_config(decoder=True).hidden_size
    states: int = tokens * hidden * model.dtype.itemsize
    return kv_bytes(model, 0, 0, 1, tokens) + states


def session_bytes(model: PreTrainedModel, config: Any, prompt_tokens: int) -> list[int]:
    """Return the bytes that a scorer keeps for the texts of one prompt, see `cached_tokens`.

    Where the prompt cannot be shared, a scorer keeps no cache.
    """
    moments = cached_tokens(config)
    if not supports_shared_prefix(model):
        return [0 for _ in moments]
    prompt = kv_bytes(model, 1, prompt_tokens, 0, 0)
    return [prompt + _slab_bytes(model, new) for _, new in moments]


def check_bytes(model: PreTrainedModel, config: Any) -> int:
    """Return the bytes that a scorer needs to read `CHECKS` checks of texts of any prompts."""
    needed = _slab_bytes(model, CHECKS * config.max_new_tokens)
    return needed if supports_shared_prefix(model) else 0


def batch_size(bytes_per_prompt: int, free: int, memory_gb: float | None, fixed: int = 0) -> int:
    """Return how many prompts fit into `memory_gb`, or into a share of what is free.

    `fixed` bytes are needed for any number of prompts.

    Raises
    ------
    ParameterError
        When `memory_gb`, or all memory that there is, is not enough for one prompt.
    """
    # all memory, not the free part: what is free now may be more when other programs end, but no
    # prompt can take more than there is
    most = min(all_bytes(), math.inf if memory_gb is None else memory_gb * GIB)
    if bytes_per_prompt + fixed > most:
        raise ParameterError(
            f"one prompt needs {(bytes_per_prompt + fixed) / GIB:.3g} GiB of memory, but there are "
            f"{most / GIB:.3g}, by memory_gb or with all GPUs of this machine; lower n_samples, "
            "keep or max_new_tokens, or raise memory_gb"
        )
    available = (PLANNED_SHARE * free if memory_gb is None else memory_gb * GIB) - fixed
    # at least 1: the system may free some memory. The inner max avoids a division by 0 for a
    # model that keeps nothing here, and MOST an infinite float, which has no int
    return max(1, int(min(available / max(1, bytes_per_prompt), MOST)))


def max_batch(
    policy: Any, readers: Iterable[Any], config: Any, prompt_tokens: int, memory_gb: float | None
) -> int:
    """Return how many prompts fit in memory at once: the least over the devices of all models.

    Parameters
    ----------
    readers : iterable of models
        See `igcore.scorers.readers_of`.
    """
    model, scoring = policy.model, set(readers)
    needed = {model: policy.search_bytes(config, prompt_tokens)}
    for reader in scoring:
        # added and not set: a scorer may read with the policy's own model
        cached = session_bytes(reader, config, prompt_tokens)
        drawn = needed.get(reader, [0] * len(cached))
        needed[reader] = [sum(moment) for moment in zip(cached, drawn, strict=True)]
    sizes = []
    for device in {device_of(model) for model in needed}:
        models = [model for model in needed if device_of(model) == device]
        # prepacked copies of the weights are made later, when decoding starts: leave room for them
        free = free_bytes(device) - missing_bytes(*models)
        fixed = sum(check_bytes(model, config) for model in models if model in scoring)
        moments = zip(*(needed[model] for model in models), strict=True)
        sizes.append(batch_size(max(map(sum, moments)), free, memory_gb, fixed))
    return min(sizes)


def halving(items: Sequence[T], size: int, work: Callable[[Sequence[T]], list[R]]) -> Iterator[R]:
    """Yield the results of `work` on batches of at most `size`, halved when memory runs out.

    Raises
    ------
    PolicyError
        When memory runs out for a single item.
    """
    at = 0
    while at < len(items):
        batch = items[at : at + size]
        try:
            done = work(batch)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            done = None
        if done is not None:  # `[]` is a result, too
            yield from done
            at += len(batch)
        elif len(batch) == 1:
            raise PolicyError(
                "memory ran out for a single text; lower n_samples, keep or max_new_tokens, or "
                "load the policy or the scorer in a smaller dtype"
            )
        # outside the except block: there the error still holds the frames, and so the tensors, that
        # filled the memory, and the next try would run out again
        else:
            # the smaller size stays: another batch of the old size would fail again
            size = len(batch) // 2
            log.warning(
                "memory ran out with %d prompts at a time; going on with %d; only near ties "
                "may change",
                len(batch),
                size,
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
