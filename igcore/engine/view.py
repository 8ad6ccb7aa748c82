"""A view of a model: igcore's changes to it are invisible elsewhere.

Decoding needs another attention, other products, evaluation mode and hooks. A view has them: a tree
of shallow copies of a model's modules, made for one call, beside the model that its user goes on
using. Weights are shared, not copied::

    view = view_of(model)
    view(input_ids=ids)     the model's own result, in evaluation mode

It shares with the model every parameter and buffer. It has for itself the dictionaries that hold
them (a module may replace a buffer, and accelerate loads offloaded weights), those of hooks, the
configuration, and accelerate's hooks.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..errors import PolicyError

# attributes of every module that a forward pass, or a hook of ours, may write to
OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
HOOK = "_hf_hook"  # where accelerate keeps what places a module's weights


def view_of(model: Any) -> Any:
    """Return a view of a model as it is now; of what is no module of torch, itself.

    A module whose ``forward`` somebody replaced by a function of their own is in it as it stands,
    with everything below it: the function may call anything. Methods of the model's modules, what
    `torch.compile` made of them, and accelerate's wrappers are bound to the view.

    Raises
    ------
    PolicyError
        When such a module is in training mode, in which it may drop activations.
    """
    if not isinstance(model, nn.Module):  # its weights are not loaded, or are in a server
        return model
    views: dict[nn.Module, nn.Module] = dict.fromkeys(model.modules(), model)
    foreign = [module for module in views if _is_foreign(module, views)]
    shared = {part for module in foreign for part in module.modules()}
    for module in views:
        views[module] = module if module in shared else object.__new__(type(module))
    if training := [module for module in shared if module.training]:
        raise PolicyError(
            f"{type(training[0]).__name__} is in training mode, and its forward was replaced by "
            "a function that igcore cannot follow; call model.eval() first"
        )
    copied: dict[int, Any] = {}  # configurations, which modules share
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
    name: str,
    value: Any,
    views: Mapping[nn.Module, nn.Module],
    copied: dict[int, Any],
) -> Any:
    """Return a view's counterpart of its module's attribute."""
    if name in OWN:
        own = copy.copy(value)
        if name == "_modules":
            own.update((key, views[part]) for key, part in value.items() if part is not None)
        return own
    if name == HOOK:
        return _hook(value)
    if name == "_compiled_call_impl":  # a graph of the module itself
        return None
    if isinstance(value, PretrainedConfig):
        return copy.deepcopy(value, copied)
    if isinstance(value, nn.Module):  # kept beside its registered children
        return views.get(value, value)
    bound = _bound(value, views)
    return value if bound is None else bound


def _bound(function: Any, views: Mapping[Any, nn.Module]) -> Callable[..., Any] | None:
    """Return a method or partial function of a module as one of its view; None for all else."""
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
    """Return a copy of a hook of accelerate that keeps account of its own of what it loads."""
    own = copy.copy(hook)
    if parts := getattr(hook, "hooks", None):  # a sequence of hooks
        own.hooks = [_hook(part) for part in parts]
    if tied := getattr(hook, "tied_params_map", None):
        own.tied_params_map = {pointer: dict(places) for pointer, places in tied.items()}
    return own
