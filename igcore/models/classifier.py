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
from ..policy import context_of
from ..rendering import neutral
from ..scorers import COST, REWARD
from ..settings import one_of, settings
from .backbone import Backbone, check_length
from .lm_scorer import Checkpoint, LMScorer, digest
from .pretrained import contents_of, one_sentence, tensors_of
from .templates import TEMPLATES, TextFormat, check_chat

ROLES = {COST: "cost", REWARD: "reward"}
HEAD = "score.weight"  # of transformers' decoders: a linear head on the last token
BATCH = 32
MULTI = "multi_label_classification"


def _number(unit: str, counted: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the number of a unit, logits (R, C) of which the counted classes are read -> (R,)."""
    if unit == "softmax":
        return logits.softmax(1)[:, counted].sum(1)
    highest = logits[:, counted].amax(1)
    return highest.sigmoid() if unit == "sigmoid" else highest


@settings(kw_only=True)
class Classifier(Checkpoint):
    """A sequence classifier, an ``AutoModelForSequenceClassification`` of transformers.

    Its scorer is called ``classifier:`` and the last part of `repo`. The number of classes of a
    decoder is that of the head in the files, because transformers assumes two when a configuration
    names none.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`. The logits of an encoder are in `dtype` too: small
        ones are better read in float32.
    sign : str
        ``higher is worse`` for a cost, ``higher is better`` for a reward.
    labels : list, optional
        The classes that count, by their names in the configuration or by their indices from 0.
        Needed unless there is only one.
    unit : str
        The number read from the logits z. Of classes that hold independently of each other:
        ``logit``, the highest z of those that count, or ``sigmoid``, its probability. Of classes
        that exclude each other: ``softmax``, the probability of those that count together. By
        default ``logit``; a cost with more than one class has no default.
    problem_type : str, optional
        ``single_label_classification`` where classes exclude each other, or
        ``multi_label_classification``: what the model was trained for, if its configuration says
        something else.
    text_format : str
        How a pair is written, a key of `igcore.models.templates.TEMPLATES`.
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
    unit: Literal["logit", "sigmoid", "softmax"] | None = None
    problem_type: Literal["single_label_classification", "multi_label_classification"] | None = None
    text_format: TextFormat = "chat"
    reads: Literal["pair", "response", "segments"] = "pair"

    def scorer(self) -> "LMScorer | EncoderScorer":
        """Return the scorer, unchecked."""
        from transformers import AutoModelForSequenceClassification

        text_format = self.text_format if self.reads == "pair" else "raw"
        check_chat(self.tokenizer, text_format, self.repo)
        heads, classes, trained_for = _heads_and_classes(self.folder)
        if heads:
            model, tensors = self.model(heads=heads)
        else:
            model, _ = self.model(AutoModelForSequenceClassification, num_labels=len(classes))
        unit = self._unit(classes, self.problem_type or trained_for)
        counted = self._counted(classes, unit)
        files = contents_of(self.folder)
        options = {
            "counted": counted,
            "unit": unit,
            "text_format": text_format,
            "reads": self.reads,
            "dtype": self.dtype,
        }
        identity = {
            "name": f"classifier:{Path(self.repo).name}-{ROLES[self.sign]}",
            "sign": self.sign,
            "unit": "logit" if unit == "logit" else "probability",
            "digest": digest(files, self.texts, **options),
            "files": files,
        }
        special = TEMPLATES[text_format].special
        number = partial(_number, unit, counted)
        if not heads:
            return EncoderScorer(
                model=model,
                tokenizer=self.tokenizer,
                texts=self.texts,
                special=special,
                number=number,
                **identity,
            )
        if self.reads == "segments":
            raise ParameterError(f"{self.repo} is no encoder; choose reads pair or response")
        backbone = Backbone(model, self.tokenizer, self.text, special=special)
        weight = tensors[HEAD].float().to(model.device)  # (C, H)
        return LMScorer(backbone=backbone, head=partial(_scores, weight, number), **identity)

    def texts(self, prompt: str, response: str) -> tuple[str, ...]:
        """Return the text that is read, or two that an encoder's tokenizer joins."""
        if self.reads == "pair":
            return (TEMPLATES[self.text_format].whole(self.tokenizer, prompt, response),)
        return (prompt, response) if self.reads == "segments" else (response,)

    def text(self, prompt: str, response: str) -> str:
        """Return the text that a decoder reads."""
        return self.texts(prompt, response)[0]

    def _unit(self, classes: list[str], trained_for: str | None) -> str:
        """Return the unit, or raise ``ParameterError`` where it is not that of these classes."""
        usual, wrong = ("sigmoid", "softmax") if trained_for == MULTI else ("softmax", "sigmoid")
        refused = [None] if self.sign == COST else []  # a logit is no probability
        refused += [wrong] if trained_for else []
        if len(classes) > 1 and self.unit in refused:
            raise ParameterError(
                f"unit is {self.unit!r}, but {self.repo} has {len(classes)} classes, problem_type "
                f"{trained_for}; give unit {usual!r}, or problem_type if its configuration is wrong"
            )
        return self.unit or "logit"

    def _counted(self, classes: list[str], unit: str) -> list[int]:
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
        if unit == "softmax" and len(counted) == len(classes):
            raise ParameterError(f"unit 'softmax' needs a class that does not count, of {known}")
        return counted


def _scores(weight: torch.Tensor, number: Callable, hidden: torch.Tensor) -> torch.Tensor:
    """Return the number of hidden states (R, H) under a head's weight (C, H), (R,)."""
    logits = linear(hidden.to(weight.device), weight)  # (R, C)
    return number(logits.double())


def _heads_and_classes(folder: Path) -> tuple[list[str], list[str], str | None]:
    """Return the key of a decoder's head, none of an encoder, the names of the classes, and what
    the configuration says that they were trained for.
    """
    from transformers import AutoConfig

    found = tensors_of(folder, [HEAD])
    # an encoder's head has a name of its own family; its configuration has to say how many classes
    options = {"num_labels": len(found[HEAD])} if found else {}
    with one_sentence(folder):
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    classes = [config.id2label[i] for i in sorted(config.id2label)]
    return list(found), classes, config.problem_type


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
            pair = [neutral(self.tokenizer, text) for text in (prompt, response)]
            texts.append(self.texts(*pair))
        scores = np.empty(len(texts))
        if not texts:
            return scores
        columns = [list(column) for column in zip(*texts, strict=True)]
        read = self.tokenizer(*columns, add_special_tokens=self.special)
        lengths = [len(ids) for ids in read["input_ids"]]
        check_length(max(lengths), min(_room(self.model), self.tokenizer.model_max_length))
        for rows in by_length(lengths, BATCH):
            batch = {name: [ids[row] for row in rows] for name, ids in read.items()}
            scores[rows] = self._numbers(batch)
        return scores

    @torch.inference_mode()
    def _numbers(self, batch: dict[str, list[list[int]]]) -> np.ndarray:
        """Return the numbers of the ids and masks of B texts of one length, (B,)."""
        device = self.model.device
        tensors = {name: torch.tensor(rows, device=device) for name, rows in batch.items()}
        return self.number(self.model(**tensors).logits.double()).cpu().numpy()


def _room(model) -> int:
    """Return the most tokens that an encoder reads: some count positions from after the pad id."""
    rooms = [context_of(model)]
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            rooms.append(len(part.weight) - part.padding_idx - 1)
    return min(rooms)


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of texts in batches of one length: some models read their padding."""
    same: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        same.setdefault(length, []).append(row)
    return [rows[at : at + size] for rows in same.values() for at in range(0, len(rows), size)]
