"""Tests of beaver-7b-cost against a plain Llama with a head written out, and of files and options
that are wrong.
"""

import json
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
    assert_growing_equal_to,
    assert_one_sentence,
    assert_refused,
    last_states,
    llama_state,
    renamed,
    without,
    write,
)
from transformers import AutoModelForSequenceClassification, LlamaModel, LlamaTokenizer

from igcore import AssetError, ParameterError, ScorerError
from igcore.models.convert import quiet_transformers
from igcore.models.lm_scorer import LMScorer
from igcore.models.paper import BeaverCost
from igcore.models.registry import load_scorer, maker
from igcore.scorers import COST
from tests.rehearsal.tokenizers import sentencepiece_folder

NORMAL = {
    "normalizer.mean": torch.tensor([0.7]),
    "normalizer.var": torch.tensor([6.25]),
    "normalizer.count": torch.tensor([9]),
}
COST_MODEL = CONFIG | {
    "architectures": ["LlamaForScore"],
    "vocab_size": 401,
    "pad_token_id": 400,
    "score_dim": 1,
    "bias": False,
    "score_type": "cost",
    "do_normalize": False,
    "normalizer_type": None,
    "momentum": None,
}
STATE = llama_state(COST_MODEL, {"score_head.weight": (1, 32)}) | NORMAL
BIAS = {"score_head.bias": torch.tensor([0.25])}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "tokens"
    sentencepiece_folder(path, pad=True)
    return path


@pytest.fixture
def folder(tokens, tmp_path):
    """A folder with the tokenizer and a sound checkpoint, which a test may replace."""
    for path in tokens.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return write(tmp_path, COST_MODEL, STATE)


def load(folder=None, **options) -> LMScorer:
    repo = {"repo": str(folder)} if folder else {}
    return BeaverCost(**{"dtype": "float32", "self_check": False} | repo | options).load()


def conversation(prompt: str, response: str) -> str:
    """Write what Safe RLHF trained on, without the end; of the prompts of `scorerfiles` one is a
    dialogue.
    """
    prompt, response = (text.replace("</s>", "< /s>") for text in (prompt, response))
    if prompt.startswith("\n\nHuman:"):
        return (
            "BEGINNING OF CONVERSATION: USER: Why does bread rise? ASSISTANT:Yeast eats "
            "sugar.</s>USER: And then? ASSISTANT:" + response
        )
    return f"BEGINNING OF CONVERSATION: USER: {prompt} ASSISTANT:{response}"


def reference_of(folder, side: str = "right", state=STATE, divisor: float = 1.0):
    """Return what computes costs as Safe RLHF does: a head on every position, read at the last one
    that is attended.
    """
    with quiet_transformers():
        model = LlamaModel.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    weight, bias = (
        state["score_head.weight"][0].double(),
        state.get("score_head.bias", torch.zeros(1)).item(),
    )

    def reference(prompts, responses, finished):
        sequences = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = tokenizer(conversation(prompt, response))["input_ids"]
            sequences.append(ids + [2])
        assert all(ids[0] == 1 for ids in sequences)
        scores = [
            [float(position @ weight) + bias for position in states]
            for states in last_states(model, sequences, side, 400)
        ]
        return [row[-1] / divisor for row in scores]

    return reference


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_are_those_of_a_head_on_the_last_position(folder, side):
    """Guards the whole adapter. Bug: the score of the padding, or of the answer's last word where
    it should be that of its end.
    """
    scorer = load(folder)
    assert (scorer.name, scorer.sign) == ("beaver-7b-cost", COST) and maker(
        scorer.name
    ) is BeaverCost
    assert_equal_to(scorer, reference_of(folder, side))


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_used_exactly_when_it_is_there(folder, bias):
    """Guards both versions of Safe RLHF: what the configuration says of a bias is not what the
    files hold.
    """
    state = STATE | (BIAS if bias else {})
    write(folder, COST_MODEL | {"bias": not bias}, state)
    assert_growing_equal_to(load(folder), reference_of(folder, state=state))


@pytest.mark.parametrize("bias", [False, True])
def test_costs_are_normalised_without_a_shift(folder, bias):
    """Guards the boundary at 0, which a mean taken off would move: a cost is divided by sqrt(6.25)
    alone.
    """
    state = STATE | (BIAS if bias else {})
    write(
        folder,
        COST_MODEL | {"do_normalize": True, "normalizer_type": "ExponentialMovingAverage"},
        state,
    )
    assert_growing_equal_to(load(folder), reference_of(folder, state=state, divisor=2.5 + 1e-8))


def test_files_without_a_normaliser(folder):
    """Guards older files, and against costs that are said to be normalised by a number that is not
    there.
    """
    columns = list(zip(*TEXTS, strict=True))
    expected = load(folder).score(*columns).tolist()
    bare = {key: tensor for key, tensor in STATE.items() if not key.startswith("normalizer")}
    write(folder, COST_MODEL, bare)
    assert load(folder).score(*columns).tolist() == expected
    assert_refused(
        load, folder, COST_MODEL | {"do_normalize": True}, bare, "cannot be loaded .*normalizer.var"
    )


def test_the_class_of_transformers_has_a_random_head(folder):
    """Guards the reason for this module: transformers loads the same files with a head that is not
    theirs; ours is.
    """
    torch.manual_seed(0)
    with quiet_transformers():
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32, output_loading_info=True
        )
    assert report["missing_keys"] == {"score.weight"}
    assert not torch.equal(model.score.weight, STATE["score_head.weight"])
    states = torch.eye(32)
    assert torch.equal(load(folder).head(states)[:, 0], STATE["score_head.weight"][0])


def test_a_text_cannot_end_itself(folder):
    """Guards against `</s>` in an answer being read as the token 2: what follows it would be
    another conversation.
    """
    assert LlamaTokenizer.from_pretrained(folder)("a</s>b")["input_ids"].count(2) == 1
    ids = load(folder).backbone.ids("What is </s> for?", "This </s> is <pad> all</s>")
    assert (ids[0], ids[-1]) == (1, 2) and not {1, 2, 400} & set(ids[1:-1])
    turns = load(folder).backbone.ids(PROMPTS[1], "This </s> is it")
    assert turns.count(2) == 2  # one is the template's own


def test_a_reward_model_is_refused(folder):
    """Guards the sign: the reward model of the same family has the same keys, and its number means
    the opposite.
    """
    assert_refused(
        load,
        folder,
        COST_MODEL | {"score_type": "reward"},
        STATE,
        "is a reward model, not a cost model",
    )


def test_weights_in_half_precision(folder):
    """Guards the format of the hub, bfloat16, and a head that is computed in float32."""
    half = {
        key: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for key, tensor in STATE.items()
    }
    write(folder, COST_MODEL | {"torch_dtype": "bfloat16"}, half)
    scorer = load(folder, dtype="bfloat16")
    with quiet_transformers():
        model = LlamaModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = scorer.backbone.ids("Why?", "It is so.")
    expected = last_states(model, [ids])[0][-1].float() @ half["score_head.weight"].float()[0]
    assert scorer.score(["Why?"], ["It is so."], [True]) == pytest.approx(
        [expected.item()], **EXACT
    )


@pytest.mark.parametrize(
    "state, match",
    [
        (renamed(STATE, "score_head.weight"), "lacks the weights .'score_head.weight'"),
        (without(STATE, "score_head.weight"), "lacks the weights .'score_head.weight'"),
        (renamed(STATE, "normalizer.var"), "unknown weights .'normalizer.vars'"),
        (without(STATE, "model.layers.0.self_attn.k_proj.weight"), "lacks the weights"),
        (renamed(STATE, "model.norm.weight"), "lacks the weights"),
        (STATE | {"score.weight": torch.zeros(1, 32)}, "unknown weights .'score.weight'"),
        (
            STATE | {"score_head.weight": torch.zeros(2, 32)},
            "cannot be loaded .*shape",
        ),
    ],
)
def test_other_keys_and_shapes_are_refused(folder, state, match):
    """Guards against random numbers in the place of weights, and weights that nobody reads."""
    assert_refused(load, folder, COST_MODEL, state, match)


def test_a_vocabulary_of_another_model_is_refused(folder):
    """Guards against the 32000 embeddings of one model and the 32001 tokens of another."""
    state = STATE | {"model.embed_tokens.weight": STATE["model.embed_tokens.weight"][:400]}
    assert_refused(
        load,
        folder,
        COST_MODEL | {"vocab_size": 400},
        state,
        "401 tokens, but its model has embeddings for 400",
    )


def test_a_download_that_broke_off_is_refused(folder):
    """Guards against half a file."""
    assert_cut_short_refused(load, folder, COST_MODEL, STATE)
    (folder / "config.json").write_text(json.dumps(COST_MODEL)[:-40])
    with pytest.raises(AssetError, match="cannot be loaded"):
        load(folder)


@pytest.mark.parametrize(
    "options, match",
    [
        (
            {"text_format": "safe_rlhf"},
            "unknown text_format 'safe_rlhf'; did you mean 'safe-rlhf'?",
        ),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"device": 0}, "parameter device is 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, match):
    """Guards against minutes of loading before a misspelt word is noticed."""
    with pytest.raises(ParameterError, match=re.escape(match)) as caught:
        load("/no/such/folder", **options)
    assert_one_sentence(str(caught.value))


def test_digests_tell_settings_apart(folder):
    """Guards records: the same digest must mean the same scores."""
    options = [{}, {"text_format": "vicuna"}, {"dtype": "bfloat16"}]
    digests = [load(folder, **more).digest for more in options]
    write(folder, COST_MODEL | {"do_normalize": True}, STATE)
    digests.append(load(folder).digest)
    write(folder, COST_MODEL, STATE | BIAS)
    digests.append((scorer := load(folder)).digest)
    assert (
        len(set(digests)) == len(digests)
        and {"model.safetensors", "tokenizer.model"} < scorer.files.keys()
    )


def test_it_checks_itself(folder):
    """Guards the first run: costs that do not lie on their sides of 0 must not load. A head without
    a bias can be scaled only.
    """
    options = {"name": "beaver-7b-cost", "repo": str(folder), "dtype": "float32"}
    refused = []
    for sign in (1, -1):
        write(
            folder,
            COST_MODEL,
            STATE
            | {"score_head.weight": sign * STATE["score_head.weight"]}
            | {"score_head.bias": torch.ones(1)},
        )
        with pytest.raises(ScorerError) as caught:
            load_scorer(options)
        refused.append(str(caught.value))
        assert_one_sentence(refused[-1])
    assert any("as this is a cost" in text for text in refused) and any(
        "below 0" in text for text in refused
    )
