"""Tests of the parameters of notebooks 20 and 30, and of the names in all."""

import json
from itertools import product
from pathlib import Path

import pytest

from igcore.errors import ParameterError
from igstudy.baselines.value_training import ValueConfig
from igstudy.judge import JudgeParams
from igstudy.report.claims import load_claims
from igstudy.runs.critic_params import CriticParams, RolloutConfig
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.paramfiles import ParamFiles, defaults_of, kind_of
from igstudy.runs.params import ClaimsParams, OutputParams, notebook_parameters, notebook_params
from igstudy.runs.profiles import load_profile, settings_for
from igstudy.training.config import CriticConfig

ROOT = Path(__file__).parents[1]
GOOD = dict(
    profile="ci", run="raw", policy="smollm2-raw", prompts="rtp", budget=0.2, max_new_tokens=16,
    block_size=4, seed=5, critics={"m": {"layer": 8}, "o": {"features": "o", "lr": 0.01}},
)  # fmt: skip
DECODE = dict(
    profile="ci", run="x", policy="smollm2-raw", methods=["base"], prompts="mild", budget=0.2
)


def params(**changes):
    return CriticParams(**(GOOD | changes))


def test_critics_are_trained_for_the_budget_of_the_run():
    """Guards critics of one table that are judged at different budgets; all else is each critic's
    own.
    """
    assert params().configs() == {
        "m": CriticConfig(budget=0.2, layer=8),
        "o": CriticConfig(budget=0.2, features="o", lr=0.01),
    }
    assert list(params(critics={"z": {"layer": 1}, "a": {"layer": 1}}).configs()) == [
        "z",
        "a",
    ]  # the first one is shown


def test_rollouts_have_their_own_settings_alone():
    """Guards the identity of rollouts: with anything of a critic in it, no two runs could share
    them.
    """
    rolling = params(n_rollouts=3, group_size=7).rolling()
    assert type(rolling) is RolloutConfig
    assert rolling == RolloutConfig(
        n_rollouts=3, max_new_tokens=16, block_size=4, group_size=7, seed=5
    )


def test_a_value_network_is_trained_where_one_is_wanted():
    """Guards runs without RE-Control against the minutes of a training, and the word for the
    default settings: an empty mapping.
    """
    assert params().valuing() is None and params(value=None).valuing() is None
    assert params(value={}).valuing() == ValueConfig()
    assert params(value={"width": 8}).valuing() == ValueConfig(width=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critics": {}, "value": None},
         "critics is {} and value is null; name a network to train"),
        ({"critics": {"m": "layer 8"}}, "critics.m is 'layer 8': it must be a valid dict"),
        ({"critics": {"m": {"budget": 0.3}}},
         r"critics\['m'\] sets budget, which is given once for the whole run; leave it out"),
        ({"critics": {"m": {"layr": 8}}}, "unknown parameter 'layr'; did you mean 'layer'"),
        ({"critics": {"../m": {}}}, "parameter critics is '../m': it must match pattern"),
        ({"critics": {"value": {}}}, "critics names a critic 'value'; give it another name"),
        ({"value": {"layer": 8}}, "unknown parameter 'layer'; did you mean 'lr'"),
        ({"limit": 1}, "limit is 1: it must be greater than or equal to 2"),
        ({"threads": 10**6}, "threads is 1000000: "),  # torch ends the process
        ({"critic": {}}, "unknown parameter 'critic'; did you mean 'critics'"),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(changes, message):
    """Guards against a run that stops after hours of rollouts, or trains what was not asked for."""
    with pytest.raises(ParameterError, match=message):
        params(**changes)


def test_parameters_of_a_notebook_are_those_of_the_cell_that_ran_last():
    """Guards against papermill's habit of only printing a line about an unknown parameter."""
    cells = [
        "", "# Parameters of this run\nbudget = 0.2\nseed = 0", "# Parameters\nsede = 1\n",
        "later = 5",
    ]  # fmt: skip
    namespace = {"In": cells, "budget": 0.2, "seed": 0, "sede": 1, "later": 5}
    # papermill was given single values: they change what the notebook's own cell sets
    assert notebook_parameters(namespace) == {"budget": 0.2, "seed": 0, "sede": 1}
    whole = namespace | {"In": [*cells, "# Parameters\nprofile = 'ci'\nseed = 2"]}
    assert notebook_parameters(whole) == {"profile": "ci", "seed": 2}
    without_history = {
        "In": ["", ""],
        "Out": {},
        "METHODS": {},
        "_hidden": 1,
        "budget": 0.2,
        "sede": 1,
        "function": len,
    }
    assert notebook_parameters(without_history) == {"budget": 0.2, "sede": 1}
    with pytest.raises(ParameterError, match="unknown parameter 'sede'; did you mean 'seed'"):
        notebook_params("decode", namespace)


def test_the_notebooks_cell_is_read_by_name():
    """Guards the way from papermill to the parameters, a misspelt one included."""
    assert notebook_params("critic", GOOD) == params()
    with pytest.raises(
        ParameterError, match="unknown parameter 'test_limits'; did you mean 'test_limit'"
    ):
        notebook_params("critic", GOOD | {"test_limits": 4})


KINDS = {  # class -> what it needs besides, and what becomes part of a path
    CriticParams: (GOOD, ("profile", "run")),
    DecodeParams: (DECODE, ("profile", "run")),
    JudgeParams: ({"profile": "ci", "run": "x", "figures": "runs/ci/figures"}, ("profile", "run")),
    OutputParams: ({"profile": "ci", "figures": "runs/ci/figures"}, ("profile",)),
}
NOTEBOOKS = {
    **dict.fromkeys(["40_tables", "45_ablations", "50_figures", "65_harm"], OutputParams),
    "80_claims": ClaimsParams,
}
NO_NAMES = ["", "..", "../../x", "/abs", "a.b", "$(touch X)", "a b", "a\0b", "a\n", "\u00e9", "*"]


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_what_becomes_a_folder_is_a_plain_name(cls):
    """Bug: a run that writes beside runs, over a whole profile, or whose name a shell runs as a
    command.
    """
    good, names = KINDS[cls]
    for name, value in product(names, NO_NAMES):
        with pytest.raises(ParameterError) as caught:
            cls(**(good | {name: value}))
        message = f"parameter {name} is {value!r}: it must match pattern '^[A-Za-z0-9_-]+$'"
        assert str(caught.value) == message + "; give another value"


@pytest.mark.parametrize(("cls", "name"), [(JudgeParams, "figures"), (OutputParams, "figures")])
def test_what_is_written_stays_in_the_repository(cls, name):
    """Bug: a params file that writes wherever its user may write."""
    good, _ = KINDS[cls]
    assert getattr(cls(**(good | {name: "a b/c.d"})), name) == "a b/c.d"
    for folder in ("/tmp/x", "..", "figures/../../x", "", ".", "a\0b"):
        with pytest.raises(ParameterError, match=f"^parameter {name} is .*; give a folder inside"):
            cls(**(good | {name: folder}))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "params").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_every_committed_file_is_valid(path):
    """Bug: a rule that refuses what the package itself brings."""
    if path.stem.startswith("claims"):
        assert load_claims(path).regimes
        return
    files = ParamFiles(path.parent.name, base=ROOT / "params")
    if path.stem == "profile":
        asked = load_profile(files, ROOT / "notebooks")
        points = [(NOTEBOOKS[name], settings_for(files, asked, name)) for name in asked.made()]
    else:
        cls = {"critic": CriticParams, "judge": JudgeParams}.get(kind_of(path), DecodeParams)
        points = [(cls, given) for _, given in files.points(path)]
    assert points
    for cls, given in points:
        assert cls(**given).profile == path.parent.name


def test_a_default_that_changes_is_in_the_changelog():
    """Bug: a params file that leaves a setting out asks for something else after an upgrade, and
    the changelog does not name it. tests/defaults.json has the defaults of the last release.
    """
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    for kind, released in json.loads((ROOT / "tests/defaults.json").read_text()).items():
        known = {name: repr(default) for name, default in defaults_of(kind).items()}
        changed = {name for name in released if known.get(name) != released[name]}
        assert not [name for name in changed if f"`{name}`" not in newest], kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": []}, "methods is .*: it must have at least 1 item"),
        ({"methods": ["base", "base"]}, "methods names 'base' twice"),
        ({"methods": ["base", "inferenceguard-mix"], "value": "v"},
         "'inferenceguard-mix', which uses a critic, but critic names none; train one"),
        ({"methods": ["base", "re-control"], "critic": "m"},
         "'re-control', which uses a value network, but value names none; train one with note"),
        ({"cost": "offensive"}, "unknown cost scorer 'offensive'; did you mean 'offensive-lang"),
        ({"prompts": "mlid"}, "unknown prompt set 'mlid'; did you mean 'mild'"),
        ({"critic_control": "shufled"}, "critic_control is 'shufled': it must be 'none' or"),
        ({"shard": 2, "n_shards": 2}, "shard is 2; with n_shards 2 it must be below"),
    ],
)  # fmt: skip
def test_bad_parameters_of_decoding_are_named(changes, message):
    """Guards against a run that fails at its last method, or decodes what was not asked for."""
    with pytest.raises(ParameterError, match=message):
        DecodeParams(**(DECODE | changes))
