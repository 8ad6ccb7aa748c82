"""Tests of finished runs as tables, and of the command line: which values reach a notebook, and
what its errors name. What `verify` finds: see its own tests.
"""

import dataclasses
import json
import math
import os
import sys
from dataclasses import replace

import nbformat
import pytest
import yaml
from mockpolicy import letter_cost, mock_policy
from mockruns import PARAMS, SCORERS, decode_into, lines
from nbformat.v4 import new_code_cell, new_notebook

from igcore import Guard, RunError, decode
from igcore.progress import progress
from igstudy import commands, linefile
from igstudy.linefile import RECORD_FIELDS
from igstudy.report import load as runs
from igstudy.runs import folders, records, verify
from igstudy.runs.decode_params import Settings


def left(folder, prompts, methods=("base",), shard=0, n_shards=1, finish=True, run=None):
    """Write what a run or a shard leaves."""
    about = {"run": run or folder.name.partition(".")[0], "n_shards": n_shards, "shard": shard}
    with folders.open_run(folder, about) as opened:
        for method in methods:
            for prompt_id in prompts:
                opened.append({"method": method, "prompt_id": prompt_id})
        opened.responses.touch()
        if finish:
            opened.finish({})


def test_tables_want_every_shard_and_only_one_sharding(tmp_path):
    """Guards a table made from two thirds of the prompts, or from some of them twice."""
    left(tmp_path / "run.0-of-2", "0", n_shards=2)
    with pytest.raises(RunError, match="run is there as shard 0 of 2; decode what is missing"):
        runs.load_runs("x", tmp_path)
    left(tmp_path / "run.1-of-2", "1", shard=1, n_shards=2)
    assert len(runs.load_runs("x", tmp_path)) == 2
    left(tmp_path / "run", "")
    with pytest.raises(RunError, match="another sharding"):
        runs.load_runs("x", tmp_path)


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a**", "", "nothing"])
def test_a_pattern_is_of_names(tmp_path, monkeypatch, pattern):
    """Bug: a NotImplementedError and a ValueError of the library, and runs of another profile."""
    for name in ("runs/x/run", "runs/y/run"):
        left(tmp_path / name, "0", finish=False)
    with pytest.raises(RunError, match="there is no run in"):
        runs.load_runs("x", tmp_path / "runs/x", pattern)


def test_lines_come_in_one_order_however_a_run_was_cut(tmp_path):
    """Bug: bootstrap intervals of a run in shards that differ in their third digit from those of
    the run in one piece.
    """
    both = ("best-of-n", "base")
    left(tmp_path / "run.0-of-2", "ace", both, n_shards=2)
    left(tmp_path / "run.1-of-2", "bd", both, shard=1, n_shards=2)
    left(tmp_path / "another", "yx", both)
    found = runs.load_runs("x", tmp_path)
    assert "".join(found["prompt_id"]) == "xyabcde" * 2
    assert found["method"].tolist() == ["base"] * 7 + ["best-of-n"] * 7


def test_the_manifest_is_the_sign_of_success(tmp_path):
    """Guards tables against half a run."""
    path = decode_into(tmp_path / "run")
    assert len(runs.load_runs("x", tmp_path)) == 30
    (path.parent / "manifest.json").unlink()
    with pytest.raises(RunError, match="has not finished"):
        runs.load_runs("x", tmp_path)
    with pytest.raises(RunError, match="there is no run in .* decode first"):
        runs.load_runs("x", tmp_path / "elsewhere")


def test_lines_know_the_name_of_their_run(tmp_path):
    """Guards the arms of an experiment: shards are of one run, and a name with a dot in it is not
    cut short.
    """
    for i in range(2):
        shard = tmp_path / f"decode-0.5.{i}-of-2"
        left(shard, [f"decode-0.5 {i}"], shard=i, n_shards=2, run="decode-0.5")
    left(tmp_path / "decode-0.2", ["decode-0.2 0"], run="decode-0.2")
    found = runs.load_runs("x", tmp_path)
    assert found[["prompt_id", "run"]].to_records(index=False).tolist() == [
        ("decode-0.2 0", "decode-0.2"),
        ("decode-0.5 0", "decode-0.5"),
        ("decode-0.5 1", "decode-0.5"),
    ]


def test_methods_come_in_the_order_of_the_table_whatever_the_folders_are_called(tmp_path):
    """Bug: a table began with re-control because its run's folder came first in the alphabet."""
    methods = {"a": "re-control", "b": "base", "c": "of an older version", "d": "args"}
    for name, method in methods.items():
        left(tmp_path / name, [name], [method])
    assert runs.load_runs("x", tmp_path)["method"].tolist() == [
        "base", "args", "re-control", "of an older version",
    ]  # fmt: skip
    assert runs.load_runs("x", tmp_path, pattern="[ab]")["method"].tolist() == [
        "base",
        "re-control",
    ]
    with pytest.raises(RunError, match="no run in .*decode-main"):
        runs.load_runs("x", tmp_path, pattern="decode-main-*")


def test_what_has_not_finished_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    """Bug: one stopped run in a folder of many kept every table from being written; shards counted
    as runs of their own.
    """
    monkeypatch.setattr(runs, "root", lambda: tmp_path)
    empty = runs.load_finished("x")
    assert (
        not len(empty) and not capsys.readouterr().out and {"policy", "method", "run"} <= set(empty)
    )
    place = tmp_path / "runs/x"
    left(place / "b", "b", ["args"])
    left(place / "a.0-of-2", "a", n_shards=2)
    left(place / "a.1-of-2", "c", shard=1, n_shards=2)
    left(place / "c", "d", finish=False)
    found = runs.load_finished("x")
    assert found["run"].tolist() == ["a", "a", "b"] and found["method"].tolist() == [
        "base",
        "base",
        "args",
    ]
    (why,) = capsys.readouterr().out.splitlines()
    assert why.startswith("left out: the run ") and "c has not finished" in why


def test_regimes_are_read_only_when_they_are_named(tmp_path):
    """Bug: answers of the claims' arms stood in the main table, as a policy of their own."""
    for name in ("decode-raw", "regime-mild"):
        left(tmp_path / name, [name])
    assert runs.load_runs("x", tmp_path)["run"].tolist() == ["decode-raw"]
    assert runs.load_runs("x", tmp_path, pattern="regime-*")["run"].tolist() == ["regime-mild"]


def test_compare_and_errors_of_the_command_line(tmp_path, capsys):
    path = decode_into(tmp_path / "run")
    assert commands.main(["compare", str(path), str(path)]) == 0
    other = decode_into(tmp_path / "other", dataclasses.replace(PARAMS, seed=1))
    assert commands.main(["compare", str(path), str(other)]) == 1
    assert "seed differs" in capsys.readouterr().err
    asked = tmp_path / "asked.yaml"
    asked.write_text("{profile: x, run: r, policy: p, prompts: mild, methods: [base], budget: 1}")
    command = ["verify", str(tmp_path / "none.jsonl"), "--params", str(asked)]
    assert commands.main(command) == commands.ERROR
    assert "params.json cannot be read" in capsys.readouterr().err


# --- notebooks from the command line --------------------------------------------------------------


def written_notebook(folder, source):
    """Return a notebook with a cell of parameters and one with this source."""
    cells = [nbformat.v4.new_code_cell("# Parameters\nn = 1\nrun = None\nshard = 0\nm = None")]
    cells.append(nbformat.v4.new_code_cell(source))
    cells[0].metadata["tags"] = ["parameters"]
    book = nbformat.v4.new_notebook(cells=cells)
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbformat.write(book, folder / "in.ipynb")
    (folder / "params.yaml").write_text("n: 3\n")
    return ["run", str(folder / "in.ipynb"), str(folder / "new/out.ipynb")]


def test_a_notebook_runs_with_a_params_file_and_shows_its_progress(tmp_path, capfd):
    """Guards the long cell: what it prints must be seen while papermill runs."""
    command = written_notebook(tmp_path, "print('the parameter is', n)")
    assert commands.main([*command, "-f", str(tmp_path / "params.yaml")]) == 0
    printed = capfd.readouterr().out
    assert "the parameter is 3" in printed and printed.endswith("out.ipynb is complete\n")


def test_a_point_cannot_write_a_statement(tmp_path, capsys):
    """Bug: papermill writes the name of a setting into a cell as it is, and those of points were
    not compared with the notebook's: a params file could run any code.
    """
    command = written_notebook(tmp_path, "print(n)")
    statement = f"n = 1; open({str(tmp_path / 'made')!r}, 'w'); m"
    params = {"run": "r", "n": 3, "points": {"a": {statement: 0}}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    assert commands.main([*command, "-f", str(tmp_path / "params.yaml")]) == commands.ERROR
    assert "unknown parameter of" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_runs_of_a_file_share_a_kernel(tmp_path, capfd):
    """Bug: every point of a grid started a kernel and imported all anew, for seconds each; and a
    point that got the settings of another.
    """
    source = "import os\nprint(run, n, shard, os.getpid())"
    command = written_notebook(tmp_path, source)
    params = {"run": "r", "n": 3, "grid": {"n": [1, 2]}, "points": {"": {}, "x": {"m": 0}}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    given = ["-f", str(tmp_path / "params.yaml"), "-p", "shard", "1"]
    assert commands.main([*command, *given]) == commands.ERROR
    assert "params.yaml makes 4 runs, and" in capfd.readouterr().err
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params | {"grid": {"n": 1}}))
    # in its own words: the file can be read
    assert commands.main([*command, *given]) == commands.ERROR
    assert capfd.readouterr().err.startswith(f"error: {tmp_path}/params.yaml: parameter grid")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    command[2] = str(tmp_path / "new/{run}.ipynb")
    assert commands.main([*command, *given]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("r")]
    assert [line[:3] for line in lines] == [
        ["r-n-1", "1", "1"], ["r-n-2", "2", "1"], ["r-x-n-1", "1", "1"], ["r-x-n-2", "2", "1"],
    ]  # fmt: skip
    (pid,) = {line[3] for line in lines}
    with pytest.raises(ProcessLookupError):  # it ends with the command
        os.kill(int(pid), 0)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{x[0]}.ipynb" for x in lines}


def test_an_error_in_a_notebook_is_one_sentence(tmp_path, capfd):
    """Guards the reader of a log: not the 60 lines of a traceback, and no success."""
    command = written_notebook(
        tmp_path, "import igcore\nraise igcore.ParameterError('n is 1; give 2')"
    )
    assert commands.main(command) == commands.ERROR
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: n is 1; give 2 (ParameterError; ")


def test_an_interrupt_is_one_sentence(tmp_path, capsys, monkeypatch):
    """Guards a stop by hand: it must say that nothing is lost, and end with a status of failure."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("papermill.execute_notebook", interrupted)
    assert commands.main(written_notebook(tmp_path, "pass")) == commands.ERROR
    assert capsys.readouterr().err.startswith("error: stopped; every finished line is kept")


# --- lines of a run -------------------------------------------------------------------------------


CONFIG = Settings(budget=0.5, n_samples=4, block_size=3, max_new_tokens=6)


def test_a_line_has_the_columns_that_a_table_of_none_has():
    """Bug: a notebook without runs fails for a column that it would have had."""
    assert tuple(lines(methods=["base"])[0]) == RECORD_FIELDS


def test_a_number_that_is_not_finite_becomes_none():
    """Bug: NaN in a file, which is no JSON, from a perplexity or a scorer that failed."""
    guard = Guard(mock_policy(), SCORERS["letters"], SCORERS["vowels"], CONFIG)
    (response,) = decode("base", guard, ["ab"])
    odd = replace(
        response, cost=math.nan, z_trace=[0.5, -math.inf], finals=[[math.inf, None]],
        trace=[{"kl": math.nan, "round": 0}],
    )  # fmt: skip
    line = records.record(odd, "base", guard, seed=0)
    assert (line["cost"], line["z_trace"], line["z_final"], line["finals"]) == (
        None, [0.5, None], None, [[None, None]],
    )  # fmt: skip
    assert line["trace"] == [{"kl": None, "round": 0}]
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_the_digest_covers_all_but_seconds():
    """Guards every field against a change by accident; seconds differ whenever the same work is
    done again.
    """
    line = lines(methods=["base"])[0]
    free = {
        name
        for name in RECORD_FIELDS
        if linefile.line_digest(line | {name: "changed"}) == line["digest"]
    }
    assert free == {"generate_s", "cost_s", "reward_s", "critic_s", "score_s", "digest"}


def test_costs_at_the_end_only_are_recorded_and_checked_as_such():
    """Guards the line of E_critic: its accounting is `terminal` whatever was set, and its path is
    the final cost alone.
    """
    written = [
        x
        for d in (0.5, 1.0, 2.0)
        for x in lines(d, ["inferenceguard-critic"], accounting="peak", threshold=0.3)
    ]
    answered = [x for x in written if x["status"] == "verified_safe"]
    assert len(answered) > 4 and {
        (x["accounting"], x["threshold"], x["miss"]) for x in written
    } == {("terminal", 0.3, 0.01)}
    for line in answered:
        assert line["z_trace"] == [line["budget"]] * len(line["block_ends"]) + [
            line["budget"] - line["cost"]
        ]
        assert line["peak_cost"] == max(
            letter_cost(line["response"][:end]) for end in line["grid_ends"]
        )
        assert list(verify.rescored([line], *SCORERS.values())) == []


# --- which values reach a notebook from the command line ------------------------------------------

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
CELL = "# Parameters\nprofile = 'ci'\nrounds = 2\nweight: float = 0.5\nhalf = weight / 2"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notebook(place, *sources, tag="parameters", kernel=KERNEL):
    """Write a notebook whose first cell has a tag, and return its name."""
    cells = [new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = [tag] if tag else []
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), place / "n.ipynb")
    return "n.ipynb"


def refused(capsys, *arguments):
    """Return the one line that a command ends with."""
    assert commands.main(["run", *arguments]) == commands.ERROR
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("error: ")]) == 1
    return said[-1].removeprefix("error: ")


def test_values_that_no_cell_takes_are_refused(place, capsys):
    """Bug: a notebook that had lost its tag ran its own sample instead of the params file; and a
    misspelt name changed nothing.
    """
    name = notebook(place, CELL, tag="")
    said = refused(capsys, name, "o.ipynb", "-p", "rounds", "3")
    assert "'rounds'; allowed: none; its cell with the tag 'parameters', or docs" in said
    name = notebook(place, CELL)
    (place / "p.yaml").write_text("profile: x\nround: 3\n")
    for given in (["-p", "round", "3"], ["-f", "p.yaml"]):
        said = refused(capsys, name, "o.ipynb", *given)
        assert "unknown parameter of n.ipynb 'round'; did you mean 'rounds'" in said
    (place / "p.yaml").write_text("rounds: 3\n")
    said = refused(capsys, name, "o.ipynb", "-f", "p.yaml")
    assert said.startswith("p.yaml sets no profile; a params file is whole, and -p alone")
    assert not (place / "o.ipynb").exists()


def test_single_values_change_what_the_notebook_sets(place, capsys):
    """Bug: of notebook 30 with one value changed, "parameter budget is missing"."""
    look = "print('seen:', profile, rounds, weight, half)"
    name = notebook(place, CELL, look)
    assert (
        commands.main(["run", name, "o.ipynb", "-p", "rounds", "3", "-p", "profile", "mine"]) == 0
    )
    assert "seen: mine 3 0.5 0.25" in capsys.readouterr().out
    assert nbformat.read(place / "o.ipynb", as_version=4).cells[1].source.startswith("# Parameters")


def test_a_setting_that_the_cell_leaves_out_is_taken(place, capfd):
    """Bug: `stop` in a params file was refused, as the cell of notebook 30 did not have it. A
    notebook that has lost its tag still takes nothing.
    """
    look = "from igstudy.runs.params import notebook_params\n"
    look += 'print("seen:", notebook_params("output", globals()).pattern)'
    name = notebook(place, "# Parameters\nprofile = 'ci'\nfigures = 'f'", look)
    assert commands.main(["run", name, "o.ipynb", "-p", "pattern", "a*"]) == 0
    out, err = capfd.readouterr()
    assert "seen: a*" in out and "unknown" not in err
    name = notebook(place, CELL, look, tag="")
    assert "'pattern'; allowed: none" in refused(capfd, name, "o.ipynb", "-p", "pattern", "a*")


def test_a_bare_assertion_is_named_by_its_notebook(place, capsys):
    """Bug: "error:  (AssertionError; o.ipynb shows where)", without a word."""
    name = notebook(place, CELL, "x = 1\n\nassert rounds > 2")
    said = refused(capsys, name, "o.ipynb", "-p", "rounds", "1")
    assert said == "a cell failed (AssertionError; o.ipynb shows where)"


def test_errors_name_what_is_wrong(place, capsys):
    """Bug: a missing notebook, an unknown kernel and an output that cannot be written were all
    "params/x.yaml cannot be read".
    """
    (place / "p.yaml").write_text("profile: x\n")
    (place / "broken.ipynb").write_text('{"cells": [')
    (place / "other.ipynb").write_text('{"worksheets": []}')
    for path in ("gone.ipynb", "broken.ipynb", "other.ipynb"):
        said = refused(capsys, path, "o.ipynb", "-f", "p.yaml")
        assert said.startswith(f"notebook {path} cannot be read (") and "p.yaml" not in said
    name = notebook(place, CELL, kernel=KERNEL | {"name": "my-venv"})
    said = refused(capsys, name, "o.ipynb", "-f", "p.yaml")
    assert said.startswith("unknown kernel of n.ipynb 'my-venv'; allowed: ")
    name = notebook(place, CELL)
    for path in ("p.yaml/o.ipynb", "/proc/nowhere/o.ipynb"):
        said = refused(capsys, name, path, "-f", "p.yaml")
        assert said.startswith(f"cannot write in {path} (")
    for value in ("a: b: c", "*x"):
        said = refused(capsys, name, "o.ipynb", "-p", "rounds", value)
        assert said.startswith(f"-p rounds {value!r} cannot be read (line 1: ")


# --- progress, where nobody watches and where somebody does ---------------------------------------


def test_a_log_gets_few_whole_lines(capsys, monkeypatch):
    """Guards a cluster's log against thousands of redrawn bars on one endless line."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("VSCODE_PID", raising=False)
    bar = progress(1000, "decode-raw")
    for _ in range(1000):
        bar.update()
    bar.close()
    out, err = capsys.readouterr()
    assert "\r" not in out and err == ""
    assert out.startswith("decode-raw:   0%") and 2 <= out.count("\n") <= 4 and "1000/1000" in out


def test_somebody_watching_gets_a_live_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = progress(3, "x")
    bar.close()
    assert capsys.readouterr().out == ""
