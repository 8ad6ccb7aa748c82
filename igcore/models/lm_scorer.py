"""Scorers with a head on a language model's hidden states, and their checkpoints.

Within one group of prompts a `Session` keeps a KV cache, so a longer text costs only its new
tokens. Scorers on one `Backbone` share its session::

    backbone = Backbone(model, tokenizer)
    cost = LMScorer("my-cost", backbone, cost_head, "higher is worse", digest="v1")
    reward = LMScorer("my-reward", backbone, reward_head, "higher is better", digest="v1")

A scorer without a session is uncached. The final check uses an uncached scorer, so an emitted
answer does not depend on a cache.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from transformers import AutoModel, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..errors import ParameterError
from ..files import digest_of
from ..scorers import Scorer, Texts
from ..settings import Options, settings
from .backbone import Backbone
from .hub import snapshot
from .pretrained import Dtype, check_vocabulary, contents_of, load_model, load_tokenizer
from .probe import probe
from .session import Session
from .templates import TEMPLATES, check_chat
from .texts import Text

HeadFunction = Callable[[torch.Tensor], torch.Tensor]
Pooling = Literal["last", "mean"]
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

    @property
    def reads_prompts(self) -> bool:
        """True if its text holds the prompt."""
        one, other = (self.backbone.template(prompt, "a") for prompt in ("b", "c"))
        return one != other


Kind = TypeVar("Kind", bound=Reader)


@dataclass(frozen=True)
class LMScorer(Reader):
    """A cost or reward that a head reads from the hidden states of a response.

    Attributes
    ----------
    session : Session or None
        The KV cache in use. None scores without a cache, one prompt at a time: a score then does
        not depend on other prompts, which matters in bfloat16, so reported scores can be
        recomputed.
    pooling : str
        ``last``: the head reads the state of the text's last token. ``mean``: it reads the mean
        over the tokens of the response so far, 0 for an empty response.

    Raises
    ------
    ParameterError
        When it is to read a mean and the tokens of the response are uncertain.
    """

    session: Session | None = None
    pooling: Pooling = "last"

    def __post_init__(self) -> None:
        """Check that the tokens of a response are known if they are counted."""
        if self.pooling == "mean" and not self.reads_tokens:
            raise ParameterError(
                f"pooling of {self.name} is 'mean', which needs texts that end with the response "
                "and a fast tokenizer; choose another text_format, such as raw, or pooling: last"
            )

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return one number per text (n,); callers refuse the scores of a wider head."""
        states = self.features(prompts, responses)
        # without a session row by row: a batch may round differently
        rows = [states] if self.session else torch.split(states, 1)
        with torch.inference_mode():
            scores = torch.cat([self.head(row) for row in rows])
        return _numbers(scores, len(prompts)).numpy()

    @torch.inference_mode()
    def features(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return what the head reads of each response, see `pooling`: (n, H) float32."""
        pairs = list(zip(prompts, responses, strict=True))
        if self.session or len(pairs) == 1:
            texts, last = self._texts(prompts, responses), self.pooling == "last"
            counts = [1 if last else len(self.backbone.ends(text, 0)) for text in texts]
            read = self._states(texts, counts)
            return torch.stack([rows.double().mean(0).float() for rows in read])
        # no two prompts share a batch or a cache
        groups: dict[str, list[str]] = {}
        for prompt, response in pairs:
            groups.setdefault(prompt, []).append(response)
        states = {}
        for prompt, answers in groups.items():
            # prefixes of one answer share nearly all of their tokens; the final check has one text
            own = self.with_cache(self.open_cache([prompt])) if len(answers) > 1 else self
            states[prompt] = iter(own.features([prompt] * len(answers), answers))
        return torch.stack([next(states[prompt]) for prompt in prompts])

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
        mean = self.pooling == "mean"
        texts = self._texts(prompts, responses)
        starts = [0] * len(since) if mean else since  # a mean needs every token of the response
        pairs = zip(texts, starts, strict=True)
        all_ends = [self.backbone.ends(text, start) for text, start in pairs]
        counts = list(map(len, all_ends))
        with torch.inference_mode():
            states = self._states(texts, counts)
            if mean:
                states = list(map(_means, states))
            # without a session row by row: a batch may round differently
            parts = [torch.cat(states)] if self.session else states
            numbers = torch.cat([self.head(part) for part in parts])
        split = torch.split(_numbers(numbers, sum(counts)), counts)
        found = []
        for ends, scores, after in zip(all_ends, split, since, strict=True):
            first = min(bisect_right(ends, after), len(ends) - 1) if mean else 0
            found.append((ends[first:], scores[first:].numpy()))
        return found

    def _texts(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Text]:
        """Return the texts of prompts and responses."""
        return (self.session or self.backbone).texts(prompts, responses)

    def _states(self, texts: Sequence[Text], counts: Sequence[int]) -> list[torch.Tensor]:
        """Return what the head reads after each of the last tokens of texts, (count, H) each."""
        if self.session:
            states = self.session.states(texts, counts)
        else:  # row by row: a batch may round differently
            pairs = zip(texts, counts, strict=True)
            states = [self.backbone.states([text.ids], [count])[0] for text, count in pairs]
        if self.pooling == "last":
            return states
        # the only state of an empty response is that of its prompt; times 0, as NaN stays NaN
        full = [text.written != text.opening for text in texts]
        return [rows * counts for rows, counts in zip(states, full, strict=True)]

    def open_cache(self, prompts: Sequence[str]) -> Session:
        """Return a new session of its backbone over a group of prompts."""
        return Session(self.backbone, prompts)

    def with_cache(self, session: Session) -> "LMScorer":
        """Return the same scorer with a session of its backbone."""
        return replace(self, session=session)

    def uncached(self) -> "LMScorer":
        """Return the same scorer without a session."""
        return replace(self, session=None)


def _means(states: torch.Tensor) -> torch.Tensor:
    """Return the mean of the first 1, 2, ..., k states (k, H) float32."""
    counts = torch.arange(1, len(states) + 1, device=states.device)[:, None]
    return (states.double().cumsum(0) / counts).float()


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
        scorer = self.scorer()
        if self.self_check:
            probe(scorer)
        return scorer

    def scorer(self) -> Scorer:
        """Return the scorer, unchecked."""
        raise NotImplementedError

    @cached_property
    def folder(self) -> Path:
        """The folder with its files."""
        return snapshot(self.repo, self.revision)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder."""
        return load_tokenizer(self.folder)

    def model(
        self,
        kind: Any = None,
        heads: Sequence[str] = (),
        optional: Sequence[str] = (),
        **config: Any,
    ) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
        """Return the model and the tensors of its head, see `igcore.models.pretrained.load_model`.

        The default `kind` is ``AutoModel``.
        """
        # old configurations name pad ids without an embedding; padding is masked, so any id works
        config = config or {"pad_token_id": 0}
        where = self.folder, self.dtype, self.device
        model, tensors = load_model(kind or AutoModel, *where, heads, optional, **config)
        check_vocabulary(self.tokenizer, model, self.folder)
        return model, tensors

    def backbone(
        self, model: PreTrainedModel, text_format: str, kind: type[Backbone] = Backbone, **more: Any
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
        options: Options,
        unit: str = "trained scale",
        files: Mapping[str, str] | None = None,
    ) -> Kind:
        """Return a scorer loaded from the folder, with its digest.

        Parameters
        ----------
        kind : type
            Its class, a `Reader`.
        options : mapping
            Everything that changes its scores besides files, text and dtype.
        unit : str
            See `igcore.scorers.Scorer`.
        files : mapping, optional
            The result of `igcore.models.pretrained.contents_of`, if the caller has it.
        """
        files = files or contents_of(self.folder)
        # the text of an example: a chat template may write the date
        known = [files, backbone.template(*EXAMPLE), {"dtype": self.dtype, **options}]
        return kind(name, backbone, head, sign, digest_of(known), unit, files)
