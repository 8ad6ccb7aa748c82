"""The command line that checks and compares runs: ``igcore verify FILE``, ``igcore compare A B``.

``python -m igcore.runs`` is the same command.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from ..errors import IgcoreError, ParameterError
from ..folders import changes, comparable, key, read
from .rescore import TOLERANCE
from .trusted import Trusted
from .verify import Check, Report, verify

HELP = "score every emitted text again, and compare the lines with settings, prompts and manifest"
MORE = """\
Whoever mends all hashes can change more than lines betray. Without --replay these pass: answers,
token ids, block ends, `finished`, abstentions and their reasons, counts of work, traces, finals and
fail_open_cost that the policy never gave, other hashes of files and code in params.json, and
settings changed in params.json and lines alike, with all that follows from them. With --replay all
only that passes which an honest run would have left under the settings of params.json: one with
fewer prompts or methods, or with another value of a setting without influence on its methods.
Seconds, names of profile and run, times of files, commit, processor and time are never
certified."""
OPTIONS = "name or {name: ..., option: ...} in the place of the record's"


def shown(report: Report, path: Path) -> list[str]:
    """Return what was certified and what was not, line by line."""
    certified = [f"  {what:14}{plain(found)}" for what, found in report.certified.items()]
    uncertified = [f"  {plain(what)}" for what in report.uncertified]
    return [f"{path}: all hold", *certified, "not certified:", *uncertified]


def plain(text: str) -> str:
    """Return a text on one line, with every unprintable character escaped.

    A name in a record may hold line ends and control characters that would look like our own
    output.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def differences(a: Sequence[dict], b: Sequence[dict]) -> list[str]:
    """Say in which fields two runs differ, in any order of lines; seconds do not count."""
    left, right = ({" ".join(key(line)): comparable(line) for line in lines} for lines in (a, b))
    return [f"{name} differs" for name in changes(left, right)]


def _named(text: str) -> str | dict:
    """Read a name, or a mapping of a name and its options."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, str | dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name or {{name: ..., option: ...}}")
    return value


def _parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    parser = argparse.ArgumentParser(prog="igcore", description="Check what runs have written.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("verify", help=HELP, description=f"{HELP}.", epilog=MORE)
    check.add_argument("file", type=Path, help="responses.jsonl, with the files beside it")
    for role in ("cost", "reward", "policy", "prompts"):
        check.add_argument(f"--{role}", type=_named, help=OPTIONS)
    for role in ("critic", "value"):
        check.add_argument(f"--{role}", metavar="FOLDER", help="of the network that --replay uses")
    check.add_argument("--replay", default="0", metavar="K", help="decode K groups again, or 'all'")
    check.add_argument("--seed", type=int, help="samples these groups; by default a random one")
    tolerance = "by which scores may differ (default %(default)g)"
    check.add_argument("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    compare = commands.add_parser("compare", help="say in which lines and fields two files differ")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Verify or compare files of responses from the command line; return the exit status."""
    given = _parser().parse_args(arguments)
    try:
        lines, problems = _verified(given) if given.command == "verify" else _compared(given)
    except IgcoreError as error:
        lines, problems = [], [str(error)]
    for problem in problems:
        print(f"error: {plain(problem)}", file=sys.stderr)
    if not problems:
        print("\n".join(lines))
    return 1 if problems else 0


def _verified(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Verify a run; return what to print when it holds, and its problems."""
    trusted = Trusted(**{name: getattr(given, name) for name in Trusted.__dataclass_fields__})
    if given.replay != "all" and not given.replay.isdecimal():
        raise ParameterError(f"--replay is {given.replay!r}; give a number of groups, or all")
    replay = None if given.replay == "all" else int(given.replay)
    report = verify(given.file, Check(trusted, replay, given.seed, given.tolerance))
    last = [f"{given.file} does not hold: {len(report.problems)} problems"]
    return shown(report, given.file), report.problems and report.problems + last


def _compared(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Compare two files; return what to print when they agree, and their differences."""
    agreement = f"{given.a} and {given.b} agree in all fields but seconds"
    return [agreement], differences(read(given.a), read(given.b))
