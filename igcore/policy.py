"""The reference policy: a frozen language model, its tokenizer and the template of its prompts."""

import hashlib
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .catalog import room
from .errors import ParameterError
from .prompt import PROBE, Chat, Encoded, Prompt
from .prompt import as_prompt as as_prompt  # it was here in 1.0.0
from .template import RAW, Template, escape_special_tokens, special_strings

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from .engine.local import Engine
    from .engine.sampling import Sampling

REASONING = {  # what begins reasoning -> what ends it
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte for which sentencepiece has no piece


def context_of(model: "PreTrainedModel") -> int:
    """Return the longest sequence that a model reads, in tokens; 2^31 without a limit."""
    text = model.config.get_text_config(decoder=True)
    # past `index_topk` tokens sparse attention chooses by later tokens or by padding
    limits = [getattr(text, n, None) for n in ("max_position_embeddings", "index_topk")]
    # a longer text changes how LongRoPE reads every text beside it
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            own = part.get("original_max_position_embeddings")
            limits.append(own or text.original_max_position_embeddings)
    return min(limit or 2**31 for limit in limits)


@dataclass
class Policy:
    """A frozen causal language model with its tokenizer and prompt template.

    Attributes
    ----------
    name : str
        Its name in records.
    model, tokenizer
        transformers objects; the model is in evaluation mode.
    template : Template
        How a prompt becomes text.
    digest : str
        Hash of everything in `identity` except the name, at loading; empty by default for a policy
        made by hand.
    eos_ids : frozenset of int
        Tokens that end a response.
    cache : str
        How the engine keeps the KV cache, a key of `igcore.engine.agreement.CACHES`.
    files : dict of str to str
        The files that it was loaded with, see `igcore.models.pretrained.contents_of`; empty for a
        policy made by hand.
    """

    name: str
    model: "PreTrainedModel" = field(repr=False)
    tokenizer: "Tokenizer" = field(repr=False)
    template: Template = RAW
    digest: str = ""
    eos_ids: frozenset[int] = frozenset()
    cache: str = "auto"
    files: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def context(self) -> int:
        """Longest sequence of prompt and response, in tokens."""
        return context_of(self.model)

    def engine(self, watch: int | None = None, sampling: "Sampling | None" = None) -> "Engine":
        """Return a new engine; see `igcore.engine.local.LocalEngine` for `watch` and `sampling`."""
        from .engine.local import LocalEngine

        return LocalEngine(self.model, self.eos_ids, self.cache, watch, sampling)

    def check(self, name: str, method: Any, config: Any) -> None:
        """Refuse a method, or settings, that its engine cannot serve; a local one serves all."""

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the policy's answers, as JSON values.

        ``rendered`` is the sha256 of a fixed prompt in the template.
        """
        # rendered as well as named: a chat template is a program, and may write the date
        rendered = self.template.opening(self.tokenizer, PROBE)
        return {
            "name": self.name,
            "digest": self.digest,
            "files": self.files,
            "template": self.template.name,
            "rendered": hashlib.sha256(rendered.encode()).hexdigest(),
            "ends": sorted(self.eos_ids),
            **({"chat_options": self.template.options} if self.template.options else {}),
        }

    def ids_of(self, prompt: Prompt, max_new_tokens: int = 0) -> list[int]:
        """Return the token ids of a prompt in the policy's template, or in a chat's own.

        Raises
        ------
        ParameterError
            As `encode`, and for a chat where the tokenizer has no chat template, or one that
            refuses these messages or fails.
        """
        if isinstance(prompt, Encoded):
            return list(prompt.ids)
        if not isinstance(prompt, Chat):
            return self.encode(prompt.text, max_new_tokens)
        if self.tokenizer.chat_template is None:
            if len(prompt.messages) == 1 and self.template is not RAW:
                return self.encode(prompt.text, max_new_tokens)
            raise ParameterError(
                f"{self.name} has no chat template, so it cannot read chat messages; give the "
                "prompt as a text"
            )
        # strings such as </s> inside a message are broken up, as in `encode`
        messages = [
            (role, escape_special_tokens(self.tokenizer, text)) for role, text in prompt.messages
        ]
        text = room("rendered")(self.tokenizer, messages, opened=True, **self.template.options)
        return self._ids(text, False, prompt.messages[-1][1], max_new_tokens)

    def encode(self, prompt: str, max_new_tokens: int = 0) -> list[int]:
        """Return the token ids of the templated prompt.

        Strings such as ``</s>`` inside the prompt are broken up, so that a prompt cannot write the
        template's own tokens.

        Raises
        ------
        ParameterError
            When the prompt is empty, or does not fit the context together with `max_new_tokens`.
        """
        # the template's own special tokens are added after the prompt's have been broken up
        text = self.template.opening(self.tokenizer, escape_special_tokens(self.tokenizer, prompt))
        return self._ids(text, self.template.special, prompt, max_new_tokens)

    def _ids(self, text: str, special: bool, prompt: str, max_new_tokens: int) -> list[int]:
        """Return the token ids of a rendered prompt, unless it is empty or too long."""
        ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        if not prompt.strip() or not len(ids):
            raise ParameterError(
                f"prompt {prompt[:40]!r} is empty or has no tokens in template "
                f"{self.template.name!r}; give at least one word, or choose another template"
            )
        self.check_length(prompt, len(ids), max_new_tokens)
        return list(ids)

    def check_length(self, prompt: str, tokens: int, max_new_tokens: int) -> None:
        """Raise ``ParameterError`` where a prompt and its answer do not fit the context."""
        if tokens + max_new_tokens > self.context:
            raise ParameterError(
                f"prompt {prompt[:40]!r}... has {tokens} tokens, which with max_new_tokens "
                f"{max_new_tokens} exceeds the context of {self.context} of {self.name}; shorten "
                "the prompt or lower max_new_tokens"
            )

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of response tokens, without special tokens or a character cut in two.

        The text of a prefix of the tokens is a prefix of their text, so that a block end is a
        position in the emitted text. Under a template that joins, the prompt and this text are the
        text of all tokens, with the space between them.
        """
        text = self.decoded(tokens)
        if "\ufffd" in text:  # the decoder of byte pieces drops whole characters next to a cut one
            text = self.decoded(self._repaired(tokens))
        # a block may end inside a character of several bytes, which the next block completes
        return text.rstrip("\ufffd")

    def reasoning_in(self, prompt: Sequence[int], tokens: Sequence[int], text: str) -> str:
        """Return the beginning of a response's text that is reasoning, with the spaces after it.

        Reasoning ends at a mark of `REASONING`, which may be a special token. Without its end, all
        of a response is reasoning where the prompt or the response has begun it.
        """
        marked = self._plain(tokens, marked=True)
        for begins, ends in REASONING.items():
            if ends in marked:
                n = 1
                while self._plain(tokens[:n], marked=True).count(ends) < marked.count(ends):
                    n += 1
                answer = text[len(self.text(tokens[:n])) :].lstrip()
                return text.removesuffix(answer)
            if begins in marked or self._plain(prompt, marked=True).rstrip().endswith(begins):
                return text
        return ""

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text that ids add to the user's own decoding, special tokens skipped."""
        before, length = self._before
        return self._plain([*before, *ids])[length:]

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """Ids to decode in front of a response, and the length of their text.

        Many decoders drop a leading space, so a word goes in front where the response continues
        the prompt.
        """
        for word in ("a", "the", ".") if self.template.joins else ():
            ids = list(self.tokenizer(word, add_special_tokens=False)["input_ids"])
            if self._plain(ids):  # empty for a word that the tokenizer does not know
                return ids, len(self._plain(ids))
        return [], 0

    def _plain(self, ids: Sequence[int], marked: bool = False) -> str:
        """Return the text of ids; special tokens are part of it if `marked`."""
        how = {"skip_special_tokens": not marked, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(ids, **how))

    def _repaired(self, tokens: Sequence[int]) -> list[int]:
        """Replace byte pieces that form no character by those of U+FFFD, and drop a cut one."""
        pieces = self._pieces(tokens)
        if not any(map(BYTE.fullmatch, pieces)):
            return list(tokens)
        special, utf8 = special_strings(self.tokenizer), getincrementaldecoder("utf-8")("replace")
        ids = []
        for token, piece in zip(tokens, pieces, strict=True):
            byte = bytes.fromhex(piece[3:5]) if BYTE.fullmatch(piece) else b""
            # the decoder does not see special tokens; any other piece ends a run of bytes
            skipped = not piece or piece in special
            written = utf8.decode(byte, final=not byte and not skipped)
            ids += self._ids_of_pieces(f"<0x{value:02X}>" for value in written.encode())
            if not byte:
                ids.append(token)
        return ids

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's names of ids; empty for one that it does not have."""
        return [piece or "" for piece in self.tokenizer.convert_ids_to_tokens(ids)]

    def _ids_of_pieces(self, pieces: Iterable[str]) -> list[int]:
        """Return the ids of pieces, without those that the tokenizer does not have."""
        known = self.tokenizer.convert_tokens_to_ids(list(pieces))
        return [token for token in known if token is not None]
