"""What stands beside a table: which runs made it, what is said where a manifest says nothing, and
bytes that stay.
"""

import importlib.metadata
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from igstudy import provenance
from igstudy.report import sources

KNOWN = {
    "git_commit": "abc",
    "versions": {"torch": "2", "numpy": "1"},
    "processor": "a CPU",
    "root": "123",
    "counts": {},
}


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Runs of a profile: one, another in two shards, one whose manifest is old, a regime, and
    what a critic and a judge left.
    """
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    manifests = {
        "decode-a": KNOWN,
        "decode-b.0-of-2": KNOWN,
        "decode-b.1-of-2": KNOWN,
        "decode-old": {},
        "regime-mild": KNOWN,
    }
    manifests |= {
        "critics/raw": {"policy": "raw"},
        "judge/me": {"git_commit": "abc"},
        "decode-half": None,
    }
    for name, manifest in manifests.items():
        folder = tmp_path / "runs/mine" / name
        folder.mkdir(parents=True)
        if manifest is not None:
            (folder / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_each_run_says_what_its_manifest_says(finished):
    """Bug: a run that is not there, one that has not finished, or a manifest of an older version,
    on which it stopped.
    """
    found = sources.of_runs(
        "mine", ["decode-old", "decode-a", "decode-a", "decode-half", "decode-none"]
    )
    of = {"commit": "abc", "versions": "torch 2, numpy 1", "processor": "a CPU", "root": "123"}
    here = {"from": "run here"}
    assert found == {"mine/decode-a": of | here, "mine/decode-old": dict.fromkeys(of) | here}
    assert sources.of_runs("yours", ["decode-a"]) == {}


def test_a_run_from_packed_records_is_said_to_be_one(finished):
    """Bug: a table of records that somebody else made, which looks like one of runs made here."""
    (finished / "runs/mine/decode-a" / provenance.UNPACKED).touch()
    found = sources.of_runs("mine", ["decode-*"])
    assert {name: run["from"] for name, run in found.items() if run["from"] != "run here"} == {
        "mine/decode-a": "records"
    }


def test_a_record_without_texts_has_the_root_of_its_run(finished):
    """Bug: the same lines had another root in a table that was made of the packed records."""
    manifest = KNOWN | {"root": "456", "root_with_texts": "123"}
    (finished / "runs/mine/decode-a/manifest.json").write_text(json.dumps(manifest))
    assert sources.of_runs("mine", ["decode-a"])["mine/decode-a"]["root"] == "123"


def test_shards_are_parts_and_other_folders_are_named_by_pattern(finished):
    """Bug: a table of a sharded run that seemed to have come from nowhere; regimes, which the main
    table does not count, among its runs.
    """
    shards = ["mine/decode-b.0-of-2", "mine/decode-b.1-of-2"]
    assert list(sources.of_runs("mine", ["decode-b"])) == shards
    assert list(sources.of_runs("mine", ["*"])) == ["mine/decode-a", *shards, "mine/decode-old"]
    assert list(sources.of_runs("mine", ["regime-*"])) == ["mine/regime-mild"]
    assert sources.of_runs("mine", ["critics/*", "judge/me"]).keys() == {
        "mine/critics/raw",
        "mine/judge/me",
    }


def test_the_same_runs_give_the_same_bytes(finished):
    """Guards against a time, or an order of names, that makes every walk a change."""
    one, other = (
        sources.sidecar(sources.of_runs("mine", names))
        for names in (["decode-a", "decode-old"], ["decode-old", "decode-a"])
    )
    assert one == other and one.endswith("}\n")
    found = json.loads(one)
    assert found["runs"].keys() == {"mine/decode-a", "mine/decode-old"}
    here = found["written_by"]
    assert (here["commit"], here["processor"]) == (sources.commit(), sources.processor())
    assert f"torch {importlib.metadata.version('torch')}" in here["versions"].split(", ")


def test_the_processor_is_named(tmp_path, monkeypatch):
    """Bug: torch imported to write a table, a GPU that is not named, an empty name where the system
    gives none.
    """
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    cpu = provenance.processor()
    assert cpu and "torch" not in sys.modules
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a GPU")
    cpus = SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, backends=cpus))
    assert provenance.processor() == f"{cpu}, AVX, a GPU"
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some (R) CPU @ 2.0GHz\nmodel name\t: Some\n"
    )
    assert provenance._cpu(tmp_path / "cpuinfo") == "Some (R) CPU @ 2.0GHz"
    assert provenance._cpu(tmp_path / "none")


def test_only_changes_of_the_code_mark_a_commit(tmp_path, monkeypatch):
    """Bug: every table after the first marked as of changed code, because the first had changed a
    committed file.
    """
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "igstudy/code.py"))
    ask = provenance.commit.__wrapped__
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert ask() is None
    for name in ("igstudy/code.py", "figures/tables/main.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("one\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "figures/tables/main.csv").write_text("two\n")
    assert len(head := ask()) == 40
    (tmp_path / "igstudy/code.py").write_text("two\n")
    assert ask() == f"{head}+"
