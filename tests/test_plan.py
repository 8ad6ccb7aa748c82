"""Tests of the plan of a run before it starts: sizes and memory worked out by hand, hours from
measured speed, and files that say too little.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

import igcore
from igcore.baselines.value_training import ValueConfig
from igcore.critic.config import CriticConfig
from igcore.engine.device import GIB
from igcore.errors import ParameterError
from igcore.models.policies import POLICIES
from igcore.models.registry import maker
from igcore.runs import plan, sizes

LLAMA_3 = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_2_WEIGHTS, LLAMA_3_WEIGHTS = 6_738_415_616, 8_030_261_248
DECODE = dict(
    profile="paper",
    run="decode-a",
    policy="vicuna-7b",
    methods=["base", "inferenceguard"],
    prompts={"name": "hex-phi"},
    budget=0.0,
    reward="llama-7b-rm",
    cost="beaver-7b-cost",
    n_samples=8,
    keep=2,
    block_size=16,
    max_new_tokens=64,
    rounds=2,
    dtype="bfloat16",
)
CRITIC = dict(
    profile="paper",
    run="a",
    policy="vicuna-7b",
    prompts="hex-phi",
    budget=0.0,
    reward="llama-7b-rm",
    cost="beaver-7b-cost",
    critics={"terminal": {"features": "ho", "width": 4096}},
    value={"width": 4096},
    n_rollouts=5,
    max_new_tokens=64,
    block_size=16,
    search={"n_samples": 128, "keep": 32},
    dtype="bfloat16",
)


def written(tmp_path, name, base=DECODE, **changes) -> Path:
    """Write params/paper/<name>.yaml below a comment."""
    path = tmp_path / "paper" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text("# What it is for.\n" + yaml.safe_dump(base | changes, sort_keys=False))
    return path


def llama(repo="lmsys/vicuna-7b-v1.5", head=True):
    return sizes.model_of(repo, "bfloat16", head)


def planned(*files) -> list[plan.Job]:
    return list(plan.jobs(files))


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_of_the_two_families_by_hand():
    """Bug: weights in the wrong type, a head counted that a scorer lacks, tied weights twice."""
    two, three, small = llama(), llama(LLAMA_3), sizes.model_of("smollm2", "float32", True)
    assert sizes.weight_bytes(two) == 2 * LLAMA_2_WEIGHTS
    assert sizes.weight_bytes(three) == 2 * LLAMA_3_WEIGHTS
    assert sizes.weight_bytes(llama(head=False)) == 2 * (LLAMA_2_WEIGHTS - 32000 * 4096)
    assert sizes.weight_bytes(small) == 4 * 134_515_008
    assert {str(p.device) for model in (two, three, small) for p in model.parameters()} == {"meta"}


def test_every_named_model_has_a_shape():
    """Bug: a policy or scorer added without one, whose memory is unknown."""
    assert {known.repo or known.asset for known in POLICIES.values()} <= set(sizes.SHAPES)
    scorers = ["llama-7b-rm", "beaver-7b-cost", "qrm-llama-3.1-8b-reward", "qrm-llama-3.1-8b-cost"]
    for scorer in scorers:
        assert maker(scorer).repo in sizes.SHAPES


def test_a_folder_says_its_shape_itself(tmp_path):
    """Bug: a policy of one's own that is looked up on the hub."""
    config = LlamaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    config.save_pretrained(tmp_path / "own-7b")
    assert sizes.config_of(str(tmp_path / "own-7b")).num_hidden_layers == 3
    assert sizes.model_of("nobody/knows-7b", "float32", True) is None


def test_networks_are_as_large_as_they_are_made():
    """Bug: a critic of the KV cache counted as one of the last hidden state."""
    critic = sizes.network_of(llama(), CriticConfig(budget=0.0, features="ho", width=4096))
    assert critic.parameter_count == 740_384_770 and critic.reads_keys
    middle = sizes.network_of(llama(), CriticConfig(budget=0.0, features="m", layer=7, width=4096))
    assert not middle.reads_keys
    value = sizes.network_of(llama(), ValueConfig(width=16))
    assert value.parameter_count == 4096 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2


# --- jobs -----------------------------------------------------------------------------------------


def test_a_decode_run_by_hand(tmp_path):
    """Bug: prompts of another set, tokens or memory of one method only."""
    (job,) = planned(written(tmp_path, "decode-a"))
    assert (job.policy, job.prompts) == ("vicuna-7b", 300)
    assert job.tokens == {"base": 300 * 64, "inferenceguard": 300 * 64 * 8 * 2}
    scorers = 2 * (LLAMA_2_WEIGHTS - 32000 * 4096) + 4096  # one knows a token more
    search = 524288 * (2 * 512 + 12 * 64) + 8 * 32000 * 2
    sessions = 2 * 524288 * (512 + (2 * 8 + 2 * 2) * 64)
    expected = 2 * (LLAMA_2_WEIGHTS + scorers) + search + sessions
    assert job.gib == pytest.approx(expected / GIB)


def test_scorers_of_one_model_weigh_once(tmp_path):
    """Bug: QRM's reward and cost, which read one model, counted as two."""
    roles = {"reward": "qrm-llama-3.1-8b-reward", "cost": "qrm-llama-3.1-8b-cost"}
    (job,) = planned(written(tmp_path, "decode-a", policy="llama-3.1-8b", **roles))
    wide = roles | {"reward": {"name": "qrm-llama-3.1-8b-reward", "dtype": "float32"}}
    (wider,) = planned(written(tmp_path, "decode-b", policy="llama-3.1-8b", **wide))
    scorer = 2 * (LLAMA_3_WEIGHTS - 128256 * 4096 + 4096) / GIB
    assert wider.gib - job.gib > 2 * scorer


def test_embedded_scorers_weigh_nothing(tmp_path):
    embedded = {"reward": "minilm-relevance", "cost": "offensive-language"}
    (job,) = planned(written(tmp_path, "decode-a", **embedded))
    search = 524288 * (2 * 512 + 12 * 64) + 8 * 32000 * 2
    assert job.gib == pytest.approx((2 * LLAMA_2_WEIGHTS + search) / GIB)


def test_a_shape_that_nobody_knows_is_no_error(tmp_path):
    """Bug: no plan of a whole profile because of one model."""
    (job,) = planned(written(tmp_path, "decode-a", policy="nobody/knows-7b"))
    assert math.isnan(job.gib) and job.prompts == 300


@pytest.mark.parametrize(
    ("prompts", "split", "limit", "expected"),
    [
        ({"name": "pku-saferlhf", "part": "test"}, "all", None, 759),
        ("pku-saferlhf", "test", None, 759),  # its owners' test part, whole
        ("pku-saferlhf", "test", 200, 200),
        ("hh-rlhf", "all", 20_000, 12_451),
        ("hh-rlhf", "train", None, math.nan),
        ("hex-phi", "train", None, 150),
        ("hex-phi", "test", None, 78),
        ("rtp", "all", None, 623),
        ("mild", "all", None, 24),
        ("pku-saferlhf", "train", 2000, 2000),
        ("pku-saferlhf", "train", None, math.nan),
        ({"name": "pku-saferlhf", "part": "train"}, "test", None, math.nan),
    ],
)
def test_prompts_are_counted_without_a_download(prompts, split, limit, expected):
    """Bug: a split's share of a set that is not there, or a limit above what there is."""
    assert plan.count(prompts, split, limit) == pytest.approx(expected, nan_ok=True)


def test_prompts_of_a_file_are_counted_in_it(tmp_path):
    (tmp_path / "own.txt").write_text("one\ntwo\nthree\n")
    assert plan.count(str(tmp_path / "own.txt"), "all", 2) == 2
    assert plan.count({"name": str(tmp_path / "own.txt")}, "all", None) == 3


def test_a_critics_run_by_hand(tmp_path):
    """Bug: rollouts of one split only, or a training that is forgotten beside a search that needs
    less.
    """
    (job,) = planned(written(tmp_path, "critic-a", CRITIC))
    assert job.prompts == 150 + 78
    assert job.tokens["rollouts"] == (150 + 78) * 5 * 64
    assert job.tokens["inferenceguard-critic"] == 24 * 128 * 64 * 2
    (again,) = planned(written(tmp_path, "critic-b", CRITIC, rollouts="runs/paper/critics/a"))
    assert again.tokens.keys() == {"inferenceguard-critic"}
    (large,) = planned(written(tmp_path, "critic-c", CRITIC, value={"width": 65536}))
    wide = 65536 * 65536 + 4096 * 65536  # a network whose training needs more than the search
    assert large.gib > (2 * LLAMA_2_WEIGHTS + sizes.TRAINING * wide) / GIB > job.gib


def test_a_search_with_a_critic_takes_it_from_its_params_file(tmp_path):
    """Bug: the memory of a critic left out, or that of another run."""
    written(tmp_path, "critic-a", CRITIC)
    guided = {"methods": ["inferenceguard-critic"], "critic": "runs/paper/critics/a/terminal"}
    (job,) = planned(written(tmp_path, "decode-a", **guided))
    (alone,) = planned(written(tmp_path, "decode-b", methods=["inferenceguard"]))
    assert job.gib - alone.gib > 4 * 740_384_770 / GIB
    nowhere = guided | {"critic": "runs/elsewhere/critics/a/terminal"}
    (unknown,) = planned(written(tmp_path, "decode-c", **nowhere))
    assert math.isnan(unknown.gib)


def test_a_served_policy_takes_no_memory_of_a_job(tmp_path):
    """Bug: a job that asks for a GPU for a model that stands in a server, a server without room for
    a prompt, and a method planned that a server cannot carry.
    """
    written(tmp_path, "critic-a", CRITIC)
    guided = {"methods": ["inferenceguard", "inferenceguard-critic"]}
    guided["critic"] = "runs/paper/critics/a/terminal"
    files = [written(tmp_path, "decode-a", **guided), tmp_path / "paper/critic-a.yaml"]
    (job,) = plan.jobs(files, served=True)
    assert (job.policy, set(job.tokens)) == ("lmsys/vicuna-7b-v1.5", {"inferenceguard"})
    scorers = 2 * (LLAMA_2_WEIGHTS - 32000 * 4096) + 4096  # one knows a token more
    sessions = 2 * 524288 * (512 + (2 * 8 + 2 * 2) * 64)
    assert job.gib == pytest.approx((2 * scorers + sessions) / GIB)
    search = 524288 * (2 * 512 + 12 * 64) + 8 * 32000 * 2
    assert job.server == pytest.approx((2 * LLAMA_2_WEIGHTS + search) / GIB)
    text = plan.report(files, served=True)
    assert "cache of one prompt with all its candidates: 13.4 GiB for lmsys/vicuna-7b-v1.5" in text


def test_a_policy_in_a_server_is_planned_as_it_stands_in_a_file(tmp_path):
    """Bug: no plan of a file whose policy is a server, which has no name."""
    policy = {"server": "http://127.0.0.1:8000/v1", "model": "nobody/knows", "tokenizer": "x"}
    embedded = {"reward": "minilm-relevance", "cost": "offensive-language"}
    (job,) = planned(written(tmp_path, "decode-a", policy=policy, **embedded))
    assert (job.policy, job.gib) == ("nobody/knows", 0.0) and math.isnan(job.server)


# --- hours and what is printed --------------------------------------------------------------------


def finished(folder, method="base", manifest=True, **line):
    """Write a run of one line, 50 tokens in 2 seconds unless told otherwise."""
    known = {"policy": "vicuna-7b", "method": method, "prompt_id": "0", "policy_tokens": 50}
    folder.mkdir(parents=True)
    line = known | {"generate_s": 1.5, "score_s": 0.5} | line
    (folder / "responses.jsonl").write_text(json.dumps(line) + "\n")
    if manifest:
        (folder / "manifest.json").write_text("{}")


def test_hours_are_tokens_over_measured_speed(tmp_path):
    """Bug: hours guessed where nothing was measured; the speed of an unfinished run, or of another
    policy or method.
    """
    runs = tmp_path / "runs"
    finished(runs / "paper/decode-a")
    finished(runs / "paper/critics/a/rollouts-train", "rollouts", tokens=[[1] * 30, [1] * 10])
    finished(runs / "paper/decode-b", "inferenceguard", manifest=False)
    finished(runs / "other/decode-a", "inferenceguard")
    # Bug: what a method found in a pool took it no time, and the hours of a plan shrank by that
    finished(runs / "paper/decode-c", "best-of-n")
    (runs / "paper/decode-c/params.json").write_text('{"pool": "runs/pool"}')
    speeds = plan.measured(runs / "paper")
    assert speeds == {("vicuna-7b", "base"): 25.0, ("vicuna-7b", "rollouts"): 20.0}
    base = written(tmp_path, "decode-base", methods=["base"])
    both = written(tmp_path, "decode-both")
    found = planned(base, both)
    hours = list(plan.plan_table(found, speeds)["hours"])
    assert hours[0] == pytest.approx(300 * 64 / 25 / 3600) and math.isnan(hours[1])
    hours = list(plan.plan_table(found, {}, 10.0)["hours"])
    assert hours[1] == pytest.approx(300 * 64 * 17 / 10 / 3600)
    text = plan.report([base, both], runs)
    assert "Hours are unknown where no finished run in runs/paper measures" in text
    assert "| unknown |" in text.replace("   ", "")
    assert "| unknown" not in plan.report([both], runs, speed=10.0)


def test_a_row_sums_the_jobs_of_a_file(tmp_path):
    """Bug: a grid planned as one run, or with the memory of its first point."""
    grid = {"n_samples": [8, 256]}
    file = written(tmp_path, "decode-a", methods=["best-of-n"], grid=grid)
    small, large = planned(file)
    (row,) = plan.plan_table([small, large], {}, 100.0).to_dict("records")
    assert (row["file"], row["what it is"]) == ("decode-a.yaml", "What it is for.")
    assert (row["jobs"], row["prompts"], row["GiB"]) == (2, 300, large.gib)
    assert row["million tokens"] == pytest.approx(300 * 64 * 264 / 1e6)
    assert row["hours"] == pytest.approx(300 * 64 * 264 / 100 / 3600)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("run: [", "cannot be read"),
        ("- run", "cannot be read .*; it must be a mapping of settings"),
        (json.dumps(DECODE | {"n_sample": 3}), "'n_sample'"),
        (
            json.dumps(DECODE | {"prompts": "nowhere.csv"}),
            "no prompts could be read from nowhere.csv",
        ),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_name(tmp_path, content, sentence):
    """Bug: an error among 30 files that does not say which."""
    file = tmp_path / "paper/decode-a.yaml"
    file.parent.mkdir()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ParameterError, match=sentence) as caught:
        planned(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_the_command_prints_or_says_what_is_wrong(tmp_path, capsys):
    """Guards `make dry-run`, which starts nothing."""
    file = str(written(tmp_path, "decode-a"))
    plan.main([file, "--tokens-per-second", "100"])
    assert "| decode-a.yaml |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: no file has a run; give files named decode"):
        plan.main([str(written(tmp_path, "tables"))])


def test_a_light_install_is_told_what_the_plan_needs(tmp_path):
    """Bug: a bare ModuleNotFoundError where igcore was installed without its extras."""
    code = """
import runpy, sys
for name in ("pandas", "tabulate", "scipy"):
    sys.modules[name] = None
sys.argv[1:] = [FILE]
runpy.run_module("igcore.runs.plan", run_name="__main__")
"""
    code = code.replace("FILE", repr(str(written(tmp_path, "decode-a"))))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: this needs pandas; install")
    assert done.stderr.count("\n") == 1


def test_every_committed_file_of_the_paper_has_a_plan():
    """Bug: a params file that names a model or a prompt set of unknown size."""
    found = planned(*sorted(Path(igcore.__file__).parents[1].glob("params/paper/*.yaml")))
    assert found and not [
        job.file for job in found if math.isnan(job.prompts) or math.isnan(job.gib)
    ]
