"""How a call uses a model: in turn, through a view of its own, with copies of linear layers.

A decoding step multiplies few rows by every weight. torch multiplies by the weights in their own
layout; oneDNN, which is part of torch, is faster on a copy in a blocked layout, most of all for few
rows. The copies live as long as a search, so that a change of weights between searches is never
missed::

    with packed(model):
        forward(model, ...)  # runs `viewed(model)`, whose layers multiply by their copies

The copies change the order of float sums. So whether there are copies must not change between runs:
it depends on the model and on the memory of the machine, never on the memory that is free.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .device import installed_bytes
from .view import view_of

COPIES_SHARE = 0.25  # share of the machine's memory that the copies of one model may take
Product = Callable[[Tensor], Tensor]


@dataclass
class Packed:
    """A view of a model in use, and what is kept as long as its weights stay."""

    model: Any
    kept: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)


class _Thread(threading.local):
    """What one thread uses: views, and whether it is in a call, which it had to wait for."""

    def __init__(self) -> None:
        self.packed: WeakKeyDictionary[Any, Packed] = WeakKeyDictionary()
        self.in_turn = False


_HERE = _Thread()
_TURNS: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()


@contextmanager
def packed(*models: nn.Module) -> Iterator[None]:
    """Use models in a with-block: through views with copies of their linear layers, and in turn.

    Threads use one model one after the other, so that they need the memory of one. Models on
    another device, or too large for the machine, have no copies.
    """
    with turn(*models):
        # nested blocks share the copies of the outer one
        missing = [model for model in set(models) if model not in _HERE.packed]
        # all copies are made before any is kept: one that fails leaves none behind
        new = {model: Packed(prepacked(model)) for model in missing}
        _HERE.packed.update(new)
        try:
            yield
        finally:
            for model in new:
                del _HERE.packed[model]
            new.clear()  # freed before the turn ends


@contextmanager
def turn(*models: nn.Module) -> Iterator[None]:
    """Wait until no other thread uses these models."""
    if _HERE.in_turn:  # a call inside a call, as of a guard in a scorer: it must not wait for it
        yield
        return
    with ExitStack() as turns:
        # in one order, so that two threads never wait for each other
        for model in sorted(set(models), key=id):
            turns.enter_context(_TURNS.setdefault(model, threading.Lock()))
        _HERE.in_turn = True
        try:
            yield
        finally:
            _HERE.in_turn = False


def viewed(model: Any) -> Packed:
    """Return the view of a model that this thread uses; outside `packed`, one for one call."""
    return _HERE.packed.get(model) or Packed(view_of(model))


def keep_packed(model: nn.Module) -> None:
    """Keep a view for this thread while its model lives; the model's weights must not change."""
    _HERE.packed[model] = Packed(prepacked(model))


def prepacked(model: Any) -> Any:
    """Return a view of a model whose linear layers multiply by copies of their weights."""
    view = view_of(model)
    shared = set(model.modules())  # those that stand in the view as they are
    for layer in _layers(view):
        if layer not in shared:
            # shadows the method of the class
            vars(layer)["forward"] = _product(layer.weight, layer.bias)
    return view


def missing_bytes(*models: nn.Module) -> int:
    """Return the bytes that `packed` will take for models that have no copies yet."""
    layers = [layer for model in models if model not in _HERE.packed for layer in _layers(model)]
    return sum(layer.weight.nbytes for layer in layers)


def _layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers to copy: all or none."""
    layers = []
    for layer in model.modules():
        if type(layer) is not nn.Linear or "forward" in vars(layer):  # patched ones stay
            continue
        if layer.weight.device.type == "cpu" and _multiplies(layer.weight.dtype):
            layers.append(layer)
    size = sum(layer.weight.nbytes for layer in layers)
    return layers if size <= COPIES_SHARE * installed_bytes() else []


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
    """True if this build of torch has the product for a type and computes it correctly.

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
