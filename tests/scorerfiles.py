"""Tiny checkpoints in the formats of the paper's scorers, and the comparison of an adapter with a
slow reference.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import FITTING, Counter, random_model, saved, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, LlamaModel

from igcore import AssetError
from igcore.models.lm_scorer import LMScorer
from igcore.scorers import keeps_cache
from tests.rehearsal.checkpoints import FORMATS, drawn, old_keys, save, shapes_of

CONFIG = FORMATS["llama2"] | {"max_position_embeddings": 512, "torch_dtype": "float32"}
PROMPTS = [
    "How do I water a fern?",
    "\n\nHuman: Why does bread rise?\n\nAssistant: Yeast eats sugar.\n\nHuman: And "
    "then?\n\nAssistant:",
    "What is </s> for?",
]
RESPONSES = [
    "Water it when the soil is dry.", "The gas </s> makes bubbles, as in the dough.", "",
    "Black tea: 35 % of it!",
]  # fmt: skip
TEXTS = [(p, r, f) for p in PROMPTS for r in RESPONSES for f in (True, False)]
EXACT = dict(rel=1e-6, abs=1e-6)  # references compute in float64

Scores = Callable[[Sequence[str], Sequence[str], Sequence[bool]], Sequence[float]]


def llama_state(
    config: dict, heads: dict[str, Sequence[int]], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return weights of a Llama under the keys that its published heads have beside them.

    They are narrower than those of the rehearsal, which magnify the rounding of float32 to 4e-6.
    """
    body = {f"model.{key}": shape for key, shape in shapes_of(LlamaModel, config).items()}
    state = {
        key: tensor if tensor.dim() == 1 else 0.3 * tensor
        for key, tensor in drawn(body | heads, seed).items()
    }
    return state | old_keys(range(config["num_hidden_layers"]), 8)


def write(folder: Path, config: dict, state: dict, suffix: str = ".safetensors") -> Path:
    """Write or replace configuration and weights; a tokenizer stays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, state, suffix)
    return folder


def without(state: dict, key: str) -> dict:
    return {k: tensor for k, tensor in state.items() if k != key}


def renamed(state: dict, key: str) -> dict:
    return without(state, key) | {f"{key}s": state[key]}


@contextmanager
def refused(error: type[Exception], match: str) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error that says in one sentence what matches."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message.strip() and len(message) < 700, message


def assert_refused(load: Callable, folder: Path, config: dict, state: dict, match: str) -> None:
    """Write a damaged checkpoint and see that it does not load; the tokenizer is that of the
    folder.
    """
    write(folder, config, state)
    with refused(AssetError, match):
        load(repo=str(folder), dtype="float32")


def assert_equal_to(scorer: LMScorer, reference: Scores, texts: Sequence[tuple] = TEXTS) -> None:
    """Compare in one batch, one by one, and read on in a session; `texts` are (prompt, response,
    finished).
    """
    prompts, responses, finished = zip(*texts, strict=True)
    expected = reference(prompts, responses, finished)
    assert np.std(expected) > 0.01
    assert scorer.score(prompts, responses, finished) == pytest.approx(expected, **EXACT)
    alone = [scorer.score(*([part] for part in text))[0] for text in texts]
    assert alone == pytest.approx(expected, **EXACT)
    assert_growing_equal_to(scorer, reference)


def assert_growing_equal_to(
    scorer: LMScorer, reference: Scores, words: str = "Water it when the soil is dry ; then wait ."
) -> None:
    """Read answers word by word, ended and not, and others that part from them; two of the prompts
    have several turns or marks.
    """
    cached = scorer.with_cache(scorer.open_cache(PROMPTS))
    words = words.split(" ")
    for n in range(0, len(words) + 1, 2):
        answers = [
            " ".join(words[:n]),
            " ".join([*words[:n], "tea"]),
            " ".join([*words[:n], "</s>", "well"]),
        ]
        texts = [(p, r, f) for p in PROMPTS for r in answers for f in (True, False)]
        columns = list(zip(*texts, strict=True))
        assert cached.score(*columns) == pytest.approx(reference(*columns), **EXACT)
    prompts, responses = PROMPTS, [" ".join(words[:4])] * len(PROMPTS)
    cached.session.retain(prompts, responses)
    texts = (prompts, [f"{r} bread" for r in responses], [False] * len(PROMPTS))
    with Counter(cached.backbone.model) as counter:
        scores = cached.score(*texts)
    # the new word, an end, and what the tokenizer changed before them
    assert counter.tokens < 8 * len(PROMPTS)
    assert scores == pytest.approx(reference(*texts), **EXACT)


def padded(
    sequences: Sequence[Sequence[int]], side: str, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask (B, L) with the padding on one side."""
    longest = max(map(len, sequences))
    ids, mask = (torch.full((len(sequences), longest), fill) for fill in (pad, 0))
    for row, sequence in enumerate(sequences):
        columns = slice(longest - len(sequence), None) if side == "left" else slice(len(sequence))
        ids[row, columns], mask[row, columns] = torch.tensor(sequence), 1
    return ids, mask


@torch.inference_mode()
def last_states(
    model, sequences: Sequence[Sequence[int]], side: str = "right", pad: int = 0
) -> list[torch.Tensor]:
    """Return the hidden states (n, H) of the tokens of each sequence, from one plain pass over all
    of them.
    """
    ids, mask = padded(sequences, side, pad)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    return [row[chosen.bool()] for row, chosen in zip(hidden, mask, strict=True)]


# --- sequence classifiers -------------------------------------------------------------------------


CHAT = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MARKS = ["<|user|>", "<|assistant|>", "<|end|>"]
# wide weights magnify the rounding of float32
NARROW = dict(vocab_size=280, initializer_range=0.1, max_position_embeddings=256)
NAMES = {0: "rude", 1: "harmless", 2: "threatening", 3: "false"}
ENCODER = dict(vocab_size=280, max_position_embeddings=128, initializer_range=0.1, pad_token_id=257)
DECODERS = {name: FITTING[name] | NARROW for name in ("llama", "qwen2", "qwen3", "gpt2")}
ENCODERS = {
    "bert": ENCODER,
    "distilbert": ENCODER | dict(hidden_dim=48),
    "deberta-v2": ENCODER
    | dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    # positions count from the pad id on
    "roberta": ENCODER | dict(max_position_embeddings=400, pad_token_id=259),
    "electra": ENCODER | dict(embedding_size=16),
    "modernbert": ENCODER | dict(local_attention=8, global_attn_every_n_layers=2, eos_token_id=256),
}
TOGETHER = ("bert", "distilbert", "roberta", "electra")  # with a plain attention


def decoder_tokenizer(**more):
    tokenizer = tiny_tokenizer(chat_template=CHAT, bos_token="<s>", **more)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def encoder_tokenizer(family: str):
    """A byte-level tokenizer that writes [CLS] a [SEP] b [SEP]."""
    names = [
        "input_ids",
        *(["token_type_ids"] if family in ("bert", "deberta-v2") else []),
        "attention_mask",
    ]
    tokenizer = tiny_tokenizer(
        cls_token="[CLS]", sep_token="[SEP]", model_input_names=names, model_max_length=120
    )
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    specials = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=specials
    )
    return tokenizer


def save_classifier(folder, family: str, labels: int = 1, seed: int = 0, **more):
    """Write a random classifier with its tokenizer."""
    names = (
        dict(id2label=NAMES, label2id={v: k for k, v in NAMES.items()})
        if labels == len(NAMES)
        else dict(num_labels=labels)
    )
    settings = (DECODERS | ENCODERS)[family] | names | more
    model = random_model(family, settings, AutoModelForSequenceClassification, seed)
    tokenizer = decoder_tokenizer() if family in DECODERS else encoder_tokenizer(family)
    return saved(folder, model, tokenizer)


def chatted(tokenizer, prompt: str, response: str) -> list[int]:
    """Write a dialogue by hand; the second of `PROMPTS` has two turns of the user."""
    for mark in ("</s>", *MARKS):
        prompt, response = (
            text.replace(mark, f"{mark[0]} {mark[1:]}") for text in (prompt, response)
        )
    turns = re.split(
        r"\n\n(?:Human|Assistant):",
        prompt.removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:"),
    )
    said = [*(turn.strip() for turn in turns), response]
    text = "".join(
        f"<|{('user', 'assistant')[i % 2]}|>{turn}<|end|>" for i, turn in enumerate(said)
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def assert_everywhere(
    scorer, expected_of, texts, with_cache: bool = True, close: dict = EXACT
) -> None:
    """Compare one batch, texts alone, and texts that grow in a session, with (prompts, responses)
    -> scores.
    """
    columns = [list(column) for column in zip(*texts, strict=True)]
    expected = expected_of(*columns)
    assert np.std(expected) > 1e-3
    assert scorer.score(*columns, [True] * len(texts)) == pytest.approx(expected, **close)
    alone = [scorer.score([prompt], [response], [False])[0] for prompt, response in texts]
    assert alone == pytest.approx(expected, **close)
    sessions = [scorer.open_cache(columns[0])] if keeps_cache(scorer) else []
    cached = scorer.with_cache(sessions[0]) if sessions else scorer
    words = "Water it when the </s> soil is dry".split(" ")
    for n in range(0, len(words) + 1, 2):
        answers = [" ".join(words[:n]), " ".join([*words[:n], "tea"])]
        prompts, responses = zip(
            *((p, r) for p in dict.fromkeys(columns[0]) for r in answers), strict=True
        )
        found = cached.score(prompts, responses, [False] * len(prompts))
        assert found == pytest.approx(expected_of(prompts, responses), **close)
    assert all((session.root is not None) == with_cache for session in sessions)
