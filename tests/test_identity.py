"""Tests of what a run is known by: the code of the package and of a user, notebooks, prompts,
policies and scorers, and of a scorer that is a function the file of its module.
"""

import ast
import functools
import importlib
import json
import sys

import pytest
from copiedcode import edit, forget, know_code_from
from mockpolicy import LetterCost

from igcore import Prompt, RunError, load_scorer
from igcore.models.maximum import maximum_of
from igcore.models.registry import as_scorer
from igcore.scorers import of_function
from igstudy.runs import identity
from igstudy.scorers.last_words import LastWordsScorer
from igstudy.sources import identified, module_digests, package_digest, tree_digest


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
    shown = "report/statistics report/deciding report/tables figures/style paper/compare theory/mdp"
    for module in [*(f"igstudy/{name}" for name in shown.split()), "igcore/watch/tree"]:
        edit(copied / f"{module}.py", "\nimport ", "\nother = 1\nimport ")
    tables = known()
    assert tables[0] == runs and tables[1] != whole
    made = "igcore/search igcore/models/head igserve/client"
    made += " igstudy/runs/critic_run igstudy/scorers/embedded igstudy/linefile igstudy/sources"
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


# --- the digest of a scorer that is a function: that of the file of its module --------------------

# Bug: a cost kept its digest when an argument, a state, a closure or a global of it changed, and a
# run resumed with the lines of the old one.

MODULE = """
'''Costs.'''
import functools
from aid import words
LIMIT = 1
class Many:
    def __init__(self, limit): self.limit = limit
    def __call__(self, text): return words(text) > self.limit
    def of(self, text): return words(text) > self.limit
def many(text):
    return words(text) > LIMIT
def few(text):
    return words(text) < LIMIT
weighed = functools.partial(lambda text, by: by * words(text), by=2)
long = Many(9)
"""
AID = "def words(text):\n    return len(text.split())\n"
NAMES = "many few weighed long long.of words"


@pytest.fixture
def digests(tmp_path, monkeypatch):
    """A function that edits the module `manycosts`, imports it, and returns the digests by name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def made(old="", new="", aid=AID):
        assert old in MODULE
        (tmp_path / "manycosts.py").write_text(MODULE.replace(old, new, 1))
        (tmp_path / "aid.py").write_text(aid)
        for name in ("manycosts", "aid"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        scorers = {name: load_scorer(f"manycosts:{name}") for name in NAMES.split()}
        return {name: identified(scorer).digest for name, scorer in scorers.items()}

    return made


EDITS = {"LIMIT = 1": "LIMIT = 2", "by=2": "by=3", "Many(9)": "Many(8)"}


@pytest.mark.parametrize("old", EDITS)
def test_an_edit_of_the_file_changes_all_its_digests(digests, old):
    """Guards all that the file says, such as a global, an argument and a state."""
    before, after = digests(), digests(old, EDITS[old])
    assert not {*before.values()} & {*after.values()}


def test_the_file_that_defines_a_function_counts_too(digests):
    """Guards a function that its module has imported; what the module calls does not count."""
    before, after = digests(), digests(aid=AID.replace("split", "strip"))
    assert {name for name in before if before[name] != after[name]} == {"words"}


def test_what_changes_nothing_keeps_the_digests(digests):
    """Bug: one word in a docstring or a comment threw away hours of runs."""
    before = digests()
    assert digests("'''Costs.'''", "'''More.'''  # and why") == digests() == before
    assert len({*before.values()}) == len(before) and {*map(len, before.values())} == {64}


WEIGHT = 2


def closed(weight):
    return lambda text: weight * len(text)


class Held:
    weight = 2

    def __call__(self, text):
        return self.weight * len(text)


def weigh(text, by):
    return by * len(text)


def test_a_partial_counts_by_the_plain_values_that_it_holds():
    """Guards answers of another weight: no run takes them for its own."""
    light, heavy = (functools.partial(weigh, by=by) for by in (1, 2))
    digests = [identified(of_function(cost, "cost")).digest for cost in (light, heavy, light)]
    assert digests[0] != digests[1] and digests[0] == digests[2]
    with pytest.raises(RunError, match="has no digest, and no file"):
        identified(of_function(functools.partial(weigh, by=object()), "cost"))


UNNAMED = {
    "a closure": closed(2),
    "a partial": functools.partial(lambda text, by: by * len(text), by=2),
    "an object": Held(),
    "a method": Held().__call__,
    "a function that a program gives": lambda text: WEIGHT * len(text),
    "built in": len,
}


@pytest.mark.parametrize("what", UNNAMED)
def test_what_no_file_tells_needs_a_digest(what):
    """Guards what stands in no file: it is refused, at any depth, until it says what it is."""
    function = UNNAMED[what]
    refused = "has no digest, and no file .*; put it into a module .* give it a text .* digest"
    for wrap in (
        lambda cost: cost,
        lambda cost: maximum_of([load_scorer("without-new-numbers"), cost]),
        lambda cost: maximum_of([LastWordsScorer((cost,), 2)] * 2),
    ):
        with pytest.raises(RunError, match=refused) as caught:
            identified(wrap(of_function(function, "cost")))
        assert "\n" not in str(caught.value)
        named = [identified(wrap(of_function(function, "cost", digest))).digest for digest in "ab"]
        assert all(named) and named[0] != named[1]


def test_a_cell_is_no_file(monkeypatch):
    """Guards people in JupyterLab: a name of a notebook leads to whatever a cell has made last."""
    program = sys.modules["__main__"]
    for cost in (closed(2), Held()):
        monkeypatch.setattr(program, "mine", cost, raising=False)
        with pytest.raises(RunError, match="'__main__:mine' has no digest"):
            identified(load_scorer("__main__:mine"))
        cost.digest = "v1"
        assert identified(load_scorer("__main__:mine")).digest == "v1"


def test_an_object_without_a_digest_is_refused():
    """Guards a scorer of many texts whose author has left its digest empty."""
    members = dict(name="mine", digest="", sign="higher is worse", unit="points", score=None)
    with pytest.raises(RunError, match="scorer 'mine' has no digest"):
        identified(as_scorer(type("Mine", (), members)(), "cost"))
