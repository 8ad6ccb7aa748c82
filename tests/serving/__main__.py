"""``make serve-audit``: `igserve serve` under slow, leaving, many and hostile clients.

A line for each check; the exit status is 1 if one fails. The bytes on the socket are recorded from
the loopback interface, which only root may do.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.serving.load import crowd, hostile
from tests.serving.process import tiny_home
from tests.serving.safety import kills
from tests.serving.speed import first_text, overhead

CHECKS: dict[str, Callable[[Path], tuple[str, bool]]] = {
    "overhead": lambda recipe: overhead(recipe, 300),
    "first": lambda recipe: first_text(recipe.parent, 15),
    "hostile": hostile,
    "kills": lambda recipe: kills(recipe, 200, 20),
    "crowd": lambda recipe: crowd(recipe, 32, 120),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.serving", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CHECKS)}; all by default")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args(arguments).names or CHECKS:
            home = Path(folder, name)
            home.mkdir()
            begun = time.monotonic()
            line, passed = CHECKS[name](tiny_home(home))
            verdict = "ok" if passed else "FAILED"
            print(f"{name}: {verdict}, {time.monotonic() - begun:.0f} s: {line}", flush=True)
            failed += not passed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
