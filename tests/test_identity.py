"""Tests of what a run is known by: the code of the package and of a user, notebooks, prompts,
policies and scorers.
"""

import ast
import json
import sys

import pytest
from copiedcode import edit, forget, know_code_from
from mockpolicy import LetterCost

from igcore import Prompt, RunError
from igstudy.runs import identity
from igstudy.sources import module_digests, package_digest, tree_digest


def test_a_users_module_counts_by_its_file(tmp_path, monkeypatch):
    """Bug: an edit of a module that makes the lines started nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("__init__", ""), ("entry", "from . import near\n"), ("near", "x = 1\n")):
        (tmp_path / "house").mkdir(exist_ok=True)
        (tmp_path / f"house/{name}.py").write_text(text)
    found = module_digests("house", "house.entry", "house.none", "json", "igcore.guard", "nowhere")
    assert list(found) == ["house", "house.entry"]
    assert "house" not in sys.modules  # nothing was imported to find it
    (tmp_path / "house/near.py").write_text("x = 2\n")
    assert module_digests(*found) == found  # what it imports does not count
    (tmp_path / "house/entry.py").write_text("from . import far\n")
    assert module_digests("house.entry") != {"house.entry": found["house.entry"]}
    (tmp_path / "house/entry.py").write_text("def (:\n")
    with pytest.raises(RunError, match="entry.py is no Python that can be read .*line 1"):
        module_digests("house.entry")


def test_code_that_makes_records_starts_them_again(tmp_path, monkeypatch):
    """Bug: one word in a docstring threw away hours of runs, and a changed search none."""
    copied = know_code_from(monkeypatch, tmp_path)

    def known() -> tuple[dict, str]:
        forget()
        return identity.code_of(), package_digest("igstudy")

    runs, whole = known()
    edit(copied / "igcore/beams.py", '"""', '"""Another word. ')
    edit(copied / "igcore/engine/local.py", "\nimport ", "\n# why\n\nimport ")
    assert known() == (runs, whole)
    shown = "report/statistics report/claims report/tables figures/style paper/compare theory/mdp"
    for module in [*(f"igstudy/{name}" for name in shown.split()), "igcore/watch/tree"]:
        edit(copied / f"{module}.py", "\nimport ", "\nother = 1\nimport ")
    tables = known()
    assert tables[0] == runs and tables[1] != whole
    made = "igcore/search igcore/models/embedded igserve/endpoint"
    made += " igstudy/runs/critic_run igstudy/linefile igstudy/sources"
    for module in made.split():
        package, before = module.partition("/")[0], known()[0]
        edit(copied / f"{module}.py", "\nimport ", "\nother = 1\nimport ")
        after = known()[0]
        assert {name for name in after if after[name] != before[name]} == {package}
    forget()


def test_a_layout_changes_nothing():
    one = "def f(a, b):\n    return a + b\nclass C:\n    x = 1\n"
    same = '''"""Head."""
# why
def f(
    a,
    b,
):
    """Sum."""
    return (a
            + b)


class C:
    """Text."""
    x = 1
    "about x"
'''
    assert tree_digest(ast.parse(one)) == tree_digest(ast.parse(same))


def notebook(path, *cells, outputs=()):
    code = [
        {"cell_type": "code", "source": [cell], "outputs": list(outputs), "metadata": {}}
        for cell in cells
    ]
    path.write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": [str(outputs)]}, *code]})
    )
    return path


def test_a_notebook_is_known_by_its_code(tmp_path):
    """Guards papermill's jobs: an edited cell starts them anew, an output or a text does not."""
    cells = ["%matplotlib inline\nfrom igcore import budget\n!ls", "x = 1  # why"]
    digest = identity.notebook_digest(notebook(tmp_path / "a.ipynb", *cells))
    assert (
        identity.notebook_digest(notebook(tmp_path / "b.ipynb", *cells, outputs=["text"])) == digest
    )
    assert identity.notebook_digest(notebook(tmp_path / "c.ipynb", cells[0], "x = 1")) == digest
    for changed in (
        [cells[0], "x = 2"],
        [cells[0].replace("inline", "agg"), cells[1]],
        cells[::-1],
    ):
        assert identity.notebook_digest(notebook(tmp_path / "d.ipynb", *changed)) != digest


def test_prompts_count_by_text_and_id_and_not_by_order():
    a, b = Prompt("1", "one", "s"), Prompt("2", "two", "s")
    digest = identity.prompts_digest([a, b])
    assert digest == identity.prompts_digest([b, a]) and digest["n"] == 2
    assert all(
        digest != identity.prompts_digest(other)
        for other in ([a], [a, Prompt("2", "two!", "s")], [a, b, b], [])
    )


def test_a_scorer_counts_with_its_files_and_its_module():
    """Bug: a changed scorer file under the same name and digest."""
    scorer = LetterCost()
    assert identity.part_identity(scorer) == {"name": "letters", "digest": "v1"}
    assert identity.modules_of(scorer) == ["mockpolicy"]
    scorer.files, scorer.home = {"config.json": "ab"}, "igstudy.scorers.paper"
    assert identity.part_identity(scorer)["files"] == {"config.json": "ab"}
    assert identity.modules_of(scorer) == ["mockpolicy", "igstudy.scorers.paper"]
