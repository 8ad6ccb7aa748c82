"""Counts code lines, and fails above the caps of pyproject.toml, which only fall.

A code line holds code: no blank line, no comment and no docstring. ``python -m tests.caps`` prints
the counts.
"""

import ast
import io
import json
import sys
import tokenize
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of code lines of a module."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def in_modules(files: Iterable[Path]) -> int:
    """Return the code lines of modules."""
    return sum(code_lines(file.read_text(encoding="utf-8")) for file in files)


def in_text(text: str) -> int:
    """Return the lines that are neither blank nor a comment: of a cell, or of the Snakefile."""
    return sum(not line.strip().startswith("#") for line in text.splitlines() if line.strip())


def counts(root: Path) -> dict[str, int]:
    """Return the code lines of each part that has a cap."""
    package, core = root / "igcore", ["", "engine", "critic"]
    found = {
        "igcore": in_modules(package.rglob("*.py")),
        "core": sum(in_modules((package / room).glob("*.py")) for room in core),
        "igserve": in_modules((root / "igserve").rglob("*.py")),
        "tests": in_modules((root / "tests").rglob("*.py")),
    }
    joint = found["igcore"] + in_modules((root / "docs").glob("*.py"))
    joint += sum(
        in_modules((root / room).rglob("*.py")) for room in ("igserve", "igstudy", "benchmarks")
    )
    joint += in_text((root / "Snakefile").read_text(encoding="utf-8"))
    for notebook in (root / "notebooks").rglob("*.ipynb"):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                joint += in_text("".join(cell["source"]))
    return found | {"joint": joint}


def over(root: Path) -> list[str]:
    """Return a sentence for every part that is above its cap."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    caps, found = settings["tool"]["igcore"]["caps"], counts(root)
    return [
        f"{part} has {found[part]} code lines, and may have {cap}; remove as many as you add (the "
        "caps of pyproject.toml only fall)"
        for part, cap in caps.items()
        if found[part] > cap
    ]


if __name__ == "__main__":
    print(", ".join(f"{part} {lines}" for part, lines in counts(ROOT).items()), "code lines")
    sys.exit("\n".join(over(ROOT)) or None)
