"""Guarded decoding of frozen language models at inference time: a reproduction of InferenceGuard.

Public names are imported on first use, so that the theory and the statistics need no torch.
"""

import importlib
from typing import Any

__version__ = "1.0.0"
_HOME = {  # public name -> its module
    "METHODS": "beams",
    "POLICIES": "catalog",
    "SCORERS": "catalog",
    "AssetError": "errors",
    "Guard": "guard",
    "IgcoreError": "errors",
    "ParameterError": "errors",
    "Policy": "policy",
    "PolicyError": "errors",
    "Prompt": "policy",
    "Response": "response",
    "RunError": "errors",
    "Scorer": "scorers",
    "ScorerError": "errors",
    "ScorerWarning": "errors",
    "SearchConfig": "config",
    "decode": "guard",
    "labels_needed": "suggest",
    "load_policy": "models.policies",
    "load_prompts": "models.prompts",
    "load_scorer": "models.registry",
    "suggest_budget": "suggest",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "custom_generate":
        return _of_igserve(name)
    if name not in _HOME:
        raise AttributeError(f"module 'igcore' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


def _of_igserve(name: str) -> Any:
    """Return a name that igserve adds; `hasattr` is False where it is missing."""
    from .catalog import room
    from .errors import ParameterError

    try:
        return room(name)
    except ParameterError as missing:
        raise AttributeError(str(missing)) from None
