"""Use a model in a call: one thread at a time, through a view, with prepacked linear layers.

Prepacking is optional and only saves time. A decoding step multiplies few rows by every weight.
torch multiplies by the weights in their own layout; oneDNN, which is part of torch, is faster on a
copy in a blocked layout, most of all for few rows::

    with use_prepacked(model):
        forward(model, ...)  # runs `viewed(model)`, whose layers multiply by their copies

The view and its copies are kept for the next call, as long as the model lives and its `state_of` is
the same. A model of which not all is known has a new view in every call.

The product is a private operator of torch. It is tested before it is used; where it is missing,
wrong, or for another device, the layers multiply as always.

The copies change the order of float sums. So whether there are copies must not change between runs:
it depends on the model and on the memory of the machine, never on the memory that is free.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from .device import installed_bytes
from .view import state_of, view_of

# share of the machine's memory that the copies of one model may take, and all that are kept
COPIES_SHARE = 0.25
Product = Callable[[Tensor], Tensor]


@dataclass
class View:
    """A view of a model, and its cache of prompts, see `igcore.engine.prefix_cache`.

    Attributes
    ----------
    state : str
        The `state_of` its model when it was made; empty if that is not known.
    size : int
        Bytes of the copies.
    """

    model: PreTrainedModel
    state: str = ""
    size: int = 0
    # with the view, because it is stale when the weights change
    prefixes: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)


class _Thread(threading.local):
    """The views that one thread uses, and whether it is inside a `turn`."""

    def __init__(self) -> None:
        self.views: WeakKeyDictionary[nn.Module, View] = WeakKeyDictionary()
        self.in_turn = False


_HERE = _Thread()
_TURNS: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
# views that no thread uses; a call takes one out, so that no other thread finds it
_KEPT: WeakKeyDictionary[nn.Module, View] = WeakKeyDictionary()
_KEEPING = threading.Lock()  # of this table, which must not change while it is gone through


def _forget_turns() -> None:
    """Use new locks: in a forked child, no thread is left that could release the old ones."""
    global _TURNS, _KEEPING
    _TURNS, _KEEPING = WeakKeyDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_turns)


@contextmanager
def use_prepacked(*models: nn.Module) -> Iterator[None]:
    """Use models in a with-block, one thread at a time, through views with prepacked layers.

    Threads use a model one after the other, so that they need the memory of one. A model on another
    device than the CPU, or too large for the machine, has a view without copies.
    """
    with turn(*models):
        # nested blocks share the copies of the outer one
        missing = [model for model in set(models) if model not in _HERE.views]
        # all copies are made before any is stored: if one fails, for want of memory, none is left
        new = {model: _taken(model) for model in missing}
        _HERE.views.update(new)
        try:
            yield
            _keep(new)  # not after an error, which may be of a full memory
        finally:
            for model in new:
                del _HERE.views[model]
            new.clear()  # freed before the next thread makes its own


def _taken(model: PreTrainedModel) -> View:
    """Take the kept view of a model if it is that of the model as it is now, or make one."""
    state = state_of(model)
    with _KEEPING:
        kept = _KEPT.pop(model, None)
    if kept and kept.state == state:
        return kept
    del kept  # first: its copies take as much memory as the new ones
    return View(prepacked(model), state, copied_bytes(model))


def _keep(views: Mapping[nn.Module, View]) -> None:
    """Keep views for the next call; where they are too large together, the oldest go."""
    with _KEEPING:
        _KEPT.update({model: view for model, view in views.items() if view.state})
        for model in list(_KEPT):
            if sum(view.size for view in _KEPT.values()) > COPIES_SHARE * installed_bytes():
                _KEPT.pop(model, None)


@contextmanager
def turn(*models: nn.Module) -> Iterator[None]:
    """Wait until no other thread uses these models."""
    # a call inside a call, as of a guard in a scorer, must not wait for its own thread
    if _HERE.in_turn:
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


def viewed(model: PreTrainedModel) -> View:
    """Return this thread's view of a model; outside `use_prepacked`, a new one without copies."""
    return _HERE.views.get(model) or View(view_of(model))


def prepacked(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a model whose linear layers multiply by copies of their weights."""
    view = view_of(model)
    # a view may contain modules of the model itself (see `view_of`): these must not be changed
    shared = set(model.modules())
    for layer in _layers(view):
        if layer not in shared:
            # an attribute of the instance shadows the method of the class, for this view alone
            vars(layer)["forward"] = _product(layer.weight, layer.bias)
    return view


def copied_bytes(model: nn.Module) -> int:
    """Return the bytes of the copies of a model's weights."""
    return sum(layer.weight.nbytes for layer in _layers(model))


def _layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers to copy: all or none."""
    layers = []
    for layer in model.modules():
        # subclasses of the layer (quantised, LoRA) or of its weight (torchao), and layers with a
        # replaced forward (offloaded) compute something else than x W^T + b, or keep W elsewhere
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            continue
        weight = layer.weight
        if type(weight) is nn.Parameter and weight.is_cpu and _multiplies(weight.dtype):
            layers.append(layer)
    size = sum(layer.weight.nbytes for layer in layers)
    # all or none, by installed memory: a resumed run must make the same choice and round alike
    return layers if size <= COPIES_SHARE * installed_bytes() else []


@torch.inference_mode()
def _product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return x -> x W^T + b with a copy of W (out, in)."""
    # private operators, which `torch.compile` uses on CPUs; `_multiplies` tests them first
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
    # a small product of unequal sizes: a transposed or misread weight gives another result or shape
    numbers = torch.linspace(-1, 1, 40).to(dtype)
    weight, bias, x = numbers.view(5, 8), numbers[:5], numbers[:24].view(3, 8)
    try:
        result = _product(weight, bias)(x)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False  # no such operator, type or signature: fall back to the public product
    tolerance = 8 * torch.finfo(dtype).eps
    return torch.allclose(result, linear(x, weight, bias), rtol=tolerance, atol=tolerance)
