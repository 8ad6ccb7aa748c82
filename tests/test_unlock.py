"""Tests of the lock that a killed walk leaves: released when nobody walks, kept when somebody does
or may.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from igcore.errors import RunError
from igcore.runs import unlock

SNAKEFILE = """
rule all:
    output: "made"
    shell: "while [ ! -e go ]; do sleep 0.05; done; touch made"
"""
WALK = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all"]


def until(holds):
    """Wait for something that another process does."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def running(folder, command):
    """Run a command in a folder, in a group of its own that is killed in the end."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def sleeping(*arguments):
    """The command of a process that does nothing, with the arguments of another."""
    return [sys.executable, "-c", "import time; time.sleep(60)", *arguments]


def locks(folder) -> list[Path]:
    return sorted((folder / ".snakemake").glob("locks/*"))


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """A folder whose walk lives and then is killed (a function ends it), as Snakemake leaves it."""
    folder = tmp_path_factory.mktemp("walk").resolve()
    (folder / "Snakefile").write_text(SNAKEFILE)
    with running(folder, WALK) as process:
        until(lambda: locks(folder))
        with pytest.raises(RunError) as refused:
            unlock.unlock(folder)
        living = process.pid, str(refused.value), locks(folder)
    return folder, living


@pytest.fixture
def killed(walk, tmp_path) -> Path:
    """A folder whose walk was killed."""
    return Path(shutil.copytree(walk[0], tmp_path / "killed"))


def test_the_lock_of_a_living_walk_stays(walk):
    """Guards two walks that write into one folder."""
    folder, (process, sentence, held) = walk
    assert (
        sentence
        == f"another walk is going on in {folder} (process {process}); wait for it, or stop it "
        f"first"
    )
    assert held and held == locks(folder)


def test_the_lock_of_a_killed_walk_is_released_and_it_goes_on(killed, capsys):
    """Bug: after a kill, the same command stopped with a LockException until somebody unlocked by
    hand.
    """
    assert locks(killed)
    (killed / "Snakefile").rename(
        killed / "kept"
    )  # a walk that cannot be read any more does not keep its lock
    assert unlock.unlock(killed)
    (killed / "kept").rename(killed / "Snakefile")
    assert (
        not locks(killed)
        and "a killed walk had left its lock, which is released" in capsys.readouterr().out
    )
    (killed / "go").touch()
    subprocess.run([*WALK, "--rerun-incomplete"], cwd=killed, check=True, capture_output=True)
    assert (killed / "made").exists()


@pytest.mark.parametrize("name", ["snakemake", "igcore.runs.walk", "ipykernel_launcher"])
def test_a_job_that_outlived_its_walk_keeps_the_lock(killed, name):
    """Guards a notebook that still writes after Snakemake alone was killed; by a link the folder is
    the same.
    """
    link = killed.with_name("link")
    link.symlink_to(killed)
    with (
        running(killed, sleeping("-m", name)) as job,
        pytest.raises(RunError, match=rf"\(process {job.pid}\); wait for it"),
    ):
        until(lambda: name in psutil.Process(job.pid).cmdline())
        unlock.unlock(link)
    assert locks(killed)


def test_who_only_looks_keeps_no_lock(killed):
    """Bug: `tail -f .snakemake/log/...` in another window was taken for a walk; so was one in
    another folder.
    """
    with (
        running(killed, sleeping(".snakemake/log/x.log")),
        running(killed.parent, sleeping("-m", "snakemake")),
    ):
        assert list(unlock.walking(killed)) == []
        assert unlock.unlock(killed)


def test_a_process_that_has_ended_keeps_no_lock(killed):
    """Bug: a killed walk that nobody has waited for yet is still in the list of processes."""
    process = subprocess.Popen([sys.executable, "-c", "", "snakemake"], cwd=killed)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert list(unlock.walking(killed)) == []
    process.wait()


def test_the_lock_of_another_computer_stays(killed):
    """Guards folders on a disk that computers share: a walk on another one is in no list of
    processes here.
    """
    host = killed / ".snakemake" / unlock.HOST
    host.write_text("elsewhere")
    held = locks(killed)
    with pytest.raises(
        RunError,
        match=(
            f"the walk that locked {killed} was started on elsewhere; when it has ended run "
            f"`snakemake"
        ),
    ):
        unlock.unlock(killed)
    assert locks(killed) == held and host.read_text() == "elsewhere"


def test_without_a_lock_nothing_is_done_but_to_say_where_the_walk_starts(tmp_path, monkeypatch):
    """Guards the ordinary start, in which no process is looked at and no Snakemake called."""
    monkeypatch.setattr(unlock, "walking", lambda folder: pytest.fail("looked"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("called"))
    (tmp_path / ".snakemake/locks").mkdir(parents=True)
    assert not unlock.unlock(tmp_path)
    (tmp_path / "fresh").mkdir()
    assert not unlock.unlock(tmp_path / "fresh")
    assert [path.name for path in (tmp_path / "fresh/.snakemake").iterdir()] == [unlock.HOST]


def test_make_stops_with_one_sentence(killed, monkeypatch, capsys):
    """Guards `make`, which starts no walk where the lock must stay."""
    for name in ("notebooks", "params"):
        (killed / name).mkdir()
    monkeypatch.chdir(killed / "notebooks")
    (killed / ".snakemake" / unlock.HOST).write_text("elsewhere")
    assert unlock.main() == 1
    assert capsys.readouterr().err.startswith(
        f"error: the walk that locked {killed} was started on elsewhere; when"
    )
