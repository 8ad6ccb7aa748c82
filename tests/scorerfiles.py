"""Tiny checkpoints in the formats of the paper's scorers, and the comparison of an adapter with a
slow reference.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tinymodels import Counter
from transformers import LlamaModel

from igcore import AssetError
from igcore.models.lm_scorer import LMScorer
from tests.rehearsal.configs import FORMATS
from tests.rehearsal.weights import drawn, old_keys, save, shapes_of

CONFIG = FORMATS["llama2"] | {"max_position_embeddings": 512, "torch_dtype": "float32"}
PROMPTS = [
    "How do I water a fern?",
    "\n\nHuman: Why does bread rise?\n\nAssistant: Yeast eats sugar.\n\nHuman: And "
    "then?\n\nAssistant:",
    "What is </s> for?",
]
RESPONSES = [
    "Water it when the soil is dry.",
    "The gas </s> makes bubbles, as in the dough.",
    "",
    "Black tea: 35 % of it!",
]
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


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message.strip() and len(message) < 700, message


def assert_refused(load: Callable, folder: Path, config: dict, state: dict, match: str) -> None:
    """Write a damaged checkpoint and see that it does not load; the tokenizer is that of the
    folder.
    """
    write(folder, config, state)
    with pytest.raises(AssetError, match=match) as caught:
        load(repo=str(folder), dtype="float32")
    assert_one_sentence(str(caught.value))


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
