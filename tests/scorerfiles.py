"""Tiny checkpoints in the formats of the paper's scorers, and the comparison of an adapter with a
slow reference.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FITTING, random_model, saved, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, LlamaModel

from igcore import AssetError
from igcore.models.lm_scorer import LMScorer
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
TEXTS = [(p, r) for p in PROMPTS for r in RESPONSES]
EXACT = dict(rel=1e-6, abs=1e-6)  # references compute in float64

Scores = Callable[[Sequence[str], Sequence[str]], Sequence[float]]  # of prompts and responses


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


def assert_everywhere(
    scorer: LMScorer, expected_of: Scores, texts: Sequence[tuple] = TEXTS, **how: Any
) -> None:
    """Compare (prompt, response) in one batch, alone, and as texts that grow in a session; `how`
    goes to `assert_growing`.
    """
    close, columns = how.get("close", EXACT), list(map(list, zip(*texts, strict=True)))
    expected = expected_of(*columns)
    assert np.std(expected) > 0.01
    assert scorer.score(*columns, [True] * len(texts)) == pytest.approx(expected, **close)
    alone = [scorer.score([prompt], [response], [False])[0] for prompt, response in texts]
    assert alone == pytest.approx(expected, **close)
    assert_growing(scorer, expected_of, list(dict.fromkeys(columns[0])), **how)


def assert_growing(
    scorer: LMScorer,
    expected_of: Scores,
    prompts: Sequence[str] = PROMPTS,
    words: str = "Water it when the </s> soil is dry ; then wait .",
    with_cache: bool = True,
    close: Mapping[str, float] = EXACT,
) -> None:
    """Read answers word by word, ended and not, and others that part from them."""
    session, words = scorer.open_cache(prompts), words.split(" ")
    for n in range(0, len(words) + 1, 2):
        answers = [" ".join([*words[:n], *end]) for end in ([], ["tea"], ["</s>", "well"])]
        asked = [prompt for prompt in prompts for _ in answers]
        texts = (asked, answers * len(prompts))
        found = scorer.with_cache(session).score(*texts, [i % 2 > 0 for i in range(len(asked))])
        assert found == pytest.approx(expected_of(*texts), **close)
    assert (session.root is not None) == with_cache


def padded(sequences: Sequence[Sequence[int]], side: str, pad: int) -> dict[str, torch.Tensor]:
    """Return a model's inputs (B, L) for sequences, with the padding on one side."""
    longest = max(map(len, sequences))
    ids, mask = (torch.full((len(sequences), longest), fill) for fill in (pad, 0))
    for row, sequence in enumerate(sequences):
        columns = slice(longest - len(sequence), None) if side == "left" else slice(len(sequence))
        ids[row, columns], mask[row, columns] = torch.tensor(sequence), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


@torch.inference_mode()
def last_states(
    model, sequences: Sequence[Sequence[int]], side: str = "right", pad: int = 0
) -> list[torch.Tensor]:
    """Return the hidden states (n, H) of the tokens of each sequence, from one plain pass over all
    of them.
    """
    inputs = padded(sequences, side, pad)
    hidden = model(**inputs, use_cache=False).last_hidden_state
    chosen = inputs["attention_mask"].bool()
    return [row[tokens] for row, tokens in zip(hidden, chosen, strict=True)]


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
