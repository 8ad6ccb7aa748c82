"""Scorers with a head on a language model's last hidden state, and their checkpoints.

Within one group of prompts a `Session` keeps a KV cache, so a longer text costs only its new
tokens. Scorers on one `Backbone` share its session::

    backbone = Backbone(model, tokenizer)
    cost = LMScorer("my-cost", backbone, cost_head, "higher is worse", digest="v1")
    reward = LMScorer("my-reward", backbone, reward_head, "higher is better", digest="v1")

A scorer without a session is uncached. The final check uses an uncached scorer, so an emitted
answer does not depend on a cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from ..files import digest_of
from ..scorers import Scorer
from ..settings import settings
from .backbone import Backbone, Session
from .hub import snapshot
from .pretrained import (
    Dtype,
    check_vocabulary,
    contents_of,
    load_model,
    load_tokenizer,
)
from .probe import probe
from .templates import TEMPLATES, check_chat

HeadFunction = Callable[[torch.Tensor], torch.Tensor]
EXAMPLE = ("How do plants grow?", "They need light and water.")


@dataclass(frozen=True)
class Reader:
    """Base class of scorers that are language models.

    Attributes
    ----------
    name, sign, unit, digest : str
        See `igcore.scorers.Scorer`.
    backbone : Backbone
        Scorers with the same backbone share its forward passes.
    head : callable
        (R, H) float32 -> (R,) numbers.
    files : dict of str to str
        sha256 of the files it was loaded from, if any, see `igcore.models.pretrained.contents_of`.
    """

    name: str
    backbone: Backbone
    head: HeadFunction
    sign: str
    digest: str
    unit: str = "points"
    files: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


Kind = TypeVar("Kind", bound=Reader)


@dataclass(frozen=True)
class LMScorer(Reader):
    """A cost or reward that a head reads from the last hidden state of a response.

    Attributes
    ----------
    session : Session or None
        The KV cache in use. None scores without a cache, one prompt at a time: a score then does
        not depend on other prompts, which matters in bfloat16, so reported scores can be
        recomputed.
    """

    session: Session | None = None

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,); callers refuse the scores of a wider head."""
        with torch.inference_mode():
            if self.session:
                scores = self.head(self.session.hidden(prompts, responses))
            else:  # row by row: a batch may round differently
                states = self._uncached_states(prompts, responses)
                scores = torch.cat([self.head(row[None]) for row in states])
        return _numbers(scores, len(prompts)).numpy()

    @property
    def reads_tokens(self) -> bool:
        """True if one pass yields the score after every token, see `Backbone.reads_tokens`."""
        return self.backbone.reads_tokens

    def token_scores(
        self, prompts: Sequence[str], responses: Sequence[str], since: Sequence[int]
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return the scores after the tokens of each response, from one pass over its text.

        The scorer must have `reads_tokens`. The tokens are those of the encoded text, so a score
        belongs to a prefix of the text's ids.

        Parameters
        ----------
        since : sequence of int
            Number of leading characters of each response whose tokens are skipped. A token that
            ends after them is included, and so is one that begins in the prompt and ends in the
            response.

        Returns
        -------
        list of (ends, scores)
            Ends of the tokens, as character offsets in the response, and scores (k,) there,
            float64. The last is the score of the whole response, which may be empty. If the
            positions of the tokens are uncertain, none is skipped, and all ends are that of the
            response.

        Raises
        ------
        ParameterError
            For a text longer than the context.
        """
        texts = zip(prompts, responses, since, strict=True)
        encoded = [self.backbone.ids_and_ends(*text) for text in texts]
        sequences = [ids for ids, _ in encoded]
        counts = [len(ends) for _, ends in encoded]
        with torch.inference_mode():
            if self.session:
                states = self.session.states(prompts, sequences, counts)
                scores = self.head(torch.cat(states))
            else:  # row by row: a batch may round differently
                states = [self.backbone.states([ids], [len(ends)])[0] for ids, ends in encoded]
                scores = torch.cat([self.head(rows) for rows in states])
        split = torch.split(_numbers(scores, sum(counts)), counts)
        return [(ends, part.numpy()) for (_, ends), part in zip(encoded, split, strict=True)]

    def _uncached_states(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden states (R, H) of texts; no two prompts share a batch or a cache."""
        groups: dict[str, list[str]] = {}
        for prompt, response in zip(prompts, responses, strict=True):
            groups.setdefault(prompt, []).append(response)
        states = {prompt: iter(self._states(prompt, texts)) for prompt, texts in groups.items()}
        return torch.stack([next(states[prompt]) for prompt in prompts])

    def _states(self, prompt: str, responses: list[str]) -> torch.Tensor:
        """Return the hidden states (R, H) of the texts of one prompt."""
        if len(responses) == 1:  # for example in the final check
            return self.backbone.encode([self.backbone.ids(prompt, *responses)])
        # prefixes of one answer share nearly all of their tokens
        return self.open_cache([prompt]).hidden([prompt] * len(responses), responses)

    def open_cache(self, prompts: Sequence[str]) -> Session:
        """Return a new session of its backbone over a group of prompts."""
        return self.backbone.open_cache(prompts)

    def with_cache(self, session: Session) -> "LMScorer":
        """Return the same scorer with a session of its backbone."""
        return replace(self, session=session)

    def uncached(self) -> "LMScorer":
        """Return the same scorer without a session."""
        return replace(self, session=None)


def _numbers(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Return n outputs of a head as float64 numbers (n,); of a head with k outputs as (n, k)."""
    return scores.double().reshape(n, -1).squeeze(1).cpu()


@settings(kw_only=True)
class Checkpoint:
    """Options of all scorers with a checkpoint; `load` returns the scorer.

    Attributes
    ----------
    repo, revision : str
        See `igcore.models.hub.snapshot`.
    dtype : str
        Type of the model, a key of `igcore.models.pretrained.DTYPES`; its head is always float32.
    device : str
        A torch device, or ``auto``: accelerate places the model on the available devices.
    self_check : bool
        True scores two fixed texts after loading, see `igcore.models.probe.probe`.
    """

    repo: str
    revision: str | None = None
    dtype: Dtype = "bfloat16"
    device: str = "auto"
    self_check: bool = True
    # the score that separates safe from unsafe, if the scale has one
    boundary: ClassVar[float | None] = None
    scale: ClassVar[str] = "trained scale"  # the unit of its scores

    def load(self) -> Scorer:
        """Return the scorer.

        Its digest covers everything that changes a score: files, dtype and options.

        Raises
        ------
        ParameterError
            When options do not fit the files, such as a text format without its chat template.
        AssetError
            When files are missing, damaged, or not those of such a model.
        ScorerError
            When it ranks the two fixed texts in the wrong order.
        """
        scorer: Scorer = self.scorer()
        if self.self_check:
            probe(scorer, self.boundary)
        return scorer

    def scorer(self) -> Any:
        """Return the scorer, unchecked."""
        raise NotImplementedError

    @cached_property
    def folder(self) -> Path:
        """The folder with its files."""
        return snapshot(self.repo, self.revision)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder."""
        return load_tokenizer(self.folder)

    def model(
        self,
        kind: Any = None,
        heads: Sequence[str] = (),
        optional: Sequence[str] = (),
        **config: Any,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the model and the tensors of its head, see `igcore.models.pretrained.load_model`.

        The default `kind` is ``AutoModel``.
        """
        from transformers import AutoModel

        # old configurations name pad ids without an embedding; padding is masked, so any id works
        config = config or {"pad_token_id": 0}
        where = self.folder, self.dtype, self.device
        model, tensors = load_model(kind or AutoModel, *where, heads, optional, **config)
        check_vocabulary(self.tokenizer, model, self.folder)
        return model, tensors

    def backbone(
        self, model: Any, text_format: str, kind: type[Backbone] = Backbone, **more: Any
    ) -> Backbone:
        """Return a backbone that reads a text format; `more` goes to its class `kind`."""
        template = TEMPLATES[text_format]
        check_chat(self.tokenizer, text_format, self.repo)
        write = partial(template.whole, self.tokenizer)
        return kind(model, self.tokenizer, write, special=template.special, **more)

    def made(
        self,
        kind: Callable[..., Kind],
        name: str,
        sign: str,
        backbone: Backbone,
        head: HeadFunction,
        options: Mapping[str, Any],
        unit: str | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Kind:
        """Return a scorer loaded from the folder, with its digest.

        Parameters
        ----------
        kind : type
            Its class, a `Reader`.
        options : mapping
            Everything that changes its scores besides files, text and dtype.
        unit : str, optional
            By default `scale`.
        files : mapping, optional
            The result of `igcore.models.pretrained.contents_of`, if the caller has it.
        """
        files = files or contents_of(self.folder)
        # the text of an example: a chat template may write the date
        known = [files, backbone.template(*EXAMPLE), {"dtype": self.dtype, **options}]
        return kind(name, backbone, head, sign, digest_of(known), unit or self.scale, files)
