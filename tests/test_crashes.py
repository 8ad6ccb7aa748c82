"""A run that is killed, or finds the disk full, at any call that changes the file system; as a
command: test_crashes.py FOLDER SHARE.

Every SHARE-th case is tried, in the order of the calls; a case is what the run finds, a call, and
how it is disturbed. The run then goes on, and must end as one that nothing disturbed. Prints a JSON
list for each case: what was found, the disturbance, the call, and what was wrong, or "".
"""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from mockruns import PARAMS, PROMPTS, experiment, fill

from igcore import RunError
from igstudy import linefile
from igstudy.runs import folders

SMALL = replace(PARAMS, methods=["base", "inferenceguard"], n_samples=2, max_new_tokens=3)
CALLS = [
    *((os, name) for name in "write fsync truncate replace rename mkdir unlink".split()),
    *((Path, name) for name in ("touch", "write_bytes")),
]
WRITING = ("write", "write_bytes")
HOW = ("killed before", "killed in", "killed after", "disk full at")
WRITE = os.write


def run(folder, seed=0):
    """Decode, or go on."""
    with folders.open_run(folder, {"seed": seed}) as opened:
        fill(opened, experiment(replace(SMALL, seed=seed), PROMPTS[:2]))
        opened.finish({"lines": len(opened.lines)})


def lines_of(folder):
    """Return the complete lines of a folder, as bytes."""
    path = folder / "responses.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def own(lines):
    """Return the lines of this run."""
    return [line for line in lines if json.loads(line)["seed"] == 0]


def compared(lines):
    """Return lines by key, without what differs from run to run."""
    return sorted((linefile.comparable(json.loads(line)) for line in lines), key=linefile.key)


# --- what a run finds -----------------------------------------------------------------------------


def nothing(folder):
    pass


def half(folder):
    """Three lines and half a fourth."""
    run(folder)
    (folder / "manifest.json").unlink()
    path = folder / "responses.jsonl"
    first, second, third, fourth, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + third + fourth[:99])


def another(folder):
    """A finished run of another identity."""
    run(folder, seed=1)


FOUND = {found.__name__: found for found in (nothing, half, another)}


# --- disturbing -----------------------------------------------------------------------------------


def disturb(number, how, report):
    """Replace all calls for good: each is reported, and the one of this number disturbed."""
    numbers = itertools.count()

    def call(name, real, *args, **more):
        WRITE(report, f"{name} ".encode())
        if next(numbers) != number:
            return real(*args, **more)
        if how in ("killed in", "disk full at") and name in WRITING:
            real(args[0], args[1][: len(args[1]) // 3])
        if how == "disk full at":
            raise OSError(errno.ENOSPC, "No space left on device")
        try:
            if how == "killed after":
                real(*args, **more)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    for place, name in CALLS:
        made = partial(call, name, getattr(place, name))
        # a function, because a method is given its object
        setattr(place, name, lambda *args, made=made, **more: made(*args, **more))


def disturbed(folder, number, how):
    """Run in a process of its own; return the calls until it ended, and its status."""
    read, report = os.pipe()
    if (child := os.fork()) == 0:
        disturb(number, how, report)
        try:
            run(folder)
        except RunError as error:
            os._exit(0 if "No space left" in str(error) else 1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(report)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read().split(), status


def wrong(folder, found, number, how, whole):
    """Disturb a call, then go on; return what is wrong."""
    old = lines_of(folder) if found == "another" else []
    _, status = disturbed(folder, number, how)
    if status != (0 if how == "disk full at" else signal.SIGKILL):
        return "no sentence"
    left, sign = lines_of(folder), (folder / "manifest.json").exists()
    if sign and left != old and compared(left) != whole:
        return "a manifest without all lines"
    for name in ("params.json", "manifest.json"):
        if (folder / name).exists() and not (folder / name).read_bytes().endswith(b"}\n"):
            return "a file that is not whole"
    run(folder)
    lines = lines_of(folder)
    if compared(lines) != whole:
        return "other lines"
    if [line for line in lines if line in left] != own(left):
        return "a finished line was lost or decoded again"
    aside = [lines_of(path) for path in (folder.parent / folders.ASIDE).glob("*")]
    if old and old not in aside:
        return "the other run was lost"
    manifest = json.loads((folder / "manifest.json").read_text())
    params = json.loads((folder / "params.json").read_text())
    if manifest["root"] != linefile.root_of(params, list(map(json.loads, lines)), manifest):
        return "another root"
    if list(folder.glob(f"*{folders.PART}")):
        return "a part of a file"
    return ""


def cases_of(base):
    """Return all cases as (call, how it is disturbed, what is found, number of the call)."""
    cases = []
    for found in FOUND:
        calls, _ = disturbed(copied(base, found), -1, "")
        for (number, call), how in itertools.product(enumerate(calls), HOW):
            cases.append((call, how, found, number))
    return sorted(cases)


def copied(base, found):
    """Return a run folder that holds what is found."""
    shutil.rmtree(base / "case", ignore_errors=True)
    shutil.copytree(base / found, base / "case")
    return base / "case" / "run"


def main():
    base, share = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)  # so that the process may fork
    with open(os.devnull, "w") as quiet, redirect_stdout(quiet), redirect_stderr(quiet):
        run(base / "whole")
        whole = compared(lines_of(base / "whole"))
        for name, found in FOUND.items():
            (base / name).mkdir()
            found(base / name / "run")
        for call, how, found, number in cases_of(base)[::share]:
            problem = wrong(copied(base, found), found, number, how, whole)
            print(json.dumps([found, how, call, problem]), file=sys.__stdout__)


SHARE = 4  # of all cases; `python tests/test_crashes.py FOLDER 1` tries every one


def test_a_run_that_was_disturbed_anywhere_ends_as_one_that_was_not(tmp_path):
    """Bug: a full disk before the first line was a traceback. Guards finished lines, the sign of
    success, and what is kept aside.
    """
    command = [sys.executable, __file__, str(tmp_path), str(SHARE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case[-1]] == []
    calls = {call for _, _, call, _ in cases}
    wanted = "write fsync truncate replace rename mkdir unlink touch write_bytes"
    assert calls == set(wanted.split()) and len(cases) > 30


if __name__ == "__main__":
    main()
