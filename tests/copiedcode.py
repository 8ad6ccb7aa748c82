"""A copy of the package by whose source jobs are known, so that a test can edit the code."""

import shutil
from pathlib import Path

from igcore.runs import identity, jobs


def know_code_from(monkeypatch, folder: Path) -> Path:
    """Let the package be known by a copy of its source, which is returned and may be edited as
    between two walks.
    """
    copied = Path(
        shutil.copytree(
            Path(jobs.__file__).parents[1],
            folder / "igcore",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    )
    place = identity._top
    monkeypatch.setattr(
        identity, "_top", lambda name: copied / "__init__.py" if name == "igcore" else place(name)
    )
    return copied


def forget():
    """Begin a new walk: the code is looked at again."""
    for known in (jobs._code, jobs._notebook, identity.source_of):
        known.cache_clear()


def edit(path: Path, old: str, new: str):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
