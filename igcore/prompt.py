"""What a policy is asked: a text, a conversation or token ids, each a `Prompt` of a named set."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ParameterError, shown

# a fixed prompt; its rendering shows everything that a template adds, such as today's date
PROBE = "How do plants grow?"
CHAT_ROLES = ("system", "user", "assistant")  # of chat messages
Message = Mapping[str, str]  # role and content
HALF = re.compile("[\ud800-\udfff]")  # half a character: JSON can write it, no tokenizer reads it


@dataclass(frozen=True)
class Prompt:
    """One prompt of a named set.

    Attributes
    ----------
    id : str
        First 16 hex digits of the sha256 of ``f"{set_name}\\n{text}"``.
    text : str
        What the policy is given.
    set_name : str
        Key of the prompt set, or the stem of the prompts' file.

    Raises
    ------
    ParameterError
        For a text with half a character, such as a cut emoji.
    """

    id: str
    text: str
    set_name: str

    def __post_init__(self) -> None:
        if HALF.search(self.text):
            raise ParameterError(
                f"prompt is {self.text!r:.100}, which holds half a character; write the character "
                "whole, without \\u escapes"
            )


@dataclass(frozen=True)
class Encoded(Prompt):
    """A prompt given as token ids; scorers see its text.

    Attributes
    ----------
    ids : tuple of int
        At least one, and short enough for the policy's context.
    """

    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chat(Prompt):
    """A conversation, which the policy reads in its tokenizer's chat template.

    Attributes
    ----------
    text : str
        What scorers see: the user's text, or of several messages one line each.
    messages : tuple of (role, content)
        The last is the user's.
    """

    messages: tuple[tuple[str, str], ...] = ()


def as_prompt(prompt: str | Prompt | Sequence[Message], set_name: str = "user") -> Prompt:
    """Return a text or chat messages as a `Prompt` of a set; a `Prompt` comes back as it is.

    Raises
    ------
    ParameterError
        For anything else, and for messages that no policy can answer.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt_id(prompt, set_name), prompt, set_name)
    if not isinstance(prompt, Sequence) or not prompt:
        raise ParameterError(
            f"prompt is {prompt!r:.120}; give a text, or chat messages as a list, [message], such "
            'as [{"role": "user", "content": "Hello"}], or of a data set the texts, ds["prompt"]'
        )
    messages = tuple(role_and_content(message) for message in prompt)
    if messages[-1][0] != "user":
        raise ParameterError(
            f"the last message is the {messages[-1][0]}'s; end with the user's, which is answered"
        )
    # one message reads as its text does, so both have one id and one answer
    alone = len(messages) == 1
    text = messages[0][1] if alone else "\n".join(f"{role}: {said}" for role, said in messages)
    return Chat(prompt_id(text, set_name), text, set_name, messages)


def prompt_id(text: str, set_name: str) -> str:
    """Return the id of a text in a prompt set."""
    return hashlib.sha256(f"{set_name}\n{text}".encode(errors="replace")).hexdigest()[:16]


def role_and_content(message: Any) -> tuple[str, str]:
    """Return role and content; raise ``ParameterError`` unless a message has exactly these.

    A content of parts that are all text is their text, one line each.
    """
    known = isinstance(message, Mapping) and set(message) == {"role", "content"}
    content = message["content"] if known else None
    if isinstance(content, list) and content and all(map(_is_text, content)):
        content = "\n".join(part["text"] for part in content)
    if not known or message["role"] not in CHAT_ROLES or not isinstance(content, str):
        raise ParameterError(
            f"chat message {shown(message, 300)} cannot be read; give a mapping of role and "
            "content, with a text or parts of type text as content and one of these roles: "
            f"{', '.join(CHAT_ROLES)}; or give a list of prompts to guard.map"
        )
    return message["role"], content


def _is_text(part: Any) -> bool:
    """True for a part of a message that is text."""
    texts = isinstance(part, Mapping) and part.keys() == {"type", "text"}
    return texts and part["type"] == "text" and isinstance(part["text"], str)
