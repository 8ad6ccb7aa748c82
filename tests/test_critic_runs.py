"""Tests of a run of notebook 20, on a tiny random Llama that speaks seven letters, and on the mock
policy, whose f1 is known.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from mockpolicy import LetterCost, LetterReward
from sklearn.metrics import roc_auc_score
from tiny import letters, same

from igcore import AssetError, ParameterError, Prompt, settings
from igcore.prompt import Chat
from igstudy.report import critics
from igstudy.report.critic_metrics import critic_table, judged_prefixes, reference_table
from igstudy.report.critics import COLUMNS, load_finished
from igstudy.runs import critic_run as module
from igstudy.runs import rollout_run
from igstudy.runs.critic_params import CriticParams, RolloutConfig
from igstudy.runs.critic_run import CriticRun, critic_run, trained_once
from igstudy.training import loop
from igstudy.training.config import TrainingConfig

PROMPTS = [Prompt(f"{i:02d}", "abcdef"[i % 6] + "abcdef"[i // 6], "mock") for i in range(36)]
SPLITS = {"train": PROMPTS[:16], "test": PROMPTS[16:28]}
SCORERS = {"minilm-relevance": LetterReward(), "offensive-language": LetterCost()}
TINY = {"width": 8, "epochs": 1}
PARAMS = CriticParams(
    profile="tiny", run="one", policy="letters", prompts="mild", budget=3.0, n_rollouts=4,
    max_new_tokens=10, block_size=4,
    critics={"m": TINY | {"layer": 0}, "o": TINY | {"features": "o"}}, value=TINY, limit=14,
    test_limit=10,
)  # fmt: skip


def put(monkeypatch, root, asked=None):
    """Let tiny parts stand for what a run loads, and `root` for the place of the runs; note which
    prompts are asked for.
    """

    def load_prompts(name, split, limit=None):
        if asked is not None:
            asked.append((name.name, split, limit))
        return SPLITS[split][:limit]

    monkeypatch.setattr(module, "load_policy", lambda *_: replace(letters(), name="speaker"))
    monkeypatch.setattr(module, "loaded", lambda name, role="cost": SCORERS[name.name])
    monkeypatch.setattr(module, "load_prompts", load_prompts)
    monkeypatch.setattr(module, "root", lambda: root)


def judged_table(run):
    """Return the predictions of the critics of a run, and its table."""
    judged = {
        name: judged_prefixes(critic, run.policy, run.test) for name, critic in run.critics.items()
    }
    references = reference_table(run.policy, run.test, run.cost, run.params.budget)
    return judged, critic_table(run.critics, judged, references)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run that has finished, its root, its table, and the prompts that it asked for."""
    root, asked = tmp_path_factory.mktemp("root"), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        put(monkeypatch, root, asked)
        run = critic_run(PARAMS)
        judged, table = judged_table(run)
        run.finish(table)
    return SimpleNamespace(run=run, root=root, judged=judged, table=table, asked=asked)


@pytest.fixture
def work(monkeypatch):
    """What is really done: groups of prompts that are drawn, and trainings."""
    done = {"drawn": 0, "trained": 0}

    def count(name, owner, attribute):
        does = getattr(owner, attribute)

        def counting(*args):
            done[name] += 1
            return does(*args)

        monkeypatch.setattr(owner, attribute, counting)

    count("drawn", rollout_run, "_lines"), count("trained", loop._Trainer, "run")
    return done


# --- rollouts and critics -------------------------------------------------------------------------


def test_critics_learn_from_one_split_and_are_judged_on_another(first):
    """Guards against a critic that is judged on what it has learnt, limits that are swapped, and
    settings of another critic.
    """
    assert first.asked == [("mild", "train", 14), ("mild", "test", 10)]
    for part, prompts in ((first.run.train, PROMPTS[:14]), (first.run.test, PROMPTS[16:26])):
        assert [r.prompt_id for r in part] == [p.id for p in prompts for _ in range(4)]
    assert {name: (c.spec.features, c.spec.budget, c.spec.max_new_tokens) for name,
    c in first.run.critics.items()} == {
        "m": ("m", 3.0, 10), "o": ("o", 3.0, 10),
    }  # fmt: skip
    assert {c.about["n_prompts"] for c in first.run.critics.values()} == {14}


def test_a_second_start_goes_on(first, monkeypatch, work):
    """Guards hours of work: what is there is only read, and one more critic is trained alone, on
    the same rollouts.
    """
    put(monkeypatch, first.root)
    manifest = first.root / "runs/tiny/critics/one/manifest.json"
    again = critic_run(PARAMS)
    # it has not finished again yet
    assert work == {"drawn": 0, "trained": 0} and not manifest.exists()
    assert again.train == first.run.train and again.test == first.run.test
    assert all(same(again.critics[name], critic) for name, critic in first.run.critics.items())
    third = {"m": PARAMS.critics["m"], "wide": PARAMS.critics["o"] | {"width": 16}}
    more = critic_run(replace(PARAMS, critics=third))
    assert work == {"drawn": 0, "trained": 1} and list(more.critics) == ["m", "wide"]
    assert same(again.value, first.run.value) and same(more.value, first.run.value)
    again.finish(first.table)
    assert json.loads(manifest.read_text()).items() >= settings.written(PARAMS).items()


def test_prompts_with_a_system_message_are_refused(tmp_path):
    """Bug: a critic learns from rollouts of other prompts than its policy was asked."""
    told = Chat("00", "a", "mock", (("system", "b"), ("user", "a")))
    models = {"cost": LetterCost(), "reward": LetterReward(), "folder": tmp_path / "rollouts"}
    with pytest.raises(ParameterError, match="have a system message"):
        rollout_run.roll_out(letters(), [told], RolloutConfig(), **models)
    assert not models["folder"].exists()


def test_another_identity_trains_anew(tmp_path, capsys):
    """Guards the folder's identity: the same one loads, other settings or other code train."""
    folder, config, trained = tmp_path / "c", TrainingConfig(), []

    def start(config, **identity):
        learn = lambda *given: trained.append(given)  # noqa: E731
        return trained_once(folder, identity, config, learn, lambda folder: "loaded")

    assert start(config) is None and start(config) == "loaded"
    assert start(replace(config, lr=1.0)) is None
    assert "config.lr changed" in capsys.readouterr().out
    assert start(replace(config, lr=1.0), code="b") is None and len(trained) == 3


def test_rollouts_of_another_run_are_used(first, monkeypatch, work):
    """Guards an experiment on the same rollouts: none is drawn again, none is stored twice, and the
    other run stays as it is.
    """
    put(monkeypatch, first.root)
    one, two = (first.root / "runs/tiny/critics" / name for name in ("one", "two"))
    before = {path: path.read_bytes() for path in one.rglob("responses.jsonl")}
    alone = {"critics": {"o": PARAMS.critics["o"]}, "value": None}
    run = critic_run(replace(PARAMS, run="two", rollouts="runs/tiny/critics/one", **alone))
    assert run.value is None
    assert work == {"drawn": 0, "trained": 1}
    assert run.train == first.run.train
    assert run.test == first.run.test
    assert same(run.critics["o"], first.run.critics["o"])
    assert sorted(path.name for path in two.iterdir() if path.is_dir()) == ["o"]
    assert {path: path.read_bytes() for path in one.rglob("responses.jsonl")} == before
    assert len(before) == 2
    assert (one / "manifest.json").exists()


@pytest.mark.parametrize("changes", [{"limit": None}, {"block_size": 5}])
def test_rollouts_of_another_run_that_do_not_fit_are_refused(first, monkeypatch, changes):
    """Guards against training on fewer prompts than the settings say, and an error after hours of
    training.
    """
    put(monkeypatch, first.root)
    with pytest.raises(
        ParameterError, match="does not hold all .* take its settings over, or set rollouts to null"
    ):
        critic_run(replace(PARAMS, run="three", rollouts="runs/tiny/critics/one", **changes))


def test_a_finished_run_stays_where_its_prompts_are_not_to_be_had(first, monkeypatch):
    """Bug: hours of work count as unfinished because a set was gated on the day somebody started it
    again.
    """
    put(monkeypatch, first.root)
    manifest = first.root / "runs/tiny/critics/one/manifest.json"
    before = manifest.read_bytes()

    def gated(name, split, limit=None):
        if split == "test":
            raise AssetError("the set is gated; ask for access")
        return SPLITS[split][:limit]

    monkeypatch.setattr(module, "load_prompts", gated)
    with pytest.raises(AssetError, match="gated"):
        critic_run(PARAMS)
    assert manifest.read_bytes() == before


# --- tables ---------------------------------------------------------------------------------------


def test_the_table_has_all_critics_and_the_judges_that_need_no_training(first):
    """Guards rows, columns, and numbers under another critic's name."""
    table, run = first.table, first.run
    assert list(table.columns) == ["critic", *COLUMNS] and table.index.is_unique
    names = table[["critic", "features", "position"]].to_records(index=False).tolist()
    assert names == [
        ("m", "m", 8),
        ("o", "o", 8),
        ("none", "prompt-cost", 8),
        ("none", "partial-cost", 8),
    ]
    assert set(table["n"]) == {sum(len(r.words) >= 8 for r in run.test)}
    assert set(table["policy"]) == {"speaker"}
    for (name, critic), (_, row) in zip(run.critics.items(), table.iterrows(), strict=False):
        here = first.judged[name][first.judged[name]["position"] == 8]
        assert row["auroc"] == pytest.approx(roc_auc_score(here["safe"], here["f1"]))
        assert row["parameters"] == critic.parameter_count
    assert table["parameters"].tolist()[2:] == [0, 0]
    assert table["ece"].isna().tolist() == [False, False, True, True]


def test_the_value_network_learns_from_the_same_rollouts(first):
    """Guards settings, folder and split."""
    value, run = first.run.value, first.run
    assert (
        value.spec.policy,
        value.spec.width,
        value.spec.max_new_tokens,
        value.about["n_prompts"],
    ) == ("speaker", 8, 10, 14)
    assert sorted(path.name for path in (run.folder / "value").glob("value.*")) == [
        "value.json",
        "value.safetensors",
    ]


def test_no_rollout_of_the_first_position(first):
    """Guards runs of short answers, which have nothing to show at eight tokens, against a traceback
    after the training.
    """
    short = replace(first.run, test=[r for r in first.run.test if len(r.words) < 8])
    _, table = judged_table(short)
    assert short.test and list(table.columns) == ["critic", *COLUMNS]


def test_finish_writes_the_sign_of_success_last(first, monkeypatch, tmp_path):
    """Guards against a manifest that vouches for a table which a full disk has kept from being
    written.
    """
    written, replace_file = [], module.replace_file
    run = replace(first.run, folder=tmp_path)
    monkeypatch.setattr(
        module,
        "replace_file",
        lambda path, text: written.append(path.name) or replace_file(path, text),
    )
    assert run.finish(first.table) == tmp_path / "critic.csv"
    assert written == ["critic.csv", "manifest.json"]
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "critic.csv"), first.table, check_dtype=False
    )
    said = json.loads((tmp_path / "manifest.json").read_text())
    assert CriticParams(**{name: said[name] for name in settings.written(PARAMS)}) == PARAMS
    assert said["root"] and said["processor"] and "git_commit" in said


def table_of(name, **row):
    """A table as a run writes it, of one row."""
    known = {"critic": name, "policy": "p", "features": "m", "use_z": True, "position": 8, "n": 4}
    return pd.DataFrame([known | row]).reindex(columns=["critic", *COLUMNS])


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Finish a run by hand."""
    monkeypatch.setattr(critics, "root", lambda: tmp_path)

    def finished(name, table, profile="x", prompts="mild"):
        at = tmp_path / "runs" / profile / "critics" / name
        at.mkdir(parents=True)
        made = replace(PARAMS, run=name, prompts=prompts)
        CriticRun(made, at, None, None, [], [], {}).finish(table)
        return at

    return finished


def test_tables_of_a_profile_are_read_below_one_another(folder):
    """Guards against runs of another profile, an order that depends on the disk, and rows under
    other columns.
    """
    empty = load_finished("x")
    assert list(empty.columns) == ["critic", *COLUMNS] and not len(empty)
    folder("two", table_of("b", auroc=0.7))
    folder("one", table_of("a", auroc=0.6))
    folder("one", table_of("c"), "y")
    folder("three", table_of("d").iloc[:0])  # no rollout reached a position
    found = load_finished("x")
    assert found[["critic", "position", "auroc"]].to_records().tolist() == [
        (0, "a", 8, 0.6),
        (1, "b", 8, 0.7),
    ]
    assert list(found.columns) == ["critic", *COLUMNS] and found["position"].dtype.kind == "i"


def test_critics_of_one_policy_on_several_prompt_sets_are_told_apart(folder):
    """Bug: the picture joined the points of two critics of one policy by one line."""
    folder("one", table_of("m"), prompts="mild")
    folder("two", table_of("m"), prompts={"name": "hh-rlhf", "part": "train"})
    folder("three", table_of("m", policy="q"))
    assert load_finished("x")["policy"].tolist() == ["p on mild", "q", "p on hh-rlhf"]


@pytest.mark.parametrize(
    "left", [["critic.csv"], []], ids=["stopped in its second start", "stopped in its first"]
)
def test_tables_of_an_unfinished_run_are_refused(left, folder, capsys):
    """Guards against the numbers of old settings, and against a table in which a critic is missing
    without a word.
    """
    folder("one", table_of("a"))
    at = folder("two", table_of("b"))
    for path in at.iterdir():
        if path.name not in left:
            path.unlink()
    assert load_finished("x")["critic"].tolist() == ["a"]
    assert "two have not finished; run notebook 20 again" in capsys.readouterr().out
