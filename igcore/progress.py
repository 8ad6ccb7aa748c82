"""Progress of long work, told the way the place can show it. Knows only where it runs."""

import os
import sys

from tqdm import tqdm
from tqdm.auto import tqdm as live


class _Lines:
    """Standard output for a bar that cannot be redrawn: every state is a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stdout.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stdout.flush()


def progress(total: int, label: str) -> tqdm:
    """Return a tqdm bar over `total` steps.

    A live bar in a terminal or in a notebook that somebody is looking at; elsewhere (papermill, a
    cluster's log) a plain line to standard output at most every 30 seconds.
    """
    if sys.stderr.isatty() or any(
        name in os.environ for name in ("JPY_SESSION_NAME", "VSCODE_PID")
    ):
        return live(total=total, desc=label)
    return tqdm(total=total, desc=label, file=_Lines(), mininterval=30, ascii=True, ncols=80)
