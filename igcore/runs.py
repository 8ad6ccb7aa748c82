"""Finished runs as tables, and the command line that checks and compares them. Knows run folders;
decodes nothing itself.

``igcore verify FILE`` and ``igcore compare A B``, or the same behind ``python -m igcore.runs``.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
import yaml

from .errors import IgcoreError, RunError
from .folders import differences, read, root
from .methods import METHODS
from .records import COLUMNS
from .verify import TOLERANCE, Report, Trusted, verify

EXAMPLES = "examples"  # how the names of runs begin whose answers are shown and never counted
HELP = """\
score every emitted text again, and compare the lines with settings, prompts and manifest"""
MORE = """\
Whoever mends all hashes can change more than lines betray. Without --replay these pass: answers, token ids, block ends,
`finished`, abstentions and their reasons, counts of work, traces, finals and fail_open_cost that the policy never gave, other
hashes of files and code in params.json, and settings changed in params.json and lines alike, with all that follows from them.
With --replay all only that passes which an honest run would have left under the settings of params.json: one with fewer prompts
or methods, or with another value of a setting without influence on its methods. Seconds, names of profile and run, times of
files, commit, processor and time are never certified."""


def load_runs(profile: str, base: Path | None = None, pattern: str = "*") -> pd.DataFrame:
    """Return the lines of all finished runs of a profile, shards joined, methods in the order of
    `METHODS`.

    Those of a run and method are in the order of their prompts' ids, however they were decoded: a
    bootstrap depends on it.

    Each has besides the columns of `igcore.records` its ``run`` and ``critic_control``.

    Parameters
    ----------
    pattern : str
        Of the names of folders, such as ``decode-main-*``. ``*`` leaves out those that begin with
        `EXAMPLES`.

    Raises
    ------
    RunError
        When there is none, or one has not finished.
    """
    base = base or root() / "runs" / profile
    found = _folders(base, pattern)
    if not found:
        raise RunError(f"there is no run in {base / pattern}; decode first with notebook 30_decode")
    for folder in found:
        if not (folder / "manifest.json").exists():
            raise RunError(
                f"the run {folder} has not finished; run notebook 30_decode with its "
                f"parameters again"
            )
    known = {
        folder: json.loads((folder / "params.json").read_text(encoding="utf-8")) for folder in found
    }
    _check_shards(known)
    known = {
        f: {"run": p.get("run", f.name), "critic_control": p.get("critic_control", "none")}
        for f, p in known.items()
    }
    lines = [
        line | about for folder, about in known.items() for line in read(folder / "responses.jsonl")
    ]
    place = {method: i for i, method in enumerate(METHODS)}
    order = {
        run: i for i, run in enumerate(dict.fromkeys(about["run"] for about in known.values()))
    }

    def key(line: dict) -> tuple:
        return place.get(line["method"], len(place)), order[line["run"]], line["prompt_id"]

    return pd.DataFrame(sorted(lines, key=key))


def _folders(base: Path, pattern: str) -> list[Path]:
    """Return the folders of runs whose names match in alphabetical order; ``*`` leaves out
    `EXAMPLES`.
    """
    found = sorted(path.parent for path in base.glob(f"{pattern}/params.json"))
    return [folder for folder in found if pattern != "*" or not folder.name.startswith(EXAMPLES)]


def load_finished(profile: str, pattern: str = "*") -> tuple[pd.DataFrame, list[str]]:
    """Return `load_runs` of what has finished, and for everything else a sentence that says why it
    is left out.

    Without a finished run the table is empty, with the columns of `igcore.COLUMNS`, ``run`` and
    ``critic_control``.
    """
    parts = list(each_finished(profile, left_out := [], pattern))
    lines = (
        pd.concat(parts, ignore_index=True)
        if parts
        else pd.DataFrame(columns=[*COLUMNS, "run", "critic_control"])
    )
    place = {method: i for i, method in enumerate(METHODS)}
    return lines.sort_values(
        "method",
        key=lambda names: names.map(place).fillna(len(place)),
        kind="stable",
        ignore_index=True,
    ), left_out


def each_finished(profile: str, left_out: list[str], pattern: str = "*") -> Iterator[pd.DataFrame]:
    """Yield the lines of each finished run, its shards joined; to `left_out` is added why another
    is not there.
    """
    names = [folder.name for folder in _folders(root() / "runs" / profile, pattern)]
    for name in dict.fromkeys(
        re.sub(r"\.\d+-of-\d+$", ".*-of-*", name) for name in names
    ):  # shards as one run
        try:
            lines = load_runs(profile, pattern=name)
        except RunError as error:
            left_out.append(str(error))
        else:
            yield lines


def _check_shards(known: dict[Path, dict]) -> None:
    """Raise ``RunError`` unless every run is there once: whole, or in all its shards."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for folder, params in known.items():
        runs.setdefault(params.get("run", folder.name), []).append(
            (params.get("n_shards", 1), params.get("shard", 0))
        )
    for name, parts in runs.items():
        n = parts[0][0]
        if sorted(parts) != [(n, i) for i in range(n)]:
            held = ", ".join(f"shard {i} of {n}" for n, i in sorted(parts))
            raise RunError(
                f"run {name} is there as {held}; decode what is missing, or move away the "
                f"folders of another sharding"
            )


# --- command line ---------------------------------------------------------------------------------


def show(report: Report, path: Path) -> None:
    """Print what was certified and what was not; problems go to the standard error."""
    complain(report.problems)
    if report.problems:
        complain([f"{path} does not hold: {len(report.problems)} problems"])
        return
    print(f"{path}: all hold")
    for what, found in report.certified.items():
        print(f"  {what:14}{plain(found)}")
    print("not certified:")
    for what in report.uncertified:
        print(f"  {plain(what)}")


def complain(problems: Iterable[str]) -> None:
    """Print a line for each problem to the standard error."""
    for problem in problems:
        print(f"error: {plain(problem)}", file=sys.stderr)


def plain(text: str) -> str:
    """Return a text on one line: a name in a record may hold line ends and more that would look
    like words of ours.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _groups(text: str) -> int | None:
    """Read how many groups to decode again: a number, or ``all``."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of groups nor 'all'")
    return None if text == "all" else int(text)


def _named(text: str) -> str | dict:
    """Read a name, or a mapping of a name and its options."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no YAML; give a name or {{name: ..., option: ...}}"
        ) from error
    if not isinstance(value, str | dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a name nor {{name: ..., option: ...}}"
        )
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="igcore", description="Check what runs have written.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("verify", help=HELP, description=f"{HELP}.", epilog=MORE)
    check.add_argument(
        "file", type=Path, help="responses.jsonl, beside its params.json and manifest.json"
    )
    for role in ("cost", "reward", "policy", "prompts"):
        check.add_argument(
            f"--{role}",
            type=_named,
            help="name or {name: ..., option: ...} in the place of the record's",
        )
    for role in ("critic", "value"):
        check.add_argument(
            f"--{role}",
            metavar="FOLDER",
            help="of the network that --replay asks, in the place of the record's",
        )
    check.add_argument(
        "--replay",
        type=_groups,
        default=0,
        metavar="K",
        help="decode K groups again, or 'all' (default 0)",
    )
    check.add_argument(
        "--seed", type=int, help="draws the groups; by default another one each time"
    )
    check.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="by which scores may differ (default %(default)g)",
    )
    compare = commands.add_parser(
        "compare", help="say in which lines and fields two files differ; seconds do not count"
    )
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Verify or compare files of responses from the command line; return the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.command == "verify":
            trusted = Trusted(
                asked.cost, asked.reward, asked.policy, asked.prompts, asked.critic, asked.value
            )
            report = verify(asked.file, trusted, asked.replay, asked.seed, asked.tolerance)
            show(report, asked.file)
            return 1 if report.problems else 0
        problems = differences(read(asked.a), read(asked.b))
    except IgcoreError as error:
        problems = [str(error)]
    complain(problems)
    if not problems:
        print(f"{asked.a} and {asked.b} agree in all fields but seconds")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
