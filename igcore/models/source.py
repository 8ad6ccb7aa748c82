"""What scorers that read a checkpoint share: their options, how it is loaded, what is hashed."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.functional import linear

from ..files import digest_of
from ..scorers import Scorer
from ..settings import settings
from .hub import snapshot
from .lm_scorer import Backbone, LMScorer
from .pretrained import (
    Device,
    Dtype,
    check_vocabulary,
    contents_of,
    load_model,
    load_tokenizer,
    one_sentence,
)
from .probe import probe
from .templates import TEMPLATES, check_chat

EXAMPLE = ("How do plants grow?", "They need light and water.")


@settings(kw_only=True)
class Checkpoint:
    """Options that all scorers with a checkpoint share; `load` returns the scorer.

    Attributes
    ----------
    repo, revision : str
        See `igcore.models.hub.snapshot`.
    dtype : str
        Of the model; its head is always float32. A key of `igcore.models.pretrained.DTYPES`.
    device : str
        A torch device, or ``auto``: accelerate places the model on what there is.
    self_check : bool
        Whether two fixed texts are scored when it is loaded, see `igcore.models.probe.probe`.
    """

    repo: str
    revision: str | None = None
    dtype: Dtype = "bfloat16"
    device: Device = "auto"
    self_check: bool = True
    # the score that separates safe from unsafe, where the scale has one
    boundary: ClassVar[float | None] = None
    scale: ClassVar[str] = "trained scale"  # the unit of its scores

    def load(self) -> Scorer:
        """Return the scorer.

        Its digest covers all that changes a score: files, dtype, and the options of its class.

        Raises
        ------
        ParameterError
            When options do not fit the files, such as a text format without its chat template.
        AssetError
            When files are missing, damaged, or not those of such a model.
        ScorerError
            When it puts the two fixed texts in the wrong order.
        """
        scorer = self.scorer()
        if self.self_check:
            probe(scorer, self.boundary)
        return scorer

    def scorer(self) -> Scorer:
        """Return the scorer, unchecked."""
        raise NotImplementedError

    @cached_property
    def folder(self) -> Path:
        """The folder with its files."""
        return snapshot(self.repo, self.revision)

    @cached_property
    def tokenizer(self):
        """The tokenizer of the folder."""
        return load_tokenizer(self.folder)

    def model(self, kind=None, heads: Sequence[str] = (), optional: Sequence[str] = (), **config):
        """Return the model and the tensors of its head, see `igcore.models.pretrained.load_model`.

        The default `kind` is ``AutoModel``.
        """
        from transformers import AutoModel

        # old configurations name pad ids that the model has no embedding for; padding is masked, so
        # any id will do
        config = config or {"pad_token_id": 0}
        where = self.folder, self.dtype, self.device
        model, tensors = load_model(kind or AutoModel, *where, heads, optional, **config)
        check_vocabulary(self.tokenizer, model, self.folder)
        return model, tensors

    def backbone(self, model, text_format: str, **more) -> Backbone:
        """Return a model as a reader of a text format; `more` goes to `Backbone`."""
        template = TEMPLATES[text_format]
        check_chat(self.tokenizer, text_format, self.repo)
        write = partial(template.whole, self.tokenizer)
        return Backbone(model, self.tokenizer, write, special=template.special, **more)

    def single(self, model, tensors: Mapping[str, torch.Tensor], name: str) -> Callable:
        """Return the linear layer `name`, (R, H) to (R, 1) in float32, with its bias if any.

        Raises
        ------
        AssetError
            When it has more than one output.
        """
        with one_sentence(self.folder):
            weight = tensors[f"{name}.weight"].reshape(1, model.config.hidden_size)
        weight, bias = weight.float().to(model.device), tensors.get(f"{name}.bias")
        bias = bias if bias is None else bias.float().to(model.device)
        return partial(linear, weight=weight, bias=bias)

    def lm_scorer(
        self, name: str, sign: str, backbone: Backbone, head: Callable, files=None, **options
    ) -> LMScorer:
        """Return a scorer of the files of the folder.

        Parameters
        ----------
        files : mapping, optional
            See `igcore.models.pretrained.contents_of`, where they were read before.
        options
            What changes its scores besides files, text and dtype.
        """
        files = files or contents_of(self.folder)
        known = digest(files, backbone.template, dtype=self.dtype, **options)
        return LMScorer(name, backbone, head, sign, known, self.scale, files=files)


def digest(files: Mapping[str, str], write: Callable[[str, str], object], **options) -> str:
    """Return a hash of all that changes scores.

    Parameters
    ----------
    files : mapping of str to str
        See `igcore.models.pretrained.contents_of`.
    write : callable
        (prompt, response) -> what is read of them. It counts by what it writes of an example: a
        chat template may write the date.
    options
        What else changes scores.
    """
    return digest_of([files, write(*EXAMPLE), options])
