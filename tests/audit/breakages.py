"""Break one line of the package at a time, and see whether its tests notice.

The list is `breakages.toml`. To add one, copy an entry: the file, a piece of its
source that occurs there once, what replaces it, what that breaks, and the test files that see it.
"""

import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from igcore.errors import ParameterError, RunError

LIST = Path(__file__).with_name("breakages.toml")
ROOT = Path(__file__).parents[2]  # of the checkout
PACKAGES = ("igcore", "igstudy")
# imported once, and forked from; what is below igcore is forgotten, and imported from each copy
HEAVY = [
    "anyio.pytest_plugin",
    "hypothesis",
    "igcore.adapters.generate",
    "igstudy.runs.verify",
    "nbval.plugin",
    "scipy.stats",
    "transformers.models.llama.modeling_llama",
    "xdist.plugin",
]
SECONDS = 300  # a breakage may let a loop run for ever, and that is seen
LOST, ATTEMPTS = 255, 3  # the status when the fork server has lost a process, which may happen
CODE = 10  # added to pytest's exit status, so that no crash looks like a failed test
PASSED, FAILED = CODE, CODE + 1


@dataclass(frozen=True)
class Breakage:
    """One broken line.

    Attributes
    ----------
    file : str
        Seen from the repository.
    line, becomes : str
        Part of its source that occurs once, and what replaces it.
    breaks : str
        What that breaks, in a sentence.
    tests : list of str
        Below ``tests/``: files, or single tests as pytest names them; the quickest first.
    """

    file: str
    line: str
    becomes: str
    breaks: str
    tests: list[str]


def listed(path: Path = LIST, root: Path = ROOT) -> list[Breakage]:
    """Return the breakages of a list, each checked against the source.

    Raises
    ------
    ParameterError
        For an entry with missing or unknown keys, and for a line that does not occur exactly once.
    """
    keys, found = {field.name for field in fields(Breakage)}, []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["breakage"]:
        if set(entry) != keys:
            raise ParameterError(
                f"{path.name}: {entry} must have exactly {', '.join(sorted(keys))}"
            )
        found.append(Breakage(**entry))
        broken_source(found[-1], root)
    return found


def broken_source(breakage: Breakage, root: Path = ROOT) -> str:
    """Return the source of a file with one line broken."""
    source = (root / breakage.file).read_text(encoding="utf-8")
    if (n := source.count(breakage.line)) != 1:
        raise ParameterError(
            f"{breakage.file} has {breakage.line!r} {n} times; mend the list of breakages, each "
            "line must occur once"
        )
    return source.replace(breakage.line, breakage.becomes)


def outcomes(
    breakages: Sequence[Breakage], processes: int, root: Path = ROOT
) -> Iterator[tuple[Breakage, bool]]:
    """Run the tests of each breakage; yield it, and whether a test has failed.

    Raises
    ------
    RunError
        When the tests fail without any breakage, or cannot be run with one.
    """

    def check(tests: Sequence[str]) -> None:
        if (status := status_of(root, tests)) != PASSED:
            raise RunError(
                f"{' '.join(tests)}: a test fails without a breakage (status {status}); mend it "
                "first"
            )

    def caught(breakage: Breakage) -> bool:
        with TemporaryDirectory() as folder:
            copy = copied(root, Path(folder))
            file = copy / breakage.file
            file.write_text(broken_source(breakage, root), encoding="utf-8")
            status = status_of(copy, breakage.tests)
        if status not in (None, PASSED, FAILED):
            raise RunError(
                f"the tests of {breakage.file}: {breakage.breaks} could not be run (status "
                f"{status}); mend its entry in the list"
            )
        return status != PASSED

    # each test once, and all tests of a file in one process
    named = sorted({test for breakage in breakages for test in breakage.tests})
    files = [list(tests) for _, tests in groupby(named, lambda test: test.partition("::")[0])]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(check, files))
        yield from zip(breakages, pool.map(caught, breakages), strict=True)


def copied(root: Path, folder: Path) -> Path:
    """Make a checkout in a folder: its own copies of the packages, links to all else."""
    for entry in root.iterdir():
        if entry.name in PACKAGES:
            shutil.copytree(entry, folder / entry.name)
        elif not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    return folder


def status_of(checkout: Path, tests: Sequence[str]) -> int | None:
    """Return the exit status of tests in a process of their own; None when they do not end."""
    context = get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    for _ in range(ATTEMPTS):
        process = context.Process(target=run_tests, args=(str(checkout), list(tests)))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            return None
        if process.exitcode != LOST:
            break
    return process.exitcode


def run_tests(checkout: str, tests: list[str]) -> None:
    """Run tests in a checkout, and exit with pytest's status."""
    import pytest

    # what this process has of the package, and of what imported it, is not what is tested
    for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, "tests")]:
        del sys.modules[name]
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    # preloaded plugins are not rewritten, which pytest would call an error
    options = "-x -q -p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning".split()
    sys.exit(CODE + int(pytest.main([*options, *(f"tests/{name}" for name in tests)])))
