"""How a prompt becomes the text that a model reads: templates, and a tokenizer's chat template.

A chat template is a program of whoever made the model. It runs in a sandbox of transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .errors import ParameterError, said


def special_strings(tokenizer: Any) -> list[str]:
    """Return the strings that a tokenizer reads as special tokens, none after a part of itself."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens}, key=lambda s: (-len(s), s))


def neutral(tokenizer: Any, text: str) -> str:
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
    joins : bool
        Whether the answer follows the opening at once, so that a space between the two is the
        answer's.
    options : mapping
        What a chat template reads besides the messages.
    """

    name: str
    opening: Callable[[Any, str], str]
    whole: Callable[[Any, str, str], str]
    special: bool = True
    joins: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


def _as_is(tokenizer: Any, prompt: str) -> str:
    """Return the prompt without a template."""
    return prompt


def _joined(tokenizer: Any, prompt: str, answer: str) -> str:
    """Return the prompt and its answer, one after the other."""
    return prompt + answer


RAW = Template("raw", _as_is, _joined, joins=True)  # the answer continues the prompt


def rendered(
    tokenizer: Any, messages: Sequence[tuple[str, str]], opened: bool, **options: Any
) -> str:
    """Return messages, each a role and a content, in the chat template of a tokenizer.

    Parameters
    ----------
    opened : bool
        Whether the text ends where the assistant begins another turn.
    options
        What else the template reads.

    Raises
    ------
    ParameterError
        When the template refuses the messages, such as a system's, or fails.
    """

    def write(given: list[dict[str, Any]]) -> str:
        return str(
            tokenizer.apply_chat_template(
                given, add_generation_prompt=opened, tokenize=False, **options
            )
        )

    try:
        text = write([{"role": role, "content": x} for role, x in messages])
    except Exception as error:  # a program of somebody else's may raise anything
        raise ParameterError(
            f"the chat template refuses these messages ({said(error):.200}); give those that it "
            "takes, or correct it or choose another template"
        ) from error
    last = messages[-1][1].strip()
    if last in text:
        return text
    # of models with pictures it reads a list of parts
    parts = [{"role": role, "content": [{"type": "text", "text": x}]} for role, x in messages]
    with suppress(Exception):
        other = write(parts)
        text = other if last in other else text
    return text
