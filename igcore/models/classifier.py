"""A sequence classifier of transformers as a cost or a reward.

A decoder with a linear head reads through a KV cache; an encoder reads every text as a whole.
Options name the classes that count and the text to read, so a new model needs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from ..engine.agreement import rounding
from ..engine.device import out_of_memory
from ..engine.one_row import Text, one_row_view, read
from ..errors import ParameterError
from ..policy import context_of
from ..scorers import COST, REWARD, Texts
from ..settings import Options, one_of, settings
from ..template import broken_up, reserved_strings
from .backbone import Backbone
from .lm_scorer import EXAMPLE, Checkpoint, HeadFunction, LMScorer, Pooling, Reader
from .pretrained import tensors_of
from .probe import HELPFUL, UNSAFE
from .templates import TEMPLATES

ROLES_BY_SIGN = {COST: "cost", REWARD: "reward"}
LEAST = 32  # tokens of a response in a window
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

    def scorer(self) -> "LMScorer | EncoderScorer":
        """Return the scorer, unchecked."""
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
        kind: Callable[..., LMScorer | EncoderScorer] = partial(LMScorer, pooling=self.pooling)
        if not heads:
            kind = partial(EncoderScorer, model=model, pairs=two_texts)
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
    """A classifier that reads every text as a whole, or in windows.

    The texts of a call are read together, see `igcore.engine.one_row`, if the model then gives the
    logits of texts read alone. Else, as for models with an attention or a pooling of their own, it
    reads one text at a time.

    A text longer than the context is read in windows, and its worst window counts: the highest cost
    or the lowest reward. Each window has the whole prompt, the special tokens, and as much of the
    response as fits; it begins in the middle of the one before.

    Attributes
    ----------
    model
        Computes logits (R, C), which `head` turns into scores (R,). Its weights must not change.
    pairs : bool
        Whether prompt and response are the two texts of a pair: the tokenizer writes what it was
        trained to write between them, and marks whose each token is. Else `backbone` writes both
        as one text.
    """

    model: PreTrainedModel = field(kw_only=True)
    pairs: bool = False

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return one number per text (n,) float64; `finished` is ignored.

        Raises
        ------
        ParameterError
            When a text exceeds the model's context, and its prompt leaves the response too little
            of it.
        """
        windows = self.windows(prompts, responses)
        logits = self._logits([window for text in windows for window in text], self._view)
        # one by one: a vectorised function may round otherwise beside other numbers
        scores = np.array([self.head(row[None]).item() for row in logits], dtype=float)
        worst = np.maximum if self.sign == COST else np.minimum  # NaN if any is
        return np.asarray(worst.reduceat(scores, np.cumsum([0, *map(len, windows)])[:-1]))

    def windows(self, prompts: Sequence[str], responses: Sequence[str]) -> list[list[Text]]:
        """Return what is read of each text: itself, or windows that cover it."""
        texts = self._encoded(prompts, responses) if prompts else []
        room = context_of(self.model) - self._first
        return [
            [text] if len(text["input_ids"]) <= room else self._cut(prompt, text, room)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _encoded(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Text]:
        """Return texts of any length as their tokens."""
        tokenizer, template = self.backbone.tokenizer, self.backbone.template
        reserved = reserved_strings(tokenizer)
        pairs = [
            (broken_up(prompt, reserved), broken_up(response, reserved))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        if self.pairs:  # with the types of the tokens, where the tokenizer has them
            rows = tokenizer(*map(list, zip(*pairs, strict=True)))
            return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        texts = [template(*pair) for pair in pairs]
        ids = tokenizer(texts, add_special_tokens=self.backbone.special)["input_ids"]
        ids = [row or [tokenizer.eos_token_id] for row in ids]
        return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]

    def _cut(self, prompt: str, text: Text, room: int) -> list[Text]:
        """Return windows of at most `room` tokens that cover a text."""
        ids = text["input_ids"]
        # what a text has without a response belongs to every window
        bare = self._encoded([prompt], [""])[0]["input_ids"]
        start = len(commonprefix([ids, bare]))
        end = len(ids) - len(commonprefix([ids[::-1], bare[start:][::-1]]))
        width = room - start - (len(ids) - end)  # tokens of the response in a window
        if width < LEAST:
            raise ParameterError(
                f"a text has {len(ids)} tokens, which exceeds the scorer's context of {room}, and "
                f"its prompt leaves only {width}; shorten the prompts, or choose a longer context"
            )
        starts = [*range(start, end - width, width // 2), end - width]
        return [
            {name: [*row[:start], *row[at : at + width], *row[end:]] for name, row in text.items()}
            for at in starts
        ]

    @cached_property
    def _first(self) -> int:
        """The first position of a text; RoBERTa and its like count from the pad id on."""
        padding = getattr(getattr(self.model.base_model, "embeddings", None), "padding_idx", None)
        return 0 if padding is None else padding + 1

    @torch.inference_mode()
    def _logits(self, texts: Sequence[Text], view: PreTrainedModel | None) -> list[torch.Tensor]:
        """Return the logits (C,) float64 of texts, read together by a view, or one by one."""
        if view:
            outputs = [output for output, _ in read(view, texts, self._first)]
        else:  # without padding, which some models read
            row = partial(torch.tensor, device=self.model.device)
            outputs = [self.model(**{k: row([x]) for k, x in text.items()}) for text in texts]
        return [row for output in outputs for row in output.logits.cpu().double()]

    @cached_property
    def _view(self) -> PreTrainedModel | None:
        """A view that reads texts together as the model reads each alone, or None."""
        try:
            view = one_row_view(self.model)
            base = view.base_model
            vars(base)["forward"] = partial(_first_states, base, base.forward)
            texts = sum(self.windows(*zip(EXAMPLE, HELPFUL, UNSAFE, strict=True)), [])
            ours, alone = (torch.stack(self._logits(texts, by)) for by in (view, None))  # (R, C)
        except Exception as failure:  # a checkpoint may raise anything
            if out_of_memory(failure):
                raise
            return None
        # and the last bits of the numbers: those of another model may be nearly equal
        least = torch.finfo(self.model.dtype).eps * alone.norm()
        allowed = rounding(self.model) * (alone - alone.mean(0)).norm() + least
        return view if (ours - alone).norm() <= allowed else None  # NaN is not <= anything


def _first_states(base: PreTrainedModel, run: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Return the output of a base model for the first tokens of its texts, (R, 1, H)."""
    output = run(*args, **inputs)
    starts = list(accumulate([0, *inputs["lengths"][:-1]]))
    output.last_hidden_state = output.last_hidden_state[0, starts][:, None]
    if getattr(base, "pooler", None):
        output.pooler_output = base.pooler(output.last_hidden_state)
    return output
