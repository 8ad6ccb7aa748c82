"""Tests of what jobs ask a cluster for: numbers by hand, defaults where the plan knows nothing, and
nothing on one machine; and of the reasons of jobs that failed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from snakewalk import snakemake

from igcore.runs import needs
from igcore.runs.cluster import MARGIN, PROCESS, START, Asked, reasons
from igcore.runs.paramfiles import ParamFiles

ROOT = Path(__file__).parents[1]
DEFAULTS = ["tmpdir=system_tmpdir", "mem_mb=4000", "runtime=240"]
NEED = {"weights": 10.0, "prompt": 2.0, "group": 8, "hours": 6.0}


@pytest.fixture
def asked(tmp_path):
    """Return what jobs ask for, given whether they take GPUs."""
    file = tmp_path / "runs/paper/.jobs/needs.json"
    file.parent.mkdir(parents=True)
    known = {"decode-a": NEED, "decode-b": NEED | {"hours": None}, "critics/a": NEED}
    file.write_text(json.dumps(known))

    def of(resource, defaults=DEFAULTS, gpu=False, gpu_gb=0.0, **job):
        return Asked(file, [], gpu, gpu_gb).of(resource, job, defaults)

    return of


def test_memory_and_time_by_hand(asked):
    """Bug: the memory of one prompt where a group of eight is answered, or the hours of a whole run
    for each of its shards.
    """
    decode = {"runs": ["decode-a"], "suffix": ".1-of-3"}
    assert asked("mem", **decode) == (PROCESS + 10 + 8 * 2) * 1024
    assert asked("runtime", **decode) == START + MARGIN * 60 * 6 / 3
    assert asked("runtime", runs=["decode-a"], suffix="") == START + MARGIN * 60 * 6
    assert asked("mem", run="a", profile="paper") == (PROCESS + 26) * 1024
    # a job of several runs, one after the other
    assert asked("runtime", runs=["decode-a"] * 2, suffix="") == START + 2 * MARGIN * 60 * 6
    assert asked("mem", runs=["decode-a"] * 2, suffix="") == (PROCESS + 26) * 1024
    assert asked("runtime", runs=["decode-a", "decode-b"], suffix="") == 240
    # what lies on a GPU only passes through the memory of its node
    assert asked("mem", gpu=True, **decode) == (PROCESS + 10) * 1024


def test_what_the_plan_does_not_know_is_asked_for_as_elsewhere(asked):
    """Bug: a job without a time limit, or with that of another run, where no speed was measured."""
    assert asked("runtime", runs=["decode-b"], suffix="") == 240
    assert asked("mem", runs=["decode-other"], suffix="") == 4000
    assert asked("mem", run="a", profile="another") == 4000
    expression = ["mem_mb=min(max(2*input.size_mb, 1000), 8000)"]  # Snakemake's own
    assert asked("mem", expression, runs=["decode-other"], suffix="") is None


def test_an_array_asks_for_the_most_of_its_jobs(tmp_path):
    """Bug: a job array with the memory and time of its first job, too little for the others."""
    small = {"weights": 1.0, "prompt": 0.5, "group": 1, "hours": 1.0}
    (tmp_path / "needs.json").write_text(json.dumps({"a": small, "b": NEED}))
    asked = Asked(tmp_path / "needs.json", [], gpu=False)
    jobs = [{"runs": [run], "suffix": ".0-of-2"} for run in "abc"]
    assert asked.most("mem", jobs, DEFAULTS) == (PROCESS + 26) * 1024
    assert asked.most("runtime", jobs, DEFAULTS) == START + MARGIN * 60 * 3
    assert asked.most("runtime", jobs, []) is None is asked.most("mem", [], DEFAULTS)


def test_on_one_machine_nothing_is_asked_for(asked):
    """Bug: a job held back on a laptop because a plan says that it needs more memory."""
    bare = ["tmpdir=system_tmpdir"]
    for resource in ("mem", "runtime"):
        assert asked(resource, bare, runs=["decode-a"], suffix="") is None
    assert asked("gpu", bare, runs=["decode-a"], suffix="") is None
    assert asked("gpu", bare, gpu=True, gpu_gb=5.0, runs=["decode-a"], suffix="") == 1


@pytest.mark.parametrize(("gpu_gb", "gpus"), [(0.0, 1), (80.0, 1), (12.0, 1), (11.0, 2), (4.0, 3)])
def test_a_run_takes_as_many_gpus_as_hold_it(asked, gpu_gb, gpus):
    """Bug: a policy and two scorers of 105 GiB sent to one GPU of 80."""
    job = {"runs": ["decode-a"], "suffix": ""}
    assert asked("gpu", gpu=True, gpu_gb=gpu_gb, **job) == gpus
    assert asked("gpu", gpu=False, gpu_gb=gpu_gb, **job) is None


def test_the_plan_becomes_a_file_and_says_what_it_cannot_plan(tmp_path, capsys, monkeypatch):
    """Bug: one bad file among thirty, and no job of the others asked for its memory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "params/ci", tmp_path / "params/ci")
    bad = tmp_path / "params/ci/decode-raw-tokenwise.yaml"
    bad.write_text(bad.read_text().replace("n_samples: 8", "n_samples: 0"))
    needs.main(["runs/ci/.jobs/needs.json", "ci", "--tokens-per-second", "10"])
    known = json.loads((tmp_path / "runs/ci/.jobs/needs.json").read_text())
    assert known.keys() == {"critics/raw", "decode-raw", "decode-raw-critic"}
    assert known["decode-raw"]["group"] == 8 and known["critics/raw"]["group"] == 16
    # 12 prompts, 32 tokens; eight samples of 7 methods, of 3 of them two rounds, and one of base
    tokens = 12 * 32 * (1 + 8 * known_rounds())
    assert known["decode-raw"]["hours"] == pytest.approx(tokens / 10 / 3600)
    assert "not planned: params/ci/decode-raw-tokenwise.yaml: " in capsys.readouterr().err


def known_rounds() -> int:
    """Return the rounds of all methods of params/ci/decode-raw.yaml but base."""
    given = yaml.safe_load((ROOT / "params/ci/decode-raw.yaml").read_text())
    guarded = [name for name in given["methods"] if name in ("beam-augmented", "inferenceguard")]
    return len(given["methods"]) - 1 + len(guarded) * (given["rounds"] - 1)


def test_changed_settings_are_planned(tmp_path, monkeypatch):
    """Bug: a rehearsal that asked for the memory of the paper's own systems, and found no critic in
    its own folder of runs.
    """
    shutil.copytree(ROOT / "params/ci", tmp_path / "params/ci")
    changes = {"profile": "mine", "every": {"group_size": 2}}
    files = ParamFiles("ci", changes, base=tmp_path / "params")
    known = dict(needs.needs_of(files, {}))
    assert known["decode-raw-critic"].group == 2 and known["decode-raw-critic"].hours is None


def test_a_plan_is_made_once_by_the_first_process_alone(tmp_path, monkeypatch):
    """Bug: torch loaded by every job on every node, which costs seconds."""
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    first = Asked(tmp_path / "needs.json", ["ci"], gpu=False)
    for run in ("decode-a", "decode-b"):
        assert first.of("mem", {"runs": [run], "suffix": ""}, DEFAULTS) == 4000
    assert calls == [[sys.executable, "-m", "igcore.runs.needs", str(first.file), "ci"]]
    Asked(first.file, [], gpu=False).of("mem", {"runs": ["decode-a"], "suffix": ""}, DEFAULTS)
    assert len(calls) == 1


def test_what_every_job_loads_needs_no_torch():
    """Bug: a parse of the Snakefile that takes ten seconds in each of a thousand jobs."""
    code = "import sys; import igcore.runs.cluster; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Snakemake ------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder to walk in."""
    for name in ("notebooks", "params"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def resources_of(printed: str) -> dict[str, dict[str, str]]:
    """Return the resources of every decode job of a dry run, by its output."""
    found = {}
    for block in re.split(r"rule decode_\w+:", printed)[1:]:
        lines = [line.strip() for line in block.splitlines()]
        output = next(line[8:] for line in lines if line.startswith("output: "))
        given = next(line[11:] for line in lines if line.startswith("resources: "))
        found[output] = dict(part.split("=") for part in given.split(", "))
    return found


def test_a_job_of_a_cluster_asks_for_what_the_plan_says(place):
    """Guards the way from the plan into Snakemake; and a laptop's jobs, which ask for nothing."""
    known = {"decode-raw": NEED}
    file = place / "runs/ci/.jobs/needs.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(known))
    # as on a node, which reads the plan and makes none; what a profile says comes with the job
    told = ["--dry-run", "--mode", "remote", "--default-resources", *DEFAULTS[1:]]
    printed = snakemake(place, "ci", *told, "--quiet", "host", shards=2)
    jobs = resources_of(printed)
    shard = jobs["runs/ci/decode-raw.1-of-2/manifest.json"]
    assert shard["mem_mb"] == str(int((PROCESS + 26) * 1024))
    assert shard["runtime"] == str(int(START + MARGIN * 60 * 3))
    assert jobs["runs/ci/decode-raw-tokenwise/manifest.json"]["mem_mb"] == "4000"
    alone = resources_of(snakemake(place, "ci", "--dry-run", "--quiet", "host", shards=2))
    assert {frozenset(given) for given in alone.values()} == {frozenset({"tmpdir"})}


def test_the_profile_is_one_that_the_plugin_knows():
    """Bug: a flag of another version of the plugin, which stops the walk at its first line."""
    flags = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
    text = (ROOT / "profiles/slurm/config.yaml").read_text()
    offered = [line[2:].partition(":")[0] for line in text.splitlines() if "# slurm-" in line]
    command = [sys.executable, "-m", "snakemake", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for flag in [*flags, *offered]:
        assert re.search(rf"^ +--{flag}[ ,\n]", known, re.M), flag


# --- reasons --------------------------------------------------------------------------------------


def test_the_reason_of_a_failed_job_is_its_notebooks_error(tmp_path):
    """Bug: a walk that ends with the number of a job, and its reason in a log on the node."""
    error = {"output_type": "error", "ename": "ParameterError", "evalue": "n_samples is 0"}
    for name, outputs in (("bad", [error]), ("good", []), ("old", [error])):
        folder = tmp_path / name
        folder.mkdir()
        cells = [{"cell_type": "markdown"}, {"cell_type": "code", "outputs": outputs}]
        (folder / "executed.ipynb").write_text(json.dumps({"cells": cells}))
    os.utime(tmp_path / "old/executed.ipynb", (1, 1))
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/executed.ipynb").write_text('{"cel')
    folders = [tmp_path / name for name in ("bad", "good", "old", "killed", "none")]
    assert reasons(folders, 1e9) == [f"{tmp_path / 'bad'}: ParameterError: n_samples is 0"]
