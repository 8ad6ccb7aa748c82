"""Guarded decoding of frozen language models at inference time: a reproduction of InferenceGuard.

Public names are imported on first use, so that the theory and the statistics need no torch.
"""

import importlib
from typing import Any

__version__ = "1.0.0"
_HOME = {  # public name -> its module
    "METHODS": "methods",
    "POLICIES": "catalog",
    "SCORERS": "catalog",
    "AssetError": "errors",
    "Guard": "guard",
    "IgcoreError": "errors",
    "ParameterError": "errors",
    "Policy": "policy",
    "PolicyError": "errors",
    "Prompt": "prompt",
    "Response": "response",
    "RunError": "errors",
    "Scorer": "scorers",
    "ScorerError": "errors",
    "ScorerWarning": "errors",
    "SearchConfig": "config",
    "decode": "decoding",
    "labels_needed": "tools.suggest",
    "load_policy": "models.policies",
    "load_prompts": "models.prompts",
    "load_scorer": "models.registry",
    "suggest_budget": "tools.suggest",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name != "custom_generate":
        raise AttributeError(f"module 'igcore' has no attribute {name!r}")
    from .catalog import room
    from .errors import ParameterError

    try:
        return room(name)
    except ParameterError as missing:  # without igserve `hasattr` is False
        raise AttributeError(str(missing)) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
