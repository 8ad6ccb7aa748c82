"""Tests that a disk which says no costs one sentence, and neither half a file nor a part of one."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from tiny import untrained

from igcore import RunError
from igstudy.figures import style
from igstudy.files import replace_file
from igstudy.report import tables
from igstudy.runs.jobs import request
from igstudy.training.loop import _Trainer, save_network


def checkpoint(folder):
    network = untrained()
    optimizer = torch.optim.Adam(network.parameters())
    trainer = SimpleNamespace(network=network, optimizer=optimizer, best={}, history=[], seconds=0)
    trainer.checkpoint = folder / "checkpoint.pt"
    _Trainer._save(trainer)


WRITERS = {
    "table": lambda folder: tables.write(pd.DataFrame({"cost": [0.5]}), folder / "costs", {}),
    "figure": lambda folder: style.save(plt.figure(), folder / "picture"),
    "job": lambda folder: request(folder / "40.yaml", "", "notebooks/40_tables.ipynb", {"a": 1}),
    "network": lambda folder: save_network(untrained(), folder, "critic"),
    "checkpoint": checkpoint,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_says_in_one_sentence_what_is_wrong(tmp_path, monkeypatch, name):
    """Bug: a raw OSError, or RuntimeError of torch, from all but the writers of runs; half a file
    under its final name, and parts that stay.
    """
    real = Path.write_bytes

    def half(path, data):
        real(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(RunError, match=f"^cannot write in {tmp_path}/.*; free some space") as seen:
        WRITERS[name](tmp_path)
    plt.close("all")
    assert "\n" not in str(seen.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, name):
    """Bug: a raw OSError where a file of that name is in the way."""
    (tmp_path / "out").write_text("notes")
    with pytest.raises(RunError, match=r"cannot write in .* \(File exists|Not a directory\)"):
        WRITERS[name](tmp_path / "out")
    plt.close("all")
    assert (tmp_path / "out").read_text() == "notes"


def test_what_was_there_stays_when_a_new_file_cannot_be_written(tmp_path, monkeypatch):
    """Bug: an old result emptied by a write that fails."""
    path = tmp_path / "a.csv"
    replace_file(path, "old\n")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only")))
    with pytest.raises(RunError, match=r"a\.csv \(Read-only\); .* make it writable"):
        replace_file(path, "new\n")
    assert [path.read_text(), *tmp_path.iterdir()] == ["old\n", path]
