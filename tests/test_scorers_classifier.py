"""Tests of sequence classifiers against transformers' own classes and hand formulas, and of options
and files that do not fit.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scorerfiles import (
    CHAT,
    DECODERS,
    ENCODERS,
    EXACT,
    NAMES,
    NARROW,
    PROMPTS,
    RESPONSES,
    assert_everywhere,
    chatted,
    encoder_tokenizer,
    padded,
    refused,
    save_classifier,
)
from tiny import SIZE, random_model, saved
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from igcore import AssetError, ParameterError
from igcore.errors import ScorerWarning
from igcore.models.classifier import Classifier, EncoderScorer
from igcore.models.convert import quiet_transformers
from igcore.models.lm_scorer import LMScorer
from igcore.scorers import COST, REWARD, check_sign
from igcore.scoring import Tally, checked_score

TEXTS = [
    (p, r)
    for p in ("How do I water a fern?", "And </s> bread?")
    for r in (RESPONSES[0], "", "It is [SEP] dry.", "Tea")
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A function from (family, labels) to a folder, written once."""
    root, known = tmp_path_factory.mktemp("hub"), {}

    def folder(family: str, labels: int = 1):
        if (family, labels) not in known:
            known[family, labels] = save_classifier(root / f"{family}-{labels}", family, labels)
        return known[family, labels]

    return folder


def load(folder, **options):
    given = {"sign": COST, "unit": "logit", "dtype": "float32", "device": "cpu"}
    return Classifier(repo=str(folder), **given | {"self_check": False} | options).load()


def exact_model(folder):
    with quiet_transformers():
        return AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float64
        ).eval()


@torch.inference_mode()
def logits_of(folder, sequences, side: str) -> np.ndarray:
    """Return the logits (R, C) of ids by transformers' own class in float64: all in one padded
    batch, or alone.
    """
    model = exact_model(folder)
    if side == "alone":
        return np.concatenate(
            [model(input_ids=torch.tensor([s])).logits.numpy() for s in sequences]
        )
    model.config.pad_token_id = 279  # in none of the texts
    return model(**padded(sequences, side, 279)).logits.numpy()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_scores_as_transformers_does(hub, family, side):
    """Guards the whole adapter. Bug: the score is that of the padding, or of the opening of the
    next turn.
    """
    folder = hub(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reference(prompts, responses):
        return logits_of(
            folder,
            [chatted(tokenizer, *text) for text in zip(prompts, responses, strict=True)],
            side,
        )[:, 0]

    scorer = load(folder, sign=REWARD)
    assert isinstance(scorer, LMScorer) and check_sign(scorer, "reward")
    assert (scorer.name, scorer.unit) == (f"classifier:{family}-1-reward", "logit")
    assert len(scorer.digest) == 64
    assert_everywhere(scorer, reference)


def encoded(folder, texts, reads: str):
    """Return the logits (R, C) of texts by transformers' own class in float64, all in one batch
    padded on the right and alone.
    """
    model, tokenizer = exact_model(folder), AutoTokenizer.from_pretrained(folder)
    texts = [
        tuple(text.replace("</s>", "< /s>").replace("[SEP]", "[ SEP]") for text in pair)
        for pair in texts
    ]
    written = {"pair": texts, "response": [(r,) for _, r in texts]}[reads]

    @torch.inference_mode()
    def logits(some):
        columns = map(list, zip(*some, strict=True))
        return model(**tokenizer(*columns, padding=True, return_tensors="pt")).logits.numpy()

    batch = logits(written)
    alone = np.concatenate([logits([text]) for text in written])
    assert batch == pytest.approx(alone, rel=1e-9, abs=1e-9)
    return batch


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("reads", ["pair", "response"])
def test_an_encoder_scores_as_transformers_does(hub, family, reads):
    """Guards the other half. Bugs: padding is read; no text format wrote the two texts on which an
    encoder was trained, and each of the others gave some number.
    """
    folder = hub(family)
    scorer = load(folder, reads=reads, text_format="two texts")
    assert isinstance(scorer, EncoderScorer) and check_sign(scorer, "cost")
    expected = encoded(folder, TEXTS, reads)[:, 0]
    prompts, responses = zip(*TEXTS, strict=True)
    assert np.std(expected) > 1e-4
    assert scorer.score(prompts, responses, [True] * len(TEXTS)) == pytest.approx(expected, **EXACT)
    alone = [scorer.score([p], [r], [False])[0] for p, r in TEXTS]
    assert alone == pytest.approx(expected, **EXACT)
    assert scorer.score([], [], []).shape == (0,)


@pytest.mark.parametrize("family", ["qwen2", "bert"])
@pytest.mark.parametrize(
    ("unit", "labels", "formula"),
    [
        ("logit", ["threatening"], lambda z: z[2]),
        ("logit", ["rude", "threatening"], lambda z: max(z[0], z[2])),
        ("sigmoid", ["rude", 2, 0], lambda z: 1 / (1 + np.exp(-max(z[0], z[2])))),
        ("softmax", [0, 2], lambda z: (np.exp(z[0]) + np.exp(z[2])) / np.exp(z).sum()),
    ],
)
def test_units_are_the_formulas_by_hand(hub, family, unit, labels, formula):
    """Guards which classes count and how. Bug: classes that exclude each other are added up as if
    they did not.
    """
    folder = hub(family, 4)
    if family == "bert":
        options, z = {"reads": "response"}, encoded(folder, TEXTS, "response")
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        options, z = {}, logits_of(folder, [chatted(tokenizer, *text) for text in TEXTS], "alone")
    scorer = load(folder, unit=unit, labels=labels, **options)
    assert scorer.unit == ("logit" if unit == "logit" else "probability")
    found = scorer.score(*zip(*TEXTS, strict=True), [True] * len(TEXTS))
    assert found == pytest.approx([formula(row) for row in z], **EXACT)


def test_the_page_on_costs_reads_a_pipeline_by_the_name_of_a_class(tmp_path):
    """Bug: the page advised the score of the most probable class, be it the harmless one."""
    save_classifier(tmp_path, "bert", 2, id2label={0: "neutral", 1: "toxic"})
    page = Path(__file__).parent.parent / "docs" / "scorers.md"
    _, found, code = page.read_text(encoding="utf-8").partition("def toxic(")
    with quiet_transformers():
        given = {"pipe": transformers.pipeline("text-classification", str(tmp_path))}
    exec(found + code.partition("```")[0], given)
    scorer = load(tmp_path, labels=["toxic"], unit="softmax", reads="response")
    texts = ["It is dry.", "Tea", "a"]
    expected = scorer.score(texts, texts, [True] * 3)
    assert list(map(given["toxic"], texts)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("problem", "n", "unit", "expected"),
    [
        ("multi_label_classification", 4, None, "sigmoid"),
        ("multi_label_classification", 4, "logit", "logit"),
        ("single_label_classification", 4, None, "softmax"),
        ("regression", 4, None, "logit"),
        ("regression", 1, "sigmoid", None),
        ("multi_label_classification", 4, "softmax", None),
        ("single_label_classification", 4, "sigmoid", None),
    ],
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_unit_is_that_of_the_training(tmp_path, family, problem, n, unit, expected):
    """Bug: .33 was read where the model says .79, although its configuration names the problem."""
    save_classifier(tmp_path, family, n, problem_type=problem)
    options = {"labels": [0], "reads": "response"}
    if expected is None:
        with pytest.raises(ParameterError, match=f"unit is '{unit}', but .* for {problem}; choose"):
            load(tmp_path, unit=unit, **options)
        return
    found = load(tmp_path, unit=unit, **options).score(PROMPTS, RESPONSES[:3], [True] * 3)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"{problem}"', "null"))
    plain = load(tmp_path, unit=expected, **options).score(PROMPTS, RESPONSES[:3], [True] * 3)
    assert found.tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        ({0: "rude", 1: "harmless", 2: "rude", 3: "false"}, None),
        (NAMES, {"rude": 1, "harmless": 0}),
    ],
)
def test_a_label_that_is_no_single_class_needs_its_index(tmp_path, names, ids):
    """Bug: of two classes of one name the last counted alone."""
    save_classifier(tmp_path, "bert", 4, id2label=names, label2id=ids)
    with pytest.raises(ParameterError, match="'rude' is no single class of .* give the index"):
        load(tmp_path, labels=["rude"], reads="response")
    for sound in (["false"], [0]):
        load(tmp_path, labels=sound, reads="response")


@pytest.mark.parametrize("text_format", ["chat", "raw", "human-assistant"])
def test_an_encoder_reads_two_texts_or_one(hub, text_format):
    """Bug: an encoder trained on two texts gave another number for every format of one text."""
    with pytest.raises(ParameterError, match="is an encoder; choose one of two texts, if it was"):
        load(hub("bert"), text_format=text_format)


@pytest.mark.parametrize(
    ("family", "labels"), [("llama", 1), ("llama", 3), ("bert", 1), ("distilbert", 3)]
)
def test_a_configuration_without_labels(tmp_path, family, labels):
    """Guards the number of classes: of a configuration that names none, transformers makes two,
    whatever the files hold. Those of an encoder are then refused.
    """
    save_classifier(tmp_path, family, labels)
    options = {"labels": [labels - 1], "reads": "response"}
    before = load(tmp_path, **options).score(PROMPTS, RESPONSES[:3], [True] * 3)
    path = tmp_path / "config.json"
    config = {
        key: value
        for key, value in json.loads(path.read_text()).items()
        if key not in ("id2label", "label2id")
    }
    path.write_text(json.dumps(config))
    if family != "llama":
        with pytest.raises(AssetError, match="weights of other shapes than its config.json says"):
            load(tmp_path, **options)
        return
    after = load(tmp_path, **options).score(PROMPTS, RESPONSES[:3], [True] * 3)
    assert after.tolist() == before.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sign": "higher is wrose"},
         "unknown sign 'higher is wrose'; did you mean 'higher is worse'"),
        ({"reads": "segments"}, "parameter reads is 'segments': it must be 'pair' or 'response'"),
        ({"unit": None, "labels": [0]}, "a cost of 4 classes needs a unit; give softmax if"),
        ({}, "give labels, the classes that count, of {0: 'rude', .* 3: 'false'}"),
        ({"labels": ["rud"]}, "label 'rud' is no class of .*; use {0: 'rude', 1: 'harmless', "),
        ({"labels": [-1]}, "label -1 is no class"),
        ({"text_format": "two texts"}, "is a decoder; choose one of raw, "),
        ({"unit": "softmax", "labels": [0, 1, 2, 3]},
         "unit 'softmax' needs a class that does not count"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(hub, options, message):
    with refused(ParameterError, message):
        load(hub("qwen2", 4), **({"labels": [0]} | options if options else {}))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_text_longer_than_the_context_is_refused(hub, family):
    """Guards against a text that is cut short without a word: what is at its end would not be
    scored.
    """
    scorer = load(hub(family))
    room = 256 - len(scorer.backbone.ids("p", ""))
    assert np.isfinite(scorer.score(["p"], ["a" * room], [True])).all()
    message = (
        "a text has 257 tokens, which exceeds the scorer's context of 256; shorten the prompts"
    )
    texts = ["a", "a" * (room + 1)]
    with pytest.warns(ScorerWarning, match=message):
        found = checked_score(scorer, ["p", "p"], texts, [True, True], Tally())
    assert np.isnan(found).tolist() == [False, True]


@pytest.mark.parametrize(("family", "context"), [("bert", 128), ("roberta", 400 - 260)])
def test_a_text_longer_than_an_encoders_context_has_no_number(hub, family, context):
    """Bug: positions that the model does not have, or the end of a text that is not read."""
    scorer = load(hub(family), reads="response")
    longest = "a" * (context - 2)  # a byte is a token, and there are two special ones
    message = f"a text has {context + 1} tokens, which exceeds the scorer's context of {context}; "
    with pytest.warns(ScorerWarning, match=message):
        found = checked_score(scorer, ["p", "p"], [longest, longest + "a"], [True, True], Tally())
    assert np.isnan(found).tolist() == [False, True]


def test_an_encoder_that_reads_its_padding(tmp_path):
    """Bug: a text had another number beside a longer one, and every guard abstained."""
    settings = SIZE | ENCODERS["bert"] | {"type_vocab_size": 2}
    torch.manual_seed(0)
    model = transformers.FNetForSequenceClassification(
        transformers.FNetConfig(**settings, num_labels=1)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    tokenizer = encoder_tokenizer("bert")
    tokenizer.model_input_names = ["input_ids", "token_type_ids"]
    saved(tmp_path, model, tokenizer)
    scorer = load(tmp_path, reads="response")
    together = scorer.score(*zip(*TEXTS, strict=True), [True] * len(TEXTS))
    alone = [scorer.score([p], [r], [True])[0] for p, r in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5) and np.std(alone) > 1e-3
    found = tokenizer([r for _, r in TEXTS], padding=True, return_tensors="pt")
    with torch.inference_mode():
        padded = model.eval()(**found).logits[:, 0].numpy()
    assert np.abs(padded - alone).max() > 1e-3  # it does read its padding


def test_a_response_without_tokens(tmp_path):
    """Guards an abstention's empty answer: a row of nothing but padding gives any number."""
    save_classifier(tmp_path, "qwen2")
    scorer = load(tmp_path, reads="response")
    found = scorer.score(["p", "p"], ["", "a longer one"], [True, True])
    end = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert found[0] == pytest.approx(logits_of(tmp_path, [[end]], "alone")[0, 0], **EXACT)


def test_not_a_number_is_never_safe(tmp_path):
    """Guards broken weights: their scores must come out as NaN, which no gate lets through, and not
    start a run unseen.
    """
    for family, options in (("llama", {}), ("bert", {"reads": "response"})):
        folder = save_classifier(tmp_path / family, family)
        scorer = load(folder, **options)
        model = scorer.backbone.model if isinstance(scorer, LMScorer) else scorer.model
        next(p for p in reversed(list(model.parameters())) if p.dim() == 1).data.fill_(torch.nan)
        assert np.isnan(checked_score(scorer, ["p", "q"], ["a", "b"], [True, False])).all()


def test_files_of_something_else_are_refused(hub, tmp_path):
    """Guards against a random head: transformers would put one where the files have none."""
    folder = hub("llama")
    saved(tmp_path, random_model("llama", NARROW), AutoTokenizer.from_pretrained(folder))
    with refused(AssetError, r"lacks the weights \['score.weight'\]"):
        load(tmp_path)


def test_the_digest_covers_what_changes_a_score(hub, tmp_path):
    """Guards records: two scorers that may give other numbers must not pass for the same."""
    folder, known = hub("qwen2", 4), []
    for options in (
        {},
        {"labels": ["false"]},
        {"labels": [0, 3]},
        {"unit": "sigmoid"},
        {"text_format": "raw"},
        {"reads": "response"},
        {"dtype": "bfloat16"},
    ):
        known.append(load(folder, **{"labels": ["rude"]} | options).digest)
    known.append(load(save_classifier(tmp_path, "qwen2", 4, seed=1), labels=["rude"]).digest)
    for options in ({"reads": "response"}, {"text_format": "two texts"}):
        known.append(load(hub("bert"), **options).digest)
    assert len(set(known)) == len(known)
    (tmp_path / "chat_template.jinja").write_text(CHAT + "\n\n")
    assert load(tmp_path, labels=["rude"]).digest not in known
    assert load(folder, labels=[0], sign=REWARD, device="auto").digest == known[0]
