"""The fidelity table: its code exists, its reasons are given, and params/paper keeps to it."""

import re
import shutil
from pathlib import Path
from pkgutil import resolve_name

import pytest

from docs import fidelity

ROOT = Path(__file__).parents[1]
ROWS = fidelity.fidelity().to_dict("records")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["printed"][:40])
def test_each_row_leads_to_code_and_gives_its_reason(row):
    """Bug: a function renamed, a deviation without a reason, a verdict of no kind."""
    assert (
        row["part"] and row["printed"] and row["where"] and row["verdict"] in fidelity.KINDS_OF_ROWS
    )
    assert row["why"] or row["verdict"] == "faithful"
    for name in row["code"].split():
        assert resolve_name(name) is not None
    assert bool(row["files"]) == bool(row["setting"])


def test_the_papers_files_keep_to_the_table():
    """Guards params/paper against what the table says of it, such as the networks for HEx-PHI."""
    assert fidelity.wrong_settings(ROOT / "params/paper") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("decode-main-vicuna-hex", "vicuna-hh/terminal", "vicuna-pku/terminal", "critic is runs"),
        ("decode-main-alpaca-pku", "keep: 32", "keep: 32\ndiversity: paper", "not half"),
        ("decode-main-beaver-pku", "keep: 32", "keep: 32\nthreshold: 0.5", "threshold is 0.5, not"),
        ("critic-alpaca-pku", "limit: 2000", "limit: null", "limit is not set, not 2000"),
        ("critic-alpaca-pku", "batch_size: 8", "batch_size: 9", "critics.terminal.batch_size is 9"),
        ("critic-beaver-pku", "features: o,", "features: m,",
         "critics.terminal.features is m, not o"),
        ("critic-llama-pku", "lr: 1.0e-4", "lr: 1.0e-3", "value.lr is 0.001, not 0.0001"),
        ("decode-main-llama-pku", "keep: 32", "keep: 32\ntemperature: 0.7",
         "temperature is 0.7, not left out"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_the_table_is_named(tmp_path, file, old, new, sentence):
    """Guards the comparison itself: no row that every file would pass."""
    shutil.copytree(ROOT / "params/paper", tmp_path / "paper")
    path = tmp_path / f"paper/{file}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    found = fidelity.wrong_settings(tmp_path / "paper")
    assert found and all(str(path) in said for said in found) and sentence in found[0]


def test_a_row_about_no_file_is_named(tmp_path):
    """Guards rows whose files were renamed, which nothing would contradict."""
    (tmp_path / "paper").mkdir()
    found = fidelity.wrong_settings(tmp_path / "paper")
    assert len(found) == sum(bool(row["files"]) for row in ROWS)


# --- docs/paper-to-code.md leads from the paper to the code ---------------------------------------


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
