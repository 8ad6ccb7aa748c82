"""``make audit``: try to break the guarantee by hostile scorers.

Every answer that is shown is judged again, text by text, by new calls of the same scorer. For
scorers that depend on more than the text no method can give a guarantee; their violations are
reported and are no error. `zoo` has the scorers, `emissions` decodes with them and judges all that
is shown again.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator

from igcore.errors import IgcoreError, ParameterError
from igcore.progress import progress
from igcore.tools.cli import check
from igstudy.commands import printable
from tests.audit.emissions import Tally, cases, tallies_of
from tests.audit.processes import across_processes
from tests.audit.zoo import KINDS

QUICK = 10_000  # emissions: under a minute
COLUMNS = ("tried", "verified_safe", "abstained", "violations")


def emitted(cost: str, emissions: int, processes: int) -> list[str]:
    """Decode with every kind of scorer and print the table; return what must not happen."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with progress(emissions, "answers") as bar:
        for kind, tally in tallies_of(list(cases(emissions, cost)), processes):
            tallies[kind].add(tally)
            bar.update(tally.counts["tried"])
    print("\n".join(table(tallies)))
    detected = [kind for kind, tally in tallies.items() if tally.detected]
    missed = [kind for kind in tallies if not KINDS[kind].deterministic and kind not in detected]
    print(f"warned of by the package: {', '.join(detected) or 'none'}")
    print(f"depend on more than the text, unnoticed: {', '.join(missed) or 'none'}")
    fixed = [tally for kind, tally in tallies.items() if KINDS[kind].deterministic]
    problems = [example for tally in fixed for example in tally.examples]
    if problems:
        n = sum(tally.counts["violations"] for tally in fixed)
        problems.append(f"{n} answers to deterministic scorers are over budget")
    return problems


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    """Yield the lines of the table of kinds."""
    yield f"{'kind':28}" + "".join(f"{name:>15}" for name in COLUMNS)
    for kind, tally in tallies.items():
        yield f"{kind:28}" + "".join(f"{tally.counts[name]:15}" for name in COLUMNS)
    sums = [sum(tally.counts[name] for tally in tallies.values()) for name in COLUMNS]
    yield f"{'all':28}" + "".join(f"{number:15}" for number in sums)


def audit(cost: str, emissions: int, processes: int) -> list[str]:
    """Run the audit; return the problems."""
    for name, value in (("emissions", emissions), ("processes", processes)):
        if value < 1:
            raise ParameterError(f"--{name} is {value}; give a whole number of at least 1")
    if not cost:
        return emitted(cost, emissions, processes)
    print(*check(cost), sep="\n")
    found, problem = across_processes(cost)
    print(found)
    return [problem] if problem else emitted(cost, emissions, processes)


def main(arguments: list[str] | None = None) -> int:
    """Audit from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    cost = "a scorer of your own, NAME or module:function: its contract, and hostile forms of it"
    parser.add_argument("--cost", default="", help=cost)
    many = "answers to decode and to judge (default %(default)s)"
    parser.add_argument("--emissions", type=int, default=QUICK, metavar="N", help=many)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default %(default)s")
    try:
        problems = audit(**vars(parser.parse_args(arguments)))
    except IgcoreError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"error: {printable(problem)}", file=sys.stderr)
    if not problems:
        print("the audit found nothing")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
