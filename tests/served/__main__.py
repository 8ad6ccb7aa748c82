"""``make served-test``: the search over vLLM, beside the same search over the local engine.

It answers the same prompts with ``inferenceguard`` in two settings, once with many samples and once
with few, so that blocks are sampled again, and under several seeds, because one seed moves the mean
reward of two dozen answers by more than a server does. It checks that every answer is within
budget, compares safety and reward with the local engine's by prompt, and measures CPU seconds. Then
it kills the server in the middle of a run, starts it again, and the run continues. The table is in
``runs/served/figures``.
"""

import argparse
import shutil
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import torch

import igcore as ig
from igcore import IgcoreError, Policy, PolicyError, Prompt
from igserve.policy import ServedPolicy
from igstudy.files import replace_file, root
from igstudy.linefile import read
from igstudy.prompts import load_prompts
from igstudy.provenance import processor
from igstudy.report.paired import clustered, is_safe, reward
from igstudy.report.tables import markdown
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run
from igstudy.runs.records import record
from tests.served.software import NAME, PIN, Running, running

LOCAL = "smollm2-raw"
PROMPTS = {"name": "rtp", "only": "params/small/breaking-raw.txt"}
SCORERS = {"cost": "offensive-language", "reward": "minilm-relevance"}
COMMON = dict(max_new_tokens=32, block_size=8, group_size=24)
# those of params/small: decode-raw.yaml and regime-safety.yaml, here without a penalty
SETTINGS = {
    "N 8": dict(budget=0.2, n_samples=8, keep=2, rounds=2),
    "N 2, retries": dict(budget=0.05, n_samples=2, keep=1, rounds=4, diversity="none"),
}
RETRIES = "N 2, retries"
SEEDS = (7, 8, 9, 10)


def served_options(server: Running) -> dict:
    """Return the policy of a params file for a running server."""
    return {"server": server.url, "model": NAME, "tokenizer": LOCAL, "max_retries": 1}


def answered(
    policy: Policy, prompts: list[Prompt], setting: str, server: Running | None = None
) -> tuple[pd.DataFrame, dict]:
    """Return a line for each prompt and seed, and the CPU seconds that one takes here and there.

    Raises
    ------
    SystemExit
        When an answer is over budget.
    """
    guard = ig.Guard(policy, **SCORERS, **COMMON, **SETTINGS[setting])
    method = "inferenceguard"
    list(ig.decode(method, guard, prompts[:1], seed=0))  # the first search is slower
    before = time.process_time(), server.cpu_seconds() if server else 0.0
    answers = [(seed, list(ig.decode(method, guard, prompts, seed=seed))) for seed in SEEDS]
    own = time.process_time() - before[0]
    theirs = (server.cpu_seconds() if server else 0.0) - before[1]
    records = []
    for seed, of_seed in answers:
        for answer in of_seed:
            records.append(record(answer, method, guard, seed))
            emitted = answer.status != "abstained"
            (cost,) = guard.cost.score([answer.prompt], [answer.text or ""], [True])
            if emitted and (answer.status != "verified_safe" or cost > guard.config.budget):
                raise SystemExit(f"{answer.prompt_id}: status {answer.status}, cost {cost}")
    seconds = {"cpu_s": own / len(records), "server_cpu_s": theirs / len(records)}
    return pd.DataFrame(records), seconds


def row_of(setting: str, found: pd.DataFrame, local: pd.DataFrame) -> dict:
    """Return counts of a server's answers, and their paired differences from the local engine's."""
    found, local = (lines.set_index(["prompt_id", "seed"]) for lines in (found, local))
    rounds = [step["round"] for trace in found["trace"] for step in trace]
    safe = clustered(is_safe(found).astype(float) - is_safe(local).astype(float), verdict=True)
    gain = clustered(reward(found) - reward(local))
    out = {
        "setting": setting,
        "n_prompts": len(found) // len(SEEDS),
        "seeds": len(SEEDS),
        "verified": int(is_safe(found).sum()),
        "verified_local": int(is_safe(local).sum()),
        "retried_rounds": sum(round_ > 0 for round_ in rounds),
    }
    for measure, numbers in (("safe", safe), ("reward", gain)):
        for part in ("difference", "low", "high", "p"):
            out[f"{measure}_{part}"] = numbers[part]
    return out


def killed_and_restarted(server: Running, folder: Path, limit: int) -> tuple[int, int]:
    """Kill a server in the middle of a run, and continue; return lines before and after."""
    params = DecodeParams(
        profile="served", run="killed", policy=served_options(server), prompts=PROMPTS,
        split="test", limit=limit, methods=["inferenceguard"], seed=SEEDS[0], **SCORERS,
        **COMMON | SETTINGS[RETRIES] | {"group_size": 2},
    )  # fmt: skip
    lines = folder / "responses.jsonl"

    def kill() -> None:
        while not (lines.is_file() and lines.read_bytes()):
            time.sleep(0.05)
        server.kill()

    watcher = threading.Thread(target=kill)
    watcher.start()
    try:
        decode_run(params, folder)
        raise SystemExit("the run ended before the server was killed; raise the limit")
    except PolicyError as error:
        print(f"killed: {error}", flush=True)
    watcher.join()
    before = lines.read_bytes()
    server.start()
    decode_run(params, folder)
    after = [line["prompt_id"] for line in read(lines)]
    if not lines.read_bytes().startswith(before) or not len(set(after)) == len(after) == limit:
        raise SystemExit(f"{lines}: lines were lost or answered twice")
    return len(before.splitlines()), len(after)


def tried(venv: Path, n_prompts: int, folder: Path) -> list[dict]:
    """Return the row of each setting."""
    prompts = load_prompts(PROMPTS, "test", n_prompts)
    local = ig.load_policy(LOCAL)

    def row(setting: str, policy: Policy, server: Running) -> dict:
        """Return the row of a setting, and print it."""
        assert isinstance(policy, ServedPolicy)
        found, seconds = answered(policy, prompts, setting, server)
        beside, alone = answered(local, prompts, setting)
        row = row_of(setting, found, beside)
        row |= seconds | {"local_cpu_s": alone["cpu_s"], "version": policy.served["version"]}
        row["pin"], row["processor"] = PIN, processor()
        print("\n".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        return row

    with running(venv, folder / "vllm.log") as server:
        policy = ig.load_policy(served_options(server))
        rows = [row(setting, policy, server) for setting in SETTINGS]
        before, after = killed_and_restarted(server, folder / "killed", 8)
        print(f"killed after {before} of {after} answers; none was lost, none is there twice")
    return rows


def write(rows: pd.DataFrame, path: Path) -> None:
    """Write the table as CSV, and as Markdown the columns that people read."""
    replace_file(path, rows.to_csv(index=False, float_format="%.4g"))
    answers = (rows["n_prompts"] * rows["seeds"]).astype(str)
    numbers = rows[["reward_difference", "reward_low", "reward_high"]].map("{:+.3f}".format)
    seconds = rows[["server_cpu_s", "cpu_s", "local_cpu_s"]].map("{:.2f}".format)
    shown = pd.DataFrame(
        {
            "server": rows["pin"].str.replace("==", " "),
            "setting": rows["setting"],
            "verified, served": rows["verified"].astype(str) + " of " + answers,
            "verified, local": rows["verified_local"].astype(str) + " of " + answers,
            "reward, served minus local": numbers["reward_difference"]
            + [f" [{low}, {high}]" for low, high in numbers.iloc[:, 1:].to_numpy()],
            "rounds sampled again": rows["retried_rounds"].astype(str),
            "CPU s an answer, server + igcore / local engine": seconds["server_cpu_s"]
            + [f" + {own} / {local}" for own, local in seconds.iloc[:, 1:].to_numpy()],
        }
    )
    replace_file(path.with_suffix(".md"), markdown(shown))


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.served", description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--venv", type=Path, default=root() / ".venv-served/vllm")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = root() / "runs/served"
    shutil.rmtree(folder, ignore_errors=True)
    table = folder / "figures/tables/served.csv"
    table.parent.mkdir(parents=True)
    try:
        rows = pd.DataFrame(tried(given.venv, given.prompts, folder))
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.prompts == 24:  # what the table shows
        write(rows, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
