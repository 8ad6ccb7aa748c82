"""Tests that what needs no model starts without the libraries of models."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MODELS = ["torch", "transformers", "accelerate", "datasets", "sklearn", "sympy"]
WITHOUT = """
import importlib.abc, json, sys

forbidden, cells = json.load(sys.stdin)

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in forbidden:
            raise ModuleNotFoundError(f"{name} is imported", name=name)

sys.meta_path.insert(0, Blocked())
import matplotlib
matplotlib.use("Agg")
notebook = {"__name__": "__main__", "In": cells}
for cell in cells:
    exec(cell, notebook)
assert not {*forbidden} & {*sys.modules}  # not even where a library goes on without them
print("done")
"""


def run_without(forbidden: list[str], cells: list[str]) -> str:
    """Run cells in a process of their own that cannot import some modules; return its output."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        input=json.dumps([forbidden, cells]),
        capture_output=True,
        text=True,
        cwd=NOTEBOOKS,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def code_cells(name: str) -> list[str]:
    """Return the code of a notebook as Python alone, without magic lines."""
    content = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    return [
        "\n".join(line for line in source.splitlines() if not line.startswith("%"))
        for source in sources
    ]


def import_lines(cell: str) -> str:
    """Return the statements of a cell that import."""
    tree = ast.parse(cell)
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.unparse(tree)


@pytest.mark.parametrize("name", ["10_theory", "70_paper_audit"])
def test_a_notebook_runs_without_torch(name):
    """Guards a lecturer's laptop: one import at the head of a table's module once asked for a
    gigabyte of libraries that no cell uses.
    """
    printed = run_without(MODELS, code_cells(name))
    assert len(printed.splitlines()) > 1  # the cells were run


@pytest.mark.parametrize("name", ["40_tables", "45_ablations", "50_figures", "60_judge"])
def test_a_notebook_imports_no_models(name):
    """Bug: who read the tables of critics imported their training: most of the CPU seconds in
    which the job of the tables began. What a scorer needs is imported when it is asked for.
    """
    imports = [import_lines(cell) for cell in code_cells(name)]
    assert any("igstudy.report" in line for line in imports)
    run_without(MODELS, imports)


def test_the_command_line_imports_no_models():
    """Bug: `igstudy run` imported torch for `igstudy verify`, then its kernel did so again."""
    run_without([*MODELS, "pandas", "scipy"], ["import igstudy.commands"])
