"""Prepacked weights: oneDNN copies of linear layers, for faster decoding on a CPU.

A decoding step multiplies few rows by every weight. torch multiplies by the weights in their own
layout; oneDNN, which is part of torch, is faster on a copy in a blocked layout, most of all for few
rows. The copies live as long as a search, so that a change of weights between searches is never
missed. The model does not change::

    with packed(model):
        forward(model, ...)  # the layers multiply by their copies, see `products_of`

The copies change the order of float sums. So whether there are copies must not change between runs:
it depends on the model and on the memory of the machine, never on the memory that is free.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .device import GIB, installed_bytes

SHARE = 0.25  # share of the machine's memory that the copies of one model may take
Product = Callable[[Tensor], Tensor]
# model -> its layers with their products
_PACKED: WeakKeyDictionary[nn.Module, list[tuple[nn.Linear, Product]]] = WeakKeyDictionary()
# model -> what else is kept while its weights stay, see `kept_by`
_KEPT: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Any]] = WeakKeyDictionary()
log = logging.getLogger("igcore")


@contextmanager
def packed(*models: nn.Module) -> Iterator[None]:
    """Keep copies of the linear layers of models during a with-block.

    Models on another device, or too large for the machine, have none.
    """
    # nested blocks share the copies of the outer one
    new = {model: _layers(model) for model in set(models) if model not in _PACKED}
    # all copies are made before any is kept: one that fails leaves none behind
    products = {model: list(map(_copied, layers)) for model, layers in new.items()}
    _PACKED.update(products)
    _KEPT.update({model: OrderedDict() for model in products})
    try:
        yield
    finally:
        for model in products:
            del _PACKED[model], _KEPT[model]


def kept_by(model: nn.Module) -> OrderedDict[Hashable, Any]:
    """Return a mapping that lives as long as a model is `packed`; outside, an empty one."""
    return _KEPT.get(model, OrderedDict())


def keep_packed(model: nn.Module) -> None:
    """Keep copies as long as a model lives: for one whose weights nobody changes."""
    _PACKED[model] = list(map(_copied, _layers(model)))
    _KEPT[model] = OrderedDict()


def missing_bytes(*models: nn.Module) -> int:
    """Return the bytes that `packed` will take for models that have no copies yet."""
    layers = [layer for model in models if model not in _PACKED for layer in _layers(model)]
    return sum(layer.weight.nbytes for layer in layers)


@contextmanager
def products_of(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model multiply by their copies, if any, and restore them."""
    products = _PACKED.get(model, [])
    try:
        for layer, product in products:
            vars(layer)["forward"] = product  # shadows the method of the class
        yield
    finally:
        for layer, _ in products:
            vars(layer).pop("forward", None)


def _layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers to copy: all or none."""
    layers = []
    for layer in model.modules():
        if type(layer) is not nn.Linear or "forward" in vars(layer):  # patched ones stay
            continue
        if layer.weight.device.type == "cpu" and _multiplies(layer.weight.dtype):
            layers.append(layer)
    size = sum(layer.weight.nbytes for layer in layers)
    if size > SHARE * installed_bytes():
        log.warning(
            "%s decodes slower: copies of its weights would take %.3g GiB, more than a "
            "quarter of this machine's memory",
            type(model).__name__,
            size / GIB,
        )
        return []
    return layers


def _copied(layer: nn.Linear) -> tuple[nn.Linear, Product]:
    """Return a layer with the product that reads a copy of its weights."""
    return layer, _product(layer.weight, layer.bias)


@torch.inference_mode()
def _product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return x -> x W^T + b with a copy of W (out, in)."""
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def product(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
        return result

    return product


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Tell whether this build of torch has the product for a type, and whether it is right.

    The operator is not public: another build may lack it or mean something else by it.
    """
    numbers = torch.linspace(-1, 1, 40).to(dtype)
    weight, bias, x = numbers.view(5, 8), numbers[:5], numbers[:24].view(3, 8)
    try:
        result = _product(weight, bias)(x)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    tolerance = 8 * torch.finfo(dtype).eps
    return torch.allclose(result, linear(x, weight, bias), rtol=tolerance, atol=tolerance)
