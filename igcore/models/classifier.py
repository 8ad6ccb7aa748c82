"""Any sequence classifier of transformers as a cost or a reward.

A decoder with a linear head reads through a KV cache; an encoder reads every text as a whole.
Options name the classes that count and the text to read, so a new model needs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.nn.functional import linear

from ..errors import ParameterError
from ..scorers import COST, REWARD
from ..settings import one_of, settings
from .backbone import Backbone, TwoTexts
from .lm_scorer import Checkpoint, HeadFunction, LMScorer, Pooling, Reader
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
    pooling : str
        What the head of a decoder reads: the ``last`` token, as in transformers, or the ``mean``,
        see `igcore.models.lm_scorer.LMScorer`.

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
    pooling: Pooling = "last"

    def scorer(self) -> Reader:
        """Return the scorer, unchecked."""
        from transformers import AutoModelForSequenceClassification

        text_format = self.text_format if self.reads == "pair" else "raw"
        heads = list(tensors_of(self.folder, [HEAD]))
        if self.pooling == "mean" and not heads:
            raise ParameterError(
                f"pooling is 'mean', but {self.repo} has no {HEAD}, the linear head of a decoder, "
                "and pools by itself; leave pooling out"
            )
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
        if text_format == TWO_TEXTS:
            backbone: Backbone = TwoTexts(model, self.tokenizer)
        else:
            backbone = self.backbone(model, text_format)
        if self.reads == "response":
            backbone.template = _response
        number = partial(_number, unit, counted)
        head = partial(_scores, weight, number) if heads else number
        name = f"classifier:{Path(self.repo).name}-{ROLES_BY_SIGN[self.sign]}"
        options: dict[str, Any] = {"counted": counted, "unit": unit, "reads": self.reads}
        kind: Callable[..., Reader] = partial(EncoderScorer, model=model)
        if heads:
            kind = partial(LMScorer, pooling=self.pooling)
        scale = "logit" if unit == "logit" else "probability"
        options |= {"text_format": text_format, "pooling": self.pooling}
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

    def _unit(self, config: Any) -> str:
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

    def _counted(self, config: Any, unit: str) -> list[int]:
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
    """A classifier that reads every text as a whole.

    Attributes
    ----------
    model
        Computes logits (R, C), which `head` turns into scores (R,). `backbone` tokenizes the
        texts.
    """

    model: Any = None

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,) float64; `finished` is ignored.

        Raises
        ------
        ParameterError
            When a text does not fit the model's context.
        """
        scores = []
        # each text by itself: some models read their padding
        for prompt, response in zip(prompts, responses, strict=True):
            read = self.backbone.inputs(prompt, response)
            inputs = {k: torch.tensor([row], device=self.model.device) for k, row in read.items()}
            with torch.inference_mode():
                logits = self.model(**inputs).logits
            scores.append(self.head(logits.double()).item())
        return np.array(scores, dtype=float)
