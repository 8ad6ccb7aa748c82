"""Tests of what Snakemake knows of a job: its file, and the digests in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from copiedcode import edit, forget, know_code_from

from igcore.errors import RunError
from igstudy import provenance
from igstudy.runs import jobs

ROOT = Path(__file__).parents[1]
DECODE = ROOT / "notebooks/30_decode.ipynb"
SETTINGS = {
    "run": "decode-raw",
    "cost": "offensive-language",
    "reward": "minilm-relevance",
    "budget": 1e-5,
}


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A copy of the package by whose source jobs are known."""
    yield know_code_from(monkeypatch, tmp_path)
    forget()


def asked(path: Path, kind="decode", notebook=DECODE, **changes) -> dict[str, str]:
    """Ask for the file of a job anew and return the lines of its comments by name."""
    forget()
    jobs.request(path, kind, str(notebook), SETTINGS | changes)
    lines = [
        line[2:].rpartition(": ") for line in path.read_text().splitlines() if line.startswith("# ")
    ]
    return {name: digest for name, _, digest in lines}


# --- the file of a job ----------------------------------------------------------------------------


def test_the_file_of_a_job_is_left_alone_until_its_content_changes(tmp_path, code):
    """Bug: one word in a docstring threw away hours of runs, and a changed search none."""
    path = tmp_path / "runs/x/.jobs/decode-raw.yaml"
    before = asked(path)
    os.utime(path, (1, 1))
    written = path.read_bytes()
    edit(code / "igcore/search.py", '"""', '"""Another word. ')
    # of the notebook that draws the run, not of the run
    edit(code / "igstudy/figures/style.py", "\nimport ", "\nother = 1\nimport ")
    assert asked(path) == before
    assert (path.stat().st_mtime, path.read_bytes()) == (1, written)
    edit(code / "igcore/search.py", "\nimport ", "\nother = 1 + 2\nimport ")
    after = asked(path)
    assert {name for name in after if before[name] != after[name]} == {"code of igcore"}
    assert path.stat().st_mtime > 1 and not list(path.parent.glob("*.part"))
    assert yaml.safe_load(path.read_text()) == SETTINGS


@pytest.mark.parametrize("what", ["setting", "notebook", "version"])
def test_settings_notebook_and_versions_count(tmp_path, monkeypatch, what):
    """Bug: an edited notebook, or a run under another torch, started nothing."""
    path, notebook = tmp_path / "job.yaml", tmp_path / "n.ipynb"
    notebook.write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": ["x = 1"], "outputs": []}]})
    )
    asked(path, notebook=notebook)
    before = path.read_bytes()
    edit(notebook, '"outputs": []', '"outputs": ["text"]')
    asked(path, notebook=notebook)
    assert path.read_bytes() == before
    if what == "notebook":
        edit(notebook, "x = 1", "x = 2")
    if what == "version":
        monkeypatch.setattr(jobs, "versions", lambda: provenance.versions() | {"torch": "0"})
    asked(path, notebook=notebook, budget=1e-6 if what == "setting" else 1e-5)
    assert path.read_bytes() != before


def test_a_notebook_that_looks_at_runs_is_known_by_all_code(tmp_path, code):
    """Bug: a changed table or picture was never made again."""
    path = tmp_path / "job.yaml"
    before = asked(path, "figures", ROOT / "notebooks/50_figures.ipynb")
    edit(code / "igstudy/figures/style.py", "\nimport ", "\nother = 1\nimport ")
    assert asked(path, "figures", ROOT / "notebooks/50_figures.ipynb") != before


def test_two_walks_in_one_folder_are_refused(tmp_path):
    """Guards two runs of Snakemake that write into one folder; a lock that outlives a kill."""
    program = f"""
import pathlib, time
from igstudy.runs import jobs
held = jobs.lock(pathlib.Path({str(tmp_path)!r}))
print("locked", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="another Snakemake runs in .*; wait for it, or stop it"):
            jobs.lock(tmp_path)
        process.kill()
        process.wait()
    jobs.lock(tmp_path)
