"""The price of looking at the cost inside blocks: ``python -m benchmarks.checks``.

The budget is one that no text breaks, so every search samples the same tokens and only the checks
differ. CPU seconds are compared within a repeat, one kind of checks right after the other, because
other work on the machine changes them from minute to minute.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from igcore import Guard, decode, load_policy
from igcore.engine.prepack import packed
from igcore.files import replace_file
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.progress import progress
from igstudy.prompts import load_prompts

REPEATS, PROMPTS, SEED = 5, 8, 0
BUDGET = 1e6
OUT = Path("runs/bench/figures/tables/checks_price.csv")


def lm_cost() -> LMScorer:
    """Return a language model with a random head as a cost: it costs what a trained one costs."""
    reader = load_policy("smollm2-chat", "float32", "cpu")
    torch.manual_seed(SEED)
    head = torch.nn.Linear(reader.model.config.hidden_size, 1, bias=False)
    backbone = Backbone(reader.model, reader.tokenizer)
    return LMScorer("random-head", backbone, head, "higher is worse", "seed 0")


def cpu_seconds(guard: Guard, prompts: list) -> float:
    """Return the CPU seconds of one search per prompt."""
    began = time.process_time()
    answers = list(decode("inferenceguard", guard, prompts, seed=SEED))
    assert all(answer.status == "verified_safe" for answer in answers)
    return (time.process_time() - began) / len(prompts)


def main() -> None:
    """Measure both costs under both kinds of checks, and write the table."""
    torch.set_num_threads(1)
    policy = load_policy("smollm2-raw", "float32", "cpu")
    prompts = load_prompts("rtp", "tune", PROMPTS)
    rows = []
    for cost, checks in (("offensive-language", "word"), (lm_cost(), "token")):
        block = Guard(policy, cost, budget=BUDGET)
        inside = replace(block, config=replace(block.config, checks=checks))
        with packed(policy.model), progress(REPEATS, f"{checks} checks") as bar:
            cpu_seconds(inside, prompts)  # warm
            for repeat in range(REPEATS):
                base = cpu_seconds(block, prompts)
                fine = cpu_seconds(inside, prompts)
                rows.append([block.cost.name, checks, repeat, base, fine, fine / base])
                bar.update()
    columns = ["cost", "checks", "repeat", "block_s", "checks_s", "ratio"]
    table = pd.DataFrame(rows, columns=columns)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    replace_file(OUT, table.to_csv(index=False, lineterminator="\n"))
    print(table.groupby(["cost", "checks"])["ratio"].describe()[["min", "50%", "max"]])


if __name__ == "__main__":
    sys.exit(main())
