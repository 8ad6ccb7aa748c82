"""Notebook 10 shows something of every statement of the paper, and no check of it fails."""

import re
from pathlib import Path

import nbformat

from igstudy.paper import read

NOTEBOOK = Path(__file__).parents[1] / "notebooks/10_theory.ipynb"
# as the paper's LaTeX numbers them: a lemma counts with the theorems, a definition with its section
NUMBERED = [
    *("Definition 5.1", "A1", "A2", "Theorem 1(a)", "Theorem 1(b)", "Theorem 1(c)", "Theorem 2"),
    *("B1", "B2", "B3", "Lemma 3(a)", "Lemma 3(b)", "Lemma 3(c)"),
    *("Theorem 4(a)", "Theorem 4(b)", "B1'", "B4", "Theorem 5"),
]


def listed():
    """Return what the last cell of the stored notebook printed: statement -> its lines."""
    last = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"][-1]
    text = "".join(output.text for output in last.outputs)
    parts = re.findall(r"^(\S.*?) \((?:section|appendix) .*\n((?:    .*\n)*)", text, re.MULTILINE)
    return {name: lines.strip().splitlines() for name, lines in parts}, text


def test_every_statement_of_the_paper_has_a_check_that_holds():
    """Bug: assumptions and two parts of a lemma that no cell looked at."""
    found, text = listed()
    assert [name for name in found if not name.startswith("equation")] == NUMBERED
    assert list(found) == read("theory")["statement"].tolist()
    for name, lines in found.items():
        assert any(line.strip().startswith("check: ") for line in lines), name
    assert "NOT SHOWN" not in text and text.rstrip().endswith("without a check: none")


def test_what_may_fail_has_a_counterexample():
    """Guards conditions that are assumed, with nothing that shows why."""
    found, _ = listed()
    without = [
        name for name, lines in found.items() if not any("counterexample: " in x for x in lines)
    ]
    # what n at least makes true is shown below n* for Theorem 2
    assert set(without) <= {"equation 4", "Theorem 1(a)", "Theorem 1(b)"}


def test_the_reading_of_equation_6_is_shown_in_exact_numbers():
    """Bug: no page named the assumption that the printed reading breaks."""
    lines = " ".join(listed()[0]["equation 6"])
    assert "read as z >= 0" in lines and "is 9/10, 1/10 and 1/10" in lines
    assert "read as z > 0, it is 9/10, 9/10 and 1/10" in lines
