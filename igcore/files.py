"""Files written whole or not at all, and locks of files: one sentence where a disk says no."""

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import RunError

PART = ".part"  # of a file that is being written
SPACE, WRITABLE = "free some space", "make it writable"
FOLDER = "move the file away that is where a folder is needed"
LOCKS = "its file system has no file locks: mount it with them"
REMEDIES = {  # what the system says -> what the user can do
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EROFS: WRITABLE,
    errno.EACCES: WRITABLE,
    errno.EPERM: WRITABLE,
    errno.EEXIST: FOLDER,
    errno.ENOTDIR: FOLDER,
    errno.EISDIR: "move the folder away that is where a file is needed",
    errno.ENOLCK: LOCKS,
    errno.ENOSYS: LOCKS,
    errno.EOPNOTSUPP: LOCKS,
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an error of the file system as one ``RunError``, about a file or a folder."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "check its path and its disk")
        raise RunError(
            f"cannot write in {path} ({error.strerror or error}); {remedy}, or choose another "
            "folder, and run again to resume"
        ) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, with the folders that it needs.

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


def locked(path: Path, busy: str, seconds: float = 0) -> AbstractContextManager[object]:
    """Return the lock of a file, held until its context is left or this process ends, or is killed.

    Parameters
    ----------
    busy : str
        What to say when another process still holds it after some `seconds`.

    Raises
    ------
    RunError
        With that sentence, or when the file cannot be locked.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # of the whole process, so that any thread may leave the context
            return FileLock(path, thread_local=False).acquire(seconds)
        except Timeout:
            raise RunError(busy) from None
