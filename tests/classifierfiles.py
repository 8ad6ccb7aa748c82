"""Tiny sequence classifiers with their tokenizers, and the comparison with a slow reference."""

import re

import numpy as np
import pytest
import torch
import transformers
from scorerfiles import EXACT
from tiny import tiny_tokenizer
from tinymodels import GROUPED, SMALL_HEADS
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from igcore.models.convert import quiet_transformers
from igcore.scorers import keeps_cache

CHAT = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MARKS = ["<|user|>", "<|assistant|>", "<|end|>"]
# wide weights magnify the rounding of float32
NARROW = dict(vocab_size=280, initializer_range=0.1, max_position_embeddings=256)
NAMES = {0: "rude", 1: "harmless", 2: "threatening", 3: "false"}
ENCODER = dict(vocab_size=280, max_position_embeddings=128, initializer_range=0.1, pad_token_id=257)
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
DECODERS = {
    "llama": ("Llama", GROUPED | NARROW),
    "qwen2": ("Qwen2", GROUPED | NARROW),
    "qwen3": ("Qwen3", SMALL_HEADS | NARROW),
    "gpt2": (
        "GPT2",
        dict(
            vocab_size=280, n_positions=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1
        ),
    ),
}
ENCODERS = {
    "bert": ("Bert", ENCODER | SIZES),
    "distilbert": ("DistilBert", ENCODER | dict(dim=32, hidden_dim=48, n_layers=2, n_heads=4)),
    "deberta": (
        "DebertaV2",
        ENCODER
        | SIZES
        | dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    ),
    "roberta": (
        "Roberta",
        ENCODER | SIZES | dict(max_position_embeddings=400, pad_token_id=259),
    ),  # positions count from the pad id on
    "electra": ("Electra", ENCODER | SIZES | dict(embedding_size=16)),
    "modernbert": (
        "ModernBert",
        ENCODER | SIZES | dict(local_attention=8, global_attn_every_n_layers=2, eos_token_id=256),
    ),
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
        *(["token_type_ids"] if family in ("bert", "deberta") else []),
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


def save(folder, family: str, labels: int = 1, seed: int = 0, **more):
    """Write a random classifier with its tokenizer."""
    kind, settings = (DECODERS | ENCODERS)[family]
    names = (
        dict(id2label=NAMES, label2id={v: k for k, v in NAMES.items()})
        if labels == len(NAMES)
        else dict(num_labels=labels)
    )
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**settings | names | more)
    with quiet_transformers():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        (decoder_tokenizer() if family in DECODERS else encoder_tokenizer(family)).save_pretrained(
            folder
        )
    return folder


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
