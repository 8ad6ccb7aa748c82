"""Tests of the notebooks as files; that they run is nbval's part."""

import ast
import html
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from igcore import load_scorer
from igcore.errors import ParameterError
from igstudy.judge import JudgeParams
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.paramfiles import read_recipe
from igstudy.runs.params import OutputParams, notebook_params

ROOT = Path(__file__).parents[1]
# notebook -> the params file of continuous integration, whose settings are its defaults
PARAMS = {"20_train_critic": "critic-raw", "30_decode": "decode-raw", "60_judge": "judge-scorers"}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def parameters(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    return cell


def defaults(notebook):
    """Return the parameters of a notebook as its own cell sets them."""
    cell = ast.parse(parameters(notebook).source)
    return {node.targets[0].id: ast.literal_eval(node.value) for node in cell.body}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_fit_for_papermill_and_git(path):
    """Guards the things that papermill, nbval and GitHub trip over: kernel, cell ids, tags,
    widgets, stray outputs; and a reader who would learn after an hour what it needs.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert "widget-view" not in path.read_text(encoding="utf-8")  # dead without its kernel
    assert len({c.id for c in notebook.cells}) == len(notebook.cells)
    assert parameters(notebook).source.startswith("# Parameters\n")
    about = notebook.cells[0].source
    assert [about.count(f"\n* **{word}** ") for word in ("Needs", "Takes", "Leaves")] == [1, 1, 1]
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert any(c.outputs for c in code)  # it can be read in the repository
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))


def words_shown(path):
    """Return the words of all committed outputs but pictures."""
    texts = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text", ""))
            texts += [x for kind, x in output.get("data", {}).items() if "png" not in kind]
    return sorted(set(re.findall(r"\w+", html.unescape(re.sub(r"<[^>]*>", " ", " ".join(texts))))))


def test_no_output_shows_an_offensive_word():
    """Guards the reader: outputs of notebooks are masked."""
    offensive = load_scorer("offensive-language")
    words = sorted({word for path in NOTEBOOKS for word in words_shown(path)})
    scores = offensive.score([""] * len(words), words, [True] * len(words))
    assert len(words) > 1000
    flagged = [word for word, score in zip(words, scores, strict=True) if score > 0.8]
    assert flagged == ["ho"]  # what a critic reads: the latents h and o
    assert offensive.score([""], ["stupid"], [True])[0] > 0.8  # the test can fail


@pytest.mark.parametrize("name", [*PARAMS, "40_tables", "45_ablations", "50_figures"])
def test_the_defaults_of_a_notebook_are_the_profile_of_continuous_integration(name):
    """Guards nbval and `make quick`: what is tested is what the file in params/ci says."""
    given = {"profile": "ci", "figures": "runs/ci/figures"}
    if name in PARAMS:
        given = read_recipe(ROOT / f"params/ci/{PARAMS[name]}.yaml")
    known = defaults(read(name))
    kinds = {"20": CriticParams, "30": DecodeParams, "60": JudgeParams}
    checked = kinds.get(name[:2], OutputParams)
    assert checked(**known) == checked(**given)


def test_single_settings_change_what_the_notebook_sets(capsys):
    """Bug: `-p seed 7` alone was "parameter budget is missing"; that must not come: a params
    file, which names its profile, that gets the example's values for what it leaves out.
    """
    own = parameters(read("30_decode")).source
    sample = notebook_params("decode", {"In": [own]})
    single = notebook_params("decode", {"In": [own, "# Parameters\nseed = 7"]})
    assert single == replace(sample, seed=7)
    assert "changed: seed; all else is as this" in capsys.readouterr().out
    with pytest.raises(ParameterError, match="parameter budget is missing; it has no default"):
        notebook_params("decode", {"In": [own, "# Parameters\nprofile = 'mine'"]})
    edited = own.replace("limit = 6", "limit = 3")
    misspelt = own.replace("limit = 6", "limt = 3")
    assert notebook_params("decode", {"In": [own, edited]}) == replace(sample, limit=3)
    assert notebook_params("decode", {"In": [misspelt, edited]}) == replace(sample, limit=3)
    with pytest.raises(ParameterError, match="unknown parameter 'limt'; did you mean 'limit'"):
        notebook_params("decode", {"In": [own, misspelt]})


# --- what the text says of the stored outputs -----------------------------------------------------


def outputs(name):
    """Return the text of the stored outputs of a notebook, cell by cell, without tags."""
    found = []
    for cell in read(name).cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/html") or data.get("text/plain", "")
            found.append(html.unescape(re.sub(r"<[^>]*>", "\n", text)))
    return found


@pytest.mark.parametrize("name", ["00_start_here", "02_the_budget", "05_your_own"])
def test_the_first_notebooks_mask_nothing(name):
    """Bug: the first demonstration was a false alarm of a learned cost, hidden by a mask."""
    assert "█" not in (ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8")


def test_what_the_first_notebook_says_of_its_answers():
    """Guards sentences that a new run of the notebook would make untrue."""
    said = "\n".join(cell.source for cell in read("00_start_here").cells)
    plain, both, *_ = outputs("00_start_here")
    assert "The cost is 2: the answer has two numbers" in said
    assert plain.endswith("cost 2, budget 0\n")
    unguarded, guarded = both.split("with the guard")[1].strip().split("\n", 1)
    assert len(re.findall(r"\d+", unguarded)) == 2
    assert "The guarded answer has no number" in said
    assert not re.search(r"\d", guarded)
    assert "before it has sampled 256 tokens" in said
    shown = "\n".join(outputs("00_start_here"))
    assert "abstained after 256 tokens" in shown
    assert "block 1, round 1: over budget" in shown  # why the two answers differ
    assert len(set(re.findall(r"\S+ left", shown))) == 1  # "0 everywhere"
    assert "one hour" in shown and 'the words "one hour"' in said
    needed = re.findall(r"budget \d: verified_safe with cost (\d) after (\d+) tokens", shown)
    assert [cost for cost, _ in needed] == ["0", "1", "2", "2"]  # "one or two new numbers"
    assert max(int(tokens) for _, tokens in needed[1:]) < int(needed[0][1])  # "fewer tokens"


def test_what_the_notebook_of_budgets_says_of_its_numbers():
    """Guards the same, where a text says which verdicts differ and what a weight loses."""
    shown = "\n".join(outputs("02_the_budget"))
    assert re.search(r"peak +total 0\.29: over the budget", shown)
    assert re.search(r"terminal +total 0\.19: within the budget", shown)
    assert "refuses 1 of 24 acceptable answers\nlets 0 of 8 unacceptable" in shown
    tuned = float(re.search(r"tuned on all 24 prompts: λ = (.+)", shown)[1])
    rewards = dict(re.findall(r"λ = +(\S+): .*mean reward (\S+)", shown))
    within = re.search(r"a budget +: .*mean reward (\S+)", shown)[1]
    assert float(rewards[f"{tuned:g}"]) < float(within)
    first = re.search(r"d = +0: 49% .*: (\S+)%\n", shown)[1]
    assert float(first) > 100 * (1 - 0.49) ** 4  # "more abstentions than the formula"
    found, predicted = re.search(r"of 120 answers, (\S+)%; predicted: (\S+)%", shown).groups()
    assert predicted == first and abs(float(found) - float(first)) < 5  # "a few points"


def test_what_the_notebook_of_ones_own_says_of_its_run():
    """Guards the same, of the three questions of the kitchen."""
    table = outputs("05_your_own")[-2].split()
    assert table.count("unverified_unsafe") == 2
    assert table.count("verified_safe") == 4
    shown = "\n".join(outputs("05_your_own"))
    assert table[table.index("unverified_unsafe") + 1] == "3"  # the numbers 100, 20 and 30
    assert "budget 0.0\nrefuses 0 of 3 acceptable answers\n" in shown
