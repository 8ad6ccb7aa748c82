"""Any sequence classifier of transformers as a cost or a reward.

A decoder with a linear head is read through a session with a KV cache; an encoder reads every text
as a whole. Options say what to read and which classes count, so that a new model needs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch.nn.functional import linear

from ..errors import ParameterError
from ..policy import neutral
from ..scorers import COST, REWARD
from ..settings import one_of, settings
from .convert import quiet_transformers
from .embedded import by_length
from .lm_scorer import Backbone, LMScorer, check_length, context_of
from .pretrained import contents_of, one_sentence, tensors_of
from .source import Checkpoint, digest
from .templates import TEMPLATES, TextFormat, check_chat

ROLES = {COST: "cost", REWARD: "reward"}
HEAD = "score.weight"  # of transformers' decoders: a linear head on the last token
BATCH = 32


def _logit(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the highest logit of the classes that count: logits (R, C) -> (R,)."""
    return logits[:, counted].amax(1)


def _sigmoid(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the probability of the likeliest class that counts."""
    return _logit(logits, counted).sigmoid()


def _softmax(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the total probability of the counted classes, where classes exclude each other."""
    return logits.softmax(1)[:, counted].sum(1)


UNITS = {"logit": _logit, "sigmoid": _sigmoid, "softmax": _softmax}


@settings(kw_only=True)
class Classifier(Checkpoint):
    """A sequence classifier, an ``AutoModelForSequenceClassification`` of transformers.

    Its scorer is called ``classifier:`` and the last part of `repo`. The number of classes is that
    of the head in the files, because transformers assumes two when a configuration names none.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Checkpoint`. The logits of an encoder are in `dtype` too: small
        ones are better read in float32.
    sign : str
        ``higher is worse`` for a cost, ``higher is better`` for a reward.
    labels : list, optional
        The classes that count, by their names in the configuration or by their indices from 0.
        Needed unless there is only one.
    unit : str
        The number read from the logits z, a key of `UNITS`. Of classes that
        hold independently of each other: ``logit``, the highest z of those that count, or
        ``sigmoid``, its probability. Of classes that exclude each other: ``softmax``, the
        probability of those that count together.
    text_format : str, optional
        How a pair is written, a key of `igcore.models.templates.TEMPLATES`; ``chat`` by default.
    reads : str
        ``pair``: prompt and response in one text. ``response``: the response alone, as it is.
        ``segments``: the two texts that an encoder's tokenizer joins in its own way.

    Notes
    -----
    A part of a response is read as if it were whole. These examples for a params file follow the
    cards of current models; they were not run here::

        reward: {name: classifier, repo: Skywork/Skywork-Reward-V2-Qwen3-8B, sign: higher is better}
        reward: {name: classifier, repo: OpenAssistant/reward-model-deberta-v3-large-v2,
                 sign: higher is better, reads: segments, dtype: float32}
        cost: {name: classifier, repo: unitary/toxic-bert, sign: higher is worse, labels: [toxic],
               unit: sigmoid, reads: response, dtype: float32}
    """

    sign: Annotated[str, one_of(ROLES)]
    labels: list[str | int] | None = None
    unit: Annotated[str, one_of(UNITS)] = "logit"
    text_format: TextFormat | None = None
    reads: Literal["pair", "response", "segments"] = "pair"

    def scorer(self) -> "LMScorer | EncoderScorer":
        """Return the scorer, unchecked."""
        from transformers import AutoModelForSequenceClassification

        text_format = (self.text_format or "chat") if self.reads == "pair" else "raw"
        check_chat(self.tokenizer, text_format, self.repo)
        template = TEMPLATES[text_format]
        write = partial(template.whole, self.tokenizer)
        if self.reads == "response":
            write = _only_response
        texts = partial(_texts, self.reads, write)
        keys, classes = _classes(self.folder)
        counted = self._counted(classes)
        number = partial(UNITS[self.unit], counted=counted)
        files = contents_of(self.folder)
        options = {"unit": self.unit, "text_format": text_format, "reads": self.reads}
        identity = {
            "name": f"classifier:{Path(self.repo).name}-{ROLES[self.sign]}",
            "sign": self.sign,
            "unit": "logit" if self.unit == "logit" else "probability",
            "digest": digest(files, texts, counted=counted, dtype=self.dtype, **options),
            "files": files,
        }
        if keys != [HEAD]:
            model, _ = self.model(AutoModelForSequenceClassification, num_labels=len(classes))
            reading = {"tokenizer": self.tokenizer, "texts": texts, "special": template.special}
            return EncoderScorer(model=model, number=number, **reading, **identity)
        if self.reads == "segments":
            raise ParameterError(f"{self.repo} is no encoder; choose reads pair or response")
        model, tensors = self.model(heads=keys)
        backbone = Backbone(model, self.tokenizer, write, special=template.special)
        weight = tensors[HEAD].float().to(model.device)  # (C, H)
        return LMScorer(backbone=backbone, head=partial(_head, weight, number), **identity)

    def _counted(self, classes: list[str]) -> list[int]:
        """Return the indices of the classes that count, in ascending order."""
        known = dict(enumerate(classes))
        if not self.labels and len(classes) > 1:
            raise ParameterError(f"say in labels which classes count, of {known}")
        index = {name: i for i, name in known.items()} | {i: i for i in known}
        labels = self.labels or [0]
        for label in labels:
            if label not in index:
                raise ParameterError(f"label {label!r} is no class of {self.repo}: {known}")
        counted = sorted({index[label] for label in labels})
        if self.unit == "softmax" and len(counted) == len(classes):
            raise ParameterError(f"unit 'softmax' needs a class that does not count, of {known}")
        return counted


def _only_response(prompt: str, response: str) -> str:
    """Return the response as it is."""
    return response


def _texts(reads: str, write: Callable, prompt: str, response: str) -> tuple[str, ...]:
    """Return the text that is read, or two that the tokenizer joins."""
    return (prompt, response) if reads == "segments" else (write(prompt, response),)


def _head(weight: torch.Tensor, number: Callable, hidden: torch.Tensor) -> torch.Tensor:
    """Return the number of hidden states (R, H) under a head's weight (C, H), (R,)."""
    logits = linear(hidden.to(weight.device), weight)  # (R, C)
    return number(logits.double())


def _classes(folder: Path) -> tuple[list[str], list[str]]:
    """Return the keys of the head's tensors, and the names of the classes.

    A tensor belongs to the head if its shape depends on the number of classes.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    local = {"local_files_only": True, "trust_remote_code": False}
    with one_sentence(folder), quiet_transformers():
        shapes = []
        for n in (1, 2):
            config = AutoConfig.from_pretrained(folder, num_labels=n, **local)
            with torch.device("meta"):  # shapes without numbers
                state = AutoModelForSequenceClassification.from_config(config).state_dict()
            shapes.append({key: tensor.shape for key, tensor in state.items()})
        one, two = shapes
        keys = [key for key in one if one[key] != two[key]]
        tensors = tensors_of(folder, keys)
        # a language model has no such tensors; the scorer guard reads one
        found = AutoConfig.from_pretrained(folder, num_labels=len(tensors[keys[0]]), **local)
    return keys, [found.id2label[i] for i in sorted(found.id2label)]


@dataclass(frozen=True)
class EncoderScorer:
    """A classifier that reads every text as a whole.

    Attributes
    ----------
    name, sign, unit, digest : str
        See `igcore.scorers.Scorer`.
    model
        Gives logits (R, C).
    special : bool
        Whether the tokenizer adds its own special tokens.
    texts : callable
        (prompt, response) -> one text, or two that the tokenizer joins in its own way.
    number : callable
        Logits (R, C) float64 -> (R,).
    files : dict of str to str
        What it was loaded from, see `igcore.models.pretrained.contents_of`.
    """

    name: str
    sign: str
    unit: str
    digest: str
    model: object
    tokenizer: object
    texts: Callable[[str, str], tuple[str, ...]]
    special: bool
    number: Callable[[torch.Tensor], torch.Tensor]
    files: dict[str, str] = field(compare=False, repr=False)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,) float64; `finished` is ignored.

        Raises
        ------
        ParameterError
            When a text does not fit the model's context.
        """
        texts = []
        for prompt, response in zip(prompts, responses, strict=True):
            pair = neutral(self.tokenizer, prompt), neutral(self.tokenizer, response)
            texts.append(self.texts(*pair))
        scores = np.empty(len(texts))
        for rows in by_length([(sum(map(len, text)), text) for text in texts], BATCH):
            scores[rows] = self._numbers([texts[row] for row in rows])
        return scores

    @torch.inference_mode()
    def _numbers(self, texts: list[tuple[str, ...]]) -> np.ndarray:
        """Return the numbers of one batch of texts, (B,)."""
        columns = [list(column) for column in zip(*texts, strict=True)]
        # BERT counts positions from the left, whatever is masked there
        padding = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        batch = self.tokenizer(*columns, add_special_tokens=self.special, **padding)
        longest = int(batch["attention_mask"].sum(1).max())
        check_length(longest, min(context_of(self.model), self.tokenizer.model_max_length))
        logits = self.model(**batch.to(self.model.device)).logits
        return self.number(logits.double()).cpu().numpy()
