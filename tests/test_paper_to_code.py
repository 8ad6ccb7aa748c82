"""Tests that docs/paper-to-code.md leads from the paper to the code."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "paper-to-code.md"
ROW = re.compile(r"^\|[^|]*\| \[(?P<path>[^]]+)\.py\][^|]*\|(?P<names>[^|]*)\|", re.MULTILINE)
PLACE = re.compile(r"section|equation|algorithm 1|appendix", re.IGNORECASE)
FUNCTIONS = [
    f"{row['path'].replace('/', '.')}:{name}"
    for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    for name in re.findall(r"`([^`]+)`", row["names"])
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_object_is_a_function_that_cites_the_paper(name):
    """Bug: a function renamed or moved and a reader of the paper sent to nothing, or a docstring
    that does not say which part of the paper it is.
    """
    assert PLACE.search(resolve_name(name).__doc__)


def test_the_reading_guide_names_code_of_its_files():
    """Bug: docs/reading.md names a function that was renamed or moved to another file."""
    for section in PAGE.with_name("reading.md").read_text(encoding="utf-8").split("\n### ")[1:]:
        path = re.search(r"\]\(\.\./(\S+\.py)\)", section)[1]
        source = (PAGE.parents[1] / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", section.partition("\n## ")[0]):
            assert name.endswith(".py") or re.search(rf"\b{name.split('.')[-1]}\b", source), name


def test_each_room_has_a_row():
    """Bug: the room of the paper's scorers, which no table of rooms named."""
    page, root = PAGE.read_text(encoding="utf-8"), PAGE.parents[1]
    for init in [*root.glob("igcore/*/__init__.py"), *root.glob("igstudy/*/__init__.py")]:
        assert f"| [{init.parent.relative_to(root).as_posix()}/](" in page
