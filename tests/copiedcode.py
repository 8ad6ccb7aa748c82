"""A copy of the packages by whose source jobs and runs are known, so that a test can edit it; and
edits of it and of other files.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from igstudy import sources


def know_code_from(monkeypatch, folder: Path) -> Path:
    """Let the packages be known by copies of their source, which may be edited; return where."""
    ignore = shutil.ignore_patterns("__pycache__")
    copies = {
        package: Path(shutil.copytree(home, folder / package, ignore=ignore))
        for package, home in sources.HOMES.items()
    }
    monkeypatch.setattr(sources, "HOMES", copies)
    forget()
    return folder


def forget():
    """Look at the code again, as a new process does."""
    sources.package_digest.cache_clear()


def edit(path: Path, old: str, new: str):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def edit_json(path: Path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path: Path, change: Callable[[dict], dict]):
    """Put what a function makes of the tensors of a safetensors file in their place."""
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def swap_letters(path: Path):
    """Let a tokenizer.json read the two letters e and o as each other."""
    model = json.loads(path.read_text())["model"]
    words = model["vocab"]
    edit_json(path, model=model | {"vocab": words | {"e": words["o"], "o": words["e"]}})
