"""Tests of a linear head on a middle layer, against transformers' own hidden states, one text at a
time and without a cache.
"""

import numpy as np
import pytest
import torch
from mockpolicy import LetterReward, mock_policy
from safetensors.torch import load_file, save_file
from scorerfiles import (
    DECODERS,
    RESPONSES,
    assert_everywhere,
    decoder_tokenizer,
    refused,
)
from test_scorers_lm import pairs
from tiny import Counter, random_model, saved
from transformers import AutoModel, AutoTokenizer

from igcore import AssetError, Guard, ParameterError, load_scorer
from igcore.files import file_digest
from igcore.models import head as module
from igcore.models.convert import quiet_transformers
from igcore.models.head import HARM_2, Probe
from igcore.models.maximum import maximum_of
from igcore.scoring import Cached, readings, word_ends

LAYERS, LAYER = 3, 1
PROMPTS = ["How do I water a fern?", "What is </s> for?"]
WORDS = "the tree, then the reader there"
CLOSE = dict(rel=0, abs=1e-5)  # a head of norm 5.3 on float32: one processor is 1.04e-6 off


def save(folder, family: str = "llama", tokenizer=None, **more):
    settings = DECODERS[family] | {"num_hidden_layers": LAYERS} | more
    return saved(
        folder, random_model(family, settings, AutoModel), tokenizer or decoder_tokenizer()
    )


def save_head(path, width: int = 32, metadata=None, **tensors):
    generator = torch.Generator().manual_seed(1)
    drawn = {"weight": torch.randn(width, generator=generator), "bias": torch.tensor([-0.3])}
    tensors = {key: tensor for key, tensor in (drawn | tensors).items() if tensor is not None}
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function from a family, with a name of its tokenizer, to the folder of a model."""
    root = tmp_path_factory.mktemp("probes")
    save_head(root / "toy.safetensors")

    def folder(family: str = "llama", tokenizer: str = "letters"):
        place = root / f"{family}-{tokenizer}"
        if not place.exists():
            save(place, family, pairs() if tokenizer == "pairs" else None, vocab_size=320)
        return place

    return folder


def load(folder, **options):
    given = {"layer": LAYER, "dtype": "float32", "device": "cpu", "self_check": False}
    given["head"] = str(folder.parent / "toy.safetensors")
    return Probe(repo=str(folder), **given | options).load()


def normed(states):
    """Divide each state (n, H) by its root mean square."""
    return states / (states.square().mean(1, keepdim=True) + 1e-6).sqrt()


class Reference:
    """The cost by definition, in float64."""

    def __init__(self, folder, layer: int = LAYER, pooling: str = "mean"):
        self.layer, self.pooling = layer, pooling
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        with quiet_transformers():
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
        tensors = load_file(folder.parent / "toy.safetensors")
        self.weight, self.bias = tensors["weight"].double(), tensors["bias"].double()

    @torch.inference_mode()
    def cost(self, ids, answer: int) -> float:
        """Return the cost of a text whose last `answer` tokens are those of the answer."""
        output = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        states = output.hidden_states[self.layer + 1][0]  # the first are the embeddings
        states = normed(states)
        if self.pooling == "last":
            pooled = states[-1]
        else:
            pooled = states[len(ids) - answer :].sum(0) / max(answer, 1)
        return torch.sigmoid(pooled @ self.weight + self.bias).item()

    def ids(self, prompt: str, response: str) -> tuple[list[int], int]:
        """Return the ids of a text, and how many are the answer's."""
        prompt, response = (text.replace("</s>", "< /s>") for text in (prompt, response))
        before = f"\n\nHuman: {prompt}\n\nAssistant: "
        encoding = self.tokenizer(before + response)
        answer = [end > len(before) for _, end in self._spans(before + response)]
        return encoding["input_ids"], sum(answer)

    def _spans(self, text: str):
        return self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]

    def __call__(self, prompts, responses):
        texts = zip(prompts, responses, strict=True)
        return [self.cost(*self.ids(*text)) for text in texts]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_costs_are_those_of_a_middle_layer(files, family, pooling):
    """Guards the whole reader. Bug: the layer before or after, the final norm on top, the prompt's
    tokens in the mean, a state that is not divided by its root mean square.
    """
    folder = files(family)
    scorer = load(folder, pooling=pooling)
    assert (scorer.name, scorer.unit, len(scorer.digest)) == ("probe:toy", "probability", 64)
    texts = [(prompt, response) for prompt in PROMPTS for response in RESPONSES]
    assert_everywhere(scorer, Reference(folder, pooling=pooling), texts, close=CLOSE)
    assert len(scorer.backbone.model.layers) == LAYER + 1  # what is not read is not computed


def test_the_last_layer_is_read_before_the_final_norm(files):
    """Bug: off by one at the end; the norm's weight, which is 1 here until it is changed."""
    folder = files()
    scorer = load(folder, layer=LAYERS - 1)
    whole, seen = Reference(folder), []
    whole.model.layers[-1].register_forward_hook(lambda _, args, out: seen.append(out))
    ids, count = whole.ids(PROMPTS[0], "so it grows")
    whole.cost(ids, count)
    states = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    states = states.reshape(len(ids), -1)
    states = normed(states)
    expected = states[-count:].mean(0).float()
    found = scorer.features(PROMPTS[:1], ["so it grows"])
    assert torch.allclose(found[0], expected, atol=1e-5) and found.dtype == torch.float32


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tokenizer", ["letters", "pairs"])
def test_token_costs_are_those_of_prefixes(files, tokenizer, cached):
    """Bug: a mean over the tokens after `since` alone, or over the prompt's, or of later ones."""
    folder = files("llama", tokenizer)
    scorer, reference = load(folder), Reference(folder)
    texts = [WORDS, "", "Tea 🙂!", "  "]
    if cached:
        scorer = scorer.with_cache(scorer.open_cache(PROMPTS[:1]))
    found = scorer.token_scores(PROMPTS[:1] * 4, texts, [0] * 4)
    for text, (ends, scores) in zip(texts, found, strict=True):
        ids, count = reference.ids(PROMPTS[0], text.lstrip())
        steps = range(1, count + 1) if count else [0]
        expected = [reference.cost(ids[: len(ids) - count + k], k) for k in steps]
        assert scores == pytest.approx(expected, **CLOSE) and ends[-1] == len(text)
    empty = torch.sigmoid(reference.bias).item()
    assert found[1][1] == pytest.approx([empty]) == found[3][1]
    ends, scores = found[0]
    for since in (0, 1, 9, len(WORDS) - 1, len(WORDS)):
        ((later, rest),) = scorer.token_scores(PROMPTS[:1], [WORDS], [since])
        first = min(sum(end <= since for end in ends), len(ends) - 1)
        assert later == ends[first:] and rest == pytest.approx(scores[first:], **CLOSE)


def test_features_are_what_a_head_is_trained_on(files):
    """Bug: rows in another order than the texts, or an empty answer with the prompt's state."""
    scorer = load(files())
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    responses = ["one", "two", "", "three four"]
    features = scorer.features(prompts, responses)
    alone = [scorer.features([p], [r])[0] for p, r in zip(prompts, responses, strict=True)]
    assert torch.allclose(features, torch.stack(alone), atol=1e-5)
    assert features.shape == (4, 32) and not features[2].any()
    costs = scorer.score(prompts, responses, [True] * 4)
    assert scorer.head(features).numpy() == pytest.approx(costs, **CLOSE)


@pytest.mark.parametrize("checks", ["word", "token"])
def test_checks_cost_no_further_reading(files, checks):
    """Bug: every prefix is read again, so that a check at each word costs as many answers."""
    scorer = load(files())
    scorer.open_cache(PROMPTS)  # tried once, and not counted
    with Counter(scorer.backbone.model) as counter:
        session = scorer.open_cache(PROMPTS[:1])
        cached = Cached(scorer.with_cache(session))
        before = counter.tokens
        for end in (9, 20, len(WORDS)):
            readings(cached, checks, PROMPTS[:1], [WORDS[:end]], [False], [0])
        assert counter.tokens - before == len(WORDS)  # of letters


@pytest.mark.parametrize("checks", ["block", "word", "token"])
def test_the_maximum_with_another_cost(files, checks):
    """Bug: token checks of a maximum ask a cost for what it does not have, or the cost without a
    KV cache is left out.
    """
    parts = [load(files()), load_scorer("offensive-language")]
    both, texts = maximum_of(parts), [WORDS, "What an idiot you are", "", "so"]
    prompts, finished = PROMPTS[:1] * len(texts), [True] * len(texts)
    found = readings(Cached(both), checks, prompts, texts, finished, [0] * len(texts))
    for text, reading in zip(texts, found, strict=True):
        cuts = [] if checks == "block" else word_ends(text)
        each = [[part.score(PROMPTS[:1], [text[:end]], [0])[0] for end in (*cuts, len(text))]
                for part in parts]  # fmt: skip
        assert reading.costs == pytest.approx(np.max(each, axis=0), **CLOSE)
    assert np.argmax([part.score(prompts, texts, finished)[1] for part in parts]) == 1
    sizes = {"block_size": 2, "max_new_tokens": 6}
    guard = Guard(mock_policy(), both, LetterReward(), budget=0.999, checks=checks, **sizes)
    answer = guard("ab")
    assert answer.status == "verified_safe"
    alone = [part.score(["ab"], [answer.text], [True])[0] for part in parts]
    assert answer.cost == pytest.approx(max(alone), **CLOSE)


def test_not_a_number_is_never_safe(files):
    """Bug: a NaN of the model becomes 0 in the empty answer, or is dropped by the mean."""
    scorer = load(files())
    with torch.no_grad():
        scorer.backbone.model.layers[0].mlp.down_proj.weight[0] = torch.nan
    assert np.isnan(scorer.score(PROMPTS[:1] * 2, ["so", ""], [True] * 2)).all()


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"width": 31}, r"'weight': \[31\].* where .*'weight': \[32\]"),
        ({"bias": None}, r"shapes {'weight': \[32\]} where"),
        ({"weight": None}, r"shapes {'bias': \[1\]} where"),
        ({"more": torch.zeros(2)}, "'more'"),
        ({"bias": torch.tensor(0.0)}, r"'bias': \[\]"),
        ({"weight": torch.full((32,), torch.nan)}, "not finite"),
        ({"metadata": {"layer": "0"}}, "trained with layer 0, which is not"),
        ({"metadata": {"pooling": "last"}}, "trained with pooling last, which"),
        ({"metadata": {"text_format": "raw"}}, "trained with text_format raw"),
        ({"metadata": {"backbone": "ab" * 32}}, "trained with backbone abab"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(files, tmp_path, tensors, message):
    """Bug: a head of another model or layer gives numbers without a meaning."""
    path = save_head(tmp_path / "mine.safetensors", **tensors)
    with refused(AssetError, message):
        load(files(), head=str(path))


def test_a_head_that_says_what_it_fits_is_taken(files, tmp_path):
    """Bug: the number of a layer is compared with its text."""
    folder = files()
    said = {"layer": "1", "pooling": "mean", "text_format": "human-assistant"}
    said["backbone"] = file_digest(folder / "model.safetensors")
    path = save_head(tmp_path / "mine.safetensors", metadata=said)
    assert load(folder, head=str(path)).name == "probe:mine"


@pytest.mark.parametrize("content", [None, b"", b"weights"])
def test_a_file_that_is_no_head_is_refused(files, tmp_path, content):
    path = tmp_path / "mine.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AssetError, match="mine.safetensors cannot be loaded"):
        load(files(), head=str(path))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"layer": 3}, "layer is 3, counted from 0, but LlamaModel has 3 layers"),
        ("llama", {"text_format": "chat"}, "needs texts that end with the response"),
        ("gpt2", {}, "GPT2Model has 0 layers before a norm"),
    ],
)
def test_options_that_do_not_fit_are_named(files, family, options, message):
    with refused(ParameterError, message):
        load(files(family), **options)


def test_the_digest_covers_what_changes_a_score(files, tmp_path):
    folder = files()
    other = save_head(tmp_path / "toy.safetensors", bias=torch.ones(1))
    changes = [{}, {"layer": 0}, {"pooling": "last"}, {"text_format": "raw"}, {"head": str(other)}]
    digests = [load(folder, **change).digest for change in [*changes, {"dtype": "bfloat16"}]]
    assert len(set(digests)) == len(digests) and load(folder).digest == digests[0]


def test_a_window_of_layers_is_cut_with_them(tmp_path):
    """Bug: the KV cache has the kinds of layers that are gone."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    more = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 4}
    folder = save(tmp_path / "window", "qwen2", **more)
    save_head(tmp_path / "toy.safetensors")
    scorer, reference = load(folder), Reference(folder)
    found = scorer.score(PROMPTS[:1] * 2, ["so it grows", "so"], [True] * 2)
    assert found == pytest.approx(reference(PROMPTS[:1] * 2, ["so it grows", "so"]), **CLOSE)


# --- the cost of harm -----------------------------------------------------------------------------


def test_the_committed_head_says_what_it_fits():
    """Bug: a new head without its digest, or trained on something else."""
    digest, name = HARM_2.with_suffix(".sha256").read_text().split()
    assert (digest, name) == (file_digest(HARM_2), HARM_2.name)
    weight, bias, said = module.load_head(HARM_2, 576)
    assert {"layer", "pooling", "text_format", "backbone"} <= said.keys() and weight.any()


@pytest.mark.parametrize("content", [None, b"other"])
def test_a_damaged_head_is_refused(tmp_path, monkeypatch, content):
    """Bug: a head that somebody changed is called by the name of the committed one."""
    head = tmp_path / HARM_2.name
    head.with_suffix(".sha256").write_bytes(HARM_2.with_suffix(".sha256").read_bytes())
    if content:
        head.write_bytes(content)
    monkeypatch.setattr(module, "HARM_2", head)
    with pytest.raises(AssetError, match="is missing or damaged: .*; install igcore again"):
        load_scorer("smollm2-harm-2")


def test_the_cost_of_harm():
    """Guards the named scorer on the pinned model: one pass gives the costs of all prefixes."""
    scorer = load_scorer("smollm2-harm-2")
    prompt, text = "How do plants grow?", "They need light, water and 3 weeks 🙂."
    ((ends, scores),) = scorer.token_scores([prompt], [text], [0])
    ids, count = scorer.backbone.ids(prompt, text), len(ends)
    for k in range(1, count + 1):
        states = scorer.backbone.states([ids[: len(ids) - count + k]], [k])[0]
        assert scorer.head(states.mean(0)[None]).item() == pytest.approx(scores[k - 1], **CLOSE)
    cached = scorer.with_cache(scorer.open_cache([prompt]))
    ((_, again),) = cached.token_scores([prompt], [text], [0])
    assert again == pytest.approx(scores, **CLOSE)
    assert scorer.score([prompt], [text], [True]) == pytest.approx(scores[-1:], **CLOSE)
    _, bias, said = module.load_head(HARM_2, 576)
    assert len(scorer.backbone.model.layers) == int(said["layer"]) + 1
    empty = scorer.score([prompt], [""], [False])
    assert empty == pytest.approx(torch.sigmoid(bias).tolist())
    assert empty[0] < 0.2  # every search begins there


def test_the_cost_that_has_left_is_named_with_the_one_that_stays():
    """Guards params files of 1.0.0: their users learn which cost there is."""
    with pytest.raises(ParameterError, match="'smollm2-harm'; did you mean 'smollm2-harm-2'"):
        load_scorer("smollm2-harm")
