"""How a prompt becomes a text: a template, and the strings that no prompt may write."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .catalog import room
from .settings import Options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def special_strings(tokenizer: "Tokenizer") -> set[str]:
    """Return the strings that a tokenizer reads as special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}


def reserved_strings(tokenizer: "Tokenizer") -> list[str]:
    """Return the strings that no message may write, longest first.

    They are the special tokens, and all other added tokens that the chat template names or writes,
    such as the turns of DeepSeek.
    """
    written = room("written_by")(tokenizer)
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    named = {content for content in added if content in written}
    return sorted(special_strings(tokenizer) | named, key=lambda s: (-len(s), s))


def escape_special_tokens(tokenizer: "Tokenizer", text: str) -> str:
    """Break up strings such as ``</s>``, so that a text cannot write a template's own tokens."""
    return broken_up(text, reserved_strings(tokenizer))


def broken_up(text: str, reserved: Iterable[str]) -> str:
    """Return a text in which the `reserved_strings` of a tokenizer are broken up."""
    for string in reserved:
        text = text.replace(string, f"{string[0]} {string[1:]}")
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
    joins : bool
        Whether the answer follows the opening at once, so that a space between the two is the
        answer's.
    options : mapping
        What a chat template reads besides the messages.
    """

    name: str
    opening: Callable[["Tokenizer", str], str]
    whole: Callable[["Tokenizer", str, str], str]
    special: bool = True
    joins: bool = False
    options: Options = field(default_factory=dict, hash=False)


def _as_is(tokenizer: "Tokenizer", prompt: str) -> str:
    """Return the prompt without a template."""
    return prompt


def _joined(tokenizer: "Tokenizer", prompt: str, answer: str) -> str:
    """Return the prompt and its answer, one after the other."""
    return prompt + answer


RAW = Template("raw", _as_is, _joined, joins=True)  # the answer continues the prompt
