"""The reference policy: a frozen language model, its tokenizer and its prompt template. Knows
nothing of scores or search.

A policy turns a prompt into token ids and tokens into text; the engine does the decoding in
between.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from . import assets
from .config import named
from .errors import ParameterError, unknown_name
from .hub import snapshot
from .pretrained import check_placement, check_vocabulary, contents_of, load_model, load_tokenizer
from .templates import TEMPLATES, neutral

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# written by a policy's template to see what that makes of a prompt, today's date included
PROBE = "How do plants grow?"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte for which sentencepiece has no piece


@dataclass(frozen=True)
class Known:
    """A policy that has a name here.

    Attributes
    ----------
    template : str
        How a prompt becomes text, a key of `igcore.templates.TEMPLATES`.
    asset : str, optional
        Name of the asset of `igcore.assets` that holds it.
    repo, revision : str, optional
        Its name on the model hub, and the commit that is taken unless another is given; without one
        its newest state.
    ends : tuple of str
        Special tokens that end a response besides the checkpoint's own end tokens.
    """

    template: str
    asset: str | None = None
    repo: str | None = None
    revision: str | None = None
    ends: tuple[str, ...] = ()


SMOLLM2 = {"asset": "smollm2", "ends": ("<|endoftext|>", "<|im_start|>")}
POLICIES = {
    "smollm2-raw": Known("raw", **SMOLLM2),  # continues the prompt: plays the unaligned policy
    "smollm2-chat": Known(
        "chat", **SMOLLM2
    ),  # answers in the chat template: plays the aligned policy
    "alpaca-7b": Known("safe-rlhf", repo="PKU-Alignment/alpaca-7b-reproduced"),
    "beaver-7b-v3": Known("safe-rlhf", repo="PKU-Alignment/beaver-7b-v3.0"),
    "vicuna-7b": Known(
        "vicuna", repo="lmsys/vicuna-7b-v1.5", revision="3321f76e3f527bd14065daf69dad9344000a201d"
    ),
    "llama-3.1-8b": Known(
        "chat",
        repo="meta-llama/Llama-3.1-8B-Instruct",
        revision="0e9e39f249a16976918f6564b8830bc894c89659",
    ),
}


@dataclass
class Policy:
    """A frozen causal language model with its way of reading prompts.

    Attributes
    ----------
    name : str
        What records call it.
    model, tokenizer
        transformers objects; the model is in evaluation mode.
    template : str
        A key of `igcore.templates.TEMPLATES`.
    digest : str
        Hash of all in `identity` but the name, as of loading; empty unless given where a policy is
        made by hand.
    eos_ids : frozenset of int
        Tokens that end a response.
    cache : str
        How the engine keeps keys and values, a key of `igcore.engine.CACHES`.
    files : dict of str to str
        What it was loaded from, see `igcore.pretrained.contents_of`; empty for a policy made by
        hand.
    """

    name: str
    model: object
    tokenizer: object
    template: str = "raw"
    digest: str = ""
    eos_ids: frozenset = field(default=frozenset())
    cache: str = "auto"
    files: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def context(self) -> int:
        """Longest sequence, prompt and response together, in tokens."""
        return getattr(self.model.config, "max_position_embeddings", None) or 2**31

    def identity(self) -> dict:
        """Return what decides its answers to a prompt, as JSON values: two that differ say where.

        Returns
        -------
        dict
            ``name``, ``digest``, ``files``, ``template``, ``ends``, the end tokens in order, and
            ``rendered``, the sha256 of a fixed prompt in the template: a chat template is a
            program, which may write the date.
        """
        rendered = TEMPLATES[self.template].opening(self.tokenizer, PROBE)
        return {
            "name": self.name,
            "digest": self.digest,
            "files": self.files,
            "template": self.template,
            "rendered": hashlib.sha256(rendered.encode()).hexdigest(),
            "ends": sorted(self.eos_ids),
        }

    def encode(self, prompt: str, max_new_tokens: int = 0) -> list[int]:
        """Return the token ids of the templated prompt.

        Strings such as ``</s>`` inside the prompt are broken up, so that a prompt cannot write the
        template's own tokens.

        Raises
        ------
        ParameterError
            When the prompt is empty, or does not fit the context together with `max_new_tokens`.
        """
        if not prompt.strip():
            raise ParameterError(f"prompt {prompt!r} is empty; give at least one word")
        template = TEMPLATES[self.template]
        text = template.opening(self.tokenizer, neutral(self.tokenizer, prompt))
        ids = self.tokenizer(text, add_special_tokens=template.special)["input_ids"]
        if len(ids) + max_new_tokens > self.context:
            raise ParameterError(
                f"prompt {prompt[:40]!r}... has {len(ids)} tokens, which with max_new_tokens "
                f"{max_new_tokens} exceeds the "
                f"context of {self.context} of {self.name}; shorten the prompt or lower "
                f"max_new_tokens"
            )
        return list(ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of response tokens, without special tokens and without a character cut in
        its middle.

        The text of a prefix of tokens is a prefix of the text of all: block ends are positions in
        the emitted text.
        """
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if (
            "\ufffd" in text
        ):  # the decoder of byte pieces would give up whole characters beside a cut one
            pieces = list(
                filter(None, self.tokenizer.convert_ids_to_tokens(tokens, skip_special_tokens=True))
            )
            if any(map(BYTE.fullmatch, pieces)):
                text = self.tokenizer.convert_tokens_to_string(_characters(pieces))
        return text.rstrip("\ufffd")


def load_policy(
    name: str | Mapping,
    dtype: str = "float32",
    device: str = "auto",
    template: str | None = None,
    revision: str | None = None,
) -> Policy:
    """Load a policy by name, from a local Hugging Face folder, or from the hub.

    Parameters
    ----------
    name : str or mapping
        A key of `POLICIES`, the path of a folder with ``config.json``, weights and a tokenizer, or
        ``owner/name`` on the hub. A mapping gives `template` and `revision` beside its ``name``.
    dtype : str
        ``float32``, ``bfloat16`` or ``float16``.
    device : str
        A torch device, or ``auto``: accelerate places the model on what there is.
    template : str, optional
        A key of `igcore.templates.TEMPLATES`. By default a named policy's own, else ``chat`` where
        a tokenizer has one.
    revision : str, optional
        See `igcore.hub.snapshot`.

    Raises
    ------
    ParameterError
        For an unknown name, dtype or template.
    AssetError
        When its files cannot be fetched, are damaged, or do not belong together.
    """
    from transformers import AutoModelForCausalLM

    name, options = named(name, "policy", ("template", "revision"))
    template, revision = (
        options.get(key, given) for key, given in (("template", template), ("revision", revision))
    )
    check_placement(dtype, device)
    if template is not None and template not in TEMPLATES:
        raise unknown_name("template", template, TEMPLATES)
    known = POLICIES.get(name)
    if (
        known is None
        and not Path(name).joinpath("config.json").is_file()
        and not HUB_NAME.fullmatch(name)
    ):
        raise unknown_name(
            "policy",
            name,
            POLICIES,
            "; or a folder that holds config.json, or owner/name on the hub",
        )
    asset = known and known.asset
    folder = (
        assets.sound(asset)
        if asset
        else snapshot(known.repo if known else name, revision or (known and known.revision))
    )
    tokenizer = load_tokenizer(folder)
    template = template or (
        known.template if known else "chat" if tokenizer.chat_template else "raw"
    )
    if template == "chat" and not tokenizer.chat_template:
        raise ParameterError(
            f"policy {name!r} has no chat template; choose another template: {', '.join(TEMPLATES)}"
        )
    model, _ = load_model(AutoModelForCausalLM, folder, dtype, device)
    check_vocabulary(tokenizer, model, folder)
    policy = Policy(
        name=name if known else Path(name).name,
        model=model,
        tokenizer=tokenizer,
        template=template,
        eos_ids=_eos_ids(model, tokenizer, known.ends if known else ()),
        files=contents_of(folder),
    )
    decisive = {
        key: value for key, value in policy.identity().items() if key not in ("name", "digest")
    }
    return replace(
        policy, digest=hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    )


def _characters(pieces: Sequence[str]) -> list[str]:
    """Join runs of pieces that stand for bytes, such as ``<0xE2>``, into characters; a byte that is
    no part of one is U+FFFD.
    """
    parts = []
    for is_byte, run in groupby(pieces, key=lambda piece: BYTE.fullmatch(piece) is not None):
        run = list(run)
        parts += (
            [bytes(int(piece[3:5], 16) for piece in run).decode("utf-8", errors="replace")]
            if is_byte
            else run
        )
    return parts


def _eos_ids(model, tokenizer, ends: Sequence[str]) -> frozenset[int]:
    """Every end token that the tokenizer or the checkpoint's own settings name, and `ends`."""
    named = [
        tokenizer.eos_token_id,
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
    ]
    named.append(tokenizer.convert_tokens_to_ids(list(ends)))
    flat = [i for item in named for i in (item if isinstance(item, list) else [item])]
    return frozenset(i for i in flat if i is not None)
