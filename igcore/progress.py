"""Progress of long work, told the way the place can show it. Knows only where it runs."""

import os
import sys


def progress(total: int, label: str):
    """Return a tqdm bar.

    A live bar in a terminal or in a notebook that somebody is looking at; elsewhere (papermill, a cluster's log) a plain line to
    standard output every 30 seconds.
    """
    watched = sys.stderr.isatty() or any(name in os.environ for name in ("JPY_SESSION_NAME", "VSCODE_PID"))
    if watched:
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=label)
    from tqdm import tqdm

    return tqdm(total=total, desc=label, file=sys.stdout, mininterval=30, ascii=True, ncols=80)
