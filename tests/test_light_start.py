"""Tests that what needs no model starts without the libraries of models."""

import subprocess
import sys

import pytest

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
