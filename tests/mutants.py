"""``make mutants``: break what decides safety at places drawn by chance, and see if a test fails.

mutmut makes the mutants, under ``[tool.mutmut]`` in pyproject.toml, and runs for each the tests
that reach it. ``mutmut show NAME`` prints one, ``mutmut apply NAME`` writes it into the source.
"""

import json
import random
import sys
from collections import Counter
from pathlib import Path

import libcst
from mutmut.__main__ import _run as run
from mutmut.mutation import mutators
from mutmut.stats import status_by_exit_code

# mutants drawn of each module
DRAWN = {"budget": 90, "verdict": 90, "search": 80, "beams": 60, "contract": 25, "scoring": 55}
SEED = 46
RESULTS = ("killed", "survived", "timeout")


def shorter(call: libcst.Call) -> list[libcst.Call]:
    """Return the calls that lack one argument; None in its place breaks most calls, unseen."""
    return [made for made in mutators.operator_arg_removal(call) if len(made.args) < len(call.args)]


def found() -> dict[str, dict[str, int | None]]:
    """Return mutmut's exit status of each mutant by module; None before its tests have run."""
    files = {name: Path(f"mutants/igcore/{name}.py.meta") for name in DRAWN}
    return {name: json.loads(at.read_text())["exit_code_by_key"] for name, at in files.items()}


def main(children: int) -> None:
    """Draw mutants, run their tests, and print the table of results by module."""
    # the wording of messages is no safety
    mutators.mutation_operators[:] = [
        (node, shorter if change is mutators.operator_arg_removal else change)
        for node, change in mutators.mutation_operators
        if change is not mutators.operator_string
    ]
    run(["igcore.budget.x__readable__mutmut_1"], children)  # makes all others, too
    draw = random.Random(SEED).sample
    drawn = {name: draw(sorted(all_), DRAWN[name]) for name, all_ in found().items()}
    run([mutant for mutants in drawn.values() for mutant in mutants], children)
    print("module  ", *(f"{result:>10}" for result in ("mutants", *RESULTS)))
    for name, status in found().items():
        results = Counter(status_by_exit_code[status[mutant]] for mutant in drawn[name])
        print(f"{name:8}", *(f"{n:10}" for n in (len(drawn[name]), *(results[x] for x in RESULTS))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
