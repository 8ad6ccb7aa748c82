"""Tests of scorers of one's own in params files: who imports them, and what a run knows of them."""

import json
import sys

import pytest
from tiny import saved, tiny_model, tiny_tokenizer

import igcore as ig
from igcore.errors import ParameterError
from igcore.models.registry import load_scorer, prepared
from igcore.prompt import as_prompt
from igcore.settings import Named
from igstudy import commands, trust
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run
from igstudy.runs.jobs import code
from igstudy.runs.paramfiles import ParamFiles

SOURCE = """
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
    (home / f"{name}.py").write_text(SOURCE)
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
    (home / f"{module}.py").write_text(SOURCE.replace("/ len(prompt)", "/ len(prompt) / 2"))
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
