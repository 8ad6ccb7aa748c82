"""A sentence encoder whose vector of a text does not depend on the texts beside it.

The tokens of all texts stand in one row, without padding. The products of a layer are over the
whole row, the attention is over each text alone. The products read copies of the weights, see
`igcore.engine.prepack`: torch's own product adds in another order when it has few rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModel, AutoTokenizer

from ..engine.device import usable
from ..engine.prepack import prepacked
from .convert import quiet_transformers

NAME = "igcore_each_text_alone"
BATCH = 64  # texts; it bounds the memory, and changes no vector
MAX_TOKENS = 256


class Encoder:
    """Turns texts into unit vectors: the mean of the last hidden states over the tokens.

    Parameters
    ----------
    folder : Path
        Of a BERT and its tokenizer.
    device : str or torch.device
        Where it runs. On a CPU with one thread the vector of a text is the same alone and beside
        others, bit for bit. On another device, or where this build of torch has no such copies, it
        may move by about 1e-7.
    """

    def __init__(self, folder: Path, device: str | torch.device = "cpu"):
        options = {"local_files_only": True}
        with quiet_transformers():
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model = AutoModel.from_pretrained(
                folder, use_safetensors=True, attn_implementation=NAME, **options
            )
        self._model = prepacked(model.to(usable(str(device))))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors of texts, (n, H) float64; a text is cut after `MAX_TOKENS` tokens."""
        vectors = np.empty((len(texts), self._model.config.hidden_size))
        for at in range(0, len(texts), BATCH):
            batch = slice(at, at + BATCH)
            vectors[batch] = self._means(texts[batch])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    @torch.inference_mode()
    def _means(self, texts: Sequence[str]) -> np.ndarray:
        """Return the mean hidden states of the B texts of one batch, (B, H)."""
        ids = self._tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
        lengths = [len(own) for own in ids]
        tokens = torch.cat([torch.tensor(own) for own in ids])  # (T,), as the positions
        positions = torch.cat([torch.arange(length) for length in lengths])
        device = self._model.device
        row = {"input_ids": tokens.to(device)[None], "position_ids": positions.to(device)[None]}
        states = self._model(**row, lengths=lengths).last_hidden_state[0]  # (T, H)
        means = [own.mean(0) for own in states.split(lengths)]
        return torch.stack(means).cpu().numpy()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    lengths: Sequence[int],
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each text: (1, heads, T, head_dim), three times -> (1, T, heads, head_dim)."""
    texts = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(*text, scale=scaling) for text in texts]
    return torch.cat(found, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
