"""Runs of the mock policy that are slow enough to be killed in the middle: killed.py FOLDER
SECONDS.

For every line of standard input a run goes on in a process of its own, whose number is printed, and
a word when it has ended.
"""

import os
import sys
import time
from pathlib import Path

from mockpolicy import LetterCost, LetterReward, mock_policy

from igcore import Prompt
from igcore.guard import Guard
from igstudy.runs import folders
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import Experiment


class Slow(LetterCost):
    def score(self, prompts, responses, finished):
        time.sleep(float(sys.argv[2]))
        return super().score(prompts, responses, finished)


PROMPTS = [
    Prompt(f"{i:02d}", text, "mock")
    for i, text in enumerate("ab fed c dd eae fcb a ef bb cde".split())
]
PARAMS = DecodeParams(
    profile="test", run="killed", policy="mock",
    methods=["base", "best-of-n-augmented", "inferenceguard"], prompts="mild", budget=0.5,
    n_samples=4, block_size=3, max_new_tokens=6, group_size=3,
)  # fmt: skip


def run():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with folders.open_run(Path(sys.argv[1]), {"budget": PARAMS.budget}) as run:
        guard = Guard(mock_policy(), Slow(), LetterReward(), PARAMS.search())
        experiment = Experiment.of(PARAMS, PROMPTS, guard, {})
        run.fill(experiment.work, experiment.lines_of, PARAMS.run)
        run.finish({})


def main():
    for _ in sys.stdin:
        if (child := os.fork()) == 0:  # so that torch is imported once
            run()
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
