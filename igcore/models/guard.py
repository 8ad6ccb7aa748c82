"""Any generative guard as a cost, read from the logits of its labels.

A guard's own code lets it write a verdict and looks for a word. Here the logits of the label words
are read before any is written: one forward pass, and a number instead of a yes or no.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path

import torch
from torch.nn.functional import linear

from ..config import check_types
from ..engine.kv_cache import forward
from ..errors import ParameterError
from ..scorers import COST
from .classifier import check_chat
from .hub import snapshot
from .lm_scorer import Backbone, LMScorer
from .pretrained import check_vocabulary, contents_of, load_model, load_tokenizer
from .probe import probe
from .source import EXAMPLE, Source, check_name, digest
from .templates import TEMPLATES, chatted, turns_of

SLOT = re.compile(r"\{(prompt|response)\}")
COMPARED = 256  # rows of the output embedding whose logits are compared with the model's own


def _softcapped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return logits squashed smoothly into (-cap, cap)."""
    return cap * torch.tanh(logits / cap)


# field of a configuration -> how its number changes the logits: (logits, number) -> logits
FINAL = {
    "final_logit_softcapping": _softcapped,  # Gemma 2
    "logits_scaling": truediv,  # Granite
}


@dataclass(frozen=True)
class Options:
    """The options of `guard` besides files and devices, checked before anything is loaded."""

    unsafe: list
    safe: list
    text_format: str | None
    template: str | None
    prefix: str

    def __post_init__(self):
        """Refuse bad labels, and a template that is incomplete or contradicts a text format."""
        check_types(self)
        check_name("text_format", self.text_format or "chat", TEMPLATES)
        for role, labels in (("unsafe", self.unsafe), ("safe", self.safe)):
            if not labels or not all(isinstance(label, str) and label for label in labels):
                raise ParameterError(
                    f"{role} is {labels}; list the words with which the guard begins that verdict, "
                    "as texts: in YAML, Yes and No mean true and false unless they stand in quotes"
                )
        if self.template is not None:
            if self.text_format:
                raise ParameterError(
                    f"there are both a text_format, {self.text_format!r}, and a template; give one "
                    "of them"
                )
            if missing := {"prompt", "response"} - set(SLOT.findall(self.template)):
                raise ParameterError(
                    f"template has no {{{min(missing)}}}; write it where that text belongs"
                )

    @property
    def written(self) -> str | None:
        """The key of `igcore.models.templates.TEMPLATES` in use, None with an own template."""
        return None if self.template is not None else self.text_format or "chat"


def guard(
    *,
    repo: str,
    unsafe: list,
    safe: list,
    revision: str | None = None,
    text_format: str | None = None,
    template: str | None = None,
    prefix: str = "",
    dtype: str = "bfloat16",
    device: str = "auto",
    self_check: bool = True,
) -> LMScorer:
    r"""Load a generative guard; higher is worse, above 0 it would rather say unsafe than safe.

    .. math:: C(x, y) = \log \sum_{u \in \mathrm{unsafe}} e^{z_u} - \log \sum_{s \in \mathrm{safe}}
    e^{z_s}

    Here :math:`z` are the logits of the token after the text, so that the sigmoid of the cost is
    the probability of unsafe among the labels alone.

    Parameters
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.source.Source`.
    unsafe, safe : list of str
        The words of the two verdicts. Each must be one token where it stands; of a longer word give
        the beginning that is one.
    text_format : str, optional
        How prompt and response are written, a key of `igcore.models.templates.TEMPLATES`. By
        default ``chat``, the guard's own template over the turns of both, up to where the guard
        begins to speak.
    template : str, optional
        The text itself instead, with ``{prompt}`` and ``{response}``. The tokenizer adds its
        special tokens unless the template begins with its BOS.
    prefix : str
        What the guard would write before its verdict. A space between them belongs to the labels.

    Returns
    -------
    LMScorer
        Called ``guard:`` and the last part of `repo`. Its digest covers files, options and all else
        that changes a score.

    Raises
    ------
    ParameterError
        For a bad option, labels that are not one token each or not distinct, or a model whose
        logits are not those of its output embedding.
    AssetError
        When files are missing, damaged, or not those of a causal language model.
    ScorerError
        When it does not put a harmless answer below 0 and an unsafe one above it.

    Notes
    -----
    A part of a response is read as if it were whole. How current guards are written in a params
    file; these are examples from their cards, not run here::

        cost: {name: guard, repo: meta-llama/Llama-Guard-3-8B,
               unsafe: [unsafe], safe: [safe], prefix: "\n\n"}
        cost: {name: guard, repo: Qwen/Qwen3Guard-Gen-8B,
               unsafe: [" Unsafe"], safe: [" Safe"], prefix: "Safety:"}
        cost: {name: guard, repo: google/shieldgemma-9b,
               unsafe: ["Yes"], safe: ["No"], template: "..."}
        cost: {name: guard, repo: allenai/wildguard,
               unsafe: [" yes"], safe: [" no"], template: "...",
               prefix: "Harmful request: yes\nResponse refusal: no\nHarmful response:"}

    The dots stand for the text on the card with ``{prompt}`` and ``{response}`` in it. Qwen3Guard
    knows a third verdict, Controversial: add the token with which it begins to the side where it
    shall count. WildGuard answers three questions in turn: its prefix answers the first two, so
    that the cost is what it would say after them. Guards of which transformers makes a model of
    texts and images, such as Llama Guard 4, are not read here.
    """
    from transformers import AutoModelForCausalLM

    Source(repo, revision, dtype, device, self_check)
    options = Options(unsafe, safe, text_format, template, prefix)
    folder = snapshot(repo, revision)
    tokenizer = load_tokenizer(folder)
    check_chat(tokenizer, options.written, repo)
    write, special = partial(_written, tokenizer, options), _special(tokenizer, options)
    ids = _label_ids(tokenizer, write(*EXAMPLE), special, options)
    # padding is masked, so any id will do
    model, _ = load_model(AutoModelForCausalLM, folder, dtype, device, pad_token_id=0)
    check_vocabulary(tokenizer, model, folder)
    backbone = Backbone(model, tokenizer, write, special=special)
    _check_logits(model, backbone, repo)
    logits, n = _logits(model, ids), len(unsafe)

    def verdict(hidden: torch.Tensor) -> torch.Tensor:
        """Return the cost of hidden states."""
        return _gap(logits(hidden), n)

    files = contents_of(folder)
    known = digest(
        files,
        write,
        unsafe=unsafe,
        safe=safe,
        text_format=options.written,
        template=template,
        prefix=prefix,
        dtype=dtype,
    )
    scorer = LMScorer(
        f"guard:{Path(repo).name}",
        backbone,
        verdict,
        COST,
        known,
        "logit gap",
        files=files,
    )
    if self_check:
        probe(scorer, "cost", 0.0)
    return scorer


def _written(tokenizer, options: Options, prompt: str, response: str) -> str:
    """Return the text after which the guard says its verdict."""
    if options.written is None:
        # in one go: a prompt may itself hold {response}
        parts = SLOT.split(options.template)  # text, slot, text, slot, ..., text
        texts = {"prompt": prompt, "response": response}
        parts[1::2] = [texts[slot] for slot in parts[1::2]]
        text = "".join(parts)
    elif options.written == "chat":
        text = chatted(tokenizer, [*turns_of(prompt), response], opened=True)
    else:
        text = TEMPLATES[options.written].whole(tokenizer, prompt, response)
    return text + options.prefix


def _special(tokenizer, options: Options) -> bool:
    """Tell whether the tokenizer adds its own special tokens to the text."""
    if options.written:
        return TEMPLATES[options.written].special
    return not (tokenizer.bos_token and options.template.startswith(tokenizer.bos_token))


def _label_ids(tokenizer, text: str, special: bool, options: Options) -> list[int]:
    """Return the token of each label, those of unsafe first, as it is written after a text."""
    before = tokenizer(text, add_special_tokens=special)["input_ids"]
    end, found = tokenizer.decode(before[-3:]), {}
    for label in [*options.unsafe, *options.safe]:
        after = tokenizer(text + label, add_special_tokens=special)["input_ids"]
        new = after[len(before) :]
        if after[: len(before)] != before:
            raise ParameterError(
                f"label {label!r} changes the tokens before it, which end in {end!r}; move a space "
                "from the end of prefix to the start of the label"
            )
        if len(new) != 1:
            raise ParameterError(
                f"label {label!r} is {len(new)} tokens after {end!r}; give a label of one token, "
                f"such as its beginning {tokenizer.decode(new[:1])!r} if no other verdict begins so"
            )
        if new[0] in found:
            raise ParameterError(
                f"labels {found[new[0]]!r} and {label!r} are the same token; each verdict needs "
                "its own"
            )
        found[new[0]] = label
    return list(found)


def _logits(model, ids: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states (R, H) to float32 logits (R, n) of some tokens."""
    head, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    weight = head.weight[list(ids)].detach().float()  # (n, H)
    bias = None if getattr(head, "bias", None) is None else head.bias[list(ids)].detach().float()
    steps = [
        (step, value)
        for name, step in FINAL.items()
        if (value := getattr(config, name, None)) is not None
    ]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the labels for hidden states."""
        out = linear(hidden.to(weight.device), weight, bias)
        for step, value in steps:
            out = step(out, value)
        return out

    return logits


def _gap(logits: torch.Tensor, n: int) -> torch.Tensor:
    """Return log-sum-exp of the first n logits (R, n + m) minus that of the others, (R,)."""
    return logits[:, :n].logsumexp(1) - logits[:, n:].logsumexp(1)


@torch.inference_mode()
def _check_logits(model, backbone: Backbone, repo: str) -> None:
    """Raise ``ParameterError`` unless hidden states and output embedding give the model's logits.

    Some models process their logits further, and the same field means different things in different
    families.
    """
    sequence = backbone.ids(*EXAMPLE, True)
    ids = torch.tensor([sequence], device=model.device)
    # logits of the last token, (1, 1, V)
    _, theirs = forward(model, input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=1)
    theirs = theirs[0, -1].float()
    rows = torch.linspace(0, len(theirs) - 1, min(COMPARED, len(theirs))).long().tolist()
    ours, theirs = _logits(model, rows)(backbone.encode([sequence]))[0], theirs[rows]
    if (ours - theirs).norm() > 4 * torch.finfo(model.dtype).eps ** 0.75 * theirs.norm():
        raise ParameterError(
            f"the logits of {repo}, a {type(model).__name__}, are not those of its last hidden "
            f"state, output embedding and {', '.join(FINAL)}; choose a guard of another family"
        )
