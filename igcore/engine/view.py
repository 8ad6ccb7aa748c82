"""A view of a model: igcore's changes to it are invisible to the model's user.

Decoding needs another attention, other products, evaluation mode and hooks. A view has them: a tree
of shallow copies of a model's modules. The user can go on using the model. Weights are shared, not
copied::

    view = view_of(model)
    view(input_ids=ids)     the model's own result, in evaluation mode

The view shares every parameter and buffer with the model. Its own are the dictionaries that hold
them (a module may replace a buffer, and accelerate loads offloaded weights), the dictionaries of
hooks, the configuration, and accelerate's hooks.
"""

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from ..errors import PolicyError

# attributes of every module that a forward pass, or a hook of ours, may write to
OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
HOOK = "_hf_hook"  # where accelerate keeps what places a module's weights


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a model as it is now; an object that is no torch module is returned itself.

    If the ``forward`` of a module was replaced by a user's function, the view contains the module
    itself, with everything below it: the function may call anything. Methods of the model's
    modules, their compiled versions (`torch.compile`), and accelerate's wrappers are bound to the
    view.

    Raises
    ------
    PolicyError
        When such a module is in training mode, in which it may drop activations.
    """
    if not isinstance(model, nn.Module):  # it is in a server
        return model
    # 1. an empty object per module, before any attribute is copied: modules refer to each other
    views: dict[nn.Module, nn.Module] = dict.fromkeys(model.modules(), model)
    foreign = [module for module in views if _is_foreign(module, views)]
    shared = {part for module in foreign for part in module.modules()}
    for module in views:
        # no __init__, which would allocate weights again
        views[module] = module if module in shared else object.__new__(type(module))
    # a shared module cannot be put into evaluation mode without changing the user's model
    if training := [module for module in shared if module.training]:
        raise PolicyError(
            f"{type(training[0]).__name__} is in training mode, and its forward was replaced by "
            "a function that igcore cannot follow; call model.eval() first"
        )
    # 2. their attributes. Modules share one configuration, and so must their views: deepcopy
    # returns the copy that it finds in this table
    copied: dict[int, PretrainedConfig] = {}
    for module, view in views.items():
        if view is not module:
            for name, value in vars(module).items():
                vars(view)[name] = _owned(name, value, views, copied)
            vars(view)["training"] = False
    return views[model]


def _is_foreign(module: nn.Module, views: Mapping[nn.Module, nn.Module]) -> bool:
    """True if a module's forward is a function that cannot be bound to a view."""
    forward = vars(module).get("forward")
    return forward is not None and _bound(forward, views) is None


def _owned(
    name: str, value: Any, views: Mapping[nn.Module, nn.Module], copied: dict[int, PretrainedConfig]
) -> Any:
    """Return a view's counterpart of its module's attribute."""
    if name in OWN:
        own = copy.copy(value)  # a new dictionary of the same tensors or hooks
        if name == "_modules":
            own.update((key, views[part]) for key, part in value.items() if part is not None)
        return own
    if name == HOOK:
        return _hook(value)
    if name == "_compiled_call_impl":  # it was compiled from the module itself, and would run that
        return None
    if isinstance(value, PretrainedConfig):
        # a config of its own: `attention_of` writes to it
        return copy.deepcopy(value, copied)
    if isinstance(value, nn.Module):  # an attribute outside of the registered children
        return views.get(value, value)
    bound = _bound(value, views)
    return value if bound is None else bound


def _bound(function: object, views: Mapping[Any, nn.Module]) -> Callable[..., Any] | None:
    """Return a method or partial function of a module, bound to its view; None for all else."""
    # else the view would call the module itself, with its hooks, attention and training mode
    if isinstance(function, MethodType) and function.__self__ in views:
        return MethodType(function.__func__, views[function.__self__])
    if isinstance(function, partial):
        modules = [isinstance(x, nn.Module) and x in views for x in function.args]
        if any(modules):
            pairs = zip(function.args, modules, strict=True)
            args = [views[x] if is_module else x for x, is_module in pairs]
            return partial(function.func, *args, **function.keywords)
    compiled = getattr(function, "_torchdynamo_orig_callable", None)
    return None if compiled is None else _bound(compiled, views)


def _hook(hook: Any) -> Any:
    """Return a copy of a hook of accelerate, with its own table of the weights that it loads."""
    # accelerate loads a weight before a module runs and drops it after; with one table for both, a
    # pass of the view could drop weights that a pass of the model is using
    own = copy.copy(hook)
    if parts := getattr(hook, "hooks", None):  # a sequence of hooks
        own.hooks = [_hook(part) for part in parts]
    if tied := getattr(hook, "tied_params_map", None):
        own.tied_params_map = {pointer: dict(places) for pointer, places in tied.items()}
    return own


# --- whether a view is still that of its model ----------------------------------------------------


def state_of(model: nn.Module) -> str:
    """Return all that a model computes with, for comparison; nothing where not all is known.

    It is known where modules hold weights, numbers, texts, configurations and built-in functions.
    Hooks, methods and functions of a user's own may read anything, and may refer to the model.
    Every weight is read once, as in one decoding step: torch counts no change by ``weight.data``.
    """
    if not isinstance(model, nn.Module):  # it is in a server
        return ""
    found: list[object] = [*model.parameters(), *model.buffers()]  # each once
    for module in model.modules():
        own = vars(module).copy()
        names = ("_modules", "_parameters", "_buffers")
        parts = [(key, id(part)) for name in names for key, part in own.pop(name).items()]
        del own["training"]  # a view is in evaluation mode
        found.append([id(module), id(type(module)), id(type(module).forward), parts, own])
    try:
        return json.dumps(found, default=_value)
    except (TypeError, ValueError, RuntimeError):  # of weights that are not on a device, too
        return ""


def _value(known: Any) -> object:
    """Return what JSON has in place of a value; raise ``TypeError`` for what is not known."""
    if type(known) in (Tensor, nn.Parameter):
        bits = known.detach().reshape(-1).view(torch.uint8)
        # exact and in any order: whole numbers, modulo 2^64
        total = bits.sum() if len(bits) % 8 else bits.view(torch.int64).sum()
        changes = None if known.is_inference() else known._version
        place = [id(known), known.data_ptr(), known.shape, known.stride(), str(known.dtype)]
        return [*place, changes, int(total)]
    if isinstance(known, PretrainedConfig | GenerationConfig):
        return vars(known)
    if isinstance(known, partial):
        return [known.func, known.args, known.keywords]
    if isinstance(known, set):
        return sorted(known)
    if isinstance(known, torch.dtype | torch.device | BuiltinFunctionType):
        return repr(known)
    raise TypeError(type(known).__name__)
