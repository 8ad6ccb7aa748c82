"""The reference policy: a frozen language model, its tokenizer and the template of its prompts."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .errors import ParameterError

# written by a policy's template to see what that makes of a prompt, today's date included
PROBE = "How do plants grow?"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte for which sentencepiece has no piece


# --- prompts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One prompt of a named set.

    Attributes
    ----------
    id : str
        First 16 hex digits of the sha256 of ``f"{set_name}\\n{text}"``; the second of two prompts
        with one text ends in ``-2``.
    text : str
        What the policy is given.
    set_name : str
        A key of `PROMPT_SETS` or `SOURCES`, whatever the options beside it, or the stem of the file
        read.
    """

    id: str
    text: str
    set_name: str


@dataclass(frozen=True)
class Encoded(Prompt):
    """A prompt that is decoded from given token ids; its text is what scorers see.

    Attributes
    ----------
    ids : tuple of int
        At least one, and short enough for the policy's context.
    """

    ids: tuple[int, ...] = ()


def groups_of(params, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Return the groups of a shard: ``group_size`` consecutive prompts, those whose number is
    ``shard`` modulo ``n_shards``.

    Work is done group by group, so that it depends neither on shards nor on a resume. A shard above
    the last group has none.
    """
    groups = [
        list(prompts[i : i + params.group_size]) for i in range(0, len(prompts), params.group_size)
    ]
    return groups[params.shard :: params.n_shards]


def as_prompt(prompt: str | Prompt, set_name: str = "user") -> Prompt:
    """Return a prompt of the set `set_name` for a bare text; a `Prompt` comes back as it is."""
    return prompt if isinstance(prompt, Prompt) else _prompt(prompt, set_name)


def _prompt(text: str, set_name: str) -> Prompt:
    return Prompt(hashlib.sha256(f"{set_name}\n{text}".encode()).hexdigest()[:16], text, set_name)


# --- templates ------------------------------------------------------------------------------------


def special_strings(tokenizer) -> list[str]:
    """Return the strings that a tokenizer reads as special tokens, the longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens}, key=lambda s: (-len(s), s))


def neutral(tokenizer, text: str) -> str:
    """Break up strings such as ``</s>``, so that a text cannot write a template's own tokens."""
    for special in special_strings(tokenizer):
        text = text.replace(special, f"{special[0]} {special[1:]}")
    return text


@dataclass(frozen=True)
class Template:
    """One way of writing a dialogue, see `igcore.models.templates`.

    Attributes
    ----------
    name : str
    opening : callable
        (tokenizer, prompt) -> the text after which the answer begins.
    whole : callable
        (tokenizer, prompt, answer) -> the text of both.
    special : bool
        Whether the tokenizer adds its own special tokens (BOS) to these texts; a chat template
        writes them itself.
    """

    name: str
    opening: Callable[[object, str], str]
    whole: Callable[[object, str, str], str]
    special: bool = True


def _as_is(tokenizer, prompt: str) -> str:
    return prompt


def _joined(tokenizer, prompt: str, answer: str) -> str:
    return prompt + answer


RAW = Template("raw", _as_is, _joined)  # the answer continues the prompt


# --- the policy -----------------------------------------------------------------------------------


@dataclass
class Policy:
    """A frozen causal language model with its way of reading prompts.

    Attributes
    ----------
    name : str
        What records call it.
    model, tokenizer
        transformers objects; the model is in evaluation mode.
    template : Template
        How a prompt becomes text.
    digest : str
        Hash of all in `identity` but the name, as of loading; empty unless given where a policy is
        made by hand.
    eos_ids : frozenset of int
        Tokens that end a response.
    cache : str
        How the engine keeps keys and values, a key of `igcore.engine.local.CACHES`.
    files : dict of str to str
        What it was loaded from, see `igcore.models.pretrained.contents_of`; empty for a policy made
        by hand.
    """

    name: str
    model: object
    tokenizer: object
    template: Template = RAW
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
        rendered = self.template.opening(self.tokenizer, PROBE)
        return {
            "name": self.name,
            "digest": self.digest,
            "files": self.files,
            "template": self.template.name,
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
        template = self.template
        text = template.opening(self.tokenizer, neutral(self.tokenizer, prompt))
        ids = self.tokenizer(text, add_special_tokens=template.special)["input_ids"]
        if len(ids) + max_new_tokens > self.context:
            raise ParameterError(
                f"prompt {prompt[:40]!r}... has {len(ids)} tokens, which with max_new_tokens "
                f"{max_new_tokens} exceeds the context of {self.context} of {self.name}; shorten "
                "the prompt or lower max_new_tokens"
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
