"""Tests of what Snakemake knows of a job: its file, the digests in it, its shards, and whether its
run still holds.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from copiedcode import edit, forget, know_code_from

from igcore.errors import RunError
from igcore.report import provenance
from igcore.runs import identity, jobs

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
    edit(code / "search.py", '"""', '"""Another word. ')
    # of the notebook that draws the run, not of the run
    edit(code / "figures/style.py", "\nimport ", "\nother = 1\nimport ")
    assert asked(path) == before
    assert (path.stat().st_mtime, path.read_bytes()) == (1, written)
    edit(code / "search.py", "\nimport ", "\nother = 1 + 2\nimport ")
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
    edit(code / "figures/style.py", "\nimport ", "\nother = 1\nimport ")
    assert asked(path, "figures", ROOT / "notebooks/50_figures.ipynb") != before


@pytest.mark.parametrize(
    ("settings", "shards", "cut"),
    [
        ({"limit": 20, "group_size": 8}, 2, 2),
        ({"limit": 20, "group_size": 8}, 9, 3),
        ({"limit": 8, "group_size": 8}, 4, 1),
        ({"limit": 17}, 9, 3),  # the default group
        ({"limit": None, "group_size": 8}, 4, 4),
        ({}, 4, 4),
        ({"limit": "all"}, 4, 4),
        ({"limit": 0}, 4, 4),
    ],
)
def test_a_run_is_cut_into_no_more_shards_than_it_has_groups(settings, shards, cut):
    """Bug: a kernel started for a shard without a prompt; a limit that is text stopped Snakemake
    with a traceback.
    """
    assert jobs.shards_of(settings, shards) == cut


# --- finished runs --------------------------------------------------------------------------------

CRITIC = {"critics": {"m": {}, "o": {}}, "value": {"epochs": 1}}


def finished(folder: Path, kind: str) -> Path:
    """Make what a finished run leaves, by hand, and return its folder."""
    run, model = folder / "run", folder / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    left = {
        "decode": ["params.json", "responses.jsonl"],
        "judge": ["params.json", "verdicts.jsonl"],
        "critic": [
            *[
                "critic.csv",
                "reliability.csv",
                "m/critic.safetensors",
                "o/critic.safetensors",
                "value/value.safetensors",
            ],
            *["rollouts-train/responses.jsonl", "rollouts-test/responses.jsonl"],
        ],
    }
    for name in left[kind]:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}\n")
    known = {} if kind == "judge" else {"opened": identity.opened(paths=[model / "tokenizer.json"])}
    (run / "manifest.json").write_text(json.dumps(known))
    return run


def everything(folder: Path) -> dict:
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["decode", "judge", "critic"])
def test_a_sound_run_is_left_as_it_is(tmp_path, kind):
    """Guards hours of work: what has finished and holds is not touched, nor what goes on."""
    run = finished(tmp_path, kind)
    before = everything(tmp_path)
    assert jobs.check_run(run, kind, CRITIC) == ""
    assert everything(tmp_path) == before
    (run / "manifest.json").unlink()
    before = everything(tmp_path)
    assert (
        jobs.check_run(run, kind, CRITIC) == jobs.check_run(tmp_path / "none", kind, CRITIC) == ""
    )
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("decode", "responses.jsonl"),
        ("decode", "params.json"),
        ("judge", "verdicts.jsonl"),
        ("critic", "m/critic.safetensors"),
        ("critic", "o/critic.safetensors"),
        ("critic", "value/value.safetensors"),
        ("critic", "rollouts-train/responses.jsonl"),
        ("critic", "critic.csv"),
        ("critic", "reliability.csv"),
    ],
)
def test_a_run_without_one_of_its_files_runs_again(tmp_path, kind, name):
    """Bug: answers were deleted, the sign of success stayed, and nothing was decoded."""
    run = finished(tmp_path, kind)
    (run / name).unlink()
    before = everything(tmp_path)
    assert (
        jobs.check_run(run, kind, CRITIC)
        == f"{run}: {name} is not there any more, so it runs again"
    )
    assert before.keys() - everything(tmp_path).keys() == {run / "manifest.json"}


def test_rollouts_of_another_run_are_not_missed(tmp_path):
    """Bug: critics trained on the rollouts of another run were trained at every walk."""
    run = finished(tmp_path, "critic")
    shutil.rmtree(run / "rollouts-train")
    assert jobs.check_run(run, "critic", CRITIC | {"rollouts": "runs/x/critics/y"}) == ""
    assert (
        jobs.check_run(
            run, "critic", {"critics": {"m": {}}, "value": None, "rollouts": "runs/x/critics/y"}
        )
        == ""
    )


@pytest.mark.parametrize("how", ["size", "time", "gone"])
def test_a_changed_file_of_a_model_starts_its_runs_anew(tmp_path, how):
    """Bug: another tokenizer under the same name, and the old answers stood; a model that is gone
    changes no answer.
    """
    run, changed = finished(tmp_path, "decode"), tmp_path / "model/tokenizer.json"
    about = changed.stat()
    if how == "size":
        changed.write_text("others")
        os.utime(changed, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif how == "time":
        os.utime(changed, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    else:
        changed.unlink()
    assert jobs.check_run(run, "decode", {}) == (
        "" if how == "gone" else f"{run}: {changed} has changed since, so it runs again"
    )
    assert (run / "manifest.json").is_file() == (how == "gone")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"opened": []}', '{"opened": null}', "[" * 100_000, b"\xff"]
)
def test_a_damaged_manifest_is_no_sign_of_success(tmp_path, content):
    """Bug: a manifest that cannot be read stopped the whole walk with a traceback."""
    run = finished(tmp_path, "decode")
    (run / "manifest.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert jobs.check_run(run, "decode", {}) == f"{run}: its manifest is damaged, so it runs again"
    assert not (run / "manifest.json").exists() and (run / "responses.jsonl").exists()


def test_two_walks_in_one_folder_are_refused(tmp_path):
    """Guards two runs of Snakemake that write into one folder; a lock that outlives a kill."""
    program = f"""
import pathlib, time
from igcore.runs import jobs
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
    assert jobs.reasons(folders, 1e9) == [f"{tmp_path / 'bad'}: ParameterError: n_samples is 0"]
