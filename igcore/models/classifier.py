"""A sequence classifier of transformers as a cost or a reward.

A decoder with a linear head reads through a KV cache; an encoder reads every text as a whole.
Options name the classes that count and the text to read, so a new model needs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from ..errors import ParameterError
from ..scorers import COST, REWARD, Texts
from ..settings import Options, one_of, settings
from ..template import broken_up, reserved_strings
from .backbone import Backbone
from .lm_scorer import Checkpoint, HeadFunction, LMScorer, Reader
from .pretrained import tensors_of
from .templates import TEMPLATES

ROLES_BY_SIGN = {COST: "cost", REWARD: "reward"}
HEAD = "score.weight"  # the linear head of transformers' decoders
TWO_TEXTS = "two texts"  # the text format of an encoder that was trained on pairs
# problem_type of a configuration -> the unit that the model was trained in
UNITS = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "logit",
}


def _response(prompt: str, response: str) -> str:
    """Return the response alone."""
    return response


def _number(unit: str, counted: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the score (R,) of the counted classes, in a unit, from logits (R, C)."""
    if unit == "softmax":
        return logits.softmax(1)[:, counted].sum(1)
    highest = logits[:, counted].amax(1)
    return highest.sigmoid() if unit == "sigmoid" else highest


@settings(kw_only=True)
class Classifier(Checkpoint):
    """A sequence classifier, an ``AutoModelForSequenceClassification`` of transformers.

    The scorer's name is ``classifier:`` and the last part of `repo`. The number of classes of a
    decoder is that of the head in the files, because transformers assumes two if a configuration
    names none.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`. The logits of an encoder are computed in `dtype`
        too, so read small encoders in float32.
    sign : str
        ``higher is worse`` for a cost, ``higher is better`` for a reward.
    labels : list, optional
        The classes that count, by name as in the configuration or by index from 0. Required if
        there is more than one class.
    unit : str
        How the logits z become a number. For independent classes: ``logit``, the highest z of the
        classes that count, or ``sigmoid``, its probability. For classes that exclude each other:
        ``softmax``, the sum of the probabilities of the classes that count. The default is that of
        the configuration's ``problem_type``, see `UNITS`, which only ``logit`` may replace. Without
        a ``problem_type`` it is ``logit``; a cost with more than one class then has no default.
    text_format : str
        The text of a pair: for a decoder a key of `igcore.models.templates.TEMPLATES`; for an
        encoder ``two texts``, which is ``tokenizer(prompt, response)``, or its chat template.
    reads : str
        ``pair``: prompt and response in one text. ``response``: the response alone.

    Notes
    -----
    A prefix of a response is read like a complete response. These examples for a params file follow
    the model cards and are untested::

        reward: {name: classifier, repo: Skywork/Skywork-Reward-V2-Qwen3-8B, sign: higher is better}
        cost: {name: classifier, repo: unitary/toxic-bert, sign: higher is worse, labels: [toxic],
               unit: sigmoid, reads: response, dtype: float32}
    """

    sign: Annotated[str, one_of(ROLES_BY_SIGN)]
    labels: list[str | int] | None = None
    unit: Literal["logit", "sigmoid", "softmax"] | None = None
    text_format: Annotated[str, one_of([*TEMPLATES, TWO_TEXTS])] = "chat"
    reads: Literal["pair", "response"] = "pair"

    def scorer(self) -> "LMScorer | EncoderScorer":
        """Return the scorer, unchecked."""
        text_format = self.text_format if self.reads == "pair" else "raw"
        heads = list(tensors_of(self.folder, [HEAD]))
        self._check_format(is_decoder=bool(heads))
        if heads:
            model, tensors = self.model(heads=heads)
            weight = tensors[HEAD].float().to(model.device)  # (C, H)
            model.config.num_labels = len(weight)
        else:
            # with the pad id of the configuration, from which some models count positions
            model, _ = self.model(AutoModelForSequenceClassification, return_dict=True)
        unit = self._unit(model.config)
        counted = self._counted(model.config, unit)
        if two_texts := text_format == TWO_TEXTS:
            backbone = Backbone(model, self.tokenizer)
        else:
            backbone = self.backbone(model, text_format)
        if self.reads == "response":
            backbone.template = _response
        number = partial(_number, unit, counted)
        head = partial(_scores, weight, number) if heads else number
        name = f"classifier:{Path(self.repo).name}-{ROLES_BY_SIGN[self.sign]}"
        options: Options = {"counted": counted, "unit": unit, "reads": self.reads}
        options |= {"text_format": text_format}
        kind: Callable[..., LMScorer | EncoderScorer] = LMScorer
        if not heads:
            kind = partial(EncoderScorer, model=model, pairs=two_texts)
        scale = "logit" if unit == "logit" else "probability"
        return self.made(kind, name, self.sign, backbone, head, options, scale)

    def _check_format(self, is_decoder: bool) -> None:
        """Refuse a text format that the model cannot have been trained on."""
        formats = list(TEMPLATES) if is_decoder else [TWO_TEXTS]
        if not is_decoder and self.tokenizer.chat_template:
            formats.append("chat")
        if self.reads == "pair" and self.text_format not in formats:
            kind = "a decoder" if is_decoder else "an encoder"
            raise ParameterError(
                f"text_format is {self.text_format!r}, but {self.repo} is {kind}; choose one of "
                f"{', '.join(formats)}, if it was trained on pairs, else set reads to 'response'"
            )

    def _unit(self, config: PreTrainedConfig) -> str:
        """Return the unit of the score, by the option and the configuration."""
        n = config.num_labels
        problem = str(getattr(config, "problem_type", None))
        trained = UNITS.get(problem)
        if trained and self.unit not in (None, "logit", trained):
            raise ParameterError(
                f"unit is {self.unit!r}, but {self.repo} was trained for {problem}; choose "
                f"{trained!r}, or leave unit out"
            )
        if self.sign == COST and n > 1 and not (self.unit or trained):
            raise ParameterError(
                f"a cost of {n} classes needs a unit; give softmax if the classes exclude each "
                "other, else sigmoid"
            )
        return self.unit or trained or "logit"

    def _counted(self, config: PreTrainedConfig, unit: str) -> list[int]:
        """Return the indices of the classes that count, in ascending order."""
        classes = config.id2label
        if not self.labels and len(classes) > 1:
            raise ParameterError(f"give labels, the classes that count, of {classes}")
        index = {}
        for label in self.labels or [0]:
            found = [i for i, name in classes.items() if label in (i, name)]
            if not found:
                raise ParameterError(f"label {label!r} is no class of {self.repo}; use {classes}")
            stated = (config.label2id or {}).get(label, found[0])
            if [str(i) for i in found] != [str(stated)]:
                raise ParameterError(
                    f"label {label!r} is no single class of {self.repo}, whose config.json has "
                    f"{classes} and {config.label2id}; give the index of the class"
                )
            index[label] = found[0]
        counted = sorted(set(index.values()))
        if unit == "softmax" and len(counted) == len(classes):
            raise ParameterError(f"unit 'softmax' needs a class that does not count, of {classes}")
        return counted


def _scores(weight: torch.Tensor, number: HeadFunction, hidden: torch.Tensor) -> torch.Tensor:
    """Return the scores (R,) of hidden states (R, H) under a head's weight (C, H)."""
    logits = linear(hidden.to(weight.device), weight)  # (R, C)
    return number(logits.double())


@dataclass(frozen=True)
class EncoderScorer(Reader):
    """A classifier that reads every text as a whole, one at a time.

    So a text has the number that the model itself gives it, beside any others.

    Attributes
    ----------
    model
        Computes logits (1, C), which `head` turns into a score. Its weights must not change.
    pairs : bool
        Whether prompt and response are the two texts of a pair: the tokenizer writes what it was
        trained to write between them, and marks whose each token is. Else `backbone` writes both
        as one text.
    """

    model: PreTrainedModel = field(kw_only=True)
    pairs: bool = False

    @torch.inference_mode()
    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return one number per text (n,) float64; `finished` is ignored.

        Raises
        ------
        ParameterError
            When a text exceeds the model's context.
        """
        scores = []
        for prompt, response in zip(prompts, responses, strict=True):
            text = self._encoded(prompt, response)
            row = {key: torch.tensor([own], device=self.model.device) for key, own in text.items()}
            logits = self.model(**row).logits.cpu().double()  # (1, C)
            scores.append(self.head(logits).item())
        return np.array(scores, dtype=float)

    def _encoded(self, prompt: str, response: str) -> dict[str, list[int]]:
        """Return a text as its tokens: ``input_ids``, and what else there is for each of them."""
        tokenizer = self.backbone.tokenizer
        reserved = reserved_strings(tokenizer)
        asked, answer = broken_up(prompt, reserved), broken_up(response, reserved)
        if self.pairs:  # with the types of the tokens, where the tokenizer has them
            # lists: of two texts, an empty second one would count as none
            text = {key: rows[0] for key, rows in tokenizer([asked], [answer]).items()}
        else:
            written = self.backbone.template(asked, answer)
            ids = tokenizer(written, add_special_tokens=self.backbone.special)["input_ids"]
            ids = ids or [tokenizer.eos_token_id]
            text = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        self.backbone.check_length(len(text["input_ids"]), self._first)
        return text

    @cached_property
    def _first(self) -> int:
        """The first position of a text; RoBERTa and its like count from the pad id on."""
        padding = getattr(getattr(self.model.base_model, "embeddings", None), "padding_idx", None)
        return 0 if padding is None else padding + 1
