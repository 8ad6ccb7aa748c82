"""Runs of the mock policy: the lines that they write, and whole folders; and, as a command, runs
that are slow enough to be killed in the middle: mockruns.py FOLDER SECONDS.

For every line of standard input a run goes on in a process of its own, whose number is printed, and
a word when it has ended.
"""

import os
import sys
import time
from pathlib import Path

from mockpolicy import LetterCost, LetterCritic, LetterReward, mock_policy

from igcore import METHODS, Guard, Prompt, decode
from igstudy.runs import decode_run, folders, records
from igstudy.runs.decode_params import DecodeParams, Settings


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
    decode_into(Path(sys.argv[1]), cost=Slow())


def main():
    for _ in sys.stdin:
        if (child := os.fork()) == 0:  # so that torch is imported once
            run()
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


SCORERS = {"letters": LetterCost(), "vowels": LetterReward()}
UNSTEERED = [name for name in METHODS if not name.startswith("re-control")]


def lines(budget=0.5, methods=UNSTEERED, **settings):
    common = dict(n_samples=4, block_size=3, max_new_tokens=6, keep=1, token_top_k=4)
    config = Settings(**(common | {"budget": budget} | settings))
    scorers = dict(reward=SCORERS["vowels"], cost=SCORERS["letters"])
    guard = Guard(mock_policy(), config=config, critic=LetterCritic(), **scorers)
    return [
        records.record(r, method, guard, seed=0)
        for method in methods
        for r in decode(method, guard, ["ab", "fed", "c", "dd"])
    ]


def experiment(p, prompts=PROMPTS, policy=None, cost=None):
    guard = Guard(policy or mock_policy(), cost or LetterCost(), LetterReward(), p.search())
    return decode_run.Experiment.of(p, prompts, guard, {})


def fill(run, experiment):
    run.fill(experiment.work, experiment.lines_of)


def decode_into(folder, p=PARAMS, cost=None):
    with folders.open_run(folder, {"budget": p.budget}) as run:
        fill(run, experiment(p, cost=cost))
        run.finish({"lines": len(run.lines)})
    return run.responses


if __name__ == "__main__":
    main()
