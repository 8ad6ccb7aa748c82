"""The latent map phi: the o_t and h_t of every prefix, which a critic reads.

The paper's h_t holds the keys and values of the prompt, too: features ``xh`` and ``xho``. Those of
the prompt are the same for all candidates of a search, so ``h`` and ``ho`` leave them out.

`latents` selects them from the states of a model. The engine of a search has these states already
(`igcore.engine.local.LocalEngine.history`). Training computes those of finished text again in one
forward pass, the same up to rounding, see `igstudy.training.latents`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.kv_cache import History
from ..engine.local import LocalEngine
from ..errors import ParameterError

# o_t, h_t, both, these two with the prompt's keys and values, or the output of a middle layer
FEATURES = ("o", "h", "ho", "xh", "xho", "m")


class Latents(NamedTuple):
    """The inputs of a critic for B responses of up to n tokens; one response has no axis B.

    Attributes
    ----------
    mask : Tensor (B, n) bool
        True at tokens; the other tensors are 0 elsewhere.
    hidden : Tensor (B, n, H)
        o_t. H is 0 if it is not read.
    middle : Tensor (B, n, H)
        The output of the middle layer. H is 0 if it is not read.
    kv : Tensor (B, n, layers, kv_width)
        h_t: keys and values of every layer. `layers` is 0 if they are not read.
    prompt_mask : Tensor (B, L) bool
        True at tokens of the prompt. L is 0 if the prompt is not read.
    prompt : Tensor (B, L, layers, kv_width)
        Keys and values of the prompt.
    """

    mask: Tensor
    hidden: Tensor
    middle: Tensor
    kv: Tensor
    prompt_mask: Tensor
    prompt: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "Latents":
        """Return the latents on a device, as `dtype`."""
        # masks stay bool: a float mask would be added to the scores of attention
        return Latents(*[x.to(device, None if x.dtype == torch.bool else dtype) for x in self])


def latents(states: History, features: str) -> Latents:
    """Return the latents of states: phi of the paper (section 5, Definition 5.1).

    phi maps a prompt with the response so far to (h_t, o_t). By the paper (footnotes of sections 3
    and 5), h_t is the KV cache of all layers at all positions so far, and o_t is the last layer's
    hidden state, which W maps to logits. Training and search both call this function, so that a
    critic always sees the same kind of input.

    Parameters
    ----------
    states : History
        Of rows of n tokens, from the engine or from `igstudy.training.latents.encode`.
    features : str
        One of `FEATURES`, or the letters of several.

    Raises
    ------
    ParameterError
        For the KV cache of a model that keeps that of its last tokens only.
    """
    mask = states.mask  # (B, n)
    # width 0 for what is not read, so that all latents are batched and moved in one way
    nothing = torch.zeros(*mask.shape, 0, device=mask.device)
    hidden = states.hidden if "o" in features else nothing
    middle = states.middle if "m" in features else nothing
    assert hidden is not None and middle is not None  # read together with the mask
    kv = torch.zeros(*mask.shape, 0, 0, device=mask.device)
    if "h" in features:
        kv = _joined(states, features)
    prompt_mask, prompt = mask[:, :0], kv[:, :0]
    if "x" in features:
        assert states.prompts is not None  # read together with the keys
        # rows of one prompt share its cache in the engine; here each response gets its own copy
        prompt_mask = states.prompts.mask[states.owner]
        prompt = _joined(states.prompts, features)[states.owner]
    # masked_fill and not a product: NaN times 0 is NaN
    hidden, middle = (x.masked_fill(~mask[..., None], 0) for x in (hidden, middle))
    return Latents(mask, hidden, middle, kv, prompt_mask, prompt)


def _joined(states: History, features: str) -> Tensor:
    """Return keys and values of all layers (R, n, layers, kv_width)."""
    # (R, heads, n, head_dim) -> (R, n, heads * head_dim), keys before values
    pairs = zip(states.keys, states.values, strict=True)
    layers = [torch.cat([x.transpose(1, 2).flatten(2) for x in pair], dim=-1) for pair in pairs]
    if any(layer.shape[1] != states.mask.shape[1] for layer in layers):
        raise ParameterError(
            f"features {features!r} need keys and values of every token, but the model keeps "
            "those of its last tokens only; choose features 'o' or 'm'"
        )
    # the cache of padding is arbitrary, even NaN: it must not reach a token
    return torch.stack(layers, dim=2).masked_fill(~states.mask[..., None, None], 0)


def shape_of(model: PreTrainedModel) -> dict[str, int]:
    """Return the sizes of a model on which a critic depends.

    Returns
    -------
    dict
        ``n_layers`` with attention, ``kv_width`` (keys and values of a token in one of them) and
        ``hidden``.
    """
    # measured on the latents of one token: configurations name these sizes in many ways
    engine = LocalEngine(model, [])
    engine.open([[0]])
    engine.sample_block([0], [[0]], known=[[0]])
    one = engine.history([0])
    assert one.hidden is not None  # always there where no layer is left out
    # the numbers of one token: keys are (1, heads, 1, head_dim)
    widths = [k.numel() + v.numel() for k, v in zip(one.keys, one.values, strict=True)]
    return {
        "n_layers": len(widths),
        "kv_width": max(widths, default=0),
        "hidden": one.hidden.shape[-1],
    }
