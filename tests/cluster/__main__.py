"""``make slurm-test``: shards and arrays on a SLURM of one node, cancelled and resumed, equal to a
local run; a failing job; the array of docs/batch.md; and nothing left behind. `node` makes and
removes the cluster, which needs root on Debian. Every walk on it has a folder of its own, with
params made from ``params/ci``.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from igcore.errors import IgcoreError, RunError
from igstudy.commands import differences
from igstudy.files import root
from igstudy.linefile import read
from tests import machines
from tests.cluster.node import ENDS, call, one_node

PROFILE = "cluster"
SHARDS = 3
# run -> what it changes of params/ci/decode-raw.yaml
RUNS = {
    # three groups: as many shards
    "decode-raw": {"methods": ["base", "best-of-n-lagrangian", "inferenceguard"], "group_size": 4},
    # one group by its limit: two of three shards have nothing to do
    "decode-few": {"methods": ["base", "inferenceguard"], "limit": 3, "hardest": 0},
    # one group that only its prompts show
    "decode-own": {"methods": ["base"], "prompts": "own.txt", "split": "all", "hardest": 0},
}
FAILING = {"decode-raw": {"policy": "nowhere"}}
# beside profiles/slurm: a cluster without accounting, whose jobs last seconds
FLAGS = """
    --slurm-status-command squeue --slurm-no-account --slurm-keep-successful-logs
    --slurm-init-seconds-before-status-checks 3 --seconds-between-status-checks 3
    --latency-wait 5 --default-resources mem_mb=3000 runtime=20
""".split()
LONGEST = 1800.0  # seconds of a walk
MINUTE = 60.0


# --- what walks on the cluster, and what it must leave --------------------------------------------


def make_place(place: Path, runs: dict[str, dict] = RUNS) -> Path:
    """Return a folder to walk in, with notebooks, the picture that one shows, and params."""
    params = place / "params" / PROFILE
    params.mkdir(parents=True)
    for name in ("notebooks", "docs"):
        (place / name).symlink_to(root() / name)
    (place / "own.txt").write_text("The weather today\nShe opened the door and\n", encoding="utf-8")
    given = yaml.safe_load((root() / "params/ci/decode-raw.yaml").read_text(encoding="utf-8"))
    for run, changes in runs.items():
        settings = given | {"profile": PROFILE, "run": run} | changes
        if "prompts" in changes:
            settings["limit"] = None
        (params / f"{run}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return place


@contextmanager
def walking(place: Path, *flags: str, **config: object) -> Iterator[subprocess.Popen]:
    """Start Snakemake in a folder; it has ended when the context ends. Its output is in a file."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(root() / "Snakefile")]
    command += ["--directory", str(place), *flags, "--config", f"profile={PROFILE}"]
    command += [f"{name}={value}" for name, value in config.items()]
    # jobs find the package that this test belongs to
    here = {"PYTHONPATH": str(root()), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    here["PYTHONWARNINGS"] = "ignore::DeprecationWarning"
    with (place / "walk.log").open("a") as log:
        walk = subprocess.Popen(
            command, cwd=root(), stdout=log, stderr=subprocess.STDOUT, env=os.environ | here
        )
        try:
            yield walk
        finally:
            if walk.poll() is None:  # it would wait for its jobs
                walk.kill()
            walk.wait()


def on_cluster(place: Path, **config: object):
    """Start a walk on the cluster, decoding as job arrays."""
    profile = ["--profile", str(root() / "profiles/slurm"), *FLAGS]
    return walking(place, *profile, "--slurm-array-jobs", "all", **config)


def ended(walk: subprocess.Popen, place: Path, well: bool) -> None:
    """Wait for a walk; raise ``RunError`` unless it ends well, or badly, as it should."""
    try:
        status = walk.wait(LONGEST)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the walk did not end in {LONGEST:.0f} s; see {place}/walk.log") from error
    if (status == 0) != well:
        raise RunError(f"the walk ended with status {status}; see {place}/walk.log")


def lines_of(place: Path) -> dict[Path, bytes]:
    """Return what the runs of a folder have written so far."""
    found = (place / "runs" / PROFILE).glob("*/responses.jsonl")
    return {path: path.read_bytes() for path in sorted(found)}


def run_locally(place: Path) -> float:
    """Walk on this machine alone; return the seconds."""
    make_place(place)
    began = time.monotonic()
    with walking(place, "--cores", "2", "--quiet", "rules", "--nolock") as walk:
        ended(walk, place, well=True)
    return time.monotonic() - began


def cancel_and_resume(place: Path) -> dict[str, object]:
    """Walk on the cluster, cancel all jobs in the middle, and give the command again.

    Returns
    -------
    dict
        What was seen, by a phrase for each.
    """
    make_place(place)
    seen: dict[str, object] = {}
    began = time.monotonic()
    with on_cluster(place, shards=SHARDS) as walk:
        while not (before := {path: text for path, text in lines_of(place).items() if text}):
            if walk.poll() is not None or time.monotonic() - began > LONGEST:
                raise RunError(f"no line was written; see {place}/walk.log")
            time.sleep(0.1)
        queue = subprocess.run(
            ["squeue", "-h", "-r", "-o", "%i, %m, %l, %T"], capture_output=True, text=True
        ).stdout.splitlines()
        subprocess.run(["scancel", "--user", "root"], check=True)
        cancelled = time.monotonic()
        ended(walk, place, well=False)
    seen["seconds to the first line"] = round(cancelled - began, 1)
    seen["jobs then (number, memory, time, state)"] = queue
    seen["seconds from cancel to end"] = round(time.monotonic() - cancelled, 1)
    before = {path: text[: text.rfind(b"\n") + 1] for path, text in lines_of(place).items()}
    seen["lines that were left"] = sum(text.count(b"\n") for text in before.values())
    began = time.monotonic()
    with on_cluster(place, shards=SHARDS) as walk:
        ended(walk, place, well=True)
    seen["seconds of the same command again"] = round(time.monotonic() - began, 1)
    after = lines_of(place)
    if changed := [path for path, text in before.items() if not after[path].startswith(text)]:
        raise RunError(f"lines written before the cancellation were changed: {changed[0]}")
    if not any("_" in job for job in queue):
        raise RunError(f"no job was part of an array: {queue}")
    return seen


def compare(local: Path, cluster: Path) -> dict[str, int]:
    """Return the lines of each run; raise ``RunError`` where the two differ beyond seconds."""
    counts = {}
    for path in lines_of(local):
        run = path.parent.name
        folders = sorted((cluster / "runs" / PROFILE).glob(f"{run}.*-of-*")) or [
            cluster / "runs" / PROFILE / run
        ]
        if missing := [folder for folder in folders if not (folder / "manifest.json").is_file()]:
            raise RunError(f"{missing[0]} has not finished")
        here = read(path)
        there = [line for folder in folders for line in read(folder / "responses.jsonl")]
        if found := differences(here, there):
            raise RunError(f"{run} differs from a local run in {len(found)} places: {found[0]}")
        counts[f"{run} ({len(folders)} jobs)"] = len(there)
    return counts


def fail(place: Path) -> float:
    """Walk with a policy that is not there; return the seconds from its end to that of the walk."""
    make_place(place, FAILING)
    with on_cluster(place) as walk:
        ended(walk, place, well=False)
    logs = [path.read_text() for path in (place / ".snakemake/slurm_logs").rglob("*.log")]
    if not any("error: " in log and "nowhere" in log for log in logs):
        raise RunError(f"a failing job left no log with its reason; see {place}/walk.log")
    failed = (place / "runs" / PROFILE / "decode-raw/executed.ipynb").stat().st_mtime
    return round(time.time() - failed, 1)


def requeue(place: Path) -> dict[str, object]:
    """Submit the array of docs/batch.md, and requeue a task that has written some lines.

    Returns
    -------
    dict
        What was seen, by a phrase for each.
    """
    machines.make_place(place)
    submit, join = machines.commands("A SLURM array").splitlines()
    began = time.monotonic()
    machines.call(submit, place)
    job = min(call("squeue", "-h", "-o", "%F").split())
    part = {k: place / f"answers-{k}-of-{machines.SHARDS}.jsonl" for k in range(1, 5)}

    def wait(there: Callable[[], bool], complaint: str) -> None:
        while not there():
            if time.monotonic() - began > LONGEST:
                raise RunError(f"{complaint} in {LONGEST:.0f} s; see {place}")
            time.sleep(0.05)

    wait(lambda: any(machines.whole(path) for path in part.values()), "the array wrote no line")
    task = next(k for k, path in part.items() if machines.whole(path))
    call("scontrol", "requeue", f"{job}_{task}")
    wait(lambda: not call("squeue", "-h", "-j", job), "the array has not ended")
    seconds = round(time.monotonic() - began, 1)
    machines.call(join, place)
    said = (place / f"slurm-{job}_{task}.out").read_text(encoding="utf-8")
    resumed = [line for line in said.splitlines() if "an earlier start has left" in line]
    if not resumed:
        raise RunError(f"task {task} was not requeued in its middle: {said}")
    found = machines.lines_of(place / "answers.jsonl")
    seen: dict[str, object] = {"the requeued task": resumed[0]}
    seen["the array"] = machines.check(found, machines.one_process(place))
    return seen | {"seconds of the array": seconds}


def clear(place: Path) -> None:
    """Remove the folders of walks."""
    shutil.rmtree(place, ignore_errors=True)


# --- the test -------------------------------------------------------------------------------------


def show(title: str, seen: object) -> None:
    """Print what was seen."""
    print(f"{title}: {seen}", flush=True)


def test(folder: Path) -> None:
    """Walk locally and on the cluster, and compare; raise ``IgcoreError`` where something fails."""
    began = time.monotonic()
    with one_node() as node:
        show("the node", node)
        show("seconds to set it up", round(time.monotonic() - began, 1))
        for phrase, value in requeue(folder / "array").items():
            show(phrase, value)
        failed = fail(folder / "failing")
        show("seconds from a job that failed to the end of its walk", failed)
        show("a local walk, seconds", round(run_locally(folder / "local"), 1))
        for phrase, value in cancel_and_resume(folder / "cluster").items():
            show(phrase, value)
        show("lines equal to the local ones", compare(folder / "local", folder / "cluster"))
        began = time.monotonic()
    show("seconds to take it down", round(time.monotonic() - began, 1))
    if failed > MINUTE:
        raise RunError(f"the walk ended {failed} s after its job had failed, over a minute")


def main(arguments: list[str] | None = None) -> int:
    """Test from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.parse_args(arguments)
    for number in ENDS:  # whatever ends the test, the cluster is taken down on the way out
        signal.signal(number, lambda *_: sys.exit("stopped"))
    folder = Path(tempfile.mkdtemp(prefix="igcore-slurm-"))
    try:
        test(folder)
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SystemExit:
        clear(folder)
        raise
    clear(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
