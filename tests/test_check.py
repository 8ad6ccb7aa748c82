"""Tests of `igcore check`: what it finds in a scorer of one's own."""

import pytest

from igcore import cli
from igcore.cli import examine
from tests.audit.zoo import Hostile

MINE = """
from igcore.scorers import COST
def length(text):
    return len(text) / 10
class ByBatch:
    name, digest, sign, unit = "by batch", "1", COST, "points"
    def score(self, prompts, responses, finished):
        return [len(r) / len(responses) for r in responses]
by_batch = ByBatch()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mycosts.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_of_the_text_keeps_the_contract(mine, capsys):
    """Bug: an examination that no scorer passes."""
    assert cli.main(["check", "mycosts:length"]) == 0
    out = capsys.readouterr().out
    assert "FAILS" not in out and out.count("unfinished") == 4
    assert out.endswith("cost 'mycosts:length' can guard a model\n")


def test_a_scorer_that_reads_its_batch_is_named(mine, capsys):
    """Bug: a scorer that fails its examination, and a command that reports success."""
    assert cli.main(["check", "mycosts:by_batch"]) == 1
    out, errors = capsys.readouterr()
    assert "FAILS: cost 'by batch' depends on the batch: asked alone and with others" in out
    assert errors == "error: cost 'mycosts:by_batch' fails 1 of 5 checks\n"


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ("nothing", "unknown scorer 'nothing'"),
        ("nothing:here", "cost 'nothing:here' cannot be imported"),
        ("math:pi", "has no name"),
    ],
)
def test_bad_input_is_one_sentence(cost, said, capsys):
    """Bug: a traceback where a name was wrong."""
    assert cli.main(["check", cost]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and said in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("honest", ""),
        ("lies on prefixes", ""),
        ("depends on batch size", "depends on the batch"),
        ("drifts upward", "depends on the call"),
        ("NaN on some texts", "has no number for"),
    ],
)
def test_what_an_examination_finds(kind, problem):
    """Bug: a scorer that is called once, with one text at a time, or for finished texts alone."""
    cost = lambda prompt, text, finished: len(text) / 1000  # noqa: E731
    found = list(examine(Hostile(kind, cost, 1.0)))
    problems = [said for _, _, said in found if said]
    assert bool(problems) == bool(problem) and all(problem in said for said in problems[:1])
    assert len(found) == 5
