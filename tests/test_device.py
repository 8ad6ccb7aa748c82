"""Tests of what is known of the machine: its memory, and its units for bfloat16."""

from pathlib import Path

import pytest
import torch

from igcore.engine import device


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


def test_memory_is_that_of_the_kernels_own_table(monkeypatch, tmp_path):
    """Bug: pages, or kB, taken for bytes."""
    monkeypatch.setattr(device, "CGROUP", tmp_path / "none")
    table = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert device.installed_bytes() == 1024 * int(table["MemTotal"].split()[0])
    free = int(table["MemAvailable"].split()[0]) * 1024
    # Bug: pages of the file cache counted as taken, so a busy machine decoded one prompt at a time
    assert device.free_bytes(torch.device("cpu")) == pytest.approx(free, rel=0.2)
