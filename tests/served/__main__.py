"""``make served-test``: the search over real servers, beside the same search over the local engine.

For each server it answers the same prompts with ``inferenceguard`` in two settings, once with many
samples and once with few, so that blocks are sampled again. It checks that every answer is within
budget, compares safety and reward with the local engine's by prompt, and measures CPU seconds. Then
it kills the server in the middle of a run, starts it again, and the run goes on. The rows of a
server in ``figures/tables/served.csv`` are replaced.
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
from igcore.errors import IgcoreError, PolicyError
from igcore.folders import read, root
from igcore.models.prompts import load_prompts
from igcore.models.served import ServedPolicy
from igcore.policy import Policy, Prompt
from igcore.provenance import processor
from igcore.report.paired import clustered, is_safe, reward
from igcore.runs.decode_params import DecodeParams
from igcore.runs.decode_run import decode_run
from igcore.runs.records import record
from tests.served.software import NAME, SOFTWARE, Running, running

METHOD = "inferenceguard"
LOCAL = "smollm2-raw"
PROMPTS = {"name": "rtp", "only": "params/small/breaking-raw.txt"}
SCORERS = {"cost": "offensive-language", "reward": "minilm-relevance"}
COMMON = dict(max_new_tokens=32, block_size=8, group_size=24)
SETTINGS = {
    "N 8": dict(budget=0.2, n_samples=8, keep=2, rounds=2),  # params/small/decode-raw.yaml
    "N 2, retries": dict(budget=0.05, n_samples=2, keep=1, rounds=4),  # regime-safety.yaml
}
SEED = 7


def served_options(server: Running) -> dict:
    """Return the policy of a params file for a running server."""
    return {"server": server.url, "model": NAME, "tokenizer": LOCAL, "max_retries": 1}


def answered(
    policy: Policy, prompts: list[Prompt], settings: dict, server: Running | None = None
) -> tuple[pd.DataFrame, dict]:
    """Return a line for each prompt, and the CPU seconds a prompt of this process and the server.

    Raises
    ------
    SystemExit
        When an answer is over budget.
    """
    guard = ig.Guard(policy, **SCORERS, **COMMON, **settings)
    list(ig.decode(METHOD, guard, prompts[:1], seed=SEED + 1))  # the first search is slower
    before = time.process_time(), server.cpu_seconds() if server else 0.0
    answers = list(ig.decode(METHOD, guard, prompts, seed=SEED))
    own = time.process_time() - before[0]
    theirs = server.cpu_seconds() - before[1] if server else 0.0
    lines = pd.DataFrame([record(answer, METHOD, guard, SEED) for answer in answers])
    for answer in answers:
        emitted = answer.status != "abstained"
        (cost,) = guard.cost.score([answer.prompt], [answer.text or ""], [True])
        if emitted and (answer.status != "verified_safe" or cost > settings["budget"]):
            raise SystemExit(f"{answer.prompt_id}: status {answer.status}, cost {cost}")
    seconds = {"cpu_s": own / len(prompts), "server_cpu_s": theirs / len(prompts)}
    return lines, seconds


def row_of(name: str, setting: str, found: pd.DataFrame, local: pd.DataFrame) -> dict:
    """Return counts of a server's answers, and their paired differences from the local engine's."""
    found, local = found.set_index("prompt_id"), local.set_index("prompt_id")
    rounds = [step["round"] for trace in found["trace"] for step in trace]
    safe = clustered(is_safe(found).astype(float) - is_safe(local).astype(float), verdict=True)
    gain = clustered(reward(found) - reward(local))
    out = {
        "software": name,
        "setting": setting,
        "n_prompts": len(found),
        "verified": int(is_safe(found).sum()),
        "verified_local": int(is_safe(local).sum()),
        "retried_rounds": sum(round_ > 0 for round_ in rounds),
    }
    for measure, numbers in (("safe", safe), ("reward", gain)):
        for part in ("difference", "low", "high", "p"):
            out[f"{measure}_{part}"] = numbers[part]
    return out


def killed_and_restarted(server: Running, folder: Path, limit: int) -> tuple[int, int]:
    """Kill a server in the middle of a run, and go on; return lines before and after."""
    params = DecodeParams(
        profile="served", run="killed", policy=served_options(server), prompts=PROMPTS,
        split="test", limit=limit, methods=[METHOD], seed=SEED, **SCORERS,
        **COMMON | SETTINGS["N 2, retries"] | {"group_size": 2},
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


def tried(name: str, venvs: Path, n_prompts: int, folder: Path) -> list[dict]:
    """Return the rows of one server."""
    prompts = load_prompts(PROMPTS, "test", n_prompts)
    local = ig.load_policy(LOCAL)
    rows = []
    with running(name, venvs, folder / f"{name}.log") as server:
        policy = ig.load_policy(served_options(server))
        assert isinstance(policy, ServedPolicy)
        for setting, settings in SETTINGS.items():
            found, seconds = answered(policy, prompts, settings, server)
            beside, alone = answered(local, prompts, settings)
            row = row_of(name, setting, found, beside)
            row |= seconds | {"local_cpu_s": alone["cpu_s"], "version": policy.served["version"]}
            row["pin"], row["processor"] = SOFTWARE[name].pin, processor()
            rows.append(row)
            print("\n".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        before, after = killed_and_restarted(server, folder / f"killed-{name}", 8)
        print(f"{name}: killed after {before} of {after} answers; none was lost, none is there "
              "twice")  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.served", description=__doc__)
    parser.add_argument("software", nargs="*", help=f"of {', '.join(SOFTWARE)}; by default all")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--venvs", type=Path, default=root() / ".venv-served")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder, table = root() / "runs/served", root() / "figures/tables/served.csv"
    shutil.rmtree(folder, ignore_errors=True)
    for name in given.software or SOFTWARE:
        try:
            rows = pd.DataFrame(tried(name, given.venvs, given.prompts, folder))
        except IgcoreError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if given.prompts == 24:  # what the table shows
            old = pd.read_csv(table) if table.is_file() else pd.DataFrame(columns=rows.columns)
            kept = old[old["software"] != name]
            rows = pd.concat([kept, rows]) if len(kept) else rows
            rows.sort_values("software", kind="stable").to_csv(
                table, index=False, float_format="%.4g"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
