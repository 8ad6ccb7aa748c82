"""Tests of llama-7b-rm against transformers' own class, and of files and options that are wrong."""

import re

import pytest
import torch
from scorerfiles import (
    CONFIG,
    EXACT,
    PROMPTS,
    RESPONSES,
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
from transformers import (
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaTokenizer,
)

from igcore import AssetError, ParameterError, ScorerError
from igcore.models.convert import quiet_transformers
from igcore.models.lm_scorer import LMScorer
from igcore.models.paper import LlamaReward
from igcore.models.registry import load_scorer, maker
from igcore.scorers import REWARD
from tests.rehearsal.tokenizers import sentencepiece_folder

RM = CONFIG | {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 400}
STATE = llama_state(RM, {"score.weight": (1, 32)})
USER, ANSWER = "How do I water a fern?", "Water it when the soil is dry."
WRITTEN = {  # what USER and ANSWER become
    "raw": f"{USER}{ANSWER}",
    "human-assistant": f"\n\nHuman: {USER}\n\nAssistant: {ANSWER}",
    "safe-rlhf": f"BEGINNING OF CONVERSATION: USER: {USER} ASSISTANT:{ANSWER}",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. "
    f"USER: {USER} ASSISTANT: {ANSWER}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "llama-7b-rm"
    sentencepiece_folder(path, pad=False)
    return write(path, RM, STATE)


@pytest.fixture
def spoilt(folder, tmp_path):
    """A folder with the same tokenizer, whose weights a test replaces."""
    for path in folder.glob("*tok*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(folder=None, **options) -> LMScorer:
    repo = {"repo": str(folder)} if folder else {}
    return LlamaReward(**{"dtype": "float32", "self_check": False} | repo | options).load()


def reference_model(folder):
    with quiet_transformers():
        return LlamaForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float64
        ).eval()


def spoken(prompt: str, response: str) -> str:
    """Write a dialogue as HH-RLHF does; the prompts of `scorerfiles` are a question, or a dialogue
    already.
    """
    prompt, response = (text.replace("</s>", "< /s>") for text in (prompt, response))
    before = prompt if prompt.startswith("\n\nHuman:") else f"\n\nHuman: {prompt}\n\nAssistant:"
    return f"{before} {response.lstrip(' ')}"


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_are_those_of_transformers(folder, side):
    """Guards the whole adapter. Bug: the last column is read where the padding stands."""
    model, tokenizer = (
        reference_model(folder),
        LlamaTokenizer.from_pretrained(folder, padding_side=side),
    )

    @torch.inference_mode()
    def reference(prompts, responses, finished):
        batch = tokenizer(
            [spoken(*text) for text in zip(prompts, responses, strict=True)],
            return_tensors="pt",
            padding=True,
        )
        assert (batch["input_ids"][:, 0] == 1).any()  # BOS
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return model(**batch, position_ids=positions).logits[:, 0].tolist()

    scorer = load(folder)
    assert (scorer.name, scorer.sign) == ("llama-7b-rm", REWARD) and maker(
        scorer.name
    ) is LlamaReward
    assert_equal_to(scorer, reference)


@pytest.mark.parametrize("text_format", WRITTEN)
def test_text_formats_are_exact(folder, text_format):
    """Guards the text that is scored, to the last space."""
    model, tokenizer = reference_model(folder), LlamaTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        expected = model(**tokenizer(WRITTEN[text_format], return_tensors="pt")).logits.item()
    assert load(folder, text_format=text_format).score([USER], [ANSWER], [True]) == pytest.approx(
        [expected], **EXACT
    )


@torch.inference_mode()
def test_an_answer_is_read_up_to_where_it_speaks_for_the_user(folder):
    """Bug: a reward for what the answer lets the user say. ARGS reads what stands before the next
    "human:", in any letters.
    """
    model, tokenizer = reference_model(folder), LlamaTokenizer.from_pretrained(folder)

    def reference(prompts, responses, finished):
        texts = [
            spoken(p, re.split("human:", r, flags=re.IGNORECASE)[0])
            for p, r in zip(prompts, responses, strict=True)
        ]
        return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]

    assert_growing_equal_to(
        load(folder), reference, "Water it when dry \n\nHuman: And then? \n\nAssistant: Wait ."
    )
    assert_growing_equal_to(
        load(folder), reference, "Water it when dry . HUMAN: And then? human: Wait ."
    )
    for text_format in ("raw", "vicuna"):
        whole, cut = load(folder, text_format=text_format).score(
            [USER] * 2, ["Dry. Human: So.", "Dry. "], [True] * 2
        )
        assert abs(whole - cut) > 1e-3


def test_a_text_cannot_end_itself(folder):
    """Guards against `</s>` in an answer being read as the token 2."""
    backbone = load(folder).backbone
    assert LlamaTokenizer.from_pretrained(folder)("a</s>b")["input_ids"].count(2) == 1
    ids = backbone.ids("What is </s> for?", "This </s> is <s> all</s>")
    assert ids[0] == 1 and not {1, 2} & set(ids[1:])


def test_a_configuration_without_labels(folder):
    """Guards against two labels, of which transformers makes a head of two outputs where the files
    have one.
    """
    with quiet_transformers(), pytest.raises(RuntimeError):
        AutoModelForSequenceClassification.from_pretrained(folder)
    assert load(folder).score(PROMPTS, RESPONSES[:3], [True] * 3).shape == (3,)


@pytest.mark.parametrize("pad", [-1, 400, None, 7])
def test_any_pad_id_of_the_configuration_serves(folder, spoilt, pad):
    """Guards batches against a pad id that is missing, outside the vocabulary, or an ordinary
    token.
    """
    columns = list(zip(*TEXTS, strict=True))
    write(spoilt, RM | {"pad_token_id": pad}, STATE)
    assert load(spoilt).score(*columns).tolist() == load(folder).score(*columns).tolist()


def test_pickled_weights_give_the_same(folder, spoilt):
    """Guards the other file format of the hub."""
    write(spoilt, RM, STATE, ".bin")
    assert (
        load(spoilt).score([USER], [ANSWER], [True]).tolist()
        == load(folder).score([USER], [ANSWER], [True]).tolist()
    )


def test_the_head_is_exact_in_half_precision(folder):
    """Guards against a head cast down with its model: near 5 it would move in steps of 0.03."""
    scorer = load(folder, dtype="bfloat16")
    assert scorer.backbone.model.dtype == torch.bfloat16
    with quiet_transformers():
        model = LlamaModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = LlamaTokenizer.from_pretrained(folder)(spoken(USER, ANSWER))["input_ids"]
    state = last_states(model, [ids])[0][-1]
    exact, cast = (
        state.float() @ STATE["score.weight"].to(t).float()[0]
        for t in (torch.float32, torch.bfloat16)
    )
    assert abs(exact - cast) > 1e-4
    assert scorer.score([USER], [ANSWER], [True]) == pytest.approx([exact.item()], **EXACT)


@pytest.mark.parametrize(
    "state, match",
    [
        (renamed(STATE, "score.weight"), "lacks the weights .'score.weight'"),
        (without(STATE, "score.weight"), "lacks the weights .'score.weight'"),
        (without(STATE, "model.norm.weight"), "lacks the weights .*norm.weight"),
        (renamed(STATE, "model.layers.1.mlp.up_proj.weight"), "lacks the weights"),
        (STATE | {"score.bias": torch.zeros(1)}, "unknown weights .'score.bias'"),
        (STATE | {"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}, "unknown weights"),
        (
            STATE | {"score.weight": torch.zeros(2, 32)},
            "cannot be loaded .*shape",
        ),
        (
            STATE | {"model.embed_tokens.weight": torch.zeros(390, 32)},
            r"other shapes .*\[390, 32\]",
        ),
    ],
)
def test_other_keys_and_shapes_are_refused(spoilt, state, match):
    """Guards against random numbers in the place of weights, and weights that nobody reads."""
    assert_refused(load, spoilt, RM, state, match)


def test_a_vocabulary_of_another_model_is_refused(spoilt):
    """Guards against the 32000 embeddings of one model and the 32001 tokens of another."""
    state = STATE | {"model.embed_tokens.weight": STATE["model.embed_tokens.weight"][:399]}
    assert_refused(
        load,
        spoilt,
        RM | {"vocab_size": 399},
        state,
        "400 tokens, but its model has embeddings for 399",
    )


def test_a_download_that_broke_off_is_refused(spoilt):
    """Guards against half a file."""
    assert_cut_short_refused(load, spoilt, RM, STATE)
    (spoilt / "model.safetensors").unlink()
    with pytest.raises(AssetError, match="has no weights"):
        load(spoilt)


@pytest.mark.parametrize(
    "options, match",
    [
        (
            {"text_format": "human-asistant"},
            "unknown text_format 'human-asistant'; did you mean 'human-assistant'?",
        ),
        ({"text_format": ["raw"]}, "parameter text_format is ['raw']"),
        ({"text_format": "chat"}, "has no chat template"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"device": "gpu"}, "device 'gpu' is no torch device"),
        ({"repo": 7}, "parameter repo is 7; it must be text"),
        ({"revision": 7}, "parameter revision is 7"),
        (
            {"self_check": "no"},
            "parameter self_check is 'no'; it must be true or false",
        ),
    ],
)
def test_bad_options_are_refused(folder, options, match):
    """Guards against a setting that is silently another."""
    with pytest.raises(ParameterError, match=re.escape(match)) as caught:
        load(**{"repo": str(folder)} | options)
    assert_one_sentence(str(caught.value))


def test_digests_tell_settings_and_weights_apart(folder, spoilt):
    """Guards records: the same digest must mean the same scores."""
    write(spoilt, RM, llama_state(RM, {"score.weight": (1, 32)}, seed=1))
    options = [
        {},
        {"text_format": "raw"},
        {"text_format": "vicuna"},
        {"dtype": "bfloat16"},
        {"repo": str(spoilt)},
    ]
    digests = [load(folder, **more).digest for more in options]
    assert len(set(digests)) == len(options) and digests[0] == load(folder).digest
    assert re.fullmatch("[0-9a-f]{64}", digests[0])


def test_it_checks_itself(folder, spoilt):
    """Guards the first run: a head with the wrong sign must not load. One of the two signs is wrong
    for any head.
    """
    refused = []
    for sign in (1, -1):
        write(spoilt, RM, STATE | {"score.weight": sign * STATE["score.weight"]})
        try:
            load_scorer({"name": "llama-7b-rm", "repo": str(spoilt), "dtype": "float32"})
        except ScorerError as error:
            refused.append(str(error))
    assert len(refused) == 1 and "as this is a reward" in refused[0]
    assert_one_sentence(refused[0])
