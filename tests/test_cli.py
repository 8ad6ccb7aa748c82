"""Tests of ``python -m igstudy run``: which values reach a notebook, and what its errors name."""

import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from igcore.progress import progress
from igstudy import commands

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
    for value in ("010", "a: b: c", "*x"):
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
