"""Tests of what is known of the machine: its threads and cores, and its units for bfloat16."""

import os

import pytest
import torch

from igcore.engine import device


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return what sets up a machine: its cores, threads of torch and quota."""

    def arrange(cores, threads, quota="max", affinity=None):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        monkeypatch.setattr(device, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.setattr(device, "_WARNED", [])
        monkeypatch.setattr(device.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(
            device.os, "sched_getaffinity", lambda _: range(affinity or cores), raising=False
        )
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    return arrange


@pytest.mark.parametrize(
    ("there", "advised"),
    [
        (dict(cores=2, threads=2), None),
        (dict(cores=64, threads=64, quota="400000"), 4),
        (dict(cores=64, threads=32, affinity=3), 3),
    ],
)
def test_too_many_threads_are_named_once(machine, caplog, there, advised):
    """Bug: in a container with a quota a guard was many times slower, without a word."""
    machine(**there)
    before = torch.get_num_threads()
    for _ in range(3):
        device.note_threads()
    assert len(caplog.messages) == (advised is not None)
    assert advised is None or f"torch.set_num_threads({advised})" in caplog.text
    assert torch.get_num_threads() == before


def test_units_for_bfloat16_are_asked_of_the_processor(monkeypatch):
    """Guards the automatic type where torch has no such question."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    for answers in ((True, False), (False, True), (False, False)):
        for name, answer in zip(names, answers, strict=True):
            monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer, raising=False)
        assert device.multiplies_bfloat16() == any(answers)
    for name in names:
        monkeypatch.delattr(torch.cpu, name)
    assert not device.multiplies_bfloat16()


def test_a_system_that_does_not_count_free_pages_is_taken_to_have_some(monkeypatch):
    """Bug: macOS has no name for them, and every call ended in a ValueError."""
    there = {name: at for name, at in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", there)
    assert device.free_bytes(torch.device("cpu")) == 4 * device.GIB != device.installed_bytes()
