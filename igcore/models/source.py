"""What scorers that read a checkpoint share: where it lies, how it is loaded, what is hashed."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from ..config import check_types
from ..errors import AssetError, ParameterError, unknown_name
from .hub import snapshot
from .lm_scorer import Backbone
from .pretrained import check_placement, check_vocabulary, contents_of, load_model, load_tokenizer
from .templates import TEMPLATES

EXAMPLE = ("How do plants grow?", "They need light and water.")


@dataclass(frozen=True)
class Loaded:
    """A model without its head, its tokenizer, and the tensors of the head.

    Attributes
    ----------
    tensors : dict of str to Tensor
        In the type of the file, on the CPU.
    files : dict of str to str
        See `igcore.models.pretrained.contents_of`.
    """

    folder: Path
    tokenizer: object
    model: object
    tensors: dict[str, torch.Tensor]
    files: dict[str, str]

    def reading(self, text_format: str, **more) -> Backbone:
        """Return the model as a reader of a text format; `more` goes to `Backbone`."""
        template = TEMPLATES[text_format]
        if text_format == "chat" and not self.tokenizer.chat_template:
            raise ParameterError(
                f"{self.folder} has no chat template; choose another text_format: "
                f"{', '.join(TEMPLATES)}"
            )
        return Backbone(
            self.model,
            self.tokenizer,
            partial(template.whole, self.tokenizer),
            special=template.special,
            **more,
        )

    def single(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the linear layer `name`, (R, H) to (R, 1) in float32, with its bias if any.

        Raises
        ------
        AssetError
            When it has more than one output.
        """
        given = (self.tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
        weight, bias = (
            part if part is None else part.float().to(self.model.device) for part in given
        )
        if weight.shape != (1, hidden := self.model.config.hidden_size):
            raise AssetError(
                f"{self.folder} has a layer {name} of shape {tuple(weight.shape)} where "
                f"{(1, hidden)} is expected; choose the adapter that it was made for"
            )
        return partial(linear, weight=weight, bias=bias)


@dataclass(frozen=True)
class Source:
    """Options that all scorers with a checkpoint share.

    Attributes
    ----------
    repo, revision : str
        See `igcore.models.hub.snapshot`.
    dtype : str
        Of the model; its head is always float32. A key of `igcore.models.pretrained.DTYPES`.
    device : str
        A torch device, or ``auto``: accelerate places the model on what there is.
    self_check : bool
        See `igcore.models.probe.probe`.
    """

    repo: str
    revision: str | None
    dtype: str
    device: str
    self_check: bool

    def __post_init__(self):
        """Refuse options of the wrong type, and an unknown dtype or device."""
        check_types(self)
        check_placement(self.dtype, self.device)

    def load(self, heads: Sequence[str], optional: Sequence[str] = ()) -> Loaded:
        """Load model, tokenizer and the tensors of a head.

        See `igcore.models.pretrained.load_model`.
        """
        from transformers import AutoModel

        folder = snapshot(self.repo, self.revision)
        tokenizer = load_tokenizer(folder)
        # old configurations name pad ids that the model has no embedding for; padding is masked, so
        # any id will do
        model, tensors = load_model(
            AutoModel, folder, self.dtype, self.device, heads, optional, pad_token_id=0
        )
        check_vocabulary(tokenizer, model, folder)
        return Loaded(folder, tokenizer, model, tensors, contents_of(folder))


def check_name(kind: str, name: object, allowed: Sequence[str]) -> None:
    """Raise ``ParameterError`` for a name that is not allowed, before anything is loaded."""
    if name not in list(allowed):
        raise unknown_name(kind, name, allowed)


def digest(files: Mapping[str, str], write: Callable[[str, str], object], **options) -> str:
    """Return a hash of all that changes scores.

    Parameters
    ----------
    files : mapping of str to str
        See `igcore.models.pretrained.contents_of`.
    write : callable
        (prompt, response) -> what is read of them. It counts by what it makes of an example: a chat
        template may write the date.
    options
        What else changes scores.
    """
    return hashlib.sha256(
        json.dumps([files, write(*EXAMPLE), options], sort_keys=True).encode()
    ).hexdigest()
