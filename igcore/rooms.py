"""How the core reaches optional rooms: by a name, which `igcore.catalog` knows.

The core imports no room. The catalogue enters itself here when igcore is imported, and so before
any module of the core.
"""

from collections.abc import Callable
from typing import Any

_catalogues: list[Callable[[str], Any]] = []


def enter(catalogue: Callable[[str], Any]) -> None:
    """Make a function from names to parts the catalogue."""
    _catalogues[:] = [catalogue]


def room(name: str) -> Any:
    """Return a function, class or method of an optional room, and import the room."""
    return _catalogues[0](name)
