"""Tests of the caps: what counts as a code line, and that a cap fails."""

import json

from tests import caps

MODULE = '''"""A docstring

of three lines."""

# a comment
def double(x):
    """Another."""
    text = """two
    lines"""
    return 2 * x, text  # the fourth
'''


def test_a_docstring_and_a_comment_are_no_code_and_a_text_is():
    """Bug: explaining code would cost lines, and a list of texts none."""
    assert caps.code_lines(MODULE) == 4


def test_a_part_above_its_cap_is_named_with_both_numbers(tmp_path):
    """Bug: a cap that never fails."""
    for file in (
        "igcore/engine/a.py",
        "igcore/models/b.py",
        "tests/c.py",
        "docs/d.py",
        "igstudy/e.py",
        "igserve/f.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(MODULE)
    cells = [{"cell_type": "code", "source": ["# no\n", "x = 1\n"]}]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/n.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "Snakefile").write_text("rule all:\n\n    # no\n    input: 'a'\n")
    assert caps.counts(tmp_path) == {"igcore": 8, "core": 4, "igserve": 4, "tests": 4, "joint": 23}
    (tmp_path / "pyproject.toml").write_text("[tool.igcore.caps]\nigcore = 8\njoint = 18\n")
    (sentence,) = caps.over(tmp_path)
    assert sentence.startswith("joint has 23 code lines, and may have 18; remove")
