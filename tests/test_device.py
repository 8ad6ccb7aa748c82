"""Tests of what is known of the machine: its units for bfloat16."""

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
