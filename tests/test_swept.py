"""Which profile writes what holds sweeps, and that no command makes a table poorer: notebooks 40
and 45 on imaginary runs.
"""

import itertools
from pathlib import Path

import pytest
from imaginaryruns import executed, outputs, workplace, written

from igcore import RunError
from igstudy.paper import MEASURED, compare, of_paper
from igstudy.runs import jobs
from igstudy.runs.profiles import left_by

ROOT = Path(__file__).parents[1]
TOGETHER = ("45-02b", "45-swept-tables")
SWEPT = of_paper(left_by("45_ablations", "ablations", ROOT).tables_beside)


@pytest.fixture
def repository(tmp_path):
    """A folder with a params file of two runs, one of which is an example, for the profiles
    ``main`` and ``sweeps``.
    """
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    for profile, kind in itertools.product(("main", "sweeps"), ("decode", "examples")):
        path = tmp_path / f"params/{profile}/{kind}-a.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"profile: {profile}\nrun: {kind}-a\ngrid: {{seed: [0, 1]}}\n")
    asked = "notebooks: {45_ablations: {beside: main, tables_beside: [paper_ndk]}}"
    (tmp_path / "params/sweeps/profile.yaml").write_text(asked)
    return tmp_path


def finish(repository, *names):
    for name in names:
        folder = repository / "runs" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")


def test_all_runs_of_both_must_have_finished(repository):
    """Bug: tables of the sweeps beside half of the main runs, or the other way round; half of the
    shards taken for a run.
    """
    with pytest.raises(
        RunError,
        match="2 runs have not finished, the first main/decode-a-seed-0; run `make reproduce`",
    ):
        jobs.check_finished("sweeps", repository)
    finish(
        repository, "main/decode-a-seed-0", "main/decode-a-seed-1.0-of-2", "sweeps/decode-a-seed-0",
        "sweeps/decode-a-seed-1",
    )  # fmt: skip
    assert jobs.unfinished("main", repository) == ["decode-a-seed-1"]
    assert not jobs.unfinished("sweeps", repository)
    with pytest.raises(RunError, match="1 runs have not finished, the first main/decode-a-seed-1;"):
        jobs.check_finished("sweeps", repository)
    finish(repository, "main/decode-a-seed-1.1-of-2")
    assert jobs.check_finished("sweeps", repository).tables_beside == ["paper_ndk"]
    with pytest.raises(RunError, match="45_ablations of profile 'main' has no `beside`; name"):
        jobs.check_finished("main", repository)


def test_no_order_of_commands_makes_a_table_poorer(tmp_path, monkeypatch, capsys):
    """Bug: `make reproduce` without the ablations' runs left 10 of 53 rows."""
    workplace(tmp_path, monkeypatch)
    for profile in ("small", "ablations"):
        written(tmp_path, profile)
    waiting = {
        f"figures/tables/paper_{table}.{end}" for table in SWEPT for end in ("csv", "md", "json")
    }
    assert waiting <= outputs(tmp_path, "ablations")
    executed(tmp_path, "ablations", cells=TOGETHER)
    left = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in tmp_path.glob("figures/**/*.*")
    }
    assert left.keys() == waiting
    (tmp_path / "runs/small/decode-raw/manifest.json").unlink()
    assert not waiting & outputs(tmp_path, "ablations")  # whose job deletes them before it starts
    executed(tmp_path, "ablations", cells=TOGETHER)
    said = "not run: 1 runs have not finished, the first small/decode-raw;"
    assert capsys.readouterr().out.count(said) == 1
    executed(tmp_path, "small", "40_tables", cells=("40-04", "40-15"))
    assert all((tmp_path / name).read_bytes() == content for name, content in left.items())
    every = {path.stem for path in tmp_path.glob("figures/tables/*.csv")}
    unswept = {f"paper_{table}" for table in MEASURED if table not in SWEPT}
    assert every - {Path(name).stem for name in left} == {"main", *unswept}


def test_what_waits_is_what_sweeps_change(tmp_path, monkeypatch):
    """Bug: a table that sweeps make richer among those that the main runs write alone."""
    workplace(tmp_path, monkeypatch)
    for profile in ("small", "ablations"):
        written(tmp_path, profile)
    alone, both = compare.load("small"), compare.load("small", "ablations")
    changed = {
        table
        for table in MEASURED
        if not compare.beside(table, alone).equals(compare.beside(table, both))
    }
    assert changed == set(SWEPT)


def test_one_profile_writes_each_of_them():
    """Bug: two profiles that write one file into figures, so that what the second knows replaces
    what the first knew.
    """
    asked = {
        path.parent.name: left_by("40_tables", path.parent.name, ROOT)
        for path in ROOT.glob("params/*/profile.yaml")
    }
    assert len(asked) == 9 and left_by("40_tables", "mine", ROOT) is None
    found = {profile: of_paper(made.tables) for profile, made in asked.items()}
    every = {name: list(MEASURED) for name in ("ci", "paper")}
    main = {"small": [name for name in MEASURED if name not in SWEPT]}
    assert {profile: names for profile, names in found.items() if names} == every | main
