"""Tests that the notebooks of the theory and of the paper's numbers need no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
WITHOUT_TORCH = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is imported", name=name)

sys.meta_path.insert(0, Blocked())
import matplotlib
matplotlib.use("Agg")
cells = json.load(sys.stdin)
notebook = {"__name__": "__main__", "In": cells}
for cell in cells:
    exec(cell, notebook)
assert not {"torch", "transformers"} & {*sys.modules}
"""


def code_cells(path: Path) -> list[str]:
    """Return the code of a notebook as Python alone, without magic lines."""
    content = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    return [
        "\n".join(line for line in source.splitlines() if not line.startswith("%"))
        for source in sources
    ]


@pytest.mark.parametrize("name", ["10_theory", "70_paper_audit"])
def test_a_notebook_runs_without_torch(name):
    """Guards a lecturer's laptop: one import at the head of a table's module once asked for a
    gigabyte of libraries that no cell uses.
    """
    cells = code_cells(NOTEBOOKS / f"{name}.ipynb")
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=NOTEBOOKS,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout  # the cells were run
