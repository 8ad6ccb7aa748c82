"""The functions of a notebook, so that tests can call them without running the notebook."""

import ast
import json
from functools import cache
from pathlib import Path
from types import ModuleType

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# notebook -> the params file of continuous integration, whose settings are its defaults
PARAMS = {
    "20_train_critic": "critic-raw",
    "30_decode": "decode-raw",
    "40_tables": "tables",
    "45_ablations": "tables",
    "50_figures": "figures",
    "60_judge": "judge-scorers",
}
# kind of a params file -> its notebook
KINDS = {path.split("-")[0]: name for name, path in PARAMS.items()} | {
    "examples": "30_decode",
    "regime": "30_decode",
    "claims": "80_claims",
    "tables": "40_tables",
    "ablations": "45_ablations",
}
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@cache
def notebook_code(name: str) -> ModuleType:
    """Return what a notebook imports, defines with `def` or `class`, and names in capitals.

    Parameters
    ----------
    name : str
        The notebook's name without its ending, such as ``"45_ablations"``.
    """
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    module = ModuleType(name)
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        source = "".join(line for line in cell["source"] if not line.startswith("%"))
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if isinstance(node, KEPT) or is_constant(node)]
        exec(compile(tree, f"{name}.ipynb", "exec"), module.__dict__)
    return module


def is_constant(node: ast.stmt) -> bool:
    """Say whether a statement gives a value to a name in capitals."""
    return isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Name) and target.id.isupper() for target in node.targets
    )


def kind(path: Path) -> str:
    """Return the kind of a params file: its name up to the first hyphen."""
    return path.stem.split("-")[0]
