"""Guarded decoding of frozen language models at inference time: a reproduction of InferenceGuard.

Public names are imported on first use, so that the theory and the statistics need no torch.
"""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "1.1.0"
# public name -> its module; the stub, which editors read, lists them
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {name: home for home, name in re.findall(r"^from \.(\S*) import (\w+)", _STUB, re.M)}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module = importlib.import_module(f".{_HOME[name] or name}", __name__)
        return getattr(module, name) if _HOME[name] else module
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
