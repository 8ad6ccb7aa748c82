"""Any sequence classifier of transformers as a cost or a reward.

A decoder with a linear head is read through a session with a KV cache; an encoder reads every text
as a whole. Options say what to read and which classes count, so that a new model needs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

from ..config import check_types
from ..errors import AssetError, ParameterError
from ..policy import neutral
from ..scorers import COST, REWARD
from .convert import quiet_transformers
from .hub import snapshot
from .lm_scorer import Backbone, LMScorer, check_length, context_of
from .pretrained import (
    check_vocabulary,
    contents_of,
    load_model,
    load_tokenizer,
    one_sentence,
    tensors_of,
)
from .probe import probe
from .source import Source, check_name, digest
from .templates import TEMPLATES
from .units import UNITS

ROLES = {COST: "cost", REWARD: "reward"}
HEAD = "score.weight"  # of transformers' decoders: a linear head on the last token
BATCH = 32


def _pair(write: Callable[[str, str], str], prompt: str, response: str) -> tuple[str]:
    """Return prompt and response as one text."""
    return (write(prompt, response),)


def _response(write: Callable[[str, str], str], prompt: str, response: str) -> tuple[str]:
    """Return the response alone."""
    return (response,)


def _segments(write: Callable[[str, str], str], prompt: str, response: str) -> tuple[str, str]:
    """Return prompt and response as two texts, which the tokenizer joins."""
    return prompt, response


# (how prompt and response are written, prompt, response) -> the text, or two that the tokenizer
# joins
READS = {"pair": _pair, "response": _response, "segments": _segments}


@dataclass(frozen=True)
class Options:
    """The options of `classifier` besides files and devices, checked before anything is loaded."""

    sign: str
    labels: list | None
    unit: str
    text_format: str | None
    reads: str
    tokenizer: str | None

    def __post_init__(self):
        """Refuse an unknown name, and a text format that would not be used."""
        check_types(self)
        check_name("sign", self.sign, ROLES)
        check_name("unit", self.unit, UNITS)
        check_name("reads", self.reads, READS)
        check_name("text_format", self.text_format or "chat", TEMPLATES)
        if self.text_format and self.reads != "pair":
            raise ParameterError(
                f"text_format is {self.text_format!r}, but reads is {self.reads!r}, which writes "
                "nothing around the texts; leave out text_format, or choose pair"
            )

    @property
    def written(self) -> str:
        """The key of `igcore.models.templates.TEMPLATES` in use."""
        return (self.text_format or "chat") if self.reads == "pair" else "raw"


def check_chat(tokenizer, text_format: str, repo: str) -> None:
    """Raise ``ParameterError`` when the tokenizer lacks the chat template that a format needs."""
    if text_format == "chat" and not tokenizer.chat_template:
        raise ParameterError(
            f"{repo} has no chat template; choose another text_format: {', '.join(TEMPLATES)}"
        )


@dataclass(frozen=True)
class EncoderScorer:
    """A classifier that reads every text as a whole.

    Attributes
    ----------
    name, sign, unit, digest : str
        See `igcore.scorers.Scorer`.
    model
        Gives logits (R, C).
    texts : callable
        (prompt, response) -> one text, or two that the tokenizer joins in its own way.
    special : bool
        Whether the tokenizer adds its own special tokens.
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
        pairs = zip(prompts, responses, strict=True)
        texts = [self.texts(*(neutral(self.tokenizer, text) for text in pair)) for pair in pairs]
        lengths = [(sum(map(len, text)), text) for text in texts]
        order = sorted(range(len(texts)), key=lengths.__getitem__)  # little padding
        scores = np.empty(len(texts))
        for at in range(0, len(order), BATCH):
            rows = order[at : at + BATCH]
            scores[rows] = self._numbers([texts[row] for row in rows])
        return scores

    @torch.inference_mode()
    def _numbers(self, texts: list[tuple[str, ...]]) -> np.ndarray:
        """Return the numbers of one batch of texts, (B,)."""
        columns = (list(column) for column in zip(*texts, strict=True))
        # BERT counts positions from the left, whatever is masked there
        batch = self.tokenizer(
            *columns,
            add_special_tokens=self.special,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        longest = int(batch["attention_mask"].sum(1).max())
        check_length(longest, min(context_of(self.model), self.tokenizer.model_max_length))
        return self.number(self.model(**batch.to(self.model.device)).logits.double()).cpu().numpy()


def classifier(
    *,
    repo: str,
    sign: str,
    revision: str | None = None,
    labels: list | None = None,
    unit: str = "logit",
    text_format: str | None = None,
    reads: str = "pair",
    tokenizer: str | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    self_check: bool = True,
) -> LMScorer | EncoderScorer:
    """Load a sequence classifier, an ``AutoModelForSequenceClassification`` of transformers.

    The number of classes is that of the head in the files, because transformers assumes two when a
    configuration names none.

    Parameters
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Source`. The logits of an encoder are in `dtype` too: small ones
        are better read in float32.
    sign : str
        ``higher is worse`` for a cost, ``higher is better`` for a reward.
    labels : list, optional
        The classes that count, by their names in the configuration or by their indices from 0.
        Needed unless there is only one.
    unit : str
        The number read from the logits z, a key of `igcore.models.units.UNITS`. Of classes that
        hold independently of each other: ``logit``, the highest z of those that count; ``sigmoid``,
        its probability; ``any``, the probability 1 - prod(1 - sigmoid(z)) that any of them holds.
        Of classes that exclude each other: ``softmax``, the probability of those that count
        together; ``log-odds``, its logit.
    text_format : str, optional
        How a pair is written, a key of `igcore.models.templates.TEMPLATES`; ``chat`` by default.
    reads : str
        ``pair``: prompt and response in one text. ``response``: the response alone, as it is.
        ``segments``: the two texts that an encoder's tokenizer joins in its own way.
    tokenizer : str, optional
        Where the tokenizer lies if `repo` has none.

    Returns
    -------
    LMScorer or EncoderScorer
        Called ``classifier:`` and the last part of `repo`. Its digest covers files, options and all
        else that changes a score.

    Raises
    ------
    ParameterError
        For a bad option, a label that the model does not have, or labels that leave nothing to
        compare with.
    AssetError
        When files are missing, damaged, or not those of a sequence classifier.
    ScorerError
        When it puts two fixed texts in the wrong order.

    Notes
    -----
    A part of a response is read as if it were whole. These examples for a params file follow the
    cards of current models; they were not run here::

        reward: {name: classifier, repo: Skywork/Skywork-Reward-V2-Qwen3-8B, sign: higher is better}
        reward: {name: classifier, repo: OpenAssistant/reward-model-deberta-v3-large-v2,
                 sign: higher is better, reads: segments, dtype: float32}
        cost: {name: classifier, repo: DuoGuard/DuoGuard-0.5B, tokenizer: Qwen/Qwen2.5-0.5B,
               sign: higher is worse, labels: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
               unit: sigmoid, reads: response}
        cost: {name: classifier, repo: unitary/toxic-bert, sign: higher is worse, labels: [toxic],
               unit: sigmoid, reads: response, dtype: float32}
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    Source(repo, revision, dtype, device, self_check)
    options = Options(sign, labels, unit, text_format, reads, tokenizer)
    folder = snapshot(repo, revision)
    beside = snapshot(tokenizer) if tokenizer else None
    reader = load_tokenizer(beside or folder)
    check_chat(reader, options.written, repo)
    keys, classes = _classes(folder)
    counted = _counted(classes, options, repo)
    template = TEMPLATES[options.written]
    write, special = partial(template.whole, reader), template.special
    texts, number = partial(READS[reads], write), partial(UNITS[unit].of, counted=counted)
    files = contents_of(folder)
    if beside:
        files |= {
            f"tokenizer/{name}": known for name, known in contents_of(beside, weights=False).items()
        }
    known = digest(
        files,
        texts,
        counted=counted,
        unit=unit,
        text_format=options.written,
        reads=reads,
        dtype=dtype,
    )
    name = f"classifier:{Path(repo).name}-{ROLES[sign]}"
    about = {"name": name, "sign": sign, "unit": UNITS[unit].name, "digest": known, "files": files}
    if keys == [HEAD]:
        if reads == "segments":
            raise ParameterError(
                f"reads is 'segments', but {repo} is no encoder; choose pair or response"
            )
        # padding is masked, so any id will do
        model, tensors = load_model(AutoModel, folder, dtype, device, keys, pad_token_id=0)
        weight = tensors[HEAD].float().to(model.device)  # (C, H)
        backbone = Backbone(model, reader, partial(_only_text, texts), special=special)
        scorer = LMScorer(backbone=backbone, head=partial(_head, weight, number), **about)
    else:
        model, _ = load_model(
            AutoModelForSequenceClassification, folder, dtype, device, num_labels=len(classes)
        )
        scorer = EncoderScorer(
            model=model, tokenizer=reader, texts=texts, special=special, number=number, **about
        )
    check_vocabulary(reader, model, folder)
    if self_check:
        probe(scorer, ROLES[sign])
    return scorer


def _only_text(texts: Callable[[str, str], tuple[str, ...]], prompt: str, response: str) -> str:
    """Return the one text that a decoder reads."""
    (text,) = texts(prompt, response)
    return text


def _head(
    weight: torch.Tensor, number: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Return the number of hidden states (R, H) under a head's weight (C, H), (R,)."""
    logits = linear(hidden.to(weight.device), weight)  # (R, C)
    return number(logits.double())


def _classes(folder: Path) -> tuple[list[str], list[str]]:
    """Return the keys of the head's tensors, and the names of the classes.

    A tensor belongs to the head if its shape depends on the number of classes.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = partial(
        AutoConfig.from_pretrained, folder, local_files_only=True, trust_remote_code=False
    )
    with one_sentence(folder), quiet_transformers():
        with torch.device("meta"):  # shapes without numbers
            one, two = (
                AutoModelForSequenceClassification.from_config(config(num_labels=n)).state_dict()
                for n in (1, 2)
            )
        keys = [key for key in one if one[key].shape != two[key].shape]
        tensors = tensors_of(folder, keys)
        if missing := [key for key in keys if key not in tensors]:
            raise AssetError(
                f"{folder} lacks the weights {missing}, so it is no sequence classifier; a "
                "language model that writes its verdict is read by the scorer guard"
            )
        names = config(num_labels=len(tensors[keys[0]])).id2label
    return keys, [names[i] for i in sorted(names)]


def _counted(classes: list[str], options: Options, repo: str) -> list[int]:
    """Return the indices of the classes that count, in ascending order."""
    known = ", ".join(f"{i} {name}" for i, name in enumerate(classes))
    if not options.labels and len(classes) > 1:
        raise ParameterError(
            f"{repo} has {len(classes)} classes ({known}); say in labels which of them count"
        )
    by = {repr(key): i for i, name in enumerate(classes) for key in (name, i)}
    given = [repr(label) for label in options.labels or [0]]  # YAML's true is no index 1
    if unknown := [label for label in given if label not in by]:
        raise ParameterError(
            f"label {unknown[0]} is no class of {repo}; give names or indices of {known}"
        )
    counted = sorted({by[label] for label in given})
    if UNITS[options.unit].compares and len(counted) == len(classes):
        raise ParameterError(
            f"unit {options.unit!r} sets the classes that count against the others, but all "
            f"{len(classes)} of {repo} count; choose logit or sigmoid, or name fewer labels"
        )
    return counted
