"""Tests of the modules that a params file may name: which are imported, from where, and how; and of
scorers of one's own in them, and what a run knows of these.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import saved, tiny_model, tiny_tokenizer

import igcore as ig
from igcore.errors import ParameterError
from igcore.models.registry import load_scorer, prepared
from igcore.prompt import as_prompt
from igcore.settings import Named
from igserve import trust
from igstudy import commands
from igstudy.judge import JudgeParams, ScorerJudge
from igstudy.runs.critic_params import CriticParams
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run
from igstudy.runs.jobs import code
from igstudy.runs.paramfiles import ParamFiles
from igstudy.runs.params import notebook_params
from igstudy.sources import loaded

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
    igcore.files:append_line nowhere:f
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
- grid: {cost: [{name: probe, repo: "a:b"}, os:system]}
- points: {a: {reward: {name: os:system}}, b: {policy: {model: "a:b"}, refusal: "a:b"}}
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
    kinds = (DecodeParams, CriticParams, JudgeParams, ScorerJudge)
    fields = {n: f for kind in kinds for n, f in kind.__pydantic_fields__.items()}
    found = {n for n, f in fields.items() if "_checked" in repr(f.metadata) + repr(f.annotation)}
    assert found == trust.SCORERS - {"costs"}


@pytest.mark.parametrize("module", ["beside", "kit", "kit.inner", "bare.inner"])
def test_a_module_beside_the_file_is_imported_from_there(project, module):
    """Guards the folder that a colleague sends, and the path of whoever reads it."""
    before, name = list(sys.path), f"{module}:Counting.commas"
    trust.admit({"cost": name}, FILE)
    scorer = loaded(Named("maximum", {"costs": [name, name]}))
    assert list(scorer.score(["p"], ["a, b"], [True])) == [2.0]
    assert sys.path == before


@pytest.mark.parametrize("name", ["in_project:f", "house.in_house:f"])
def test_a_module_of_the_project_needs_the_option(project, name):
    """Guards the module that lies where the command runs, and the path after its error."""
    before = list(sys.path)
    trust.admit({"cost": name}, FILE, ["in_project", "house"])
    with pytest.raises(ParameterError, match="cannot be imported .ValueError: imported"):
        loaded(Named(name))
    assert sys.path == before


IMPORTED = "os.system shutil.rmtree escape twice os.environ os.environ.get Counting.__class__"


@pytest.mark.parametrize("path", [*IMPORTED.split(), "Counting.commas.__globals__.pop"])
def test_what_a_module_imports_is_not_its_own(project, path):
    """Guards a module that is allowed, and leads to another by its imports."""
    trust.admit({"cost": f"beside:{path}"}, FILE)
    with pytest.raises(ParameterError, match="is not defined in the module beside below"):
        loaded(Named(f"beside:{path}"))


def test_a_function_is_named_in_the_file_that_defines_it(project):
    """Guards the digest of a job, which is that of this file: an edit elsewhere restarted none."""
    Path("params/mine/kit/shown.py").write_text("from .inner import Counting\n")
    trust.admit({"cost": "kit.shown:Counting.commas"}, FILE)
    with pytest.raises(ParameterError, match="is not defined in the module kit.shown below"):
        loaded(Named("kit.shown:Counting.commas"))


def test_a_module_that_is_imported_by_now_is_no_other(project):
    """Guards a kernel that has imported an installed module of the name of the file's own."""
    trust.admit({"cost": "beside:Counting.commas"}, FILE)
    sys.modules["beside"] = os
    with pytest.raises(ParameterError, match="give the module a name that no other has"):
        loaded(Named("beside:Counting.commas"))


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


# --- scorers of one's own in params files ---------------------------------------------------------

OWN = """
from igcore.scorers import REWARD
def vowels(text):
    return sum(map(text.count, "aeiou"))
def score(prompt, response):
    return len(response) / len(prompt)
class Brevity:
    name, digest, sign, unit = "brevity", "v1", REWARD, "letters"
    def score(self, prompts, responses, finished):
        return [-len(response) for response in responses]
brevity = Brevity()
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if slow %} slowly{% endif %}:"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A project with a model, prompts and a module of scorers, where the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "params/mine").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "my.txt").write_text("How?\nWhy?\n")
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    saved("model", tiny_model(tokenizer), tokenizer)
    return tmp_path


@pytest.fixture
def module(home, request):
    """The name of a module that no other test imports."""
    name = f"scorers_of_{abs(hash(request.node.name))}"
    (home / f"{name}.py").write_text(OWN)
    yield name
    sys.modules.pop(name, None)


def settings(**changes):
    given = dict(
        profile="mine", run="a", policy="model", prompts="my.txt", budget=3.0, n_samples=2,
        methods=["base", "inferenceguard"], max_new_tokens=6, block_size=3, device="cpu",
    )  # fmt: skip
    return given | changes


def verified(run, capsys, *options):
    done = commands.main(["verify", str(run.responses), "--replay", "all", *options])
    return done, "\n".join(capsys.readouterr())


def params_file(home, **changes):
    (home / "params/mine/decode-a.yaml").write_text(json.dumps(settings(**changes)))
    return ["--params", "params/mine/decode-a.yaml"]


def test_a_params_file_names_functions_and_objects(home, module, capsys):
    """Bug: a cost of one's own was for `Guard` alone, and registering it meant editing igcore."""
    own = dict(cost=f"{module}:score", reward=f"{module}:brevity")
    run = decode_run(DecodeParams(**settings(**own)))
    line, known = run.lines[0], json.loads((run.folder / "params.json").read_text())
    assert (line["cost_scorer"], line["reward_scorer"]) == (f"{module}:score", "brevity")
    assert line["cost"] == len(line["response"]) / len(line["prompt"])
    assert module in known["code"]  # and so what the module imports, and its globals
    done, said = verified(run, capsys, *params_file(home, **own), "--allow", module)
    assert done == 0, said
    (home / f"{module}.py").write_text(OWN.replace("/ len(prompt)", "/ len(prompt) / 2"))
    sys.modules.pop(module)
    again = decode_run(DecodeParams(**settings(**own)))
    assert again.lines[0]["cost"] == line["cost"] / 2


def test_a_record_does_not_say_what_is_imported(home, module, capsys):
    """Bug that must not come: a record of somebody else that runs a module of this folder."""
    run = decode_run(DecodeParams(**settings(cost=f"{module}:vowels", reward=None)))
    sys.modules.pop(module)
    done, said = verified(run, capsys, *params_file(home, cost="offensive-language", reward=None))
    assert done == 1 and f"cost is '{module}:vowels', not 'offensive-language'" in said
    assert module not in sys.modules
    prepared(Named(f"{module}:vowels"))  # nor do settings import it
    assert module not in sys.modules


@pytest.mark.filterwarnings("ignore:.* (mixes the units|is a probability)")
def test_several_costs_and_no_reward(home, module, capsys):
    """Bug: `cost: [a, b]` and `reward: null`, which `Guard` takes, were refused."""
    own = dict(cost=[f"{module}:vowels", "offensive-language"], reward=None)
    params = DecodeParams(**settings(**own))
    assert params.cost == Named("maximum", {"costs": own["cost"]}) and params.reward is None
    run = decode_run(params)
    likely = [line["reward"] for line in run.lines if line["n_tokens"]]
    assert all(reward < 0 for reward in likely) and run.lines[0]["reward_scorer"] is None
    file = [*params_file(home, **own), "--allow", module]
    done, said = verified(run, capsys, *file)
    assert done == 0 and "without a reward model" not in said, said  # all are replayed
    # a line that drops its reward model, or names one, does not pass
    forged = run.responses.read_text().replace('"reward_scorer": null', '"reward_scorer": "x"')
    run.responses.write_text(forged)
    done, said = verified(run, capsys, *file)
    assert done == 1 and "reward_scorer is 'x', not None" in said
    with pytest.raises(ParameterError, match="method 'args' needs a reward, and there is none"):
        decode_run(DecodeParams(**settings(methods=["args"], reward=None)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_here:f", "cost 'nowhere_here:f' cannot be imported .ModuleNotFoundError"),
        ("json:nothing", "cost 'json:nothing' cannot be imported .AttributeError"),
        ("broken_here:f", "cost 'broken_here:f' cannot be imported .SyntaxError"),
        ("a b:f", "unknown scorer 'a b:f'; .* or module:function of a module of your own"),
        ("os:", "unknown scorer 'os:'"),
    ],
)
def test_a_scorer_that_is_not_there_is_one_sentence(home, name, said):
    (home / "broken_here.py").write_text("def f(text) return 1")
    with pytest.raises(ParameterError, match=said) as caught:
        load_scorer(name)
    assert "\n" not in str(caught.value)


def test_a_job_runs_again_when_a_cost_of_ones_own_changes(home, module, monkeypatch):
    """Bug that must not come: Snakemake, which finds a run complete after an edit of its cost."""
    monkeypatch.syspath_prepend(home)  # as Snakemake does for the folder of the Snakefile
    given = {"cost": [f"{module}:vowels", "offensive-language"], "reward": None}
    for where in (given, {"grid": {"cost": [f"{module}:vowels"]}}):
        assert module in code("decode", where) and module not in sys.modules
    assert "nowhere_here" not in code("decode", given | {"reward": "nowhere_here:f"})


def test_a_job_knows_a_cost_beside_its_params_file(home, module, monkeypatch):
    """Bug that must not come: a job that does not run again when such a cost changes."""
    monkeypatch.setenv(trust.MODULES, "{}")
    (home / f"{module}.py").rename(home / f"params/mine/{module}.py")
    params_file(home, cost=f"{module}:vowels")
    ((_, given),) = ParamFiles("mine").points("params/mine/decode-a.yaml")
    assert module in code("decode", given) and module not in sys.modules


def test_chat_options_reach_the_template(home):
    """Bug: `enable_thinking: false` could not be said of a policy, only of a scorer."""
    plain, slow = (
        ig.load_policy({"name": "model", **more}) for more in ({}, {"chat_options": {"slow": True}})
    )
    chat = [{"role": "user", "content": "Go"}]
    for prompt in ("Go", chat):
        read = [p.tokenizer.decode(p.ids_of(as_prompt(prompt))) for p in (plain, slow)]
        assert read == ["Go:", "Go slowly:"]
    assert plain.digest != slow.digest and "chat_options" not in plain.identity()
    assert slow.identity()["chat_options"] == {"slow": True}
    for given, said in (
        ({"chat_options": {"sloow": True}}, "has 'sloow', which its template 'chat' does not read"),
        ({"template": "raw", "chat_options": {"slow": 1}}, "its template 'raw' does not read"),
        (
            {"chat_options": "slow"},
            "parameter chat_options is 'slow': it must be a valid dictionary",
        ),
    ):
        with pytest.raises(ParameterError, match=said):
            ig.load_policy({"name": "model", **given})
