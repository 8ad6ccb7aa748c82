"""Tests of QRM against a slow reference that loops over objectives and quantiles, and of what
reward and cost share.
"""

import gc
import json
import math
import re

import pytest
import torch
from scorerfiles import (
    CONFIG,
    EXACT,
    PROMPTS,
    TEXTS,
    assert_cut_short_refused,
    assert_equal_to,
    assert_one_sentence,
    assert_refused,
    last_states,
    llama_state,
    renamed,
    without,
    write,
)
from tinymodels import Counter
from transformers import AutoTokenizer, LlamaModel

from igcore import ParameterError, ScorerError
from igcore.contract import Contract, Scoring
from igcore.engine.agreement import fits
from igcore.models import paper
from igcore.models.convert import quiet_transformers
from igcore.models.paper import QRMCost, QRMReward
from igcore.models.registry import load_scorer, maker
from igcore.scorers import COST, REWARD
from tests.rehearsal.tokenizers import llama3_folder
from tests.rehearsal.weights import drawn

WIDTH, HIDDEN, SAFE = 16, 16, 10
MODEL = CONFIG | {
    "architectures": ["LlamaForRewardModelWithGating31"],
    "hidden_size": HIDDEN,
    "num_key_value_heads": 2,
    "rope_theta": 500000.0,
    "auto_map": {
        "AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating31"
    },
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "pad_token_id": 128256,
    "vocab_size": 128257,
    "num_objectives": 19,
    "num_quantiles": 19,
    "gating_temperature": 5.0,
}
NORMS = [
    f"gating.layers.{i}.{name}"
    for i in (2, 5, 8)
    for name in ("weight", "bias", "running_mean", "running_var")
]


def head_state() -> dict[str, torch.Tensor]:
    """Return a head of which no part could be left out unnoticed."""
    shapes = {
        "regression_layer.weight": (361, HIDDEN),
        "reward_transform_matrix": (19, 19),
        "gating.layers.9.weight": (19, WIDTH),
    }
    shapes |= {f"gating.layers.{i}.weight": (WIDTH, HIDDEN if i == 0 else WIDTH) for i in (0, 3, 6)}
    state = drawn(shapes, seed=3)
    vectors = torch.randn(len(NORMS) + 2, 19, generator=torch.Generator().manual_seed(4))
    state |= {
        key: 0.5 + row[:WIDTH].abs() if "var" in key else row[:WIDTH]
        for key, row in zip(NORMS, vectors, strict=False)
    }
    state |= {f"gating.layers.{i}.num_batches_tracked": torch.tensor(7) for i in (2, 5, 8)}
    state["reward_transform_matrix"] += torch.eye(19)
    return state | {"gating.layers.9.bias": vectors[-1], "gating.logit_scale": torch.tensor([1.25])}


STATE = {
    key: tensor for key, tensor in llama_state(MODEL, {}).items() if "inv_freq" not in key
} | head_state()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "tokens"
    llama3_folder(path, 128257)
    return path


@pytest.fixture(scope="module")
def folder(tokens, tmp_path_factory):
    return write(copied(tokens, tmp_path_factory.mktemp("qrm")), MODEL, STATE)


@pytest.fixture
def spoilt(tokens, tmp_path):
    """A folder with the same tokenizer, in which a test writes its own files."""
    return copied(tokens, tmp_path)


def copied(tokens, path):
    for file in tokens.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def load(kind=QRMReward, folder=None, **options):
    repo = {"repo": str(folder)} if folder else {}
    return kind(**{"dtype": "float32", "self_check": False} | repo | options).load()


def reward_of(**options):
    return load(QRMReward, **options)


def messages(prompt: str, response: str) -> list[dict]:
    """Return the turns; one of the prompts of `scorerfiles` is a dialogue."""
    said = (
        ["Why does bread rise?", "Yeast eats sugar.", "And then?"]
        if prompt.startswith("\n\nHuman:")
        else [prompt]
    )
    return [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate([*said, response])
    ]


def reference_of(folder, what: str, side: str = "right", temperature: float = 5.0):
    """Return what computes reward or is_safe in plain Python, objective by objective and quantile
    by quantile.
    """
    with quiet_transformers():
        model = LlamaModel.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    s = {key: tensor.tolist() for key, tensor in STATE.items() if not key.startswith("model.")}

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def gate(x):
        for i in (0, 3, 6):
            x = [max(0.0, dot(row, x)) for row in s[f"gating.layers.{i}.weight"]]
            weight, bias, mean, var = (
                s[f"gating.layers.{i + 2}.{n}"]
                for n in ("weight", "bias", "running_mean", "running_var")
            )
            x = [
                (x[j] - mean[j]) / math.sqrt(var[j] + 1e-5) * weight[j] + bias[j]
                for j in range(WIDTH)
            ]
        logits = [
            dot(row, x) + b
            for row, b in zip(s["gating.layers.9.weight"], s["gating.layers.9.bias"], strict=True)
        ]
        powers = [math.exp(logit / temperature) for logit in logits]
        return [p / sum(powers) * s["gating.logit_scale"][0] for p in powers]

    def score(ids, states):
        starts = [
            i for i in range(len(ids)) if ids[i : i + 5] == [128009, 128006, 78191, 128007, 271]
        ]
        last, asked = states[-1].tolist(), states[starts[-1]].tolist()
        raw = [
            sum(dot(s["regression_layer.weight"][19 * o + q], last) for q in range(19)) / 19
            for o in range(19)
        ]
        after = [
            sum(raw[o] * s["reward_transform_matrix"][o][k] for o in range(19)) for k in range(19)
        ]
        return dot(gate(asked), after) if what == "reward" else after[SAFE]

    def reference(prompts, responses, finished):
        sequences = []
        for prompt, response in zip(prompts, responses, strict=True):
            sequences.append(
                tokenizer.apply_chat_template(messages(prompt, response), return_dict=True)[
                    "input_ids"
                ]
            )
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
        states = last_states(model, distinct, side, 128256)
        scores = {tuple(ids): score(ids, rows) for ids, rows in zip(distinct, states, strict=True)}
        return [scores[tuple(ids)] for ids in sequences]

    return reference


@pytest.mark.parametrize("side", ["left", "right"])
def test_rewards_are_those_of_the_slow_reference(folder, side):
    """Guards the whole head. Bug: objectives and quantiles swapped; the gate read at the answer;
    statistics of the batch used.
    """
    scorer = load(QRMReward, folder)
    assert (scorer.name, scorer.sign) == ("qrm-llama-3.1-8b-reward", REWARD) and maker(
        scorer.name
    ) is QRMReward
    assert_equal_to(scorer, reference_of(folder, "reward", side))


def test_costs_are_those_of_the_slow_reference(folder):
    """Guards the sign: a safe answer, near 1, must cost less than an unsafe one, near 0."""
    scorer = load(QRMCost, folder)
    assert (scorer.name, scorer.sign) == ("qrm-llama-3.1-8b-cost", COST) and maker(
        scorer.name
    ) is QRMCost
    is_safe = reference_of(folder, "is_safe")
    assert_equal_to(scorer, lambda *texts: [0.5 - safe for safe in is_safe(*texts)])


def test_the_gate_reads_where_the_prompt_ends(folder):
    """Guards the place: at the end of the user's last turn, where the published code reads it, and
    not after the pattern.
    """
    backbone = load(QRMReward, folder).backbone
    ids = backbone.ids(PROMPTS[1], "It rises.")
    at = backbone.anchored(ids) - 1
    assert (
        ids[at : at + 5] == [128009, 128006, 78191, 128007, 271]
        and backbone.prefix(PROMPTS[1]) == ids[: at + 1]
    )
    assert ids.count(78191) == 2 and 78191 not in ids[at + 5 :]
    assert (
        ids[0] == 128000 and ids.count(128000) == 1 and ids[-1] == 128009
    )  # one BOS, by the template


@pytest.mark.parametrize(
    "config, temperature", [({"gating_temperature": 2.0}, 2.0), ({"gating_temperature": None}, 5.0)]
)
def test_the_temperature_is_that_of_the_configuration(folder, spoilt, config, temperature):
    """Guards a gate that is flatter or sharper than the one that was trained; older files do not
    name it.
    """
    config = {key: value for key, value in (MODEL | config).items() if value is not None}
    columns = list(zip(*TEXTS[:6], strict=True))
    scorer = load(QRMReward, write(spoilt, config, STATE))
    assert scorer.score(*columns) == pytest.approx(
        reference_of(folder, "reward", temperature=temperature)(*columns), **EXACT
    )
    assert scorer.digest != load(QRMReward, folder).digest


def test_reward_and_cost_come_from_one_pass(folder):
    """Guards the work of a search: the second scorer reads nothing, weights are there once."""
    roles = {"cost": load(QRMCost, folder), "reward": load(QRMReward, folder)}
    model = roles["cost"].backbone.model
    assert roles["reward"].backbone is roles["cost"].backbone and fits(model)
    with Counter(model) as counter:
        contracts = {role: Contract(scorer) for role, scorer in roles.items()}
        scoring = Scoring(contracts, PROMPTS)
        columns = list(zip(*TEXTS, strict=True))
        cost = scoring.search["cost"].score(*columns)
        read = counter.tokens
        reward = scoring.search["reward"].score(*columns)
        assert len(scoring.sessions) == 1 and counter.tokens == read > 0
    assert cost == pytest.approx(roles["cost"].score(*columns), **EXACT)
    assert reward == pytest.approx(roles["reward"].score(*columns), **EXACT)


def test_a_model_is_shared_while_it_is_used(folder):
    """Guards memory: other types are other models, and what no scorer holds any more is freed."""
    cost, reward, half = (
        load(QRMCost, folder),
        load(QRMReward, folder),
        load(QRMReward, folder, dtype="bfloat16"),
    )
    assert cost.backbone is reward.backbone is not half.backbone
    assert half.backbone.model.dtype == torch.bfloat16
    backbone = id(cost.backbone)
    del cost, half
    gc.collect()
    assert [id(shared.backbone) for shared in paper._SHARED.values()] == [backbone]
    assert load(QRMCost, folder).backbone is reward.backbone
    del reward
    gc.collect()
    assert not paper._SHARED


def test_a_text_cannot_end_its_turn(folder):
    """Guards the pattern: an answer that writes it would be scored as another prompt's."""
    backbone = load(QRMReward, folder).backbone
    turn = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes"
    assert 128009 in AutoTokenizer.from_pretrained(folder)(turn)["input_ids"]
    ids, plain = (backbone.ids("Why?", answer) for answer in (f"so {turn}", "so"))
    assert all(ids.count(i) == plain.count(i) for i in range(128000, 128257))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace(
            "'<|start_header_id|>' + turn.role", "'<|start_header_id|>' + (turn.role | upper)"
        ),
        lambda t: None,
    ],
    ids=["other-pattern", "none"],
)
def test_a_chat_template_without_the_pattern_is_refused(spoilt, change):
    """Guards the place of the gate: without it some other hidden state would be read."""
    settings = json.loads((spoilt / "tokenizer_config.json").read_text())
    settings["chat_template"] = change(settings["chat_template"])
    (spoilt / "tokenizer_config.json").write_text(json.dumps(settings))
    write(spoilt, MODEL, STATE)
    with pytest.raises(
        ParameterError,
        match="does not hold the tokens .128009, .*chat template|has no chat template",
    ) as caught:
        load(QRMReward, spoilt)
    assert_one_sentence(str(caught.value))


def test_the_head_is_exact_in_half_precision(folder):
    """Guards against a head of which the 361 rows or the gate are rounded to three digits."""
    scorer = load(QRMCost, folder, dtype="bfloat16")
    with quiet_transformers():
        model = LlamaModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    state = last_states(model, [scorer.backbone.ids("Why?", "It is so.")])[0][-1].float()
    means = (STATE["regression_layer.weight"].view(19, 19, HIDDEN) @ state).mean(-1)
    expected = 0.5 - means @ STATE["reward_transform_matrix"][:, SAFE]
    assert scorer.score(["Why?"], ["It is so."], [True]) == pytest.approx(
        [expected.item()], **EXACT
    )


@pytest.mark.parametrize(
    "state, match",
    [
        (
            renamed(STATE, "gating.layers.5.running_mean"),
            "lacks the weights .'gating.layers.5.running_mean'",
        ),
        (
            without(STATE, "gating.layers.8.num_batches_tracked"),
            "lacks the weights .'gating.layers.8.num_batches_tracked'",
        ),
        (without(STATE, "reward_transform_matrix"), "lacks the weights .'reward_transform_matrix'"),
        (without(STATE, "model.layers.1.mlp.up_proj.weight"), "lacks the weights"),
        (
            STATE | {"regression_layer.bias": torch.zeros(361)},
            "unknown weights .'regression_layer.bias'",
        ),
        (
            STATE | {"regression_layer.weight": torch.zeros(95, HIDDEN)},
            "cannot be loaded .*Head",
        ),
        (STATE | {"gating.layers.3.weight": torch.zeros(WIDTH, 9)}, "cannot be loaded .*Head"),
    ],
)
def test_other_keys_and_shapes_are_refused(spoilt, state, match):
    """Guards against random numbers in the place of weights, and against the second version, which
    knows no safety.
    """
    assert_refused(reward_of, spoilt, MODEL, state, match)


def test_a_vocabulary_of_another_model_is_refused(spoilt):
    """Guards against the 128256 embeddings of Llama under the 128257 tokens of QRM."""
    state = STATE | {"model.embed_tokens.weight": STATE["model.embed_tokens.weight"][:-1]}
    assert_refused(
        reward_of,
        spoilt,
        MODEL | {"vocab_size": 128256},
        state,
        "128257 tokens, but its model has embeddings for 128256",
    )


def test_a_download_that_broke_off_is_refused(spoilt):
    """Guards against half a file."""
    assert_cut_short_refused(reward_of, spoilt, MODEL, STATE)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"scale": 2}, "unknown parameter 'scale'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, match):
    """Guards against minutes of loading before a wrong option is noticed."""
    with pytest.raises(ParameterError, match=re.escape(match)) as caught:
        load(QRMCost, "/no/such/folder", **options)
    assert_one_sentence(str(caught.value))


def test_digests_tell_settings_apart(folder):
    """Guards records: the same digest must mean the same scores."""
    options = [{}, {"dtype": "bfloat16"}]
    digests = [load(QRMCost, folder, **more).digest for more in options] + [
        load(QRMReward, folder).digest
    ]
    assert len(set(digests)) == len(digests)


def test_they_check_themselves(spoilt):
    """Guards the first run: a head with the wrong sign must not load. One of the two signs is wrong
    for any head.
    """
    options = {"repo": str(spoilt), "dtype": "float32"}
    refused = []
    for sign in (1, -1):
        write(
            spoilt,
            MODEL,
            STATE | {"regression_layer.weight": sign * STATE["regression_layer.weight"]},
        )
        for name in ("qrm-llama-3.1-8b-reward", "qrm-llama-3.1-8b-cost"):
            try:
                load_scorer({"name": name} | options)
            except ScorerError as error:
                refused.append((name.rsplit("-", 1)[1], str(error)))
    assert sorted(role for role, _ in refused) == ["cost", "reward"]
    assert all(f"as this is a {role}" in text for role, text in refused)
