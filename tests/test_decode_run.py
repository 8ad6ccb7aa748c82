"""Tests of a run of notebook 30: resume after a kill, shards, what a run is known by, and the
networks that it asks.
"""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mockpolicy import LetterCost, LetterReward
from mockruns import PARAMS, PROMPTS, decode_into, experiment, fill
from tiny import letters, tiny_model, tiny_tokenizer, untrained
from tiny import value_network as network

from igcore import ParameterError, Prompt, RunError
from igcore.critic.network import Critic
from igcore.models import policies
from igcore.models.registry import SCORERS
from igcore.policy import Policy
from igstudy import linefile
from igstudy.baselines.re_control import ValueNetwork
from igstudy.commands import differences
from igstudy.runs import decode_run, folders, identity
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.networks import ShuffledCritic
from igstudy.runs.verify import verify
from igstudy.training.loop import save_network

GOOD = dict(
    profile="ci", run="x", policy="smollm2-raw", methods=["base"], prompts="mild", budget=0.2
)
SIZE = dict(budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=6, refusal="f")


def params(**changes):
    return DecodeParams(**(GOOD | changes))


@pytest.fixture
def mocked(tmp_path, monkeypatch):
    """Runs whose policy, scorers and prompts are mocks, and whose root is the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policies, "load_policy", lambda *_: letters())
    monkeypatch.setitem(SCORERS, "offensive-language", LetterCost)
    monkeypatch.setitem(SCORERS, "minilm-relevance", LetterReward)
    monkeypatch.setattr(decode_run, "load_prompts", lambda *_: PROMPTS)


def test_a_run_records_the_sampling_that_it_took_from_the_checkpoint(tmp_path, monkeypatch, mocked):
    """Bug: lines and identity that say temperature 1, or only `checkpoint`."""
    policy = letters()
    policy.model.generation_config.temperature = 0.5
    policy.model.generation_config.top_k = 3
    monkeypatch.setattr(policies, "load_policy", lambda *_: policy)
    run = decode_run.decode_run(params(sampling="checkpoint", **SIZE), tmp_path / "taken")
    same = decode_run.decode_run(params(temperature=0.5, top_k=3, **SIZE), tmp_path / "given")
    assert {(x["temperature"], x["top_p"], x["top_k"]) for x in run.lines} == {(0.5, None, 3)}
    assert run.params["temperature"] == 0.5 and run.params["sampling"] is None
    begun = {"began_at": same.params["began_at"]}  # perhaps a second later
    assert not differences(run.lines, same.lines) and run.params | begun == same.params
    plain = decode_run.decode_run(params(**SIZE), tmp_path / "plain")
    assert differences(run.lines, plain.lines)


# --- one policy for the runs of a file ------------------------------------------------------------


def test_runs_of_one_policy_load_it_once_and_again_when_a_file_has_changed(
    tmp_path, mocked, monkeypatch
):
    """Bug: every run of a grid read the policy's weights and packed them anew, four seconds each;
    and a policy from memory after its files were changed.
    """
    (tmp_path / "config.json").write_text("{}")
    files = {"config.json": ""}
    loaded = []

    def load(*given):
        loaded.append(given)
        policy = dataclasses.replace(letters(), files=files)
        policy.tokenizer.name_or_path = str(tmp_path)
        return policy

    monkeypatch.setattr(policies, "load_policy", load)
    monkeypatch.setattr(decode_run, "_LAST", {})

    def policy_of(**changes):
        return decode_run.guard_of(params(**changes)).policy

    first = policy_of()
    assert policy_of(budget=0.1, seed=3) is first and len(loaded) == 1
    assert policy_of(dtype="bfloat16") is not first
    again = policy_of()
    assert again is not first and len(loaded) == 3  # one is kept, not all
    (tmp_path / "config.json").write_text("{ }")
    assert policy_of() is not again and len(loaded) == 4
    files.clear()  # a policy whose files nobody knows is never kept
    policy_of(seed=1), policy_of(seed=1)
    assert len(loaded) == 6


# --- resume and shards ----------------------------------------------------------------------------


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """Guards resume: SIGKILL at any moment loses no finished response, doubles none, and the end is
    the same file.
    """
    rng = random.Random(0)
    path = tmp_path / "killed/responses.jsonl"
    command = [
        sys.executable,
        str(Path(__file__).with_name("mockruns.py")),
        str(path.parent),
        "0.05",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for _ in range(3):
            before = len(linefile.read(path)) if path.exists() else 0
            want = before + rng.randint(1, 6)
            print(file=process.stdin, flush=True)
            child = int(process.stdout.readline())
            while not path.exists() or path.read_bytes().count(b"\n") < want:
                time.sleep(0.01)
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "ended\n"
            assert not (path.parent / "manifest.json").exists()
            after_kill = linefile.read(path)
            assert len(after_kill) >= want
        process.stdin.close()
    with path.open("ab") as file:
        file.write(b'{"half": ')
    resumed = decode_into(path.parent)
    assert linefile.read(resumed)[: len(after_kill)] == after_kill
    assert len(linefile.read(resumed)) == 30
    assert differences(linefile.read(resumed), linefile.read(decode_into(tmp_path / "whole"))) == []
    assert (path.parent / "manifest.json").exists()


def test_shards_and_a_resume_are_bit_equal_in_float32(tmp_path):
    """Guards the real engine, padding and scorer batches included: the digest of a line covers
    every number but seconds.
    """
    p = dataclasses.replace(PARAMS, max_new_tokens=12, n_shards=1, group_size=2)
    prompts = [
        Prompt(f"{i}", text, "tiny")
        for i, text in enumerate(["a", "longer prompt", "mid one", "b c", "the last of five"])
    ]

    def run(folder, p, keep=None):
        tokenizer = tiny_tokenizer()
        policy = Policy(
            "tiny", tiny_model(tokenizer), tokenizer, eos_ids=frozenset({tokenizer.eos_token_id})
        )
        with folders.open_run(folder, {}) as run:
            if keep is not None:
                run.lines[keep:] = []
                run.responses.write_text("".join(json.dumps(line) + "\n" for line in run.lines))
            fill(run, experiment(p, prompts, policy))
        return {linefile.key(line): line["digest"] for line in linefile.read(run.responses)}

    whole = run(tmp_path / "whole", p)
    shards = [run(tmp_path / str(i), dataclasses.replace(p, shard=i, n_shards=2)) for i in range(2)]
    assert shards[0] | shards[1] == whole and len(shards[0]) + len(shards[1]) == len(whole) == 15
    # a group that was cut in its middle is decoded whole
    assert run(tmp_path / "whole", p, keep=8) == whole


def test_a_finished_run_is_not_decoded_again(tmp_path, monkeypatch):
    path = decode_into(tmp_path / "run")
    before = path.read_bytes()
    monkeypatch.setattr(decode_run, "decode", lambda *a, **k: pytest.fail("decoded again"))
    decode_into(tmp_path / "run")
    assert path.read_bytes() == before


def test_a_shard_above_the_last_group_is_an_empty_complete_run(tmp_path):
    """Bug: the cluster command failed on the node for every run with fewer groups than shards."""
    path = decode_into(tmp_path / "run", dataclasses.replace(PARAMS, n_shards=5, shard=4))
    assert linefile.read(path) == [] and path.with_name("manifest.json").exists()


def test_a_deleted_line_is_decoded_anew_and_the_run_ends_as_a_fresh_run(tmp_path, mocked):
    """Guards the remedy for a line that was changed: the others stay as they are."""
    p = params(methods=["base", "inferenceguard"], **SIZE)
    fresh = decode_run.decode_run(p, tmp_path / "fresh")
    run = decode_run.decode_run(p, tmp_path / "run")
    texts = run.responses.read_text().splitlines(keepends=True)
    kept = texts[:3] + texts[4:]
    run.responses.write_text("".join(kept))
    again = decode_run.decode_run(p, tmp_path / "run")
    assert run.responses.read_text().splitlines(keepends=True)[:-1] == kept
    assert differences(linefile.read(again.responses), linefile.read(fresh.responses)) == []
    manifests = [json.loads(made.manifest.read_text()) for made in (again, fresh)]
    assert manifests[0]["counts"] == manifests[1]["counts"] and manifests[0]["lines"] == 20


# --- what a run is known by -----------------------------------------------------------------------


def test_other_versions_start_a_run_anew(tmp_path, mocked, monkeypatch, capsys):
    """Bug: lines of other versions stayed in the file, and a table mixed them."""
    p = params(methods=["base"], **SIZE)
    decode_run.decode_run(p, tmp_path / "run")
    monkeypatch.setattr(identity, "versions", lambda: {"torch": "0"})
    decode_run.decode_run(p, tmp_path / "run")
    assert re.search("versions.igcore, .* changed since the last run", capsys.readouterr().out)


def test_an_embedded_run_from_parameters_to_verification(tmp_path, capsys):
    """Guards the way from a params file to a line that the command line confirms, on the real
    policy and scorers.
    """
    p = params(
        methods=["base", "inferenceguard"], limit=2, n_samples=2, keep=1, block_size=4,
        max_new_tokens=8,
    )  # fmt: skip
    run = decode_run.decode_run(p, tmp_path / "run")
    manifest = json.loads(run.manifest.read_text())
    assert manifest["lines"] == 4 and manifest["counts"].keys() == {"base", "inferenceguard"}
    assert manifest["seconds"]["generate_s"] > 0 and manifest["seconds"]["reward_s"] > 0
    assert manifest["git_commit"] is None or len(manifest["git_commit"].rstrip("+")) == 40
    known = manifest["params"]
    assert known["parts"].keys() == {"policy", "cost", "reward"} and known["device"] == "cpu"
    assert known["code"].keys() == {"igcore", "igserve", "igstudy"}
    capsys.readouterr()
    report = verify(run.responses, p)
    assert report.problems == [] and report.replayed.startswith("0 of 4 lines were replayed;")


# --- networks -------------------------------------------------------------------------------------


def test_a_run_with_a_critic_from_a_folder(tmp_path, mocked, capsys):
    """Guards the way of a critic into a run: seen from the root, named by its hash, refused before
    anything is decoded.
    """
    p = params(
        methods=["inferenceguard-critic", "inferenceguard-mix"], critic="critics/one", **SIZE,
        accounting="terminal",
    )  # fmt: skip
    with pytest.raises(RunError, match="no critic can be read from .*critics/one"):
        decode_run.decode_run(p, tmp_path / "run")
    folder = tmp_path / "critics/one"
    folder.mkdir(parents=True)
    save_network(untrained(accounting="terminal"), folder, "critic")
    run = decode_run.decode_run(p, tmp_path / "run")
    manifest = json.loads(run.manifest.read_text())
    assert len(manifest["params"]["parts"]["critic"]) == 64
    assert manifest["params"]["critic"] == "critics/one"
    assert manifest["lines"] == 20 and manifest["seconds"]["critic_s"] > 0
    with pytest.raises(
        ParameterError, match="for accounting 'terminal', but 'inferenceguard-mix' runs with 'peak'"
    ):
        decode_run.decode_run(dataclasses.replace(p, accounting="peak"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    other = untrained(accounting="terminal")
    other.heads.weight.data *= 2
    save_network(other, folder, "critic")
    decode_run.decode_run(p, tmp_path / "run")
    assert "parts.critic changed since the last run in run" in capsys.readouterr().out


def test_a_shuffled_critic_is_another_run(tmp_path, mocked, monkeypatch, capsys):
    """Guards the control: what the search asks is the critic of the folder, dealt out, and the
    lines of the two never mix.
    """
    asked, decode = [], decode_run.decode
    monkeypatch.setattr(
        decode_run,
        "decode",
        lambda method, guard, *a, **k: asked.append(guard.critic) or decode(method, guard, *a, **k),
    )
    critic = untrained()
    save_network(critic, tmp_path, "critic")
    size = SIZE | dict(critic=".", threshold=1.0)
    real, shuffled = (
        params(methods=["inferenceguard-critic"], critic_control=c, **size)
        for c in ("none", "shuffled")
    )
    one = decode_run.decode_run(real, tmp_path / "run")
    two = decode_run.decode_run(shuffled, tmp_path / "run")
    assert "critic_control changed since the last run in run" in capsys.readouterr().out
    first, *_, last = asked
    assert type(first) is Critic and type(last) is ShuffledCritic and last.spec == critic.spec
    pairs = zip(last.critic.parameters(), critic.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert [line["prompt_id"] for line in one.lines] == [line["prompt_id"] for line in two.lines]
    assert [line["response"] for line in one.lines] != [line["response"] for line in two.lines]
    assert json.loads(two.manifest.read_text())["params"]["critic_control"] == "shuffled"


def test_the_control_gives_the_same_answers_in_groups_of_any_size(tmp_path, mocked):
    """Bug: it dealt verdicts out among all prompts of a group: shards changed its answers."""
    save_network(untrained(), tmp_path, "critic")
    settings = SIZE | dict(methods=["inferenceguard-critic"], critic_control="shuffled")
    runs = []
    for size in (1, 3):
        p = params(critic=".", threshold=1.0, **settings | {"group_size": size})
        runs.append(decode_run.decode_run(p, tmp_path / f"run{size}"))
    one, three = ([(x["prompt_id"], x["response"]) for x in run.lines] for run in runs)
    assert one == three and len(one) > 2


def test_a_run_whose_methods_ask_different_networks(tmp_path, mocked, monkeypatch, capsys):
    """Guards each method's own network, both hashes in the identity, the control of the critic
    alone, and an early refusal.
    """
    asked, decode = {}, decode_run.decode

    def noted(method, guard, *given, **named):
        asked[method] = guard.critic
        return decode(method, guard, *given, **named)

    monkeypatch.setattr(decode_run, "decode", noted)
    for folder in ("critic", "value"):
        (tmp_path / folder).mkdir()
    save_network(untrained(), tmp_path / "critic", "critic")
    save_network(network(max_new_tokens=6), tmp_path / "value", "value")
    methods = ["base", "re-control-lagrangian", "inferenceguard-critic", "re-control"]
    p = params(
        methods=methods, critic="critic", value="value", critic_control="shuffled", value_steps=3,
        **SIZE,
    )  # fmt: skip
    run = decode_run.decode_run(p, tmp_path / "run")
    kinds = {method: type(network) for method, network in asked.items()}
    assert kinds == dict(
        zip(methods, [type(None), ValueNetwork, ShuffledCritic, ValueNetwork], strict=True)
    )
    known = json.loads(run.manifest.read_text())["params"]
    for name in ("critic", "value"):
        assert len(known["parts"][name]) == 64 and known[name] == name
    texts = {m: [line["response"] for line in run.lines if line["method"] == m] for m in methods}
    assert len(texts["base"]) == 10
    assert texts["base"] != texts["re-control"] != texts["re-control-lagrangian"]
    capsys.readouterr()
    save_network(network(max_new_tokens=6, seed=1), tmp_path / "value", "value")
    decode_run.decode_run(p, tmp_path / "run")
    assert "parts.value changed since the last run in run" in capsys.readouterr().out
    save_network(network(max_new_tokens=9), tmp_path / "value", "value")
    with pytest.raises(
        ParameterError,
        match="value network was trained for max_new_tokens 9, but 're-control-lagrangian' runs",
    ):
        decode_run.decode_run(p, tmp_path / "other")
    assert not (tmp_path / "other").exists()
