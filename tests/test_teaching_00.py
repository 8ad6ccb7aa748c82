"""Tests of notebook 00: its words for an unguarded answer, and that its example shows a guard."""

import json
import math
from types import SimpleNamespace

import pytest
from notebook_code import NOTEBOOKS, notebook_code

start = notebook_code("00_start_here")
OUTPUTS = {
    cell["id"]: json.dumps(cell["outputs"], ensure_ascii=False)
    for cell in json.loads((NOTEBOOKS / "00_start_here.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
}


def words(cost, peak_cost, budget=0.1):
    guard = SimpleNamespace(config=SimpleNamespace(budget=budget))
    return start.in_words(SimpleNamespace(cost=cost, peak_cost=peak_cost, guard=guard))


@pytest.mark.parametrize(
    ("cost", "peak_cost", "begins"),
    [
        (0.04, 0.08, "within budget, though"),
        (0.1, 0.1, "within budget, though"),  # the budget itself is within
        (0.04, 0.12, "within budget at the end, but over budget on the way"),
        (0.12, 0.12, "over budget ("),
        (math.nan, math.nan, "over budget ("),
        (0.04, math.nan, "within budget at the end, but over budget on the way"),
    ],
)
def test_an_unguarded_answer_is_never_called_verified(cost, peak_cost, begins):
    """Bug: `verified_safe` above a picture that shows the same answer over budget on the way; and
    a score that cannot be read counted as good.
    """
    said = words(cost, peak_cost)
    assert said.startswith(begins)
    assert "verified" not in said and "safe" not in said


def test_a_cost_just_over_budget_does_not_look_like_the_budget():
    """Bug: "over budget: cost 0.01, budget 0.01", rounded to two digits."""
    assert "0.053 at worst, budget 0.05)" in words(0.035, 0.053, 0.05)


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
