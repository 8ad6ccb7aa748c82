"""Tests of `igcore check`: what it finds in a scorer of one's own."""

import math

import pytest
from mockpolicy import LetterCost

from igcore.tools import cli
from igcore.tools.cli import examine, longest
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
    assert "reads at least 1000 words\n" in out
    assert out.endswith("cost 'mycosts:length' can guard a model\n")


def test_a_scorer_that_reads_its_batch_is_named(mine, capsys):
    """Bug: a scorer that fails its examination, and a command that reports success."""
    assert cli.main(["check", "mycosts:by_batch"]) == 1
    out, errors = capsys.readouterr()
    assert "FAILS: cost 'by batch' depends on the batch: asked alone and with others" in out
    assert errors == "error: cost 'mycosts:by_batch' fails 1 of 5 checks\n"


def encoder(room):
    """Return a model cost whose context has room for some words."""
    return LetterCost(lambda text: n if (n := len(text.split())) <= room else math.nan)


@pytest.mark.parametrize(
    ("cost", "shown", "problem"),
    [
        (encoder(400), "250, unfinished 250; reads 250 words, not 500: a longer answer", ""),
        (encoder(10**6), "8000, unfinished 8000; reads at least 8000 words", ""),
        (encoder(100), "nan, unfinished nan", "it has no number for 125 words"),
    ],
)
def test_a_cost_says_how_long_a_text_it_reads(cost, shown, problem):
    """Guards model costs, all of which failed on a text longer than any context."""
    found, said = longest(cost)
    assert found.startswith(shown) and said == problem


def test_a_slow_cost_reads_a_thousand_words_and_no_more(monkeypatch):
    """Guards a model without a GPU, which would read its whole context for minutes."""
    monkeypatch.setattr(cli, "PATIENCE", 0)
    assert longest(encoder(10**6))[0].endswith("reads at least 1000 words")


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
