"""Tests of the notebooks as files; that they run is nbval's part."""

import html
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pandas as pd
import pytest
import yaml
from notebook_code import KINDS, PARAMS, kind
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from igcore import load_scorer
from igcore.errors import ParameterError
from igcore.scorers import as_scorer
from igstudy.report.statistics import STATUSES
from igstudy.runs import verify
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.paramfiles import OUTPUT, ParamFiles
from igstudy.runs.params import notebook_parameters, notebook_params

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARAMS_FILES = sorted(  # what papermill gives to notebooks, which claims are not
    path for path in (ROOT / "params").glob("*/*.yaml") if path.stem != "claims"
)
# they keep their outputs, because they are read in the repository
TEACHING = {path.stem for path in NOTEBOOKS if path.stem[0] in "017"}


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
    """Guards the things that papermill, nbval and GitHub trip over: kernel, cell ids, tags,
    widgets, stray outputs.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert "widget-view" not in path.read_text(encoding="utf-8")  # dead without its kernel
    assert len({c.id for c in notebook.cells}) == len(notebook.cells)
    assert parameters(notebook).source.startswith("# Parameters\n")
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(
        bool(c.outputs) <= (path.stem in TEACHING)
        and (path.stem in TEACHING or c.execution_count is None)
        for c in code
    )


def words_shown(path):
    """Return the words of all committed outputs but pictures."""
    texts = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text", ""))
            texts += [x for kind, x in output.get("data", {}).items() if "png" not in kind]
    return sorted(set(re.findall(r"\w+", html.unescape(re.sub(r"<[^>]*>", " ", " ".join(texts))))))


def test_no_output_shows_an_offensive_word():
    """Guards the reader: outputs of notebooks are masked. The scorer is not the one that masks."""
    toxicity = load_scorer("jigsaw-toxicity")
    words = sorted({word for path in NOTEBOOKS for word in words_shown(path)})
    scores = toxicity.score([""] * len(words), words, [True] * len(words))
    assert len(words) > 1000
    assert not [word for word, score in zip(words, scores, strict=True) if score > 0.8]
    assert toxicity.score([""], ["stupid"], [True])[0] > 0.8  # the test can fail


@pytest.mark.parametrize("name", PARAMS)
def test_the_defaults_of_a_notebook_are_the_profile_of_continuous_integration(name):
    """Guards nbval and `make quick`: what is tested is what the file in params/ci says."""
    given = yaml.safe_load((ROOT / f"params/ci/{PARAMS[name]}.yaml").read_text())
    known = defaults(read(name))
    assert given.items() <= known.items()
    kinds = {"20_train_critic": CriticParams, "30_decode": DecodeParams}
    if name in kinds:
        assert kinds[name](**known) == kinds[name](**given)


@pytest.mark.parametrize("path", PARAMS_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_no_params_file_sets_what_its_notebook_does_not_know(path):
    """Guards against a misspelling that papermill would only print."""
    given = yaml.safe_load(path.read_text())
    given |= given.pop("grid", {})
    for own in given.pop("points", {}).values():
        given |= own
    assert given.keys() <= defaults(read(KINDS[kind(path)])).keys()


def told(name, given, *rerun):
    """Return the namespace of a notebook after its parameters: its own cell, what papermill
    injects, and cells run by hand.
    """
    notebook = load_notebook_node(str(ROOT / f"notebooks/{name}.ipynb"))
    cells = parameterize_notebook(notebook, given).cells if given else notebook.cells
    tagged = [
        cell.source
        for cell in cells
        if {"parameters", "injected-parameters"} & set(cell.metadata.get("tags", []))
    ]
    namespace = {"In": ["", *tagged, *rerun]}
    for source in namespace["In"]:
        exec(source, namespace)
    return namespace


CLASSES = {
    "20_train_critic": "critic",
    "30_decode": "decode",
    "60_judge": "judge",
}  # the others: "output"


@pytest.mark.parametrize("path", PARAMS_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_params_file_comes_through_papermill_as_it_is(path):
    """Bug: a limit of a dozen prompts of the notebook's own sample in a run of a file that sets
    none.
    """
    name = KINDS[kind(path)]
    files = ParamFiles(path.parent.name, base=ROOT / "params")
    given = files.read(path) if kind(path) in OUTPUT else next(files.points(path))[1]
    sample = {
        "limit",
        "hardest",
        "split",
        "probe_fail_open",
        "workers",
        "pattern",
        "n_rollouts",
        "test_limit",
    }
    for left_out in (set(), sample):
        kept = {key: value for key, value in given.items() if key not in left_out}
        known = notebook_params(CLASSES.get(name, "output"), told(name, kept))
        assert known == type(known)(**kept)


@pytest.mark.parametrize(
    ("name", "single", "missing"),
    [
        ("20_train_critic", {"seed": 7}, "run"),
        ("30_decode", {"seed": 7}, "budget"),
        ("40_tables", {"pattern": "a*"}, "figures"),
        ("60_judge", {"seed": 7}, "run"),
    ],
)
def test_single_settings_change_what_the_notebook_sets(name, single, missing, capsys):
    """Bug: `-p seed 7` alone was "parameter budget is missing"; that must not come: a params
    file, which names its profile, that gets the example's values for what it leaves out.
    """
    kind = CLASSES.get(name, "output")
    own = notebook_params(kind, told(name, {}))
    assert notebook_params(kind, told(name, single)) == replace(own, **single)
    assert f"changed: {next(iter(single))}; all else is as this" in capsys.readouterr().out
    with pytest.raises(ParameterError) as caught:
        notebook_params(kind, told(name, single | {"profile": "mine"}))
    assert str(caught.value).startswith(f"parameter {missing} is missing; it has no default")


def test_by_hand_the_cell_that_ran_last_counts():
    """Bug: an own cell that is edited and run again taken for papermill's, or a misspelt line that
    haunts until the kernel ends.
    """
    own = parameters(read("30_decode")).source
    sample = notebook_params("decode", told("30_decode", {}))
    edited = own.replace("limit = 12", "limit = 3").replace("seed = 0\n", "seed = 7\n")
    assert notebook_params("decode", told("30_decode", {}, own, edited)) == replace(
        sample, limit=3, seed=7
    )
    with pytest.raises(ParameterError, match="unknown parameter 'limt'; did you mean 'limit'"):
        notebook_params("decode", told("30_decode", {}, own.replace("limit = 12", "limt = 3")))
    mended = told("30_decode", {}, own.replace("limit = 12", "limt = 3"), edited)
    assert notebook_params("decode", mended) == replace(sample, limit=3, seed=7)
    given = {
        "profile": "mine",
        "run": "x",
        "policy": "smollm2-raw",
        "methods": ["base"],
        "prompts": "mild",
        "budget": 0.5,
    }
    executed = told(
        "30_decode", given
    )  # what papermill left, opened again: first as it is, then with its own cell run anew
    assert notebook_params("decode", executed) == DecodeParams(**given)
    assert notebook_params("decode", told("30_decode", given, own)) == sample


def test_a_shard_without_prompts_ends_well(capsys):
    """Bug: of a run of one group in three shards two ended with KeyError: 'method', and the walk
    with them.
    """
    cells = [cell.source for cell in read("30_decode").cells if cell.cell_type == "code"]
    (at,) = [i for i, cell in enumerate(cells) if cell.startswith("result = decode_run(params)")]
    empty = SimpleNamespace(lines=[], scorers=[as_scorer(len, "cost"), None])
    names = {"result": empty, "pd": pd, "np": np, "STATUSES": STATUSES, "verify": verify}
    names["load_scorer"] = lambda name: None
    for cell in cells[at + 1 :]:
        exec(cell, names)
    assert "0 lines scored again, 0 problems" in capsys.readouterr().out
