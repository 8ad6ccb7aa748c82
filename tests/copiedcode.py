"""A copy of the package by whose source jobs and runs are known, so that a test can edit it."""

import shutil
from pathlib import Path

from igcore.runs import identity


def know_code_from(monkeypatch, folder: Path) -> Path:
    """Let the package be known by a copy of its source, which is returned and may be edited."""
    ignore = shutil.ignore_patterns("__pycache__")
    copied = shutil.copytree(identity.HOME, folder / "igcore", ignore=ignore)
    monkeypatch.setattr(identity, "HOME", copied)
    forget()
    return copied


def forget():
    """Look at the code again, as a new process does."""
    identity.package_digest.cache_clear()


def edit(path: Path, old: str, new: str):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
