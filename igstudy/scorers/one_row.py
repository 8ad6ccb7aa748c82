"""Read many texts in one pass of an encoder: their tokens form one row without padding.

Matrix products cover the whole row, and attention covers each text alone. The products use copies
of the weights, see `igcore.engine.prepack`, because torch's own product adds in another order for
few rows. So on a CPU with one thread the states of a text are bitwise equal alone and beside any
others. On another device, or if this build of torch has no such copies, they may differ by
rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from igcore.engine.prepack import prepacked

ATTENTION = "igcore_each_text_alone"
UNREAD = {"dropout", "position_ids"}  # arguments of a plain attention that change nothing here
TOKENS = 2048  # about as many are read at once; it bounds the memory and changes no state

Text = Mapping[str, list[int]]  # ``input_ids``, and what else there is for each token


def one_row_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a prepacked view of an encoder for `read`; the weights must not change any more.

    Raises
    ------
    NotImplementedError
        When the view contains modules of the model itself, see `igcore.engine.view.view_of`.
    """
    view = prepacked(model)
    # else the attention, or a hook, would be set on the user's own model
    if not set(model.modules()).isdisjoint(view.modules()):
        raise NotImplementedError(f"{type(model).__name__} has no view of its own")
    view.config._attn_implementation = ATTENTION
    return view


@torch.inference_mode()
def read(view: Any, texts: Sequence[Text], first: int = 0) -> Iterator[tuple[Any, list[int]]]:
    """Yield a view's output for each row of texts, (1, T, ...), and the lengths of its texts.

    `first` is the position of the first token of every text.
    """
    numbers = np.cumsum([len(text["input_ids"]) for text in texts]) // TOKENS
    for _, group in groupby(zip(numbers, texts, strict=True), key=lambda pair: pair[0]):
        own = [text for _, text in group]
        lengths = [len(text["input_ids"]) for text in own]
        names = own[0].keys() - {"attention_mask"}  # there is no padding
        row = {name: [number for text in own for number in text[name]] for name in names}
        row["position_ids"] = [first + at for length in lengths for at in range(length)]
        inputs = {name: torch.tensor([one], device=view.device) for name, one in row.items()}
        with torch.autocast(view.device.type, enabled=False):  # the copies have one type
            output = view(**inputs, lengths=lengths)
        yield output, lengths


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    lengths: list[int],
    scaling: float,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend within each text: (1, heads, T, head_dim), three times -> (1, T, heads, head_dim).

    Raises
    ------
    NotImplementedError
        When it is given anything else: a window or a bias that is ignored would give wrong states.
    """
    given = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := given - UNREAD:
        raise NotImplementedError(f"attention with {unknown}")
    texts = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in texts]
    return torch.cat(found, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
