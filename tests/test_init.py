"""Tests of the package's front door."""

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import igcore
from igcore import catalog


def test_every_public_name_exists_and_no_other():
    assert all(getattr(igcore, name) is not None for name in igcore.__all__)
    assert set(igcore.__all__) <= set(dir(igcore))
    assert not hasattr(igcore, "decoed")


def test_a_fresh_process_has_every_public_name_and_every_part_that_the_core_asks_for():
    """Bug: a name of the core that the catalogue lacks, or whose module has moved: unseen until
    a user draws a tree.
    """
    code = "".join(path.read_text() for path in Path(igcore.__file__).parent.rglob("*.py"))
    asked = {*re.findall(r'\broom\("(\w+)"\)', code)}
    assert {"Tree", "explore", "answer_rows", "rendered"} <= asked
    script = (
        "import igcore, igstudy; from igcore.catalog import METHODS, SCORERS, found, room; "
        f"[getattr(igcore, name) for name in igcore.__all__]; [room(name) for name in {asked}]; "
        "[found(entry) for entry in (*METHODS.values(), *SCORERS.values())]"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_without_igserve_its_names_are_one_sentence(monkeypatch):
    """Bug: with a wheel alone a guard inside `generate` ended in a ModuleNotFoundError."""
    monkeypatch.setattr(catalog, "PARTS", {})
    monkeypatch.setattr(catalog, "entry_points", lambda **_: [])
    monkeypatch.setitem(sys.modules, "igserve", None)  # as if it were not installed
    sentence = "this needs igserve; install it by pip install igserve"
    with pytest.raises(igcore.ParameterError, match=f"^{sentence}$"):
        catalog.room("answer_rows")
    with pytest.raises(AttributeError, match=f"^{sentence}$"):
        attrgetter("custom_generate")(igcore)
    assert not hasattr(igcore, "custom_generate")


def test_an_igserve_that_lies_beside_igcore_needs_no_entry_point(monkeypatch):
    """Bug: a checkout on the path, whose igserve no installer has registered."""
    monkeypatch.setattr(catalog, "PARTS", {})
    monkeypatch.setattr(catalog, "entry_points", lambda **_: [])
    monkeypatch.delitem(sys.modules, "igserve")
    assert catalog.room("answer_rows").__module__ == "igserve.generate"


# --- what needs no model starts without the libraries of models -----------------------------------


MODELS = {"torch", "transformers", "accelerate", "datasets"}
LIGHT = {  # what imports none of some libraries, and the modules of its imports
    "the theory": (
        {*MODELS, "sklearn"},
        "igcore.budget igstudy.paper igstudy.theory.homomorphism "
        "igstudy.theory.instances igstudy.report.statistics igstudy.figures.style",
    ),
    "the tables": (
        MODELS,
        "igstudy.paper.counts igstudy.report.critics igstudy.report.tables igstudy.report.verdicts "
        "igstudy.figures.critic igstudy.runs.params",
    ),
    "the command line": ({*MODELS, "pandas", "scipy"}, "igstudy.commands"),
}


@pytest.mark.parametrize("what", LIGHT)
def test_it_imports_no_models(what):
    """Guards a lecturer's laptop, and the seconds before each job of the tables: one import at the
    head of a module once brought in a gigabyte of libraries that no cell uses.
    """
    forbidden, modules = LIGHT[what]
    code = f"import sys, {', '.join(modules.split())}; print({{*sys.modules}} & {forbidden})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stdout + run.stderr
