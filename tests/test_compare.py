"""What is said of a walk beside the committed tables and records, and what publishing copies."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from synthetic import record

from docs.compare import compare_profile, compared_answers, differing_cells, publish
from docs.pages import PAGES
from docs.records import pack
from igcore.errors import ParameterError, RunError
from igstudy.linefile import sealed
from igstudy.provenance import UNPACKED

ROOT = Path(__file__).parents[1]
TABLE = {"method": ["base", "ours"], "reward": [0.5, None], "unsafe": [3, 0], "train_s": [9.0, 8.0]}


def table(folder: Path, name: str, **columns) -> Path:
    path = folder / "figures/tables" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(TABLE | columns).to_csv(path, index=False)
    return path


def write(folder: Path, **changes) -> None:
    """Write three answers of a run, the second of which is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {"trace": [], "cost_digest": "old", "tokens": [3]}
    lines = [record(prompt_id=f"p{k}") | known for k in range(3)]
    lines[1] |= changes
    text = "".join(json.dumps(sealed(line)) + "\n" for line in lines)
    (folder / "responses.jsonl").write_text(text)
    (folder / "manifest.json").write_text("{}")


@pytest.fixture
def base(tmp_path):
    """A repository with a committed table and the records behind it, and a walk that is equal."""
    for folder in (tmp_path, tmp_path / "runs/small"):
        table(folder, "main")
    write(tmp_path / "runs/small/decode-raw")
    pack("small", tmp_path)
    return tmp_path


def test_a_cell_that_differs_is_found_with_its_distance(tmp_path):
    """Bug: seconds in the list of what another processor changed, and an empty cell taken for a
    number.
    """
    kept = table(tmp_path / "kept", "main")
    assert differing_cells(table(tmp_path / "a", "main", train_s=[1.0, 2.0]), kept) == {}
    other = table(tmp_path / "b", "main", reward=[0.5000004, None], unsafe=[5, 0])
    moved = differing_cells(other, kept)
    assert [float(f"{apart:.3g}") for apart in moved.values()] == [4e-7, 2]
    assert list(moved)[1] == "main.csv, line 2, unsafe: 5, not 3"
    other = table(tmp_path / "c", "main", method=["base", "mine"], reward=[0.5, 1.0])
    found = differing_cells(other, kept)
    assert list(found.values()) == [float("inf")] * 2
    (shape,) = differing_cells(table(tmp_path / "d", "main", more=[1, 2]), kept)
    assert "(2, 5) rows and columns, not (2, 4)" in shape


def test_an_equal_walk_is_said_to_be_equal(base):
    """Guards the end of `make reproduce`: scores in their last digits, other seconds and another
    hash of a scorer are no difference.
    """
    write(base / "runs/small/decode-raw", reward=0.5000004, cost_s=7.0, cost_digest="new")
    runs, first, second, last = compare_profile("small", base)
    assert runs == "1 runs decoded here, 0 read from records"
    assert "1 tables" in first and "1 equal" in first and "0 differ" in first
    assert "3 answers" in second and "3 equal" in second and "0 differ" in second
    assert "runs/small/compared.txt has every difference; no committed file" in last


def test_what_differs_is_listed_with_its_near_ties(base):
    """Bug: `make test` failed after `make reproduce` on another processor, and nothing said that
    three answers of thousands differ, after near ties.
    """
    write(base / "runs/small/decode-raw", tokens=[7], response="another", near_ties=1)
    table(base / "runs/small", "main", unsafe=[2, 0])
    table(base / "runs/small", "new")  # not committed
    committed = {path: path.read_bytes() for path in (base / "figures").rglob("*.*")}
    _, first, second, third, _ = compare_profile("small", base)
    assert first.endswith("0 within 1e-05, 1 differ (main)")
    assert "2 equal" in second and "1 differ, 1 of these after near ties" in second
    assert third == "  decode-raw base p1 (near ties: 1)"
    every = (base / "runs/small/compared.txt").read_text()
    assert "main.csv, line 2, unsafe: 2, not 3\n" in every
    assert "decode-raw base p1: response is 'another', not 'an answer'" in every
    assert {path: path.read_bytes() for path in (base / "figures").rglob("*.*")} == committed


def test_records_without_texts_are_compared_by_digest(base):
    """Bug: `make reproduce` called 960 equal answers to harmful requests different."""
    run = base / "runs/small/decode-raw"
    (run / "params.json").write_text('{"prompts": "strongreject"}')
    pack("small", base)
    assert [found for _, found in compared_answers("small", base).values()] == [[], [], []]
    write(run, response="another")
    assert sum(bool(found) for _, found in compared_answers("small", base).values()) == 1


def test_records_are_not_compared_with_themselves(base):
    """Bug: a thousand answers that were read from the records, counted as equal to the records."""
    (base / "runs/small/decode-raw" / UNPACKED).touch()
    runs, _, answers, _ = compare_profile("small", base)
    assert runs == "0 runs decoded here, 1 read from records"
    assert answers.startswith("0 answers beside the committed ones")


def test_shards_are_read_and_missing_answers_are_not_compared(base):
    """Guards a walk in shards, whose folders have other names, and one of fewer prompts."""
    run = base / "runs/small/decode-raw"
    run.rename(run.with_name("decode-raw.0-of-2"))
    assert compared_answers("small", base).keys() == {f"decode-raw base p{k}" for k in range(3)}
    (run.with_name("decode-raw.0-of-2") / "responses.jsonl").write_text("")
    assert compared_answers("small", base) == {}


def test_publishing_copies_what_the_walk_left(base):
    """Guards committed tables against those of a profile of which none are committed, which have
    the same names.
    """
    new = table(base / "runs/small", "main", unsafe=[2, 0])
    (base / "docs").mkdir()
    for page in PAGES:
        (base / page).write_text("<!-- table main -->\n<!-- end -->\n")
    for name in ("main", "other"):
        new.with_name(f"{name}.md").write_text("| a |")
        new.with_name(f"{name}.json").write_text('{"runs": {}}')
    sources = base / "figures/tables/sources.json"
    sources.write_text('{"harm": {"runs": {}}}')
    publish("small", base)
    assert (base / "figures/tables/main.csv").read_bytes() == new.read_bytes()
    # Markdown that a page shows, and the sources of all tables in one file
    assert {path.name for path in sources.parent.glob("*.md")} == {"main.md"}
    assert {*json.loads(sources.read_text())} == {"harm", "main", "other"}
    assert [*sources.parent.glob("*.json")] == [sources]
    with pytest.raises(RunError, match="^runs/tune has no figures; walk the profile first"):
        publish("tune", base)
    table(base / "runs/ci", "main", unsafe=[0, 0])
    with pytest.raises(ParameterError, match="^unknown profile with committed tables 'ci'"):
        publish("ci", base)
    assert (base / "figures/tables/main.csv").read_bytes() == new.read_bytes()


def test_a_walk_that_cannot_be_compared_ends_well(base):
    """Bug: information at the end of a walk that makes the whole command fail."""
    (base / "notebooks").mkdir(), (base / "params").mkdir()
    (base / "runs/small/decode-raw/responses.jsonl").write_text("no line\n")
    command = [sys.executable, "-m", "docs.compare", "small"]
    here = {"cwd": base, "env": {"PYTHONPATH": str(ROOT)}}
    said = subprocess.run(command, **here, capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.startswith("not compared: line 1 of ")
