"""Tests of what a run is known by: the import closure of its code, syntax trees, notebooks,
prompts, policies and scorers.
"""

import ast
import importlib
import json
import sys
import types

import pytest
from mockpolicy import LetterCost

from igcore import Prompt, RunError
from igcore.models.registry import SCORERS
from igcore.runs import identity

FILES = {
    "__init__": "",
    "entry": """\
import json
from . import near
from .deep.leaf import x
def f():
    from . import late
""",
    "near": """\
import numpy
from typing import TYPE_CHECKING as TYPE_CHECKING
if TYPE_CHECKING:
    from . import typed
else:
    from . import other
""",
    "late": "from .named import x\n",
    "deep/__init__": "from . import beside\n",
    "deep/leaf": "x = 1\n",
    "deep/beside": "",
    "named": "",
    "typed": "",
    "other": "",
    "alone": "",
    "user": "from igcore import decode\n",
}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A package of modules that import one another in every way, in a place that can be imported
    from.
    """
    for name, text in FILES.items():
        path = tmp_path / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    identity.source_of.cache_clear()
    yield tmp_path / "house"
    identity.source_of.cache_clear()


def test_the_closure_follows_every_way_to_import(house):
    """Guards code that decides a number and that no list holds: late, relative and named imports,
    packages on the way.
    """
    found = identity.code_of("house.entry")
    inside = [
        "entry",
        "near",
        "other",
        "typed",
        "deep",
        "deep.leaf",
        "deep.beside",
        "late",
        "named",
    ]
    assert set(found) == {"house", *(f"house.{name}" for name in inside)}
    assert "house" not in sys.modules  # nothing was imported to find it


def test_a_lazy_name_stands_for_the_module_it_lives_in(house):
    """Bug: ``from igcore import decode`` reaches nothing, because the package imports by string."""
    assert {"house.user", "igcore", "igcore.guard"} <= identity.code_of("house.user").keys()


def test_the_public_names_of_the_package_are_found():
    """Guards the rule above where it is needed."""
    tree = ast.parse("import igcore as ig\nig.decode\nfrom igcore import load_policy")
    found = set(identity.imports_of(tree, ""))
    assert {"igcore.guard", "igcore.models.policies"} <= found


@pytest.mark.parametrize(
    "module", ["near", "other", "deep/beside", "deep/__init__", "named", "late"]
)
def test_an_operator_anywhere_in_the_closure_changes_one_digest(house, module):
    """Bug: finished runs were valid after a scorer had been changed to return 0."""
    before = identity.code_of("house.entry")
    path = house / f"{module}.py"
    path.write_text(path.read_text() + "y = 1 + 2\n")
    between = identity.code_of("house.entry")
    path.write_text(path.read_text().replace("1 + 2", "1 - 2"))
    after = identity.code_of("house.entry")
    name = f"house.{module}".replace("/", ".").removesuffix(".__init__")
    assert (
        {n for n in after if before[n] != after[n]}
        == {n for n in after if between[n] != after[n]}
        == {name}
    )


def test_a_comment_a_docstring_and_a_layout_change_nothing(house):
    """Bug: one word in a docstring threw away 140 minutes of runs."""
    path = house / "deep/leaf.py"
    path.write_text("def f(a, b):\n    return a + b\nclass C:\n    pass\n")
    before = identity.code_of("house.entry")
    path.write_text(
        '"""Head."""\n# why\ndef f(\n    a,\n    b,\n):\n    """Sum."""\n'
        "    return (a\n            + b)\n\n\n"
        'class C:\n    """Text."""\n'
    )
    assert identity.code_of("house.entry") == before


def test_what_is_not_reached_does_not_count(house):
    before = identity.code_of("house.entry")
    (house / "alone.py").write_text("y = 1\n")
    assert identity.code_of("house.entry") == before


def test_a_module_that_cannot_be_read_is_one_sentence(house):
    (house / "named.py").write_text("def (:\n")
    with pytest.raises(RunError, match="named.py is no Python that can be read .*line 1"):
        identity.code_of("house.entry")
    with pytest.raises(RunError, match="module house.nowhere has no source to be known by"):
        identity.code_of("house.nowhere")


def test_the_digest_is_that_of_every_python_version():
    """Guards runs that are carried to another Python: newer ones have other fields, and cut
    f-strings otherwise.
    """
    text = '''
def f(x, /, y=1, *a, z: int = 2, **k) -> int:
    """doc"""
    return f"{x:}" f"{y!r:>{z}}" "tail" f"{{}}" f"" f"a{{b}}c{x}d{{" f"{x=}" f"{x = !s:^10}"
class A:
    "doc"
    pass
async def g():
    async with a as b, c: pass
    return ({**a, 1: 2}, {*x}, [*y], lambda *a, k=1: 0, x[1:2, ::3, ...], -1, 1j, b"x", 1e-5, None,
            True)
match x:
    case {"a": 1, **rest}: pass
    case [1, *_, A(b=2) | None as q] if q: pass
try: pass
except* ValueError: pass
print(u"x", r"\\d", 0xFF, 1_000)
'''
    assert identity.digest_of(identity.canonical(ast.parse(text)))[:16] == "034d701aa9d20127"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 'a'", "x = b'a'"),
        ("a < b", "a <= b"),
        ("f(a, b)", "f(b, a)"),
        ("{**a}", "{None: a}"),
        ("x[1:]", "x[:1]"),
        ("def f(a=None): x", "def f(a): x"),
        ("return_ = 1", "return_ = 2"),
        ("f'{x}a'", "f'a{x}'"),
        ("f'{x!r}'", "f'{x}'"),
        ("def f(*, a, b=1): x", "def f(*, a=1, b): x"),
        ("x: int = 1", "x = 1"),
        ("@a\ndef f(): x", "def f(): x"),
        ("if a:\n  x\nelse:\n  y", "if a:\n  x\ny"),
    ],
)
def test_what_python_tells_apart_has_two_digests(one, other):
    """Guards the canonical form: fields that are left out must not make two programs one."""
    a, b = (identity.digest_of(identity.canonical(ast.parse(text))) for text in (one, other))
    assert a != b


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
    digest, modules = identity.notebook_code(notebook(tmp_path / "a.ipynb", *cells))
    assert modules == ["igcore", "igcore.budget"]
    assert (
        identity.notebook_code(notebook(tmp_path / "b.ipynb", *cells, outputs=["text"]))[0]
        == digest
    )
    assert identity.notebook_code(notebook(tmp_path / "c.ipynb", cells[0], "x = 1"))[0] == digest
    for changed in (
        [cells[0], "x = 2"],
        [cells[0].replace("inline", "agg"), cells[1]],
        cells[::-1],
    ):
        assert identity.notebook_code(notebook(tmp_path / "d.ipynb", *changed))[0] != digest


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
    scorer.files, scorer.home = {"config.json": "ab"}, "igcore.models.beaver"
    assert identity.part_identity(scorer)["files"] == {"config.json": "ab"}
    assert identity.modules_of(scorer) == ["igcore.models.beaver", "mockpolicy"]


def test_a_scorer_of_a_notebook_counts_by_its_source(monkeypatch):
    """Guards people in JupyterLab: their class lives in no module."""
    import linecache

    digests = []
    for number, body in enumerate(("return 1", "return 2", "return 2  # two")):
        text = (
            f"class Mine:\n    name, digest = 'mine', 'v1'\n    def score(self):\n        {body}\n"
        )
        name = f"<cell {number}>"
        cell = types.ModuleType(name)
        cell.__file__ = name
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        monkeypatch.setitem(sys.modules, name, cell)
        exec(compile(text, name, "exec"), cell.__dict__)
        part = cell.Mine()
        digests.append(identity.part_identity(part)["code"])
        assert identity.modules_of(part) == []
    assert digests[0] != digests[1] == digests[2]


def test_every_entry_point_has_a_closure_without_strangers():
    """Guards what starts runs anew: a changed table or picture must not decode again, nor a changed
    search draw rollouts.
    """
    decoding, rollouts = (
        identity.code_of("igcore.runs.decode_run"),
        identity.code_of("igcore.runs.rollout_run"),
    )
    assert {
        "igcore.search",
        "igcore.budget",
        "igcore.engine.sampling",
        "igcore.engine.local",
        "igcore.runs.records",
    } <= decoding.keys()
    strangers = ("report", "figures", "judge", "critic.training", "report.load", "runs.verify")
    assert not {f"igcore.{name}" for name in strangers} & decoding.keys()
    adapters = {home.partition(":")[0] for home in SCORERS.values()}
    assert not adapters & decoding.keys()  # the scorers that a run names are added to it
    assert {"igcore.engine.sampling", "igcore.engine.local", "igcore.policy"} <= rollouts.keys()
    assert (
        not {"igcore.search", "igcore.guard", "igcore.report.tables", "igcore.report.statistics"}
        & rollouts.keys()
    )
    assert {"igcore.critic.network", "igcore.critic.latent"} <= identity.code_of(
        "igcore.critic.training"
    ).keys()


def test_all_of_the_closure_is_what_python_imports():
    """Guards the walker against Python itself: whatever of the package importing the entry point
    loads is in the closure.
    """
    importlib.import_module("igcore.runs.decode_run")
    known = identity.code_of("igcore.runs.decode_run")
    for name in known:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):  # a package holds whatever of it was imported, by anybody
            continue
        used = {
            v.__module__ for v in vars(module).values() if isinstance(v, type | types.FunctionType)
        }
        used |= {v.__name__ for v in vars(module).values() if isinstance(v, types.ModuleType)}
        assert {u for u in used if u.partition(".")[0] == "igcore"} <= known.keys(), name
