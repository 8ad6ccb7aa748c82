"""Tests of run folders: lines on disk, what a resume keeps, and what is moved aside."""

import errno
import fcntl
import gzip
import json
import os
import tracemalloc

import pytest
from mockruns import lines

from igcore import RunError
from igcore.files import append_line
from igstudy import linefile
from igstudy.commands import differences
from igstudy.runs import folders

LINES = [
    {"method": method, "prompt_id": name, "cost": 0.5, "cost_s": 1.0}
    for method in ("base", "args")
    for name in "abc"
]


def filled(folder, identity=None):
    """A finished run of `LINES`."""
    with folders.open_run(folder, identity or {"seed": 0}) as run:
        for line in LINES:
            run.append(line)
        run.finish({"lines": len(LINES)})
    return run


def opened_again(folder, identity=None):
    """What a resume finds."""
    with folders.open_run(folder, identity or {"seed": 0}) as run:
        return [linefile.key(line) for line in run.lines]


def test_a_run_has_begun_with_its_first_start(tmp_path, monkeypatch):
    """Bug: after a resume a run seems to last as long as its last start."""
    monkeypatch.setattr(folders, "now", lambda: "2026-01-01T00:00:00Z")
    filled(tmp_path / "run")
    monkeypatch.setattr(folders, "now", lambda: "2026-02-02T00:00:00Z")
    assert len(opened_again(tmp_path / "run")) == len(LINES)
    assert json.loads((tmp_path / "run/params.json").read_text())["began_at"][:7] == "2026-01"
    assert opened_again(tmp_path / "run", {"seed": 1}) == []
    assert json.loads((tmp_path / "run/params.json").read_text())["began_at"][:7] == "2026-02"


# --- lines ----------------------------------------------------------------------------------------


def test_a_line_is_json_and_survives_the_file(tmp_path):
    path = tmp_path / "responses.jsonl"
    for line in lines():
        append_line(path, line)
    assert differences(linefile.read(path), lines()) == []


def test_a_half_written_last_line_is_named_then_dropped_and_the_rest_kept(tmp_path):
    """Guards verification and tables against a line that silently does not count."""
    path = tmp_path / "responses.jsonl"
    written = lines(methods=["base"])
    for line in written:
        append_line(path, line)
    with path.open("ab") as file:
        file.write(json.dumps(written[0]).encode()[:50])
    with pytest.raises(RunError, match="line 5 of .* is not a response; run its parameters again"):
        linefile.read(path)
    folders.sound_lines(path)
    assert path.read_bytes().endswith(b"}\n")
    assert len(linefile.read(path)) == 4


def test_a_small_packed_file_cannot_fill_the_memory(tmp_path):
    """Bug: four megabytes took three gigabytes before a sentence said that they are no record."""
    path = tmp_path / "responses.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 10**8))
    tracemalloc.start()
    with pytest.raises(RunError, match=r"gz of [\d,]+ bytes holds more than 33,554,432, as no"):
        linefile.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**7
    path.write_bytes(gzip.compress(BASE.encode()))
    assert len(linefile.read(path)) == 1


BASE = '{"method": "base", "prompt_id": "x"}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read .*responses.jsonl"),
        (BASE + '{"meth\n{}\n', "line 2 of .* is not a response; run its parameters again"),
        (BASE * 2, "lines 1 and 2 of .* both answer"),
        ('{"method": 1, "prompt_id": "x"}\n', "line 1 of .* is not a response"),
        ('{"method": "base", "prompt_id": null}\n', "line 1 of .* is not a response"),
        ("[]\n", "line 1 of .* is not a response"),
    ],
)
def test_what_is_no_file_of_responses_is_one_sentence(tmp_path, text, said):
    """Bug: numbers in the place of names, which cannot be sorted beside them: a traceback."""
    path = tmp_path / "responses.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunError, match=said):
        linefile.read(path)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """Guards the append: the bytes that did fit must not stay as a broken line in front of the next
    one.
    """
    path = tmp_path / "responses.jsonl"
    first, second, *_ = lines(methods=["base"])
    append_line(path, first)
    before = path.read_bytes()
    write = os.write

    def full(file, data):
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match="No space left on device.* run again to resume"):
            append_line(path, second)
    assert path.read_bytes() == before
    append_line(path, second)
    assert len(linefile.read(path)) == 2


def test_differences_ignore_seconds_and_order_but_nothing_else():
    a = lines(methods=["base"])
    b = [line | {"generate_s": 9.0} for line in reversed(a)]
    assert differences(a, b) == []
    b[0] = b[0] | {"reward": 7.0}
    name = f"{b[0]['method']} {b[0]['prompt_id']}"
    assert differences(a, b) == [f"{name}.reward differs"]
    assert differences(a, b[1:]) == [f"{name} differs"]


def test_the_root_hash_is_over_everything_but_seconds_and_order(tmp_path):
    """Guards the one hash of a run: with another line, parameter or word of the manifest it is
    another.
    """
    run = filled(tmp_path / "run")
    manifest = json.loads(run.manifest.read_text())
    root = linefile.root_of(run.params, run.lines, manifest)
    slower = [line | {"cost_s": 9.0} for line in run.lines[::-1]]
    assert manifest["root"] == root == linefile.root_of(run.params, slower, manifest)
    others = [
        ({"seed": 1}, run.lines, manifest),
        (run.params, run.lines[1:], manifest),
        (run.params, [run.lines[0] | {"cost": 0.25}, *run.lines[1:]], manifest),
        (run.params, run.lines, manifest | {"git_commit": "another"}),
    ]
    assert len({root, *(linefile.root_of(*other) for other in others)}) == 5


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["", "{", "[1]", "7", "[" * 100_000])
def test_a_damaged_params_file_starts_a_run_anew(tmp_path, capsys, damage):
    filled(tmp_path / "run")
    (tmp_path / "run/params.json").write_text(damage)
    assert opened_again(tmp_path / "run") == []
    assert json.loads((tmp_path / "run/params.json").read_text())["seed"] == 0
    assert "params.json was missing or damaged in run" in capsys.readouterr().out


def test_the_notebook_of_a_fresh_run_is_no_old_run(tmp_path):
    """Bug: whoever runs the notebook writes it into the folder first, and every run began by moving
    it aside.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run/executed.ipynb").write_text("{}")
    assert opened_again(tmp_path / "run") == [] and (tmp_path / "run/executed.ipynb").exists()
    assert not (tmp_path / ".replaced").exists()


@pytest.mark.parametrize(
    "changed",
    ['{"method": "base", "prompt_id": "a", "cost": 0.4}', "7", "null", '{"digest": 1}', "{half"]
    + ["[" * 100_000, '{"method": [], "prompt_id": "a", "digest": "0"}'],
)
def test_a_changed_line_stops_the_run_and_is_answered_anew_without_it(tmp_path, changed):
    """Bug: a finished line with another text or budget was kept and counted."""
    run = filled(tmp_path / "run")
    texts = run.responses.read_text().splitlines()
    texts[4] = texts[4].replace("1.0", "9.0")  # seconds
    run.responses.write_text("\n".join([texts[0], changed, *texts[2:], "{half"]))
    with pytest.raises(
        RunError, match="line 2 of .*responses.jsonl was changed .*; delete the line"
    ):
        opened_again(tmp_path / "run")
    run.responses.write_text("\n".join([texts[0], *texts[2:], ""]))
    assert opened_again(tmp_path / "run") == [linefile.key(LINES[i]) for i in (0, 2, 3, 4, 5)]


def test_a_whole_file_is_left_alone(tmp_path):
    """Guards the manifest, which is the sign of success: nothing was dropped, so nothing is
    written.
    """
    run = filled(tmp_path / "run")
    before = run.responses.stat().st_mtime_ns, run.manifest.read_bytes()
    assert len(opened_again(tmp_path / "run")) == 6
    assert before == (run.responses.stat().st_mtime_ns, run.manifest.read_bytes())


def test_a_file_system_without_locks_is_not_called_busy(tmp_path, monkeypatch):
    """Bug: a network file system without locks, and a search for another process that there is
    not.
    """

    def unlocked(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unlocked)
    with (
        pytest.raises(RunError, match="No locks available.; free some space"),
        folders.open_run(tmp_path / "run", {}),
    ):
        pass


def test_two_processes_cannot_write_to_one_run(tmp_path):
    with (
        folders.open_run(tmp_path / "run", {}),
        pytest.raises(RunError, match="another process is writing"),
        folders.open_run(tmp_path / "run", {}),
    ):
        pass
