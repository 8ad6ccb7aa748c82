"""The command line: ``igcore run``, ``igcore verify``, ``igcore compare`` and ``igcore audit``."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ..audit.cli import add_audit
from ..errors import IgcoreError, RunError, needs
from ..folders import changes, comparable, key, read
from .paramfiles import ParamFiles, runs_of
from .scope import TOLERANCE, UNCHECKED

HELP = "score every emitted text again, and compare the lines with settings, prompts and manifest"
MORE = f"""\
Whoever mends all hashes can change more than lines betray. Without --replay nothing shows
{UNCHECKED}; nor settings changed in params.json and lines alike, with all that follows from them.
With --replay all only that passes which an honest run would have left under the settings of
params.json: one with fewer prompts or methods, with another value of a setting without influence on
its methods, or with those last digits of perplexity and kl that another batch gives. Seconds, names
of profile and run, times of files, commit, processor and time are never certified."""
OPTIONS = "name or {name: ..., option: ...} in the place of the record's"
Result = tuple[list[str], list[str]]  # lines to print when all holds, and problems


def plain(text: str) -> str:
    """Return a text on one line, with every unprintable character escaped.

    A name in a record may hold line ends and control characters that would look like our own
    output.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def differences(a: Sequence[dict], b: Sequence[dict], tolerance: float = 0.0) -> list[str]:
    """Say in which fields two runs differ, in any order of lines; seconds do not count.

    With a tolerance, scores may differ by it, and near ties and the diagnostics of a trace as far
    as another batch or processor moves them. Lines that differ say how many near ties they had.
    """
    left = {" ".join(key(line)): comparable(line) for line in a}
    right = {" ".join(key(line)): comparable(line) for line in b}
    if not tolerance:
        return [f"{name} differs" for name in changes(left, right)]
    from .rescore import unlike  # here: they load torch
    from .verify import allow_for_batch

    found = [f"{name} is in one file only" for name in sorted(left.keys() ^ right.keys())]
    for name in sorted(left.keys() & right.keys()):
        one, other = left[name], right[name]
        ties = one.pop("near_ties"), other.pop("near_ties")
        del one["digest"], other["digest"]
        allow_for_batch(one["trace"], other["trace"], one["block_size"])
        for sentence in unlike(name, one, other, tolerance):
            found.append(f"{sentence} (near ties: {ties[0]} and {ties[1]})")
    return found


def _named(text: str) -> str | dict:
    """Read a name, or a mapping of a name and its options."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, str | dict):
        raise ValueError(text)
    return value


def _groups(text: str) -> int | None:
    """Read a number of groups; None stands for all."""
    return None if text == "all" else int(text)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="igcore", description="Run notebooks, and check runs.")
    commands = parser.add_subparsers(required=True)
    notebook = commands.add_parser("run", help="run a notebook with a params file by papermill")
    notebook.set_defaults(run=_run)
    notebook.add_argument("notebook", type=Path)
    place = "the executed notebook; {run} in it stands for the name of each run of the file"
    notebook.add_argument("output", help=place)
    notebook.add_argument("-f", "--params", type=Path, help="YAML file of parameters")
    one = "a parameter that takes the place of the file's"
    notebook.add_argument(
        "-p",
        dest="given",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help=one,
    )
    check = commands.add_parser("verify", help=HELP, description=f"{HELP}.", epilog=MORE)
    check.set_defaults(run=_verify)
    check.add_argument("file", type=Path, help="responses.jsonl, with the files beside it")
    for role in ("cost", "reward", "policy", "prompts"):
        check.add_argument(f"--{role}", type=_named, help=OPTIONS)
    for role in ("critic", "value"):
        check.add_argument(f"--{role}", metavar="FOLDER", help="of the network that --replay uses")
    trusted = "params file that you trust; it names what no option above names"
    check.add_argument("--params", type=Path, metavar="FILE", help=trusted)
    replay = "decode K groups again, or 'all'"
    check.add_argument("--replay", type=_groups, default=0, metavar="K", help=replay)
    check.add_argument("--seed", type=int, help="samples these groups; by default a random one")
    tolerance = "by which scores may differ (default %(default)g)"
    check.add_argument("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    compare = commands.add_parser("compare", help="say in which lines and fields two files differ")
    compare.set_defaults(run=_compare)
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    moved = "by which numbers may differ, as between processors; then near ties are counted, too"
    compare.add_argument("--tolerance", type=float, default=0.0, help=moved)
    add_audit(commands)
    return parser


def _run(notebook: Path, output: str, params: Path | None, given: list[list[str]]) -> Result:
    """Run a notebook for every run of a params file, one after the other in one kernel.

    What its cells print is shown as they print it. A kernel takes seconds to start, most of them
    for imports, so the runs of a file share one.
    """
    papermill = needs("papermill", "notebooks")
    written = []
    try:
        values = yaml.safe_load(params.read_text(encoding="utf-8")) if params else {}
        if not isinstance(values, dict):
            raise ValueError("it must be a mapping of settings")
        own = {name: yaml.safe_load(value) for name, value in given}
        about = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
        with _one_kernel(about.get("kernelspec", {}).get("name", "python3")) as kernel:
            for run, settings in _runs(values, params, output):
                path = Path(output.replace("{run}", run))
                path.parent.mkdir(parents=True, exist_ok=True)
                papermill.execute_notebook(
                    notebook, path, settings | own, km=kernel, progress_bar=False,
                    stdout_file=sys.stdout, stderr_file=sys.stderr,
                )  # fmt: skip
                written.append(f"{path} is complete")
    except papermill.PapermillExecutionError as error:  # its text holds a whole traceback
        raise RunError(f"{error.evalue} ({error.ename}; {path} shows where)") from None
    except KeyboardInterrupt:
        raise RunError(
            "stopped; every finished line is kept, and the same command goes on from there"
        ) from None
    except IgcoreError:  # of a grid, which is a ValueError, too
        raise
    except (OSError, ValueError, KeyError, RecursionError, yaml.YAMLError) as error:
        raise RunError(f"{params or notebook} cannot be read: {plain(str(error))}") from None
    return written, []


@contextmanager
def _one_kernel(name: str) -> Iterator[Any]:
    """Yield the manager of a kernel that the first notebook starts, and stop the kernel."""
    from jupyter_client.manager import KernelManager  # papermill has it

    clients = []

    class Manager(KernelManager):
        """Remembers its clients: a notebook closes none of a kernel that it did not start."""

        def client(self, **options):
            """Return a new client."""
            clients.append(super().client(**options))
            return clients[-1]

    kernel = Manager(kernel_name=name)
    try:
        yield kernel
    finally:
        for client in clients:
            client.stop_channels()
        if kernel.has_kernel:
            kernel.shutdown_kernel(now=True)


def _runs(values: dict, params: Path | None, output: str) -> list[tuple[str, dict]]:
    """Return name and settings of every run of a params file."""
    if not {"grid", "points"} & values.keys():
        return [(str(values.get("run", "")), values)]
    runs = list(runs_of(values, params))
    if len(runs) > 1 and "{run}" not in output:
        raise RunError(
            f"{params} makes {len(runs)} runs, and {output} is one notebook; put {{run}} into its "
            "path, such as runs/small/{run}/executed.ipynb"
        )
    return runs


def _verify(file: Path, params: Path | None, **given) -> Result:
    """Verify a run."""
    from .verify import Check, verify  # here: it loads torch, and `igcore run` needs none

    settings = {}
    if params:
        folder = params.absolute().parent
        settings = ParamFiles(folder.name, base=folder.parent).read(params)
    report = verify(file, Check.trusting(settings, **given))
    certified = [f"  {what:14}{plain(found)}" for what, found in report.certified.items()]
    uncertified = [f"  {plain(what)}" for what in report.uncertified]
    problems = list(report.problems)
    if problems:
        problems.append(f"{file} does not hold: {len(problems)} problems")
    return [f"{file}: all hold", *certified, "not certified:", *uncertified], problems


def _compare(a: Path, b: Path, tolerance: float) -> Result:
    """Compare two files of responses."""
    within = f", numbers within {tolerance:g}" if tolerance else ""
    agree = f"{a} and {b} agree in all fields but seconds{within}"
    return [agree], differences(read(a), read(b), tolerance)


def main(arguments: list[str] | None = None) -> int:
    """Run a command from the command line; return the exit status."""
    given = vars(_parser().parse_args(arguments))
    run = given.pop("run")
    try:
        lines, problems = run(**given)
    except IgcoreError as error:
        lines, problems = [], [str(error)]
    for problem in problems:
        print(f"error: {plain(problem)}", file=sys.stderr)
    if not problems:
        print("\n".join(lines))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
