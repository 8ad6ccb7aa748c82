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
from igstudy import closure
from igstudy.closure import module_digests, tree_digest
from igstudy.runs import identity

FILES = {
    "__init__": "",
    "entry": """\
import json
from . import near
from .deep.leaf import x
def f():
    from . import late
""",
    "near": "import numpy\nif numpy:\n    from . import other\n",
    "late": "from .named import x\nfrom igcore import decode\n",
    "deep/__init__": "from . import beside\n",
    "deep/leaf": "x = 1\n",
    "deep/beside": "",
    "named": "",
    "other": "",
    "alone": "",
}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A user's package of modules that import one another in every way."""
    for name, text in FILES.items():
        path = tmp_path / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "house"


def test_a_users_module_counts_with_all_that_it_imports(house):
    """Guards code that decides a number and that no list holds: late, relative and named imports,
    packages on the way.
    """
    found = module_digests("house.entry")
    inside = "entry near other deep deep.leaf deep.beside late named".split()
    assert set(found) == {"house", *(f"house.{name}" for name in inside)}
    assert "house" not in sys.modules  # nothing was imported to find it
    (house / "named.py").write_text("y = 1 - 2\n")
    changed = module_digests("house.entry")
    assert {name for name in changed if changed[name] != found[name]} == {"house.named"}
    (house / "named.py").write_text("def (:\n")
    with pytest.raises(RunError, match="named.py is no Python that can be read .*line 1"):
        module_digests("house.entry")


def test_code_that_makes_records_starts_them_again(tmp_path, monkeypatch):
    """Bug: one word in a docstring threw away hours of runs, and a changed search none."""
    copied = know_code_from(monkeypatch, tmp_path)

    def known() -> tuple[dict, str]:
        forget()
        return identity.code_of(), closure.package_digest("igstudy")

    runs, whole = known()
    edit(copied / "igcore/beams.py", '"""', '"""Another word. ')
    edit(copied / "igcore/engine/local.py", "\nimport ", "\n# why\n\nimport ")
    assert known() == (runs, whole)
    shown = "report/statistics report/claims report/tables figures/style paper/compare theory/mdp"
    for module in [*(f"igstudy/{name}" for name in shown.split()), "igcore/watch/tree"]:
        edit(copied / f"{module}.py", "\nimport ", "\nother = 1\nimport ")
    tables = known()
    assert tables[0] == runs and tables[1] != whole
    made = "igcore/search igcore/models/embedded igstudy/runs/critic_run igstudy/linefile"
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


def test_a_scorer_of_a_notebook_counts_by_its_content():
    """Guards people in JupyterLab: their class lives in no module."""
    digests = []
    for body in ("return 1", "return 2", "return 2  # two"):
        text = (
            f"class Mine:\n    name, digest = 'mine', 'v1'\n    def score(self):\n        {body}\n"
        )
        cell = {"__name__": "__main__"}
        exec(text, cell)
        part = cell["Mine"]()
        digests.append(identity.part_identity(part)["code"])
        assert module_digests(*identity.modules_of(part)) == {}
    assert digests[0] != digests[1] == digests[2] and digests[0]
