"""``make machines-test``: the blocks of docs/batch.md as they stand, in a folder with a tiny
random model; the answers must be those of one process but for times.

``python -m tests.machines ray snakemake`` runs these routes; vllm is the server of `tests.served`,
with one guard and then with two. `tests.cluster` runs the array of SLURM.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from test_batch import lines_of, timeless
from tiny import saved, tiny, tiny_tokenizer

from igcore.errors import IgcoreError, RunError
from igstudy.files import root
from igstudy.prompts import load_prompts
from tests.served.software import running

ROWS, SHARDS = 60, 4
RAY = "ray[data]==2.60.0"
PROMPTS = {"name": "rtp", "only": "params/small/breaking-raw.txt"}
PAIRS = 4  # of runs with one process and with two
SECONDS = ("seconds", "CPU seconds of the guards", "CPU seconds of the server")
LONGEST = 300.0  # seconds of a command
FENCE = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^# (\S*\w)$", re.MULTILINE)  # a comment that is the name of a file
ONE = "igserve batch prompts.csv one.jsonl --guard guard.yaml"
Lines = list[dict[str, Any]]


# --- the page -------------------------------------------------------------------------------------


def sections() -> dict[str, list[str]]:
    """Return the code of the page's blocks by the heading above them."""
    page = (root() / "docs/batch.md").read_text(encoding="utf-8")
    parts = ["", *re.split(r"^## (.*)\n", page, flags=re.MULTILINE)]
    return {
        heading: FENCE.findall(text) for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def files() -> dict[str, str]:
    """Return the blocks that are files."""
    code = [block for blocks in sections().values() for block in blocks]
    return {match[1]: block for block in code if (match := NAME.search(block))}


def commands(heading: str) -> str:
    """Return the block of a section that is no file."""
    (found,) = (block for block in sections()[heading] if not NAME.search(block))
    return found


# --- what is run ----------------------------------------------------------------------------------


def make_place(folder: Path, rows: int = ROWS) -> Path:
    """Write the page's files, prompts and a random model; return the folder."""
    folder.mkdir(parents=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
    prompts = [f"Room {i} of the house has" for i in range(rows)]
    pd.DataFrame({"prompt": prompts}).to_csv(folder / "prompts.csv", index_label="row")
    tokenizer = tiny_tokenizer()
    ends = tokenizer.eos_token_id
    # large enough that a shard takes seconds, and can be stopped
    size = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    size |= dict(max_position_embeddings=512, vocab_size=len(tokenizer), eos_token_id=ends)
    saved(folder / "model", tiny("llama", **size, initializer_range=0.02), tokenizer)
    return folder


def environment() -> dict[str, str]:
    """Return an environment in which the package is this one, its commands on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(root()), "PATH": path, "OMP_NUM_THREADS": "1"}


def call(code: str, folder: Path, **more: str) -> str:
    """Run commands in a folder; return what they print; raise ``RunError`` unless they end well."""
    process = subprocess.Popen(
        ["bash", "-ec", code], cwd=folder, env=environment() | more, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise RunError(f"{code!r} has not ended after {LONGEST:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
    if process.returncode:
        raise RunError(f"{code!r} failed in {folder}: {said[-2000:]}")
    return said


def check(found: Lines, expected: Lines) -> str:
    """Return what was compared; raise ``RunError`` where lines differ."""
    pairs = enumerate(zip(found, expected, strict=False))
    differing = [i for i, (a, b) in pairs if a != b]
    if differing or len(found) != len(expected):
        raise RunError(f"{len(found)} lines, {len(expected)} expected; other lines: {differing}")
    statuses = pd.Series([line["status"] for line in expected]).value_counts().to_dict()
    return f"{len(found)} of {len(expected)} lines equal those of one process ({statuses})"


def begin(folder: Path, command: str, path: str) -> bytes:
    """Kill a command once its file has a line; return the whole lines that it has left."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=environment(), stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + LONGEST
    while not (left := whole(folder / path)) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.wait()
    return whole(folder / path) or left


def whole(path: Path) -> bytes:
    """Return the whole lines of a file, if it is there."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


# --- the routes -----------------------------------------------------------------------------------


def one_process(folder: Path) -> Lines:
    """Return the lines of one process."""
    call(ONE, folder)
    return lines_of(folder / "one.jsonl")


def snakemake(folder: Path) -> str:
    """Run the Snakefile after one of its jobs was killed; return what was compared."""
    own = f"{ONE.replace('one', 'answers')} --shard 2/{SHARDS}"
    left = begin(folder, own, part := f"answers-2-of-{SHARDS}.jsonl")
    call(commands("Snakemake"), folder)
    if not left or not (folder / part).read_bytes().startswith(left):
        raise RunError(f"{part} does not begin with the lines that were left")
    n = len(left.splitlines())
    same = check(lines_of(folder / "joined.jsonl"), one_process(folder))
    return f"{n} lines were left by a killed job; {same}"


def ray(folder: Path) -> str:
    """Run the script of Ray in an environment of its own; return what was compared."""
    python = with_ray(root() / ".venv-machines")
    # a cluster that only this computer reaches, in place of the one that the script would start
    here = f"_node_ip_address='127.0.0.1', include_dashboard=False, _temp_dir='{folder}/ray'"
    script = commands("Ray Data").split()[1]
    code = f"import ray, runpy; ray.init(num_cpus=4, {here}); "
    code += f"runpy.run_path('{script}', run_name='__main__')"
    call(f'"{python}" -c "{code}"', folder, RAY_USAGE_STATS_ENABLED="0")
    table = pd.read_parquet(folder / "answers").sort_values("row")
    found = [timeless(json.loads(line)) for line in table["line"]]
    return check(found, one_process(folder))


def with_ray(venv: Path) -> Path:
    """Return the Python of an environment with Ray, beside the packages of this one."""
    python = venv / "bin/python"
    if not (venv / "installed").is_file():
        print(f"installing {RAY} into {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
        these = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(own) / "beside.pth").write_text(these, encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, RAY], check=True)
        (venv / "installed").touch()
    return python


def two_guards(folder: Path) -> str:
    """Guard prompts behind a server with one process and with two; return the seconds of each."""
    texts = [prompt.text for prompt in load_prompts(PROMPTS, "test", ROWS)]
    pd.DataFrame({"prompt": texts}).to_csv(folder / "prompts.csv", index=False)
    both = commands("A policy in vLLM")
    codes = {"one": ONE.replace("guard.yaml", "served.yaml"), "two": both}
    rows, answers = [], {}
    with running(root() / ".venv-served/vllm", root() / "runs/machines/vllm.log") as server:
        recipe = folder / "served.yaml"
        here = recipe.read_text(encoding="utf-8").replace("http://127.0.0.1:8000", server.url)
        recipe.write_text(here, encoding="utf-8")
        for pair in range(-1, PAIRS):
            for arm in sorted(codes, reverse=bool(pair % 2)):
                for path in folder.glob("*.jsonl"):
                    path.unlink()
                before = time.monotonic(), spent(), server.cpu_seconds()
                said = call(codes[arm], folder)
                after = time.monotonic(), spent(), server.cpu_seconds()
                found = [lines_of(path) for path in sorted(folder.glob("*.jsonl"))]
                if [line["prompt"] for part in found for line in part] != texts:
                    raise RunError(f"lines are missing: {said}")
                statuses = Counter(line["status"] for part in found for line in part)
                answers[arm] = [line["text"] for part in found for line in part]
                seconds = dict(
                    zip(SECONDS, (b - a for a, b in zip(before, after, strict=True)), strict=True)
                )
                rows.append({"pair": pair, "arm": arm} | seconds | statuses)
                print(rows[-1], flush=True)
    # the first pair, in which the server reads its files, does not count
    table = pd.DataFrame(rows).query("pair >= 0").pivot(index="pair", columns="arm")
    same = sum(a == b for a, b in zip(answers["one"], answers["two"], strict=True))
    printed = [f"{same} of {ROWS} texts are the same", f"{PAIRS} pairs"]
    return "; ".join(printed + [f"{column}: {compared(table[column])}" for column in SECONDS])


def spent() -> float:
    """Return the CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(table: pd.DataFrame) -> str:
    """Return the mean of each arm, and the ratio of two to one with its interval over pairs."""
    ratios = np.log(table["two"] / table["one"])
    wide = stats.t.ppf(0.975, len(ratios) - 1) * ratios.sem()
    ratio, low, high = (np.exp(ratios.mean() + by) for by in (0, -wide, wide))
    means = f"{table['one'].mean():.1f} with one process, {table['two'].mean():.1f} with two"
    return f"{means}, ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"


def main(arguments: list[str] | None = None) -> int:
    """Run routes from the command line; return the exit status."""
    routes: dict[str, Callable[[Path], str]] = {"ray": ray, "snakemake": snakemake}
    routes["vllm"] = two_guards
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("routes", nargs="+", choices=routes)
    for name in parser.parse_args(arguments).routes:
        with tempfile.TemporaryDirectory(prefix="igcore-") as folder:
            try:
                began, said = time.monotonic(), routes[name](make_place(Path(folder) / "place"))
            except IgcoreError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        print(f"{name}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
