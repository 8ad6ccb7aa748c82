"""Tests of the modules that a params file may name: which are imported, from where, and how."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from igcore.errors import ParameterError
from igcore.models.registry import load_scorer
from igcore.settings import Named
from igstudy import commands, trust
from igstudy.judge import JudgeParams, ScorerJudge
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.harm_run import HarmParams
from igstudy.runs.params import notebook_params

SOURCE = """
import os, shutil
from glob import escape
from textual_aid import twice
class Counting:
    @staticmethod
    def commas(text):
        return twice(text.count(","))
"""
FILE = Path("params/mine/decode-x.yaml")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a module that raises an error on import in each place but beside the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(trust.MODULES, raising=False)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for folder in ("params/mine/site-packages", "params/mine/kit", "params/mine/bare", "house"):
        Path(folder).mkdir(parents=True)
    for path in ("in_project", "params/in_parent", "house/in_house", "params/mine/statistics"):
        Path(f"{path}.py").write_text("raise ValueError('imported')")
    Path("params/mine/site-packages/installed_here.py").write_text("")
    Path("params/mine/torch.py").write_text("raise ValueError('imported')")
    Path("params/mine/kit/led_away.py").symlink_to(tmp_path / "in_project.py")
    for name in ("beside", "kit/__init__", "kit/inner", "bare/inner"):
        Path(f"params/mine/{name}.py").write_text(SOURCE)
    Path("params/mine/textual_aid.py").write_text("def twice(number):\n    return 2 * number\n")
    return tmp_path


FOREIGN = """
    statistics:mean pickle:loads builtins:exec posixpath:os.popen in_parent:f in_project:f
    house.in_house:f installed_here:f kit.led_away:f torch:load pydantic:create_model
    igcore.files:replace_file nowhere:f
"""


@pytest.mark.parametrize("name", FOREIGN.split())
@pytest.mark.parametrize("allow", [[], ["statistics", "torch", "igcore", "in_parent", "nowhere"]])
def test_a_params_file_cannot_name_a_foreign_module(project, monkeypatch, name, allow):
    """Guards the reader of a colleague's params file: its cost could be a shell."""
    monkeypatch.syspath_prepend("params/mine/site-packages")
    before = set(sys.modules), list(sys.path), dict(os.environ)
    with pytest.raises(ParameterError, match=f"decode-x.yaml names '{name}'") as caught:
        trust.admit({"cost": name}, FILE, allow)
    assert (set(sys.modules), sys.path, dict(os.environ)) == before
    module = name.partition(":")[0]
    advice = f"add --allow {module} to the command (of Snakemake: --config allow={module})"
    assert (advice in str(caught.value)) == (module in ("in_project", "house.in_house"))


NESTED = """
- reward: os:system
- cost: [offensive-language, {name: os:system}]
- cost: {name: maximum, costs: [[os:system]]}
- grid: {cost: [{name: endpoint, model: "llama3:8b", url: "localhost:80"}, os:system]}
- points: {a: {reward: {name: os:system}}, b: {policy: {model: "a:b"}, refusal: "a:b"}}
- judges: [jigsaw-toxicity, os:system]
- judge: {name: scorer, harmlessness: os:system}
"""


@pytest.mark.parametrize("settings", yaml.safe_load(NESTED))
def test_a_name_is_found_at_any_depth_and_no_other(settings):
    """Guards forms of a scorer that nobody looks into, and a model in a server, whose name has the
    form of a function.
    """
    assert list(trust.named_functions(settings)) == ["os:system"]


def test_each_setting_that_names_a_scorer_is_looked_at():
    """Guards settings to come: the type of a scorer stands under these names alone."""
    kinds = (DecodeParams, CriticParams, JudgeParams, HarmParams, ScorerJudge)
    fields = {n: f for kind in kinds for n, f in kind.__pydantic_fields__.items()}
    found = {n for n, f in fields.items() if "_checked" in repr(f.metadata) + repr(f.annotation)}
    assert found == trust.SCORERS - {"costs"}


@pytest.mark.parametrize("module", ["beside", "kit", "kit.inner", "bare.inner"])
def test_a_module_beside_the_file_is_imported_from_there(project, module):
    """Guards the folder that a colleague sends, and the path of whoever reads it."""
    before, name = list(sys.path), f"{module}:Counting.commas"
    trust.admit({"cost": name}, FILE)
    scorer = trust.loaded(Named("maximum", {"costs": [name, name]}))
    assert list(scorer.score(["p"], ["a, b"], [True])) == [2.0]
    assert sys.path == before


@pytest.mark.parametrize("name", ["in_project:f", "house.in_house:f"])
def test_a_module_of_the_project_needs_the_option(project, name):
    """Guards the module that lies where the command runs, and the path after its error."""
    before = list(sys.path)
    trust.admit({"cost": name}, FILE, ["in_project", "house"])
    with pytest.raises(ParameterError, match="cannot be imported .ValueError: imported"):
        trust.loaded(Named(name))
    assert sys.path == before


IMPORTED = "os.system shutil.rmtree escape twice os.environ os.environ.get Counting.__class__"


@pytest.mark.parametrize("path", [*IMPORTED.split(), "Counting.commas.__globals__.pop"])
def test_what_a_module_imports_is_not_its_own(project, path):
    """Guards a module that is allowed, and leads to another by its imports."""
    trust.admit({"cost": f"beside:{path}"}, FILE)
    with pytest.raises(ParameterError, match="is not defined in the module beside below"):
        trust.loaded(Named(f"beside:{path}"))


def test_a_function_is_named_in_the_file_that_defines_it(project):
    """Guards the digest of a job, which is that of this file: an edit elsewhere restarted none."""
    Path("params/mine/kit/shown.py").write_text("from .inner import Counting\n")
    trust.admit({"cost": "kit.shown:Counting.commas"}, FILE)
    with pytest.raises(ParameterError, match="is not defined in the module kit.shown below"):
        trust.loaded(Named("kit.shown:Counting.commas"))


def test_a_module_that_is_imported_by_now_is_no_other(project):
    """Guards a kernel that has imported an installed module of the name of the file's own."""
    trust.admit({"cost": "beside:Counting.commas"}, FILE)
    sys.modules["beside"] = os
    with pytest.raises(ParameterError, match="give the module a name that no other has"):
        trust.loaded(Named("beside:Counting.commas"))


def test_papermill_alone_names_no_module(project):
    """Guards `papermill -f` with a file of somebody else, which no command has looked at."""
    own = "# Parameters\nprofile = 'ci'\nrun = 'x'\npolicy = 'p'\nprompts = 'rtp'\nbudget = 1.0\n"
    own += "methods = ['base']\ncost = 'in_project:f'\n"
    given = {"In": [own, own.replace("in_project:f", "pickle:loads")]}
    with pytest.raises(ParameterError, match="use `python -m igstudy run`. names 'pickle:loads'"):
        notebook_params("decode", given)
    assert notebook_params("decode", {"In": [own, own]}).cost.name == "in_project:f"


def test_a_users_own_name_needs_nothing(project):
    """Guards `igcore.load_scorer`, which a program calls, and the path of its process."""
    Path("mine_here.py").write_text("def f(text):\n    return 1.5\n")
    before = list(sys.path)
    assert list(load_scorer("mine_here:f").score(["p"], ["a"], [True])) == [1.5]
    with pytest.raises(ParameterError, match="cannot be imported"):
        load_scorer("in_project:f")
    assert sys.path == before


@pytest.mark.parametrize("command", ["run 30.ipynb out.ipynb -f", "verify no.jsonl --params"])
def test_a_file_is_refused_before_models_are_loaded(project, command):
    """Guards the seconds and the memory that a refusal takes."""
    FILE.write_text("profile: mine\nrun: x\ncost: os:system\n")
    for name in ("30.ipynb", "params.json", "manifest.json"):
        Path(name).write_text("{}")
    Path("no.jsonl").touch()
    words = [*command.split(), str(FILE)]
    code = "import sys; from igstudy.commands import main\n"
    code += f"print(main({words}), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "3 False\n"


def test_what_one_command_admits_no_later_one_may_name(project, capsys):
    """Guards the next file of the same process."""
    FILE.write_text("profile: mine\nrun: x\ncost: beside:Counting.commas\n")
    assert commands.main(["verify", "no.jsonl", "--params", str(FILE)]) == commands.ERROR
    assert "no.jsonl" not in capsys.readouterr().err and trust.admitted() == {}
