"""Files of the study: the project's root, and files that are written whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from igcore.files import PART, writing


def root() -> Path:
    """Return the project: the nearest folder upwards with ``notebooks`` and ``params``, or here."""
    current = Path.cwd()
    for folder in (current, *current.parents):
        if (folder / "notebooks").is_dir() and (folder / "params").is_dir():
            return folder
    return current


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and make its folders.

    Raises
    ------
    RunError
        When it cannot be written, as on a full disk; what was there stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
