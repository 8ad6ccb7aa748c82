"""Progress bars, in the form that a terminal, a notebook or a log can show."""

import os
import sys

from tqdm import tqdm


class _Lines:
    """Standard output for a bar that cannot be redrawn: each state is a line."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stdout.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stdout.flush()


def progress(total: int, label: str) -> tqdm:
    """Return a tqdm bar over `total` steps.

    In a terminal or an open notebook the bar is live. Elsewhere (papermill, a cluster's log) it is
    a plain line to standard output at most every 30 seconds.
    """
    in_notebook = os.environ.keys() & {"JPY_SESSION_NAME", "VSCODE_PID"}
    if sys.stderr.isatty() or in_notebook:
        return tqdm(total=total, desc=label)
    return tqdm(total=total, desc=label, file=_Lines(), mininterval=30, ascii=True, ncols=80)
