"""The fidelity table: its code exists, its reasons are given, and params/paper keeps to it."""

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
