"""A copy of the packages by whose source jobs and runs are known, so that a test can edit it."""

import shutil
from pathlib import Path

from igstudy import closure


def know_code_from(monkeypatch, folder: Path) -> Path:
    """Let the packages be known by copies of their source, which may be edited; return where."""
    ignore = shutil.ignore_patterns("__pycache__")
    copies = {
        package: Path(shutil.copytree(home, folder / package, ignore=ignore))
        for package, home in closure.HOMES.items()
    }
    monkeypatch.setattr(closure, "HOMES", copies)
    forget()
    return folder


def forget():
    """Look at the code again, as a new process does."""
    closure.package_digest.cache_clear()


def edit(path: Path, old: str, new: str):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
