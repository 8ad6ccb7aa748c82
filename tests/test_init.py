"""Tests of the package's front door."""

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import igcore
from igcore import catalog


def test_every_public_name_exists_and_no_other():
    assert all(getattr(igcore, name) is not None for name in igcore.__all__)
    assert set(igcore.__all__) <= set(dir(igcore))
    assert not hasattr(igcore, "decoed")


def test_a_fresh_process_has_every_public_name_and_every_part_that_the_core_asks_for():
    """Bug: a name of the core that the catalogue lacks, or whose module has moved: unseen until
    a user draws a tree.
    """
    code = "".join(path.read_text() for path in Path(igcore.__file__).parent.rglob("*.py"))
    asked = {*re.findall(r'\broom\("(\w+)"\)', code)}
    assert {"Tree", "answer_rows", "rendered"} <= asked
    script = (
        "import igcore, igstudy; from igcore.catalog import METHODS, SCORERS, found, room; "
        f"[getattr(igcore, name) for name in igcore.__all__]; [room(name) for name in {asked}]; "
        "[found(entry) for entry in (*METHODS.values(), *SCORERS.values())]"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_without_igserve_its_names_are_one_sentence(monkeypatch):
    """Bug: with a wheel alone a guard inside `generate` ended in a ModuleNotFoundError."""
    monkeypatch.setattr(catalog, "PARTS", {})
    monkeypatch.setattr(catalog, "entry_points", lambda **_: [])
    monkeypatch.setitem(sys.modules, "igserve", None)  # as if it were not installed
    sentence = "this needs igserve; install it by pip install igserve"
    with pytest.raises(igcore.ParameterError, match=f"^{sentence}$"):
        catalog.room("answer_rows")
    with pytest.raises(AttributeError, match=f"^{sentence}$"):
        attrgetter("custom_generate")(igcore)
    assert not hasattr(igcore, "custom_generate")


def test_an_igserve_that_lies_beside_igcore_needs_no_entry_point(monkeypatch):
    """Bug: a checkout on the path, whose igserve no installer has registered."""
    monkeypatch.setattr(catalog, "PARTS", {})
    monkeypatch.setattr(catalog, "entry_points", lambda **_: [])
    monkeypatch.delitem(sys.modules, "igserve")
    assert catalog.room("answer_rows").__module__ == "igserve.generate"


# --- what needs no model starts without the libraries of models -----------------------------------


MODELS = {"torch", "transformers", "accelerate", "datasets"}
LIGHT = {  # what imports none of some libraries, and the modules of its imports
    "the theory": (
        {*MODELS, "sklearn"},
        "igcore.budget igstudy.paper igstudy.theory.homomorphism "
        "igstudy.theory.instances igstudy.report.statistics igstudy.figures.style",
    ),
    "the tables": (
        MODELS,
        "igstudy.paper.counts igstudy.report.critics igstudy.report.tables igstudy.report.verdicts "
        "igstudy.figures.critic igstudy.runs.params",
    ),
    "the command line": ({*MODELS, "pandas", "scipy"}, "igstudy.commands"),
}


@pytest.mark.parametrize("what", LIGHT)
def test_it_imports_no_models(what):
    """Guards a lecturer's laptop, and the seconds before each job of the tables: one import at the
    head of a module once brought in a gigabyte of libraries that no cell uses.
    """
    forbidden, modules = LIGHT[what]
    code = f"import sys, {', '.join(modules.split())}; print({{*sys.modules}} & {forbidden})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stdout + run.stderr


# --- what other systems have not: no fcntl, no alarms, no fork, as on Windows ---------------------


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
# what takes locks: a run, the cache
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


def test_a_guard_and_a_run_need_nothing_that_windows_lacks(run, tmp_path, monkeypatch):
    """Bug: `import fcntl` at the top of four modules, so that nothing could be imported there;
    locks of single bytes, reads at a place and alarms, which only POSIX has.
    """
    monkeypatch.setenv("IGCORE_HOME", str(tmp_path))
    found = run(GUARD + FILES, str(tmp_path))
    answers, kept = found.communicate(timeout=300)[0].splitlines()
    assert answers.count("'verified_safe'") == 2 and kept == "kept" and found.returncode == 0
