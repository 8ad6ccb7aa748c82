"""The command line: ``igcore run``, ``igcore verify``, ``igcore compare`` and ``igcore audit``."""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..audit import add_audit
from ..errors import IgcoreError, ParameterError, RunError, needs, unknown_name
from ..files import writing
from ..report.linefile import comparable, key, read
from ..report.yamlfile import parsed, read_yaml
from .folders import changes
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
REMEDY = "; choose one in JupyterLab, or `python -m ipykernel install --user --name NAME`"
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


def _named(text: str) -> str | dict | list:
    """Read a name, a mapping of a name and its options, or a list of costs."""
    value = parsed(text, text)
    if not isinstance(value, str | dict | list):
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
    own = {name: parsed(text, f"-p {name} {text!r:.100}") for name, text in given}
    values = read_yaml(params) if params else dict(own)
    about, source = _read(notebook)
    if len(own) < len(given):
        raise ParameterError("a parameter is given by -p twice; give each once")
    if values or own:
        values = _taken(values, own, source, notebook, params)
    spec = about.get("kernelspec", {})
    kernel_name, language = spec.get("name", "python3"), spec.get("language", "python")
    written = []
    try:
        with _one_kernel(kernel_name, notebook) as kernel:
            for run, settings in _runs(values, params or notebook, output):
                path = Path(output.replace("{run}", run))
                with writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    papermill.execute_notebook(
                        notebook, path, settings | own, km=kernel, progress_bar=False,
                        kernel_name=kernel_name, language=language,
                        stdout_file=sys.stdout, stderr_file=sys.stderr,
                    )  # fmt: skip
                written.append(f"{path} is complete")
    except papermill.PapermillExecutionError as error:  # its text holds a whole traceback
        raise RunError(f"{_failure(error)} ({error.ename}; {path} shows where)") from None
    except KeyboardInterrupt:
        raise RunError(
            "stopped; every finished line is kept, and the same command goes on from there"
        ) from None
    except RuntimeError as error:  # of the kernel's client
        raise RunError(f"{notebook} stopped ({error}); see whether memory ran out") from None
    return written, []


def _failure(error: Any) -> str:
    """Return what a cell said when it failed, or where it failed without a word."""
    if error.evalue:
        return " ".join(error.evalue.split())
    (*_, line) = ["1", *re.findall(rf"Cell In\[{error.exec_count}\], line (\d+)", str(error))]
    statement = error.source.splitlines()[int(line) - 1].strip()
    return f"cell {error.exec_count}, line {line}: {statement}"


def _read(notebook: Path) -> tuple[dict, str | None]:
    """Return the metadata of a notebook, and its cell of parameters, None where there is none."""
    try:
        found = json.loads(notebook.read_text(encoding="utf-8"))
        cells = [c for c in found["cells"] if "parameters" in c["metadata"].get("tags", ())]
        return dict(found["metadata"]), "".join(cells[0]["source"]) if cells else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RunError(f"notebook {notebook} cannot be read ({why}); check its path") from None


def _taken(
    values: dict, own: dict, source: str | None, notebook: Path, params: Path | None
) -> dict:
    """Return the values of a params file; without one those of the notebook's cell under `own`.

    papermill only warns of a value that no cell takes, and the notebook's own would run.
    """
    if source is None:
        raise ParameterError(
            f"{notebook} has no cell with the tag 'parameters', so it takes no values; give the "
            "tag to the cell that sets them (JupyterLab: Property Inspector), or give no values"
        )
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # of another language: what it sets is not known here
        return values
    known = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for name in (values | own).keys() - {"grid", "points"}:
        if name not in known:
            raise unknown_name(f"parameter of {notebook}", name, known)
    if params and "profile" in known - values.keys():
        raise ParameterError(
            f"{params} sets no profile; a params file is whole, and -p alone changes single values"
        )
    if params:
        return values
    written: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):  # a value that the cell computes stays as it is
                written[node.targets[0].id] = ast.literal_eval(node.value)
    return written | values


@contextmanager
def _one_kernel(name: str, notebook: Path) -> Iterator[Any]:
    """Yield the manager of a kernel that the first notebook starts, and stop the kernel."""
    from jupyter_client.kernelspec import find_kernel_specs  # papermill has it
    from jupyter_client.manager import KernelManager

    if name not in find_kernel_specs():
        raise unknown_name(f"kernel of {notebook}", name, find_kernel_specs(), REMEDY)
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


def _runs(values: dict, params: Path, output: str) -> list[tuple[str, dict]]:
    """Return name and settings of every run of a params file."""
    if not {"grid", "points"} & values.keys() and "{run}" not in output:
        return [("", values)]
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
