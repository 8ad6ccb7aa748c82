"""Which cache a model is read through: the first one in which it agrees with itself.

A model is tried once, on a few tokens: rows of unequal prompts that branch and grow by two tokens,
through the very cache that will be used, against each row read alone and without a cache. That
shows whatever a model does with padding, positions, other rows, its cache or later tokens.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import PolicyError, unknown_name
from .device import device_of, out_of_memory
from .kv_cache import DynamicRows, forward, inputs_of, padded
from .prefix_cache import SharedRows
from .sampling import check_finite

CacheRows = SharedRows | DynamicRows
Kind = type[SharedRows] | type[DynamicRows]

# how the KV cache may be kept; of its kinds the first that agrees is taken, the fastest first
CACHES: dict[str, tuple[Kind, ...]] = {
    "auto": (SharedRows, DynamicRows),
    "shared": (SharedRows,),
    "dynamic": (DynamicRows,),
}
LEAST = -100.0  # log-probabilities below count as this one: some models forbid tokens
# of float32 by `torch.get_float32_matmul_precision`, which users lower for speed
PRECISIONS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}
# model -> kind of rows -> what is wrong with it, empty where the model agreed
_TRIED: WeakKeyDictionary[nn.Module, dict[Kind, str]] = WeakKeyDictionary()


def cache_for(model: PreTrainedModel, cache: str = "auto") -> Kind:
    """Return the first kind of rows of a cache, a key of `CACHES`, in which a model agrees.

    Raises
    ------
    ParameterError
        For an unknown cache.
    PolicyError
        When a model agrees in none of them.
    """
    if cache not in CACHES:
        raise unknown_name("cache", cache, CACHES)
    for kind in CACHES[cache]:
        if not (fault := _fault(model, kind)):
            return kind
    _TRIED.pop(model)  # what was wrong may be mended
    raise PolicyError(fault)


def fits(model: PreTrainedModel) -> bool:
    """True if a model agrees in `SharedRows`; see `cache_for`."""
    return not _fault(model, SharedRows)


def _fault(model: PreTrainedModel, kind: Kind) -> str:
    """Return why a kind of rows does not fit a model, or nothing; each model is tried once."""
    tried = _TRIED.setdefault(model, {})
    if kind not in tried:
        tried[kind] = _try(model, kind)
    return tried[kind]


def _try(model: PreTrainedModel, kind: Kind) -> str:
    """Return why a kind of rows does not fit a model, or nothing."""
    name = type(model).__name__
    if kind is SharedRows and not _is_plain(model):
        return f"{name} cannot be decoded in the cache 'shared'; set cache to 'auto'"
    try:
        error = _error(model, kind)
    except PolicyError as refusal:
        return str(refusal)
    except Exception as failure:  # whatever the code of a model raises
        if out_of_memory(failure):
            raise
        said = " ".join(f"{type(failure).__name__}: {failure}".split())
        return f"{name} fails with the KV cache of transformers ({said:.200}); choose another model"
    dtype = PRECISIONS[torch.get_float32_matmul_precision()]
    eps = torch.finfo(dtype if model.dtype == torch.float32 else model.dtype).eps
    if error <= 8 * eps**0.75:
        return ""
    return (
        f"{name} gives a token other probabilities where the text goes on behind it: it reads both "
        "ways, or rounds over a whole batch; choose a causal model (is_decoder: true in its "
        "config), not quantised on the fly"
    )


def _is_plain(model: PreTrainedModel) -> bool:
    """Return True if all layers keep plain keys and values, and take a registered attention."""
    layers = DynamicCache(config=model.config).layers
    plain = all(type(layer) is DynamicLayer for layer in layers)
    return plain and getattr(model, "_supports_attention_backend", False)


def _error(model: PreTrainedModel, kind: Kind) -> float:
    """Return how far rows are from their texts read alone and without a cache, at the worst token.

    It is the distance of log-probabilities, of a model without a head of o_t, over their spread.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    # special tokens, which magnify rounding, stand at the ends of a vocabulary
    ids = [i * vocabulary // 11 for i in range(1, 11)]
    texts = [ids[:3], ids[3:5]]
    state: CacheRows = kind.open(model, texts)
    found = [(texts, _said(state.hidden, state.logits))]
    for rows, tokens in (((0, 1, 1), ids[5:8]), ((0, 1, 2), ids[7:10])):
        branch = state.gather([(state, row) for row in rows], room=1)
        state = branch.step(range(3), tokens)
        texts = [[*texts[row], token] for row, token in zip(rows, tokens, strict=True)]
        found.append((texts, _said(state.hidden, state.logits)))
    ends = [(_alone(model, text), len(text)) for text in texts]  # which the earlier ones begin
    errors = []
    for texts, said in found:
        for text, ours, (whole, length) in zip(texts, said, ends, strict=False):
            # from the end: the tokens of a tuned prompt may come before
            expected = whole[len(text) - length - 1]
            difference = (ours - expected).norm()
            spread = (expected - expected.mean()).norm()
            # of equal constants the spread is 0; NaN stays, and agrees with nothing
            errors.append(difference / spread if difference else difference)
    return float(torch.stack(errors).max())


def _alone(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Return a model's logits after each token of a text, read alone and uncached."""
    ids, mask = padded([text], device_of(model))
    options = {"use_cache": False, "logits_to_keep": 0}
    hidden, logits = forward(model, None, **inputs_of(ids, mask), **options)
    check_finite(hidden)
    return _said(hidden[0], logits[0])


def _said(hidden: Tensor, logits: Tensor) -> Tensor:
    """Return log-probabilities (..., V), or o_t (..., H) where there is no head."""
    if not logits.shape[-1]:
        return hidden.float()
    return logits.float().log_softmax(-1).clamp(min=LEAST)
