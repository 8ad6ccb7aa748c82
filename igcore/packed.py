"""Copies of linear layers laid out for the processor, while a search lasts. Knows layers and weights; knows nothing of tokens.

A decoding step multiplies few rows by every weight. On a CPU torch multiplies by the weights as they lie; oneDNN, which comes with
it, is faster on a copy laid out in blocks: at 16 rows by more than half, see ``python -m igcore.bench``. The copy is made when a
search begins and freed when it ends, so that weights changed in between are never missed, and no model is changed::

    with packed(model):
        forward(model, ...)  # inside it, `products_of(model)` puts the copies in the place of the layers' own products
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import linear

from .device import free_bytes

SHARE = 0.5  # of what is free may be taken by copies
Products = list[tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]]
_PACKED: WeakKeyDictionary = WeakKeyDictionary()  # model -> [its products, how many searches use them]


@contextmanager
def packed(*models) -> Iterator[None]:
    """Keep copies of the linear layers of models; those on another device, or too large for the free memory, are left alone."""
    for model in models:
        _PACKED.setdefault(model, [_products(model) if model not in _PACKED else None, 0])[1] += 1
    try:
        yield
    finally:
        for model in models:
            _PACKED[model][1] -= 1
            if not _PACKED[model][1]:
                del _PACKED[model]


@contextmanager
def products_of(model) -> Iterator[None]:
    """Let the layers of a model multiply by their copies, if there are any, and give them back as they were."""
    products = _PACKED.get(model, ([],))[0]
    for layer, product in products:
        vars(layer)["forward"] = product
    try:
        yield
    finally:
        for layer, _ in products:
            del vars(layer)["forward"]


def _products(model) -> Products:
    layers = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]  # what others patched stays theirs
    layers = [m for m in layers if m.weight.device.type == "cpu" and _multiplies(m.weight.dtype)]
    if sum(m.weight.nbytes for m in layers) > SHARE * free_bytes(torch.device("cpu")):
        return []
    return [(m, _product(m.weight, m.bias)) for m in layers]


@torch.inference_mode()
def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return x -> x W^T + b with a copy of W (out, in)."""
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Tell whether this build of torch has the product for a type, and gives what its own gives: the operator is not public."""
    numbers = torch.linspace(-1, 1, 40).to(dtype)
    weight, bias, x = numbers.view(5, 8), numbers[:5], numbers[:24].view(3, 8)
    try:
        found = _product(weight, bias)(x)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, linear(x, weight, bias), rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
