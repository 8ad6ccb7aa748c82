"""Tests of run folders: parameters, resume after a kill, shards, and the command line."""

import dataclasses
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from killed import PARAMS, PROMPTS
from mockpolicy import LetterCost, LetterReward, mock_policy
from test_critic_only import letters, untrained
from test_policy import tiny_model, tiny_tokenizer
from test_value import network

from igcore import ParameterError, Prompt, RunError, ScorerError, decode_run, folders, load_policy, load_scorer, runs, verify
from igcore.config import from_mapping
from igcore.critic import Critic, Shuffled, save_critic
from igcore.decode_params import DecodeParams
from igcore.params import notebook_parameters, notebook_params
from igcore.policy import Policy
from igcore.training import CriticConfig, spec_of
from igcore.value import ValueNetwork, save_value

GOOD = dict(profile="ci", run="x", policy="smollm2-raw", methods=["base"], prompts="mild", budget=0.2)


def params(**changes):
    return from_mapping(DecodeParams, GOOD | changes)


def decode_into(folder, p=PARAMS):
    with folders.open_run(folder, {"budget": p.budget}) as run:
        decode_run.decode_missing(p, run, PROMPTS, mock_policy(), LetterCost(), LetterReward())
        run.finish({"lines": len(run.lines)})
    return run.responses


def environment():
    return os.environ | {"PYTHONPATH": str(Path(__file__).parent)}


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """Guards resume: SIGKILL at any moment loses no finished response, doubles none, and the end is the same file."""
    rng = random.Random(0)
    for _ in range(3):
        command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path / "killed"), "0.05"]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        path, want = tmp_path / "killed" / "responses.jsonl", rng.randint(1, 6)
        before = len(folders.read(path)) if path.exists() else 0
        while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < before + want):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (tmp_path / "killed" / "manifest.json").exists()
        after_kill = folders.read(path)
        assert len(after_kill) >= before + want
    with path.open("ab") as file:
        file.write(b'{"half": ')
    resumed = decode_into(tmp_path / "killed")
    assert folders.read(resumed)[: len(after_kill)] == after_kill
    assert len(folders.read(resumed)) == 30
    assert folders.differences(folders.read(resumed), folders.read(decode_into(tmp_path / "whole"))) == []
    assert (tmp_path / "killed" / "manifest.json").exists()


@pytest.mark.parametrize("n_shards", [2, 3])
def test_shards_hold_the_same_lines_as_the_whole(tmp_path, n_shards):
    """Guards groups as the unit of work: composition, and with it every bit, is the same in any shard."""
    whole = folders.read(decode_into(tmp_path / "whole"))
    parts = []
    for shard in range(n_shards):
        part = dataclasses.replace(PARAMS, shard=shard, n_shards=n_shards)
        parts += folders.read(decode_into(tmp_path / str(shard), part))
    assert len(parts) == len(whole) == 30
    assert folders.differences(parts, whole) == []


def test_shards_and_a_resume_are_bit_equal_in_float32(tmp_path):
    """Guards the real engine, padding and scorer batches included: the digest of a line covers every number but seconds."""
    p = dataclasses.replace(PARAMS, max_new_tokens=12, n_shards=1, group_size=2)
    prompts = [Prompt(f"{i}", text, "tiny") for i, text in enumerate(["a", "longer prompt", "mid one", "b c", "the last of five"])]

    def run(folder, p, keep=None):
        tokenizer = tiny_tokenizer()
        policy = Policy("tiny", tiny_model(tokenizer), tokenizer, eos_ids=frozenset({tokenizer.eos_token_id}))
        with folders.open_run(folder, {}) as run:
            if keep is not None:
                run.lines[keep:] = []
                run.responses.write_text("".join(json.dumps(line) + "\n" for line in run.lines))
            decode_run.decode_missing(p, run, prompts, policy, LetterCost(), LetterReward())
        return {folders.key(line): line["digest"] for line in folders.read(run.responses)}

    whole = run(tmp_path / "whole", p)
    shards = [run(tmp_path / str(i), dataclasses.replace(p, shard=i, n_shards=2)) for i in range(2)]
    assert shards[0] | shards[1] == whole and len(shards[0]) + len(shards[1]) == len(whole) == 15
    assert run(tmp_path / "whole", p, keep=8) == whole  # a group that was cut in its middle is decoded whole


def test_a_finished_run_is_not_decoded_again(tmp_path, monkeypatch):
    path = decode_into(tmp_path / "run")
    before = path.read_bytes()
    monkeypatch.setattr(decode_run, "decode", lambda *a, **k: pytest.fail("decoded again"))
    decode_into(tmp_path / "run")
    assert path.read_bytes() == before


def test_other_parameters_never_mix_with_old_lines(tmp_path, capsys):
    """Guards against a table whose rows were made under different budgets; the old lines are kept aside."""
    old = decode_into(tmp_path / "run").read_bytes()
    path = decode_into(tmp_path / "run", dataclasses.replace(PARAMS, budget=2.0))
    assert "budget changed since the last run in run" in capsys.readouterr().out
    assert {line["budget"] for line in folders.read(path)} == {2.0}
    (aside,) = (tmp_path / ".replaced").glob("run.*/responses.jsonl")
    assert aside.read_bytes() == old


def test_other_code_starts_a_run_anew(tmp_path, capsys):
    """Guards a resume that would mix two samplers in one file, and says which module it was."""
    with folders.open_run(tmp_path / "run", {"code": {"igcore.search": "a", "igcore.budget": "b"}}) as run:
        run.append({"method": "base", "prompt_id": "x"})
    with folders.open_run(tmp_path / "run", {"code": {"igcore.search": "c", "igcore.budget": "b"}}) as run:
        assert run.lines == []
    assert "code.igcore.search changed since the last run in run" in capsys.readouterr().out


def test_a_damaged_params_file_starts_a_run_anew(tmp_path):
    with folders.open_run(tmp_path / "run", {"seed": 0}):
        pass
    (tmp_path / "run" / "params.json").write_text("")
    with folders.open_run(tmp_path / "run", {"seed": 0}) as run:
        assert run.lines == [] and json.loads((run.folder / "params.json").read_text()) == {"seed": 0}


def test_missing_work_takes_back_the_sign_of_success(tmp_path):
    """Guards a manifest that would vouch for a file from which a damaged line was deleted."""
    path = decode_into(tmp_path / "run")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))

    class Failing(LetterCost):
        def score(self, prompts, responses, finished):
            raise RuntimeError("gone")

    with pytest.raises(ScorerError), folders.open_run(tmp_path / "run", {"budget": PARAMS.budget}) as run:
        decode_run.decode_missing(PARAMS, run, PROMPTS, mock_policy(), Failing(), LetterReward())
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_shard_above_the_last_group_is_an_empty_complete_run(tmp_path):
    """Bug: the cluster command failed on the node for every run with fewer groups than shards."""
    path = decode_into(tmp_path / "run", dataclasses.replace(PARAMS, n_shards=5, shard=4))
    assert folders.read(path) == [] and path.with_name("manifest.json").exists()


def test_tables_want_every_shard_and_only_one_sharding(tmp_path):
    """Guards a table made from two thirds of the prompts, or from some of them twice."""
    for name, n, i in (("run.0-of-2", 2, 0), ("run.1-of-2", 2, 1)):
        with folders.open_run(tmp_path / name, {"run": "run", "n_shards": n, "shard": i}) as run:
            run.append({"method": "base", "prompt_id": str(i)})
            run.finish({})
        if i == 0:
            with pytest.raises(RunError, match="run run is there as shard 0 of 2; decode what is missing"):
                runs.load_runs("x", tmp_path)
    assert len(runs.load_runs("x", tmp_path)) == 2
    with folders.open_run(tmp_path / "run", {"run": "run", "n_shards": 1, "shard": 0}) as run:
        run.responses.write_text("")
        run.finish({})
    with pytest.raises(RunError, match="another sharding"):
        runs.load_runs("x", tmp_path)


def test_a_full_disk_is_one_sentence_before_the_first_response_too(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="cannot write in .*No space left on device"), folders.open_run(tmp_path / "run", {}):
        pass


def test_two_processes_cannot_write_to_one_run(tmp_path):
    with (
        folders.open_run(tmp_path / "run", {}),
        pytest.raises(RunError, match="another process is writing"),
        folders.open_run(tmp_path / "run", {}),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_sample": 4}, "unknown parameter 'n_sample'; did you mean 'n_samples'"),
        ({"budget": "0.2"}, "budget is '0.2', which is text; it must be a number"),
        ({"methods": "base"}, "methods is 'base', which is text; it must be a list"),
        ({"methods": []}, "methods is empty"),
        ({"methods": ["base", "base"]}, "methods names 'base' twice"),
        ({"methods": ["bose"]}, "unknown method 'bose'; did you mean 'base'"),
        (
            {"methods": ["base", "inferenceguard-mix"]},
            "'inferenceguard-mix', which asks a critic, but critic names none; train one",
        ),
        ({"critic": 1}, "critic is 1, which is a whole number; it must be text or nothing"),
        ({"threshold": "match"}, "threshold is 'match'; give a number or 'matched'"),
        ({"cost": "offensive"}, "unknown cost scorer 'offensive'; did you mean 'offensive-language'"),
        ({"limit": "all"}, "limit is 'all', which is text; it must be a whole number or nothing"),
        ({"limit": 0}, "limit is 0"),
        ({"shard": 2, "n_shards": 2}, "shard is 2; with n_shards 2 it must be below"),
        ({"keep": 9}, "keep is 9, more than n_samples, which is 8"),
        ({"seed": 1.5}, "seed is 1.5, which is a number; it must be a whole number"),
    ],
)
def test_bad_parameters_are_named(changes, message):
    with pytest.raises(ParameterError, match=message):
        params(**changes)


def test_a_missing_parameter_is_named():
    with pytest.raises(ParameterError, match="parameter budget is missing"):
        from_mapping(DecodeParams, {name: value for name, value in GOOD.items() if name != "budget"})


def test_parameters_of_a_notebook_include_a_misspelt_injected_one():
    """Guards against papermill's habit of only printing a line about a parameter that no cell has."""
    cells = ["", "# Parameters of this run\nbudget = 0.2\nseed = 0", "# Parameters\nsede = 1\n", "later = 5"]
    namespace = {"In": cells, "budget": 0.2, "seed": 0, "sede": 1, "later": 5}
    assert notebook_parameters(namespace) == {"budget": 0.2, "seed": 0, "sede": 1}
    without_history = {"In": ["", ""], "Out": {}, "METHODS": {}, "_hidden": 1, "budget": 0.2, "sede": 1, "function": len}
    assert notebook_parameters(without_history) == {"budget": 0.2, "sede": 1}
    with pytest.raises(ParameterError, match="unknown parameter 'sede'; did you mean 'seed'"):
        notebook_params("decode", namespace)


def test_the_manifest_is_the_sign_of_success(tmp_path):
    """Guards tables against half a run."""
    path = decode_into(tmp_path / "run")
    assert len(runs.load_runs("x", tmp_path)) == 30
    (path.parent / "manifest.json").unlink()
    with pytest.raises(RunError, match="has not finished"):
        runs.load_runs("x", tmp_path)
    with pytest.raises(RunError, match="there is no run in .* decode first"):
        runs.load_runs("x", tmp_path / "elsewhere")


def test_an_embedded_run_from_parameters_to_verification(tmp_path):
    """Guards the way from a params file to a line that the command line confirms, on the real policy and scorers."""
    p = params(methods=["base", "inferenceguard"], limit=2, n_samples=2, keep=1, block_size=4, max_new_tokens=8)
    run = decode_run.decode_run(p, tmp_path / "run")
    manifest = json.loads(run.manifest.read_text())
    assert manifest["lines"] == 4
    assert manifest["params"]["digests"].keys() == {"smollm2-raw", "offensive-language", "minilm-relevance"}
    assert manifest["seconds"]["generate_s"] > 0 and manifest["seconds"]["reward_s"] > 0
    command = [sys.executable, "-m", "igcore.runs", "verify", str(run.responses)]
    assert manifest["git_commit"] is None or len(manifest["git_commit"].rstrip("+")) == 40
    assert manifest["counts"].keys() == {"base", "inferenceguard"} and manifest["params"]["device"] == "cpu"
    good = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "") and "4 lines" in good.stdout
    text = run.responses.read_text()
    run.responses.write_text(text.replace('"seed": 0', '"seed": 1', 1))
    bad = subprocess.run(command, env=environment(), capture_output=True, text=True)
    line = run.lines[0]
    run.responses.write_text(text[: text.index("\n") + 1])
    short = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert short.returncode == 1 and "holds 1 responses where 4 are expected" in short.stderr
    assert bad.returncode == 1 and bad.stderr.startswith(f"error: line 1, prompt {line['prompt_id']}, base: the line was changed")


def save_tiny_critic(folder, seed, **changes):
    """Save an untrained critic for the embedded policy and scorers."""
    policy, cost, reward = load_policy("smollm2-raw"), load_scorer("offensive-language"), load_scorer("minilm-relevance")
    config = CriticConfig(budget=0.2, features="m", layer=8, width=8)
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    save_critic(Critic(dataclasses.replace(spec_of(policy, cost, reward, config, 8), **changes)), folder)


def test_a_run_with_a_critic_from_a_folder(tmp_path, monkeypatch, capsys):
    """Guards the way of a critic into a run: seen from the root, named by its hash, refused before anything is decoded."""
    monkeypatch.setattr(decode_run, "root", lambda: tmp_path)
    size = dict(limit=2, n_samples=2, keep=1, block_size=4, max_new_tokens=8, accounting="terminal")
    p = params(methods=["inferenceguard-critic", "inferenceguard-mix"], critic="critics/one", **size)
    with pytest.raises(RunError, match="no critic can be read from .*critics/one"):
        decode_run.decode_run(p, tmp_path / "run")
    (tmp_path / "critics").mkdir()
    save_tiny_critic(tmp_path / "critics/one", 0)
    run = decode_run.decode_run(p, tmp_path / "run")
    digest = hashlib.sha256((tmp_path / "critics/one/critic.safetensors").read_bytes()).hexdigest()
    manifest = json.loads(run.manifest.read_text())
    assert manifest["params"]["digests"]["critic"] == digest and manifest["params"]["critic"] == "critics/one"
    assert manifest["lines"] == 4 and manifest["seconds"]["critic_s"] > 0
    assert list(verify.rescored(run.lines, load_scorer)) == []
    with pytest.raises(ParameterError, match="for accounting 'terminal', but 'inferenceguard-mix' runs with 'peak'"):
        decode_run.decode_run(dataclasses.replace(p, accounting="peak"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    save_tiny_critic(tmp_path / "critics/one", 1)
    decode_run.decode_run(p, tmp_path / "run")
    assert "digests changed since the last run in run" in capsys.readouterr().out


def test_a_shuffled_critic_is_another_run(tmp_path, monkeypatch, capsys):
    """Guards the control: what the search asks is the critic of the folder, dealt out, and the lines of the two never mix."""
    monkeypatch.setattr(decode_run, "root", lambda: tmp_path)
    monkeypatch.setattr(decode_run, "load_policy", lambda *_: letters())
    monkeypatch.setattr(decode_run, "load_scorer", {"offensive-language": LetterCost(), "minilm-relevance": LetterReward()}.get)
    monkeypatch.setattr(decode_run, "load_prompts", lambda *_: PROMPTS)
    asked, decode = [], decode_run.decode
    monkeypatch.setattr(decode_run, "decode", lambda *a, critic, **k: asked.append(critic) or decode(*a, critic=critic, **k))
    critic = untrained()
    save_critic(critic, tmp_path)
    size = dict(budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=6, refusal="f", critic=".", threshold=1.0)
    real, shuffled = (params(methods=["inferenceguard-critic"], critic_control=c, **size) for c in ("none", "shuffled"))
    one, two = decode_run.decode_run(real, tmp_path / "run"), decode_run.decode_run(shuffled, tmp_path / "run")
    assert "critic_control changed since the last run in run" in capsys.readouterr().out
    first, *_, last = asked
    assert type(first) is Critic and type(last) is Shuffled and last.spec == critic.spec
    assert all(torch.equal(x, y) for x, y in zip(last.critic.parameters(), critic.parameters(), strict=True))
    assert [line["prompt_id"] for line in one.lines] == [line["prompt_id"] for line in two.lines]
    assert [line["response"] for line in one.lines] != [line["response"] for line in two.lines]
    assert json.loads(two.manifest.read_text())["params"]["critic_control"] == "shuffled"


def test_a_run_whose_methods_ask_different_networks(tmp_path, monkeypatch, capsys):
    """Guards each method's own network, both hashes in the identity, the control of the critic alone, and an early refusal."""
    monkeypatch.setattr(decode_run, "root", lambda: tmp_path)
    monkeypatch.setattr(decode_run, "load_policy", lambda *_: letters())
    monkeypatch.setattr(decode_run, "load_scorer", {"offensive-language": LetterCost(), "minilm-relevance": LetterReward()}.get)
    monkeypatch.setattr(decode_run, "load_prompts", lambda *_: PROMPTS)
    asked, decode = {}, decode_run.decode
    monkeypatch.setattr(
        decode_run,
        "decode",
        lambda method, *a, critic, **k: asked.update({method: critic}) or decode(method, *a, critic=critic, **k),
    )
    for folder in ("critic", "value"):
        (tmp_path / folder).mkdir()
    save_critic(untrained(), tmp_path / "critic")
    save_value(network(max_new_tokens=6), tmp_path / "value")
    methods = ["base", "re-control-lagrangian", "inferenceguard-critic", "re-control"]
    size = dict(budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=6, refusal="f", value_steps=3)
    p = params(methods=methods, critic="critic", value="value", critic_control="shuffled", **size)
    run = decode_run.decode_run(p, tmp_path / "run")
    kinds = {method: type(network) for method, network in asked.items()}
    assert kinds == dict(zip(methods, [type(None), ValueNetwork, Shuffled, ValueNetwork], strict=True))
    known = json.loads(run.manifest.read_text())["params"]
    for name in ("critic", "value"):
        weights = (tmp_path / name / f"{name}.safetensors").read_bytes()
        assert known["digests"][name] == hashlib.sha256(weights).hexdigest() and known[name] == name
    texts = {m: [line["response"] for line in run.lines if line["method"] == m] for m in methods}
    assert len(texts["base"]) == 10 and texts["base"] != texts["re-control"] != texts["re-control-lagrangian"]
    capsys.readouterr()
    save_value(network(max_new_tokens=6, seed=1), tmp_path / "value")
    decode_run.decode_run(p, tmp_path / "run")
    assert "digests changed since the last run in run" in capsys.readouterr().out
    save_value(network(max_new_tokens=9), tmp_path / "value")
    with pytest.raises(ParameterError, match="value network was trained for max_new_tokens 9, but 're-control-lagrangian' runs"):
        decode_run.decode_run(p, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_lines_know_the_name_of_their_run(tmp_path):
    """Guards the arms of an experiment: shards are of one run, and a name with a dot in it is not cut short."""
    for name, n, i in (("decode-0.5", 2, 0), ("decode-0.5", 2, 1), ("decode-0.2", 1, 0)):
        folder = tmp_path / (f"{name}.{i}-of-{n}" if n > 1 else name)
        with folders.open_run(folder, {"run": name, "n_shards": n, "shard": i}) as run:
            run.append({"method": "base", "prompt_id": f"{name} {i}"})
            run.finish({})
    found = runs.load_runs("x", tmp_path)
    assert found[["prompt_id", "run"]].to_records(index=False).tolist() == [
        ("decode-0.2 0", "decode-0.2"), ("decode-0.5 0", "decode-0.5"), ("decode-0.5 1", "decode-0.5"),
    ]  # fmt: skip


def test_a_file_is_scored_again_with_the_options_of_its_run(tmp_path):
    """Bug: a scorer with options of its own scored again with the defaults, and every line called wrong."""
    reward = {"name": "minilm-relevance", "echo_weight": 0.0}
    p = params(methods=["base"], limit=1, hardest=0, n_samples=2, keep=1, block_size=4, max_new_tokens=8, reward=reward)
    path = decode_run.decode_run(p, tmp_path / "run").responses
    assert runs.main(["verify", str(path)]) == 0
    path.with_name("params.json").unlink()
    assert runs.main(["verify", str(path)]) == 1


def test_methods_come_in_the_order_of_the_table_whatever_the_folders_are_called(tmp_path):
    """Bug: a table began with re-control because the folder of its run came first in the alphabet."""
    for name, method in (("a", "re-control"), ("b", "base"), ("c", "of an older version"), ("d", "args")):
        with folders.open_run(tmp_path / name, {"run": name}) as run:
            run.append({"method": method, "prompt_id": name})
            run.finish({})
    assert runs.load_runs("x", tmp_path)["method"].tolist() == ["base", "args", "re-control", "of an older version"]
    assert runs.load_runs("x", tmp_path, pattern="[ab]")["method"].tolist() == ["base", "re-control"]
    with pytest.raises(RunError, match="no run in .*decode-main"):
        runs.load_runs("x", tmp_path, pattern="decode-main-*")


def test_what_has_not_finished_is_left_out_and_said(tmp_path, monkeypatch):
    """Bug: one stopped run in a folder of many kept every table from being written; shards counted as runs of their own."""
    monkeypatch.setattr(runs, "root", lambda: tmp_path)
    empty, why = runs.load_finished("x")
    assert not len(empty) and not why and {"policy", "method", "run"} <= set(empty)
    for name, n, finished in (("b", 1, True), ("a.0-of-2", 2, True), ("a.1-of-2", 2, True), ("c", 1, False)):
        about = {"run": name.partition(".")[0], "n_shards": n, "shard": 1 if ".1-" in name else 0}
        with folders.open_run(tmp_path / "runs/x" / name, about) as run:
            run.append({"method": "args" if name == "b" else "base", "prompt_id": name})
            if finished:
                run.finish({})
    found, why = runs.load_finished("x")
    assert found["run"].tolist() == ["a", "a", "b"] and found["method"].tolist() == ["base", "base", "args"]
    assert len(why) == 1 and "c has not finished" in why[0]


def test_examples_are_read_only_when_they_are_named(tmp_path):
    """Bug: answers that were decoded to be looked at stood in the main table, as a policy of their own."""
    for name in ("decode-raw", "examples-mild"):
        with folders.open_run(tmp_path / name, {"run": name}) as run:
            run.append({"method": "base", "prompt_id": name})
            run.finish({})
    assert runs.load_runs("x", tmp_path)["run"].tolist() == ["decode-raw"]
    assert runs.load_runs("x", tmp_path, pattern="examples-*")["run"].tolist() == ["examples-mild"]


def test_compare_and_errors_of_the_command_line(tmp_path, capsys):
    path = decode_into(tmp_path / "run")
    assert runs.main(["compare", str(path), str(path)]) == 0
    other = decode_into(tmp_path / "other", dataclasses.replace(PARAMS, seed=1))
    assert runs.main(["compare", str(path), str(other)]) == 1
    assert "seed differs" in capsys.readouterr().err
    assert runs.main(["verify", str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot read")
