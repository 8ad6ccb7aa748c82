"""Tests on what other systems have not: no fcntl, no alarms, no fork, as on Windows."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT = """
import sys
sys.modules["fcntl"] = None
import os, signal, warnings
warnings.filterwarnings("ignore", "only soft file lock")  # of filelock: Windows has another kind
import accelerate, platformdirs, psutil, torch
from transformers import LlamaForCausalLM
for module, names in {
    signal: "SIGALRM SIGKILL alarm setitimer getitimer ITIMER_REAL pthread_kill".split(),
    os: "fork forkpty register_at_fork pread pwrite sysconf sysconf_names killpg mkfifo "
    "getuid geteuid fchmod O_NOFOLLOW O_NONBLOCK sched_getaffinity sched_setaffinity uname "
    "getloadavg".split(),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import igcore as ig
from igstudy.pool import Pool, value_of
from tiny import tiny_model, tiny_tokenizer

tokenizer = tiny_tokenizer()
def share(text):
    return text.count("a") / max(len(text), 1)
config = dict(budget=1.0, n_samples=4, keep=2, block_size=2, max_new_tokens=6, rounds=2)
"""
GUARD = """
guard = ig.Guard((tiny_model(tokenizer), tokenizer), share, **config)
print([(answer.status, answer.text) for answer in map(guard, ["abc", "the"])])
"""
# what takes locks: a run, a pool, the cache
FILES = """
from igstudy.runs.folders import open_run
from igcore.files import locked
folder = Path(sys.argv[2])
identity = {"seed": 0}
with open_run(folder / "run", identity) as run:
    run.append({"method": "base", "prompt_id": "1"})
    try:
        with open_run(folder / "run", identity):
            print("two writers")
    except ig.RunError as error:
        assert "another process is writing" in str(error), error
    run.finish({"lines": 1})
with open_run(folder / "run", identity) as run:
    assert len(run.lines) == 1
with locked(folder / "lock", "busy"):
    pass

pool = Pool(folder / "pool")
pool.add([(b"prompt", b"key", [7, -1.0, -1.0, False])])
with Pool(folder / "pool").opened(b"prompt") as database:
    assert value_of(database, b"key") == [7, -1.0, -1.0, False]
print("kept")
"""


@pytest.fixture
def run():
    """What starts code in a process of its own."""
    started = []

    def start(code: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", WITHOUT + code, str(ROOT / "tests"), *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_guard_a_run_and_a_pool_need_nothing_that_windows_lacks(run, tmp_path, monkeypatch):
    """Bug: `import fcntl` at the top of four modules, so that nothing could be imported there;
    locks of single bytes, reads at a place and alarms, which only POSIX has.
    """
    monkeypatch.setenv("IGCORE_HOME", str(tmp_path))
    found = run(GUARD + FILES, str(tmp_path))
    answers, kept = found.communicate(timeout=300)[0].splitlines()
    assert answers.count("'verified_safe'") == 2 and kept == "kept" and found.returncode == 0
