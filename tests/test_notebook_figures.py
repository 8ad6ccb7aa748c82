"""Notebook 50 run cell by cell without a kernel: on an empty folder, and on imaginary runs."""

import json
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import synthetic
from mockpolicy import LetterCost

from igcore.errors import ParameterError, RunError
from igstudy.figures.style import unless_missing
from igstudy.report import statistics as metrics

ROOT = Path(__file__).parents[1]
SECTIONS = "tradeoff distributions critic".split()
CRITICS = {"critic"}
METHODS = ("base", "best-of-n", "best-of-n-lagrangian", "inferenceguard")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("params", "notebooks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "RESAMPLES", 99)
    monkeypatch.setattr("igcore.load_scorer", lambda name: LetterCost(lambda text: 0.0))
    return tmp_path


def executed(folder, monkeypatch, **parameters) -> tuple[set[str], int]:
    """Run the notebook; return the names of the pictures that it wrote, and how many figures it
    showed.
    """
    written, shown = set(), []
    monkeypatch.setattr(
        "igstudy.figures.style.save",
        lambda fig, stem: written.add(Path(stem).relative_to(folder / "figures").as_posix()),
    )
    monkeypatch.setattr("IPython.display.display", shown.append)
    notebook = nbformat.read(ROOT / "notebooks/50_figures.ipynb", as_version=4)
    first, *rest = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    given = "\n".join([first, *(f"{name} = {value!r}" for name, value in parameters.items())])
    namespace = {"In": [given]}
    for source in [given, *rest]:
        exec("\n".join(text for text in source.splitlines() if not text.startswith("%")), namespace)
    return written, len(shown)


def decoded(folder, name, records, finished=True) -> None:
    target = folder / "runs/x" / name
    target.mkdir(parents=True)
    (target / "params.json").write_text(json.dumps({"run": name}))
    lines = [
        line | {"response": f"{line['method']} says hello"} for line in records.to_dict("records")
    ]
    (target / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (target / "manifest.json").write_text("{}")


def imaginary(**fields) -> pd.DataFrame:
    lines = synthetic.records(6, METHODS, {"smollm2-raw": (1.0, 0.0)}).assign(**fields)
    more = {
        "finals": [[[0.5, 0.1 * k] for k in range(4)]] * len(lines),
        "strict": False,
        "cost_digest": "v2",
    }
    lines = lines.assign(**more, lagrange_multiplier=5.0, n_samples=4)
    return lines.astype(object).where(lines.notna(), None)


def said(capsys) -> list[str]:
    return [text for text in capsys.readouterr().out.splitlines() if text]


@pytest.mark.parametrize("profile", ["x", "small"])
def test_without_any_run_every_section_says_so(profile, folder, monkeypatch, capsys):
    """Bug: a traceback in the first cell, where nothing has been decoded yet."""
    written, shown = executed(folder, monkeypatch, profile=profile, figures="figures")
    found = said(capsys)
    assert not written and not shown
    assert len(found) == len(SECTIONS) and all(text.startswith("not run: ") for text in found)
    assert all(any(what in text for what in ("30_decode", "20_train_critic")) for text in found)


def test_runs_that_have_not_finished_are_named_and_the_others_drawn(folder, monkeypatch, capsys):
    """Bug: one stopped run kept every figure from being drawn."""
    decoded(folder, "decode-a", imaginary())
    decoded(folder, "decode-b", imaginary(policy="smollm2-chat"), finished=False)
    written, shown = executed(folder, monkeypatch, profile="x", figures="figures")
    found = said(capsys)
    assert written == set(SECTIONS) - CRITICS and shown == len(written)
    assert [text for text in found if "decode-b has not finished" in text][0].startswith(
        "left out: "
    )
    assert sum(text.startswith("not run: ") for text in found) == 1


def test_only_what_is_missing_is_forgiven(capsys):
    """Bug: a notebook that goes on after an error which no run would mend."""
    with unless_missing():
        raise RunError("there is nothing; run it first")
    assert capsys.readouterr().out == "not run: there is nothing; run it first\n"
    for error in (ParameterError("mistyped"), KeyError("column")):
        with pytest.raises(type(error)), unless_missing():
            raise error
