"""Searches that share a pool, each in a process of its own, forked so that torch is imported once.

Every line of standard input is JSON: folder of the pool, methods, seconds per step of the model,
and the file for the answers. The number of the process is printed at once.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from mockpolicy import MockModel, mock_policy
from test_pool import answered

from igcore import Pool


class Slow(MockModel):
    pause = 0.0

    def forward(self, *given, **named):
        time.sleep(self.pause)
        return super().forward(*given, **named)


def work(folder, methods, pause, out):
    Slow.pause, pool = pause, Pool(folder)
    policy = replace(mock_policy(), model=Slow())
    answers = {name: str(answered(policy, name, pool)) for name in methods}
    part = Path(f"{out}.part")
    part.write_text(json.dumps(answers | {"drawn": pool.drawn, "reused": pool.reused}))
    part.rename(out)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            work(*json.loads(line))
            os._exit(0)
        print(child, flush=True)
