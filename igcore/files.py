"""Files: digests, lines that are added, and locks.

A file is written whole or not at all, and an error of the disk becomes one sentence.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import RunError

DIGITS = 16  # hex digits of the digests of modules, prompts and lines
PART = ".part"  # of a file that is being written


def digest_of(value: object) -> str:
    """Return the sha256 of a JSON value, 64 hex digits; mappings count without their order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an error of the file system as one ``RunError``, about a file or a folder."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write in {path} ({error.strerror or error}); free some space or make it "
            "writable, or choose another folder, and run again to resume"
        ) from error


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line of JSON and force it to the disk, or leave the file as it was.

    Raises
    ------
    RunError
        When it cannot be written, as on a full disk.
    """
    data = json.dumps(line, allow_nan=False).encode() + b"\n"
    with writing(path.parent), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:  # the system may take part of the bytes only
                data = data[os.write(file.fileno(), data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # half a line would hide the next one
            raise


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, if it is there; drop a half-written last one from it."""
    with writing(path.parent):
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
    return content[:whole].splitlines()


def locked(path: Path, busy: str, seconds: float = 0) -> AbstractContextManager[object]:
    """Return the lock of a file, held until its context is left or this process ends, or is killed.

    Parameters
    ----------
    busy : str
        What to say when another process holds it: at once, and after some `seconds` as an error.

    Raises
    ------
    RunError
        With that sentence, or when the file cannot be locked.
    """
    lock = FileLock(path, thread_local=False)  # so that any thread may leave the context
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            return lock.acquire(0)
        if seconds:
            print(f"{busy} (waiting {seconds / 60:g} minutes)", file=sys.stderr, flush=True)
        with suppress(Timeout):
            return lock.acquire(seconds)
    raise RunError(busy)
