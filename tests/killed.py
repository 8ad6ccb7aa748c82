"""A run of the mock policy in a process of its own, slow enough to be killed in the middle: killed.py FOLDER SECONDS."""

import sys
import time
from pathlib import Path

from mockpolicy import LetterCost, LetterReward, mock_policy

from igcore import Prompt, decode_run, folders
from igcore.decode_params import DecodeParams


class Slow(LetterCost):
    def score(self, prompts, responses, finished):
        time.sleep(float(sys.argv[2]))
        return super().score(prompts, responses, finished)


PROMPTS = [Prompt(f"{i:02d}", text, "mock") for i, text in enumerate("ab fed c dd eae fcb a ef bb cde".split())]
PARAMS = DecodeParams(
    profile="test", run="killed", policy="mock", methods=["base", "best-of-n-augmented", "inferenceguard"], prompts="mild",
    budget=0.5, n_samples=4, block_size=3, max_new_tokens=6, group_size=3,
)  # fmt: skip


def main():
    with folders.open_run(Path(sys.argv[1]), {"budget": PARAMS.budget}) as run:
        decode_run.decode_missing(PARAMS, run, PROMPTS, mock_policy(), Slow(), LetterReward())
        run.finish({})


if __name__ == "__main__":
    main()
