"""Release the lock that a killed Snakemake has left: ``python -m igcore.runs.unlock``.

`make` calls it before Snakemake, which locks its folder and cannot tell a living run from a killed
one. The lock is released when no process of a Snakemake run lives in the folder. It stays when one
does, or when the run was started on another computer.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

import psutil

from ..errors import IgcoreError, RunError
from ..folders import root

# programs whose processes belong to a Snakemake run ("walk")
WALKING = {"snakemake", "igcore.runs.walk", "papermill", "ipykernel_launcher"}
HOST = "walk-host"  # file beside the locks: the computer that started the last walk


def unlock(folder: Path) -> bool:
    """Release a stale lock; return whether there was one.

    Raises
    ------
    RunError
        When the run that holds the lock is alive, or may be alive on another computer.
    """
    folder = folder.resolve()
    home = folder / ".snakemake"
    locked = any((home / "locks").glob("*"))
    host, here = home / HOST, platform.node()
    if locked:
        if living := sorted(walking(folder)):
            raise RunError(
                f"another walk is going on in {folder} (process "
                f"{', '.join(map(str, living[:4]))}); wait for it, or stop it first"
            )
        if host.is_file() and (there := host.read_text(encoding="utf-8")) != here:
            raise RunError(
                f"the walk that locked {folder} was started on {there}; when it has ended run "
                "`snakemake --unlock`"
            )
        # the locks are those of the folder, whatever its Snakefile and params say by now
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--unlock",
            "--quiet",
            "all",
            "--snakefile",
            os.devnull,
        ]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        print(
            "igcore: a killed walk had left its lock, which is released; it goes on where it was",
            flush=True,
        )
    home.mkdir(exist_ok=True)
    host.write_text(here, encoding="utf-8")
    return locked


def walking(folder: Path) -> Iterator[int]:
    """Yield the ids of Snakemake's processes in a folder, without this one and its parents."""
    mine = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            names = {PurePath(part).name for part in process.cmdline()}
            here = process.cwd() == str(folder)
        except psutil.Error:  # it has ended, or is somebody else's
            continue
        if here and names & WALKING and process.pid not in mine:
            yield process.pid


def main() -> int:
    """Release a stale lock of the root folder; return the exit status."""
    try:
        unlock(root())
    except (IgcoreError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
