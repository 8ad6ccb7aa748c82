"""Tests that docs/paper-to-code.md leads from the paper to the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper-to-code.md"

LINK = re.compile(r"\]\(([^)#\s]+)\)")
PLACE = re.compile(r"sections? \d|equations? \d|algorithm 1|appendix", re.IGNORECASE)


def table() -> list[list[str]]:
    """The cells of each row of the page's table: object, file, functions, place in the paper."""
    text = PAGE.read_text(encoding="utf-8").partition("## The rooms of the package")[0]
    lines = [line for line in text.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def functions() -> list[tuple[str, str]]:
    """Every (file, function) of the table, the file relative to the repository."""
    pairs = []
    for _, file, names, _ in table():
        path = (PAGE.parent / LINK.search(file)[1]).resolve().relative_to(ROOT)
        pairs += [(str(path), name) for name in re.findall(r"`([^`]+)`", names)]
    return pairs


def find(source: str, name: str) -> ast.AST | None:
    """Return the top-level function, or the method named Class.method, without importing it."""
    node = ast.parse(source)
    for part in name.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        if node is None:
            return None
    return node


@pytest.mark.parametrize(("path", "name"), functions())
def test_each_object_is_a_function_that_cites_the_paper(path, name):
    """Bug: a function renamed or moved and a reader of the paper sent to nothing, or a docstring
    that does not say which part of the paper it is.
    """
    file = ROOT / path
    assert file.is_file(), f"{path} is not there"
    node = find(file.read_text(encoding="utf-8"), name)
    assert isinstance(node, ast.FunctionDef), f"{path} has no function {name}"
    cited = " ".join((ast.get_docstring(node) or "").split())
    assert PLACE.search(cited), f"the docstring of {name} cites no place of the paper: {cited!r}"
