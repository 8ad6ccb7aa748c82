"""The pinned downloads as a table: which wheel holds which model or prompt file, and its hashes.

`igcore.models.assets` fetches and checks what is named here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from .convert import convert_jigsaw, convert_offensive_language, convert_policy

# Raise it when a converter writes something else: it is in the folders' names, so that all are made
# anew.
CONVERTER_VERSION = 2


@dataclass(frozen=True)
class Asset:
    """One pinned wheel and the files wanted from it.

    Attributes
    ----------
    name, pin : str
        The asset's name here, and the package and version that hold it, as pip writes them.
    sha256 : str
        Hash of the whole wheel; nothing is opened before it was compared.
    members : sequence of str
        The only files taken out of the wheel; their folders are dropped.
    licence : str
        SPDX identifier of the wheel's licence, and of the model inside where that differs.
    convert : callable or None
        ``convert(source, target)`` writes the ready files from the members; None takes the members
        as they are.
    ready : mapping of str to str
        sha256 of the ready files that come out alike on all machines: weights, word lists, prompts.
        Settings and tokenizers that transformers writes change with its version; they are in the
        `digest` alone.
    """

    name: str
    pin: str
    sha256: str
    members: Sequence[str]
    licence: str
    convert: Callable[[Path, Path], None] | None = None
    ready: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The version of the package."""
        return self.pin.partition("==")[2]


CONVERTERS = {
    "smollm2": convert_policy,
    "offensive-language": convert_offensive_language,
    "jigsaw": convert_jigsaw,
}


def _pinned() -> dict[str, Asset]:
    """Return the assets of the table that this package ships."""
    table = json.loads((files(__package__) / "data/pins.json").read_text(encoding="utf-8"))
    return {
        name: Asset(name=name, convert=CONVERTERS.get(name), **facts)
        for name, facts in table.items()
    }


ASSETS = _pinned()
