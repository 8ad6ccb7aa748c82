"""Tests of what is known of the machine: its memory, and its units for bfloat16."""

import os

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


def test_a_system_that_does_not_count_free_pages_is_taken_to_have_some(monkeypatch):
    """Bug: macOS has no name for them, and every call ended in a ValueError."""
    there = {name: at for name, at in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", there)
    assert device.free_bytes(torch.device("cpu")) == 4 * device.GIB != device.installed_bytes()
