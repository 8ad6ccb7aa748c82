"""Tests of the plan of a run before it is started: sizes, memory and hours worked out by hand, and
files that say too little.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import igcore.runs.plan.report
from igcore.baselines.value_training import ValueConfig
from igcore.critic.config import CriticConfig
from igcore.engine.device import GIB
from igcore.engine.memory import search_bytes, session_bytes
from igcore.errors import AssetError, ParameterError
from igcore.models.policies import POLICIES
from igcore.models.registry import maker
from igcore.runs.critic_params import CriticParams
from igcore.runs.decode_params import Settings
from igcore.runs.plan.__main__ import main
from igcore.runs.plan.estimate import (
    DEVICES,
    Assumed,
    Device,
    NetworkSize,
    Reader,
    System,
    batches,
    decode_s,
    drawn,
    fitting,
    prompt_bytes,
    rollouts_s,
    search_s,
    splits,
    training_s,
)
from igcore.runs.plan.needs import count, jobs
from igcore.runs.plan.report import plan_block, plan_table, report
from igcore.runs.plan.shapes import SHAPES, critic_size, shape, value_size

VICUNA, LLAMA_3 = "lmsys/vicuna-7b-v1.5", "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_2_WEIGHTS, LLAMA_3_WEIGHTS = 6_738_415_616, 8_030_261_248
ASSUMED = Assumed(DEVICES["h100-80gb"])
COUNTED = Assumed(
    Device(1e9, 1e30, 1e30, 1e30), layer_s=1 / 32
)  # a pass through 32 layers takes one second, whatever it reads
SETTINGS = Settings(
    budget=1.0, n_samples=6, keep=2, block_size=4, max_new_tokens=8, rounds=3, top_k=5
)
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


def llama(repo=VICUNA, head=True):
    return shape(repo, "bfloat16", head)


def system(critic=None):
    return System(
        llama(),
        (Reader(llama(head=False), ("reward",)), Reader(llama(head=False), ("cost",))),
        critic,
    )


def written(tmp_path, name, base=DECODE, **changes) -> Path:
    """Write params/paper/<name>.yaml below a comment."""
    path = tmp_path / "paper" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text("# What it is for.\n" + yaml.safe_dump(base | changes, sort_keys=False))
    return path


# --- shapes ---------------------------------------------------------------------------------------


def test_sizes_of_the_two_families_by_hand():
    """Bug: key heads taken for query heads, or the table of embeddings, which is only looked up,
    taken for a product.
    """
    two, three = llama(), llama(LLAMA_3)
    assert two.token == 2 * 32 * 32 * 128 * 2 == 524288
    assert three.token == 2 * 32 * 8 * 128 * 2 == 131072
    assert (two.weights, three.weights) == (2 * LLAMA_2_WEIGHTS, 2 * LLAMA_3_WEIGHTS)
    assert two.multiplied == LLAMA_2_WEIGHTS - 32000 * 4096
    assert (
        llama(head=False).multiplied == two.multiplied - 32000 * 4096
    )  # a scorer has no head over the vocabulary
    assert shape(VICUNA, "float32", True).token == 2 * two.token
    small = shape("smollm2", "float32", True)
    assert (
        small.weights == 4 * 134_515_008 and small.multiplied == 134_515_008
    )  # its table is its head, too
    assert {str(p.device) for s in (two, three, small) for p in s.model.parameters()} == {"meta"}


def test_every_named_model_has_a_shape():
    """Bug: a policy or scorer added without one, whose plan says n/a."""
    assert {known.repo or known.asset for known in POLICIES.values()} <= set(SHAPES)
    for scorer in (
        "llama-7b-rm",
        "beaver-7b-cost",
        "qrm-llama-3.1-8b-reward",
        "qrm-llama-3.1-8b-cost",
    ):
        assert maker(scorer).repo in SHAPES


def test_a_folder_says_its_shape_itself(tmp_path):
    """Bug: a policy of one's own that is looked up on the hub."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    config.save_pretrained(tmp_path)
    assert shape(str(tmp_path), "float32", True).token == 3 * 2 * 32 * 4
    assert shape("nobody/knows-7b", "float32", True) is None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(
        AssetError,
        match=r"damaged/config.json cannot be read \(.*\); fetch or save the whole model again$",
    ):
        shape(str(tmp_path / "damaged"), "float32", True)


def test_a_mirror_says_the_shape_of_what_it_holds(tmp_path, monkeypatch):
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path / "someone" / "own-7b")
    monkeypatch.setenv("IGCORE_HUB", str(tmp_path))
    assert shape("someone/own-7b", "float32", True).config.num_hidden_layers == 5


def test_the_papers_critic_is_as_large_as_the_policy_is_deep():
    """Bug: its operations taken from its parameters: it reads the keys and values of all 32 layers
    of every token.
    """
    critic = critic_size(llama(), CriticConfig(budget=0.0, features="ho", width=4096))
    assert critic.parameters == 740_384_770
    projections = 32 * 3 * 8192 * 8192 * 2  # query, key and value of every layer
    assert projections < critic.operations < 1.1 * projections
    assert critic.reads_keys and critic.layers == 32
    middle = critic_size(llama(), CriticConfig(budget=0.0, features="m", layer=7, width=4096))
    assert not middle.reads_keys and middle.layers == 8
    assert (
        value_size(llama(), ValueConfig(width=16)).parameters
        == 4096 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2
    )


# --- hours ----------------------------------------------------------------------------------------


def test_a_step_is_as_fast_as_memory_and_arithmetic_allow():
    """Bug: keys and values, or one of the two limits, left out. 32 and 128 rows of 128 tokens on
    4.3 TB/s and 780 TFLOP/s.
    """
    roofline = Assumed(
        Device(139, 4.3e12, 780e12, 67e12), efficiency=1, layer_s=0, prompt_tokens=128
    )
    config = Settings(budget=0.0, n_samples=32, keep=1, block_size=64, max_new_tokens=128)
    alone = System(llama())
    assert sum(search_s(alone, "best-of-n", config, 1, roofline)) == pytest.approx(0.46, rel=0.3)
    steps = search_s(
        alone, "best-of-n", Settings(budget=0.0, n_samples=128, max_new_tokens=128), 1, roofline
    )[1]
    assert 128 * 128 / steps == pytest.approx(26_000, rel=0.3)
    rows, kept = 1024, 128 + 1024 * 64
    by_hand = max(
        (13_214_687_232 + (kept + rows) * 524288) / 4.3e12, 2 * 6_607_343_616 * rows / 780e12
    )
    assert roofline.forward_s(llama(), rows, kept) == pytest.approx(by_hand)
    assert Assumed(roofline.device, 0.5, 0).forward_s(llama(), rows, kept) == pytest.approx(
        2 * by_hand
    )
    assert (
        Assumed(roofline.device, 1, 1.0).forward_s(llama(), 1) == 32
    )  # nothing is faster than its 32 layers can be started
    assert roofline.forward_s(llama(), rows, kept, layers=8) == pytest.approx(by_hand / 4)


@pytest.mark.parametrize(
    ("method", "once", "a_round"),
    # three models read the prompts, the cost checks the answer; the policy takes 7 steps to 8
    # tokens
    [
        ("base", 3 + 1 + 2, 7),  # both scorers read the answer alone
        ("best-of-n", 3 + 1 + 1, 7 + 1),  # the reward reads all at the end
        ("best-of-n-augmented", 3 + 1, 7 + 2),
        ("beam-lagrangian", 3 + 1, 7 + 2 * 2),  # both read at the end of both blocks
        ("inferenceguard", 3 + 1, 7 + 2 * 2),
        ("inferenceguard-critic", 3 + 1, 7 + 2),  # both read finished answers only
        ("args", 3 + 1 + 1, 7 + 8),  # the reward reads after every token
        ("args-cost", 3 + 1 + 1, 7 + 8),
        ("args-lagrangian", 3 + 1, 7 + 2 * 8),
        ("re-control-lagrangian", 3 + 1 + 2, 7),
    ],
)
def test_forward_passes_of_every_kind_of_method(method, once, a_round):
    """Bug: a scorer counted that a method does not ask, or asked too rarely."""
    critic = critic_size(llama(), CriticConfig(budget=0.0, features="o"))
    assert search_s(system(critic), method, SETTINGS, 4, COUNTED) == pytest.approx((once, a_round))


def test_scorers_that_share_weights_read_once():
    both = System(llama(), (Reader(llama(head=False), ("reward", "cost")),))
    assert search_s(both, "inferenceguard", SETTINGS, 4, COUNTED) == pytest.approx((2 + 1, 7 + 2))


def test_hours_go_from_one_round_to_all():
    """Bug: retries counted for methods that have none, or prompts encoded in every round."""
    assert decode_s(system(), "inferenceguard", SETTINGS, 4, 4, COUNTED) == pytest.approx(
        (4 + 11, 4 + 3 * 11)
    )
    assert decode_s(system(), "beam-augmented", SETTINGS, 4, 4, COUNTED) == pytest.approx(
        (4 + 11, 4 + 11)
    )


def test_the_critic_reads_every_prefix_again():
    """Bug: the critic left out, which takes as many operations for a token as the policy, and reads
    a token in several blocks.
    """
    slow = Assumed(Device(1e9, 1e30, 1e30, peak_float32=100.0), efficiency=0.5, layer_s=0)
    critic = NetworkSize("o", parameters=1, operations=50.0, layers=32)
    config = Settings(budget=1.0, n_samples=6, keep=2, block_size=4, max_new_tokens=16, rounds=1)
    assert search_s(system(critic), "inferenceguard-mix", config, 2, slow)[1] == pytest.approx(
        12 * (4 + 8 + 12) * 50 / 100 / 0.5
    )


def test_args_reads_one_token_of_many():
    """Bug: the policy charged for every token that ARGS considers; only scorers read them all."""
    busy = Assumed(Device(1e9, 1e30, 2.0, 2.0), efficiency=1, layer_s=0)
    alone, one = System(llama()), llama().multiplied
    assert search_s(alone, "args", SETTINGS, 3, busy)[1] == pytest.approx(7 * 3 * one)
    scored = System(llama(), (Reader(llama(head=False), ("reward",)),))
    assert search_s(scored, "args", SETTINGS, 3, busy)[1] == pytest.approx(
        7 * 3 * one + 8 * 3 * 5 * llama(head=False).multiplied
    )


def test_rollouts_are_scored_text_by_text():
    """Bug: prefixes scored as if a session carried them. Two groups of 32 prompts, and 320 texts in
    batches of 32.
    """
    params = CriticParams(**CRITIC)
    assert rollouts_s(system(), params, 64, COUNTED) == pytest.approx(2 * (1 + 63) + 10 * (4 + 1))


def test_batches_are_cut_from_groups():
    """Bug: batches across groups, which the engine never makes."""
    assert batches(20, 8, 3) == {3: 5, 2: 2, 1: 1}  # 3 3 2, 3 3 2, 3 1
    assert batches(5, 8, 100) == {5: 1}


def test_tokens_drawn_and_considered():
    assert drawn("inferenceguard", SETTINGS, 10) == (480, 1440)
    assert drawn("best-of-n", SETTINGS, 10) == (480, 480)
    assert drawn("args", SETTINGS, 10) == (400, 400)  # 5 candidates for each of 8 tokens
    assert drawn("base", SETTINGS, 10) == (80, 80)


def test_training_encodes_in_every_epoch_unless_it_may_keep_what_it_read():
    """Bug: the policy's passes counted once, or for all layers where a middle one is enough."""
    network = NetworkSize("o", 10, 0.0, 32)
    config = ValueConfig(epochs=9, patience=3, batch_size=8, memory_gb=0.0)
    assert training_s(llama(), network, config, 80, 64, COUNTED) == pytest.approx((4 * 10, 9 * 10))
    keeps = ValueConfig(epochs=9, patience=3, batch_size=8, memory_gb=80 * 64 * 4096 * 2 / GIB)
    assert training_s(llama(), network, keeps, 80, 64, COUNTED) == pytest.approx((10, 10))
    assert training_s(
        llama(), NetworkSize("m", 10, 0.0, 8), config, 80, 64, COUNTED
    ) == pytest.approx((10, 9 * 10 / 4))
    slow = Assumed(Device(1e9, 1e30, 1e30, 100.0), efficiency=1, layer_s=0)
    learning = training_s(
        llama(),
        NetworkSize("o", 1, 50.0, 32),
        ValueConfig(epochs=2, patience=9, validation=0.5),
        80,
        64,
        slow,
    )
    assert learning[1] == pytest.approx(2 * 80 * 64 * (0.5 * 3 + 0.5) * 50 / 100)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_the_engines_own_plan(tmp_path):
    """Bug: a plan on a model without weights that differs from what the engine plans for the model
    itself.
    """
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    config.save_pretrained(tmp_path)
    here = shape(str(tmp_path), "float32", True)
    model = LlamaForCausalLM(config).eval()
    both, short = (
        System(here, (Reader(here, ("cost",)),)),
        Assumed(ASSUMED.device, longest_prompt=9),
    )
    needed = prompt_bytes(both, "inferenceguard", SETTINGS, short)
    assert needed["keys_values"] + needed["logits"] == search_bytes(model, SETTINGS, 9)
    assert needed["session_0"] == session_bytes(model, SETTINGS, 9)
    assert needed["logits"] == 6 * 97 * 4
    assert needed["critic"] == 0


def test_a_prompt_of_the_papers_search_by_hand():
    """Bug: the rows of ARGS, or of a method that fixes its own samples, planned with those of the
    others.
    """
    config = Settings(
        budget=0.0, n_samples=128, keep=32, block_size=32, max_new_tokens=128, top_k=16
    )
    needed = prompt_bytes(system(), "inferenceguard", config, ASSUMED)
    assert needed["keys_values"] == 524288 * (2 * 512 + 192 * 128)
    assert needed["logits"] == 128 * 32000 * 2
    assert prompt_bytes(system(), "args", config, ASSUMED)["keys_values"] == 524288 * (
        2 * 512 + 18 * 128
    )
    ho = NetworkSize("ho", 1, 1.0, 32)
    assert (
        prompt_bytes(system(ho), "inferenceguard-critic", config, ASSUMED)["critic"]
        == 12 * 524288 * 2 * 8 * 128
    )
    assert prompt_bytes(system(ho), "inferenceguard", config, ASSUMED)["critic"] == 0


def test_models_are_split_over_devices_whole():
    """Bug: a model cut in two, or all of them counted on each device. Of what weights leave of 40
    GiB a fifth stays free.
    """
    assert fitting([10 * GIB] * 3, [10 * GIB] * 3, (0, 0, 0), Device(40, 1, 1, 1)) == 0  # 8 of 30
    assert fitting([10 * GIB] * 3, [10 * GIB] * 3, (0, 0, 1), Device(40, 1, 1, 1)) == 0  # 16 of 20
    assert (
        fitting([10 * GIB] * 3, [10 * GIB] * 3, (0, 1, 2), Device(40, 1, 1, 1)) == 2
    )  # 24 for 2 times 10
    parts = [
        SimpleNamespace(weights=10 * GIB),
        *(Reader(SimpleNamespace(weights=w * GIB), ("x",)) for w in (5, 10)),
    ]
    three = SimpleNamespace(policy=parts[0], readers=parts[1:])
    needed = {"keys_values": 9 * GIB, "logits": GIB, "session_0": 2 * GIB, "session_1": 2 * GIB}
    assert list(splits(three, 0, needed, Device(40, 1, 1, 1))) == [
        (0, (0, 0, 0)),
        (2, (0, 1, 1)),
        (2, (0, 1, 1)),
    ]
    assert [fit for fit, _ in splits(three, 6 * GIB, needed, Device(40, 1, 1, 1))] == [
        0,
        1,
        1,
    ]  # a network beside the policy


# --- files ----------------------------------------------------------------------------------------


def test_a_decode_run_by_hand(tmp_path):
    """Bug: weights in the wrong type, prompts of another set, tokens of one method only."""
    (job,) = jobs([written(tmp_path, "decode-a")], ASSUMED)
    assert (job.job, job.policy, job.scorers) == (
        "decode-a",
        "vicuna-7b",
        "llama-7b-rm, beaver-7b-cost",
    )
    assert job.prompts == 300
    assert job.policy_gib == pytest.approx(2 * LLAMA_2_WEIGHTS / GIB)
    assert job.scorers_gib == pytest.approx(
        2 * (2 * (LLAMA_2_WEIGHTS - 32000 * 4096) + 4096) / GIB
    )  # one knows a token more
    kept = 524288 * (2 * 512 + 12 * 64) / GIB
    assert (job.keys_values_gib, job.logits_gib) == (
        pytest.approx(kept),
        pytest.approx(8 * 32000 * 2 / GIB),
    )
    assert job.total_gib == pytest.approx(
        job.policy_gib + job.scorers_gib + job.keys_values_gib + job.logits_gib + job.sessions_gib
    )
    assert job.tokens == (300 * 64 * 9, 300 * 64 * 17)
    assert (
        job.devices == 1
        and job.split == "policy + reward + cost"
        and 0 < job.fit[0] < job.fit[1] < job.fit[2]
    )
    assert 0 < job.gpu_hours[0] < job.gpu_hours[1] < 1


def test_scorers_of_one_model_weigh_once(tmp_path):
    """Bug: QRM's reward and cost, which read one model, counted as two."""
    qrm = {
        "policy": "llama-3.1-8b",
        "reward": "qrm-llama-3.1-8b-reward",
        "cost": "qrm-llama-3.1-8b-cost",
    }
    (job,) = jobs([written(tmp_path, "decode-a", **qrm)], ASSUMED)
    assert job.scorers_gib == pytest.approx(2 * (LLAMA_3_WEIGHTS - 128256 * 4096 + 4096) / GIB)
    assert len(job.fit) == 2
    wide = qrm | {"reward": {"name": "qrm-llama-3.1-8b-reward", "dtype": "float32"}}
    assert jobs([written(tmp_path, "decode-a", **wide)], ASSUMED)[0].scorers_gib == pytest.approx(
        3 * job.scorers_gib
    )


def test_embedded_scorers_weigh_nothing(tmp_path):
    (job,) = jobs(
        [written(tmp_path, "decode-a", reward="minilm-relevance", cost="offensive-language")],
        ASSUMED,
    )
    assert (job.scorers_gib, job.sessions_gib, job.fit[1:]) == (0, 0, ())


def test_a_grid_has_a_job_for_every_point(tmp_path):
    """Bug: a grid planned as one run, or with the settings of its first point."""
    grid = {"n_samples": [4, 8], "keep": [1, 2]}
    found = jobs([written(tmp_path, "decode-a", methods=["best-of-n"], grid=grid)], ASSUMED)
    assert [job.job for job in found] == [
        f"decode-a-n_samples-{n}-keep-{k}" for n in (4, 8) for k in (1, 2)
    ]
    assert [job.tokens[0] for job in found] == [300 * 64 * n for n in (4, 4, 8, 8)]


def test_devices_are_held_together(tmp_path):
    """Bug: hours of one device where models stand on three, or a search planned in larger batches
    than the engine decodes.
    """
    (job,) = jobs(
        [written(tmp_path, "decode-a", methods=["best-of-n"], n_samples=256, max_new_tokens=128)],
        ASSUMED,
    )
    assert job.fit[:2] == (0, 1) and job.devices == 2
    config = Settings(
        budget=0.0, n_samples=256, keep=2, block_size=16, max_new_tokens=128, rounds=2
    )
    seconds = decode_s(system(), "best-of-n", config, 300, 1, ASSUMED)[0]
    assert job.gpu_hours[0] == pytest.approx(2 * seconds / 3600, rel=1e-3)


def test_a_shape_that_nobody_knows_is_no_error(tmp_path):
    """Bug: a plan of 80 jobs that stops at one policy of one's own; or its hours taken for none."""
    files = [
        written(tmp_path, "decode-a", policy="someone/unseen-7b"),
        written(tmp_path, "decode-b", run="decode-b"),
    ]
    unseen, known = jobs(files, ASSUMED)
    assert (
        unseen.unknown == "someone/unseen-7b"
        and math.isnan(unseen.gpu_hours[0])
        and math.isnan(unseen.total_gib)
    )
    text = report(files, ASSUMED, "h100-80gb")
    assert "decode-a: n/a because nothing here says the shape of someone/unseen-7b." in text
    assert "2 jobs, " in text and "for the 1 of them that are known" in text


def test_a_set_of_unknown_size_has_memory_but_no_hours(tmp_path):
    (job,) = jobs(
        [written(tmp_path, "decode-a", prompts={"name": "pku-saferlhf", "part": "train"})], ASSUMED
    )
    assert math.isnan(job.prompts) and math.isnan(job.gpu_hours[0]) and job.devices == 1


@pytest.mark.parametrize(
    ("prompts", "split", "limit", "expected"),
    [
        ({"name": "pku-saferlhf", "part": "test"}, "all", None, 759),
        ("pku-saferlhf", "test", None, 759),  # its owners' test part, whole
        ("pku-saferlhf", "test", 200, 200),
        ("hh-rlhf", "all", 20_000, 12_451),
        ("hh-rlhf", "calibrate", None, 17_928),  # 16 % of their train part
        ("hh-rlhf", "train", None, 85_160),  # 76 % of it
        (
            {"name": "hh-rlhf", "part": "train"},
            "train",
            None,
            56_026,
        ),  # a part alone is divided as any set
        ("hex-phi", "train", None, 150),
        ("hex-phi", "test", None, 78),
        ("rtp", "all", None, 623),
        ("mild", "all", None, 24),
        ("pku-saferlhf", "train", 2000, 2000),
        ("pku-saferlhf", "train", None, math.nan),
    ],
)
def test_prompts_are_counted_without_fetching_them(prompts, split, limit, expected):
    """Bug: a split's share of a set that is not there, or a limit above what there is."""
    assert count(prompts, split, limit) == pytest.approx(expected, nan_ok=True)


def test_prompts_of_a_file_are_counted_in_it(tmp_path):
    (tmp_path / "own.txt").write_text("one\ntwo\nthree\n")
    assert count(str(tmp_path / "own.txt"), "all", 2) == 2
    assert count({"name": str(tmp_path / "own.txt")}, "all", None) == 3


def test_a_critics_run_by_hand(tmp_path):
    """Bug: rollouts of one split only, or a training that is forgotten beside a search that needs
    less.
    """
    (job,) = jobs([written(tmp_path, "critic-a", CRITIC)], ASSUMED)
    assert job.methods == "rollouts, critic terminal (ho), value network, search"
    assert job.prompts == 150 + 78
    rollouts, searched = 228 * 5 * 64, 24 * 128 * 64
    assert job.tokens == (rollouts + searched, rollouts + 2 * searched)
    assert job.critic_gib == pytest.approx(
        (16 * 740_384_770 + 12 * 2 * 524288 * 32 * 64) / GIB
    )  # of the training
    taken = written(tmp_path, "critic-b", CRITIC, rollouts="runs/paper/critics/a", value=None)
    (later,) = jobs([taken], ASSUMED)
    assert later.methods == "critic terminal (ho), search" and later.tokens[0] == searched
    (both,) = jobs([written(tmp_path, "critic-c", CRITIC, value=None)], ASSUMED)
    rolling = sum(rollouts_s(system(), CriticParams(**CRITIC), n, ASSUMED) for n in (150, 78))
    assert both.gpu_hours[1] - later.gpu_hours[1] == pytest.approx(
        both.devices * rolling / 3600, rel=1e-3
    )
    small = {
        "critics": {"o": {"features": "o", "width": 4096}},
        "search": {"n_samples": 1, "keep": 1},
        "value": None,
    }
    (job,) = jobs([written(tmp_path, "critic-a", CRITIC, **small)], ASSUMED)
    assert job.critic_gib == 0 and 0 < job.keys_values_gib < 1 and job.devices == 1


def test_a_search_with_a_critic_takes_it_from_its_params_file(tmp_path):
    """Bug: a critic that is trained in the same plan taken for one that nobody knows; or one that
    does not fit passed over.
    """
    written(tmp_path, "critic-a", CRITIC)
    guided = {
        "methods": ["inferenceguard-critic"],
        "accounting": "terminal",
        "n_samples": 1024,
        "keep": 256,
    }
    file = written(
        tmp_path,
        "decode-a",
        critic="runs/paper/critics/a/terminal",
        value="runs/paper/critics/a/value",
        **guided,
    )
    (job,) = jobs([file], ASSUMED)
    networks = 4 * (740_384_770 + value_size(llama(), ValueConfig(width=4096)).parameters) / GIB
    held = [
        job.policy_gib,
        job.scorers_gib,
        job.keys_values_gib,
        job.logits_gib,
        job.sessions_gib,
        job.critic_gib,
    ]
    assert job.total_gib == pytest.approx(sum(held) + networks)
    assert job.fit == (0, 0, 0) and math.isnan(job.devices) and job.split == "policy, reward, cost"
    assert "decode-a: its neediest method fits on no number of devices." in report(
        [file], ASSUMED, "h100-80gb"
    )
    nobody = written(tmp_path, "decode-b", critic="runs/elsewhere/critics/a/terminal", **guided)
    assert jobs([nobody], ASSUMED)[0].unknown == "runs/elsewhere/critics/a/terminal"


# --- what is printed ------------------------------------------------------------------------------


def test_the_report_lists_every_job_and_says_how(tmp_path):
    files = [
        written(tmp_path, "decode-a", grid={"budget": [0.0, 0.5]}),
        written(tmp_path, "tables"),
    ]
    text = report(files, ASSUMED, "h100-80gb")
    lines = text.splitlines()
    assert sum(line.startswith("| decode-a-budget-0_") for line in lines) == 4  # in both tables
    assert len({len(line) for line in lines[:4]}) == 1
    assert (
        "Estimated by formula, not measured" in text
        and "3.35 TB/s" in text
        and "efficiency of 0.5" in text
    )
    assert lines[-1] == "Not planned: tables.yaml."


def test_a_row_of_the_readme_sums_a_file(tmp_path):
    """Bug: memory of the first point of a grid where a later one needs more."""
    file = written(
        tmp_path,
        "decode-a",
        methods=["best-of-n"],
        grid={"n_samples": [8, 256]},
        max_new_tokens=128,
    )
    small, large = jobs([file], ASSUMED)
    (row,) = plan_table([file, written(tmp_path, "tables")], ASSUMED).to_dict("records")
    assert list(row) == ["file", "what it is", "jobs", "prompts", "GiB", "GPUs", "GPU hours"]
    assert row["file"] == "decode-a.yaml" and row["what it is"] == "What it is for."
    assert (row["jobs"], row["prompts"], row["GPUs"]) == ("2", "300", "2")
    assert float(row["GiB"]) == pytest.approx(large.total_gib, rel=0.01)
    assert float(row["GPU hours"]) == pytest.approx(
        small.gpu_hours[0] + large.gpu_hours[0], rel=0.01
    )
    block = plan_block(tmp_path / "paper").splitlines()
    assert block[0].startswith("| file | what it is |") and block[-1].startswith(
        "Estimated by formula, not measured"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read .No such file or directory.; check the path"),
        ("run: [", "is no YAML .*; mend it$"),
        (
            "- run",
            "is no params file; it must be a mapping of settings, with the name of the run as run$",
        ),
        ("budget: 1.0", "is no params file; it must be a mapping"),
        (
            json.dumps(DECODE | {"n_sample": 3}),
            "unknown parameter 'n_sample'; did you mean 'n_samples'",
        ),
        (json.dumps(DECODE | {"memory_gb": 0.1}), "memory_gb is 0.1, but one prompt needs"),
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
        jobs([file], ASSUMED)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_the_command_prints_or_says_what_is_wrong(tmp_path, capsys):
    file = str(written(tmp_path, "decode-a"))
    main([file, "--device", "a100-80gb", "--prompt-tokens", "64"])
    assert "2.04 TB/s" in (text := capsys.readouterr().out) and "prompts have 64 tokens" in text
    for arguments, sentence in (
        ([file, "--device", "a100"], "error: unknown device 'a100'; did you mean 'a100-80gb'"),
        ([file, "--efficiency", "2"], "error: efficiency is 2.0; it must be above 0 and at most 1"),
        (
            [str(written(tmp_path, "tables"))],
            "tables.yaml has no run; give files named decode or critic-....yaml",
        ),
    ):
        with pytest.raises(SystemExit, match=sentence):
            main(arguments)


def test_every_committed_file_of_the_paper_has_a_plan():
    """Bug: a params file that names a model or a prompt set of unknown size, whose hours nobody can
    tell.
    """
    files = sorted(Path(igcore.__file__).parents[1].glob("params/paper/*.yaml"))
    found = jobs(files, ASSUMED)
    assert found and not [job.job for job in found if math.isnan(job.gpu_hours[1])]
