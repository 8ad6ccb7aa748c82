"""Tests of the notebooks as files; that they run is nbval's part."""

from pathlib import Path

import nbformat
import pytest
import yaml

from igcore.critic_config import CriticParams
from igcore.decode_params import DecodeParams
from igcore.params import notebook_parameters

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEACHING = {"00_start_here", "10_theory", "70_paper_audit"}  # keep their outputs: they are read in the repository
PARAMS = {
    "20_train_critic": "critic-raw",
    "30_decode": "decode-raw",
    "40_tables": "tables",
    "45_ablations": "tables",
    "50_figures": "figures",
    "60_judge": "judge-scorers",
}


KINDS = {path.split("-")[0]: name for name, path in PARAMS.items()} | {
    "examples": "30_decode",
    "tables": "40_tables",
    "ablations": "45_ablations",
}


def kind(path):
    """The kind of a params file: its name up to the first hyphen."""
    return path.stem.split("-")[0]


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def parameters(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    return cell


def defaults(notebook):
    namespace = {"In": [parameters(notebook).source]}
    exec(parameters(notebook).source, namespace)
    return notebook_parameters(namespace)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_fit_for_papermill_and_git(path):
    """Guards the things that papermill, nbval and GitHub trip over: kernel, cell ids, tags, widgets, stray outputs."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert len({c.id for c in notebook.cells}) == len(notebook.cells)
    assert parameters(notebook).source.startswith("# Parameters\n")
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(bool(c.outputs) <= (path.stem in TEACHING) and (path.stem in TEACHING or c.execution_count is None) for c in code)
    assert not any(line.startswith(("def ", "class ")) for c in code for line in c.source.splitlines())


@pytest.mark.parametrize("name", PARAMS)
def test_the_defaults_of_a_notebook_are_the_profile_of_continuous_integration(name):
    """Guards nbval and `make quick`: what is tested is what the file in params/ci says."""
    given = yaml.safe_load((ROOT / f"params/ci/{PARAMS[name]}.yaml").read_text())
    known = defaults(read(name))
    assert given.items() <= known.items()
    kinds = {"20_train_critic": CriticParams, "30_decode": DecodeParams}
    if name in kinds:
        assert kinds[name](**known) == kinds[name](**given)


@pytest.mark.parametrize("path", sorted((ROOT / "params").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_no_params_file_sets_what_its_notebook_does_not_know(path):
    """Guards against a misspelling that papermill would only print."""
    given = yaml.safe_load(path.read_text())
    given |= given.pop("grid", {})
    assert given.keys() <= defaults(read(KINDS[kind(path)])).keys()


@pytest.mark.parametrize("path", sorted((ROOT / "params").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_params_file_sets_all_that_makes_the_sample_of_continuous_integration_small(path):
    """Guards against a default of the notebook that slips into a real run: a limit of a dozen prompts, say."""
    stem = PARAMS[KINDS[kind(path)]]
    given = yaml.safe_load(path.read_text())
    given |= given.pop("grid", {})
    assert given.keys() >= yaml.safe_load((ROOT / f"params/ci/{stem}.yaml").read_text()).keys()
