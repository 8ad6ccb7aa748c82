"""Tests of notebook 00: its example shows a guard."""

import json

from notebook_code import NOTEBOOKS

OUTPUTS = {
    cell["id"]: json.dumps(cell["outputs"], ensure_ascii=False)
    for cell in json.loads((NOTEBOOKS / "00_start_here.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
}


def test_the_committed_example_needs_its_guard():
    """Guards the demonstration: once neither baseline was clearly over budget, no candidate block
    was retried and nothing abstained.
    """
    assert "base: over budget" in OUTPUTS["00-04"]
    assert "best-of-n: within budget at the end, but over budget on the way" in OUTPUTS["00-04"]
    assert "verified safe by the final check" in OUTPUTS["00-06"]
    assert "retry 1" in OUTPUTS["00-08"] and "block 1, round 2" in OUTPUTS["00-08-rounds"]
    assert "other candidates are within budget" in OUTPUTS["00-10"]
    assert "abstained" in OUTPUTS["00-14"]


def test_readers_without_a_kernel_see_the_panel():
    """Bug: a widget without its picture, which a repository page shows as an empty line."""
    assert "<svg" in OUTPUTS["00-16"]
    assert "widget-view" not in "".join(OUTPUTS.values())
