"""``make slurm-test``: shards and arrays on a SLURM of one node, cancelled and resumed, equal to a
local run; a failing job; and nothing left behind. `node` makes and removes the cluster, which needs
root on Debian; `walks` says what walks on it.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from igcore.errors import IgcoreError, RunError
from tests.cluster import walks
from tests.cluster.node import ENDS, one_node

MINUTE = 60.0


def show(title: str, seen: object) -> None:
    """Print what was seen."""
    print(f"{title}: {seen}", flush=True)


def test(folder: Path) -> None:
    """Walk locally and on the cluster, and compare; raise ``IgcoreError`` where something fails."""
    began = time.monotonic()
    with one_node() as node:
        show("the node", node)
        show("seconds to set it up", round(time.monotonic() - began, 1))
        failed = walks.fail(folder / "failing")
        show("seconds from a job that failed to the end of its walk", failed)
        show("a local walk, seconds", round(walks.run_locally(folder / "local"), 1))
        for phrase, value in walks.cancel_and_resume(folder / "cluster").items():
            show(phrase, value)
        show("lines equal to the local ones", walks.compare(folder / "local", folder / "cluster"))
        began = time.monotonic()
    show("seconds to take it down", round(time.monotonic() - began, 1))
    if failed > MINUTE:
        raise RunError(f"the walk ended {failed} s after its job had failed, over a minute")


def main(arguments: list[str] | None = None) -> int:
    """Test from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.parse_args(arguments)
    for number in ENDS:  # whatever ends the test, the cluster is taken down on the way out
        signal.signal(number, lambda *_: sys.exit("stopped"))
    folder = Path(tempfile.mkdtemp(prefix="igcore-slurm-"))
    try:
        test(folder)
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SystemExit:
        walks.clear(folder)
        raise
    walks.clear(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
