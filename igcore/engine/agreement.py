"""Choose the KV cache of a model: the first kind whose results agree with uncached ones.

A model is tested on a few tokens, and again when its `structure` has changed: rows of unequal
prompts branch and grow by two tokens in the cache that will be used, and each row is compared with
its text read alone and uncached. An error with padding, positions, other rows, the cache or later
tokens shows as a difference.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import PolicyError, one_line, unknown_name
from .device import device_of, out_of_memory
from .kv_cache import DynamicRows, Rows, forward, inputs_of, padded
from .prefix_cache import SharedRows
from .sampling import check_finite

# name of a cache -> kinds of rows to try in turn, the fastest first
CACHES: dict[str, tuple[type[Rows], ...]] = {
    "auto": (SharedRows, DynamicRows),
    "shared": (SharedRows,),
    "dynamic": (DynamicRows,),
}
# log-probabilities are clamped here: some models forbid tokens by a logit of -infinity, and two
# infinities have no difference
LOWEST_LOGPROB = -100.0
# `torch.get_float32_matmul_precision` -> a dtype of about that precision; users lower it for speed
PRECISIONS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}
PLAIN = (bool, int, float, str, tuple, type(None))  # types of attributes that a user may set
# model -> its structure when it was tested, and kind of rows -> why it does not work, empty if it
# does. Weak keys, so that this table keeps no model in memory
_TRIED: WeakKeyDictionary[nn.Module, tuple[object, dict[type[Rows], str]]] = WeakKeyDictionary()


def cache_for(model: PreTrainedModel, cache: str = "auto") -> type[Rows]:
    """Return the first kind of rows under ``CACHES[cache]`` that a model supports.

    Raises
    ------
    ParameterError
        For an unknown cache.
    PolicyError
        When a model supports none of them.
    """
    if cache not in CACHES:
        raise unknown_name("cache", cache, CACHES)
    for kind in CACHES[cache]:
        if not (fault := _fault(model, kind)):
            return kind
    _TRIED.pop(model)  # test again next time: the user may have fixed the model
    raise PolicyError(fault)


def supports_shared_prefix(model: PreTrainedModel) -> bool:
    """True if `SharedRows` give the results of a model; see `cache_for`."""
    return not _fault(model, SharedRows)


def _fault(model: PreTrainedModel, kind: type[Rows]) -> str:
    """Return why a kind of rows fails for a model, or nothing."""
    now = structure(model)
    before, tried = _TRIED.get(model, (None, {}))
    if now != before:
        tried = {}
        _TRIED[model] = now, tried
    if kind not in tried:
        tried[kind] = _try(model, kind)
    return tried[kind]


def structure(model: nn.Module) -> list[object]:
    """Return the modules of a model, their functions, plain attributes and configurations.

    Two equal results mean that the model computes in the same way, with any weights and hooks:
    most hooks only watch. It takes .2 ms for two layers and 2 ms for 32.
    """
    # numbers and texts alone: a reference to a part of the model would keep it in memory
    found: list[object] = []
    configs: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        kind = type(module)
        found.append((id(module), id(kind), id(kind.forward)))
        for name, value in list(vars(module).items()):
            # not `training`: a view is in evaluation mode
            if isinstance(value, PLAIN) and name != "training":
                found.append((name, repr(value)))
            elif isinstance(value, PretrainedConfig):
                configs[id(value)] = value
            elif callable(value):
                found.append((name, id(value)))
    return [*found, *(repr(vars(config)) for config in configs.values())]


def _try(model: PreTrainedModel, kind: type[Rows]) -> str:
    """Return why a kind of rows fails for a model, or nothing."""
    name = type(model).__name__
    # by its structure first: a sliding window, for one, agrees on texts shorter than itself
    if kind is SharedRows and not _is_plain(model):
        return f"{name} cannot be decoded in the cache 'shared'; set cache to 'auto'"
    try:
        error = _error(model, kind)
    except PolicyError as refusal:
        return str(refusal)
    except Exception as failure:  # a checkpoint may run any code, and raise anything
        # a full memory says nothing about the model: the caller tries a smaller batch
        if out_of_memory(failure):
            raise
        why = f"{one_line(failure):.200}"
        return f"{name} fails with the KV cache of transformers ({why}); choose another model"
    if error <= rounding(model):  # NaN is not <= anything
        return ""
    return (
        f"{name} gives a token other probabilities where the text goes on behind it: it reads both "
        "ways, or rounds over a whole batch; choose a causal model (is_decoder: true in its "
        "config), not quantised on the fly"
    )


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the type that a model computes in; users lower that of float32 for speed."""
    lowered = PRECISIONS[torch.get_float32_matmul_precision()]
    return lowered if model.dtype == torch.float32 else model.dtype


def rounding(model: PreTrainedModel) -> float:
    """Return the largest error of a model, relative to the spread, that may come from rounding."""
    eps = torch.finfo(dtype_of(model)).eps
    # more than rounding, which adds up over layers (5e-5 in float32, 0.2 in bfloat16), and less
    # than a wrong position or a token that reads later ones
    return float(8 * eps**0.75)


def _is_plain(model: PreTrainedModel) -> bool:
    """True if all layers keep plain keys and values, and accept a registered attention."""
    # `type is`, not `isinstance`: a sliding window is a subclass, and a slab cannot forget tokens
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    return plain and getattr(model, "_supports_attention_backend", False)


def _error(model: PreTrainedModel, kind: type[Rows]) -> float:
    """Return the largest relative error of cached rows against their texts read alone, uncached.

    It is the distance of log-probabilities, or of o_t for a model without a head, divided by their
    spread.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    # spread over the vocabulary: special tokens are at its ends, and they magnify rounding
    ids = [i * vocabulary // 11 for i in range(1, 11)]
    # 1. two prompts of unequal length, so that one has left padding
    texts = [ids[:3], ids[3:5]]
    state = kind.open(model, texts)
    results = [(texts, _log_probs(state.hidden, state.logits))]
    # 2. the second prompt branches into two rows, and all three rows grow by two tokens: siblings
    # must not read each other, and copies must not change their source
    for rows, tokens in (((0, 1, 1), ids[5:8]), ((0, 1, 2), ids[7:10])):
        branch = state.gather([(state, row) for row in rows], reserve=1)
        state = branch.step(range(3), tokens)
        texts = [[*texts[row], token] for row, token in zip(rows, tokens, strict=True)]
        results.append((texts, _log_probs(state.hidden, state.logits)))
    # 3. the final texts alone; row i of an earlier result is a prefix of final text i
    alone = [(_uncached(model, text), len(text)) for text in texts]
    errors = []
    for texts, cached in results:
        # not strict: there are two rows before the branch, and three after it
        for text, ours, (whole, length) in zip(texts, cached, alone, strict=False):
            # count from the end: a tuned prompt may put tokens of its own first. A prefix is read
            # here with later tokens behind it, so a model that reads both ways shows
            expected = whole[len(text) - length - 1]
            difference = (ours - expected).norm()
            # a mean is subtracted, so that a constant in all entries does not hide the error
            spread = (expected - expected.mean()).norm()
            # equal constants have spread 0, and 0 / 0 would be NaN; a NaN difference stays NaN
            errors.append(difference / spread if difference else difference)
    return float(torch.stack(errors).max())  # max keeps a NaN


def _uncached(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Return the log-probabilities (n, V) after each token of a text, read alone and uncached."""
    ids, mask = padded([text], device_of(model))
    options = {"use_cache": False, "logits_to_keep": 0}
    hidden, logits = forward(model, None, **inputs_of(ids, mask), **options)
    check_finite(hidden)  # else the error would name the cache, not the weights
    return _log_probs(hidden[0], logits[0])


def _log_probs(hidden: Tensor, logits: Tensor) -> Tensor:
    """Return log-probabilities (..., V), or o_t (..., H) where there is no head."""
    if not logits.shape[-1]:
        return hidden.float()
    # float32: a softmax in bfloat16 would add an error of its own
    return logits.float().log_softmax(-1).clamp(min=LOWEST_LOGPROB)
