"""Templates that turn a prompt and an answer into the text that a model was trained on.

A prompt that is itself a dialogue, as in HH-RLHF ("\\n\\nHuman: ... \\n\\nAssistant: ...
\\n\\nHuman: ... \\n\\nAssistant:"), is split into its turns first.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import combinations, cycle
from typing import Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase as Tokenizer

from ..errors import ParameterError, one_line
from ..prompt import CHAT_ROLES
from ..settings import Options, one_of
from ..template import RAW, Template

DIALOGUE = re.compile(r"\n\n(Human|Assistant):")


def turns_of(prompt: str) -> list[str]:
    """Split a prompt into turns of user and assistant; the first and the last are the user's.

    A prompt that is no dialogue is one turn.
    """
    before, *parts = DIALOGUE.split(prompt)
    speakers = parts[::2]
    texts = [text.strip() for text in parts[1::2]]
    alternating = speakers == ["Human", "Assistant"] * (len(speakers) // 2)
    if before or not speakers or not alternating or texts[-1] or not all(texts[:-1]):
        return [prompt]
    return texts[:-1]


def plain_text(name: str, begin: str, user: str, seam: str, end: str) -> Template:
    """Return a plain-text template.

    Its text is `begin`, the user's turn in `user`, `seam`, and the answer closed by `end`.
    """

    def opening(_: Tokenizer, prompt: str) -> str:
        """Return the text before the answer."""
        text = begin
        for i, turn in enumerate(turns_of(prompt)):
            text += user.format(turn) if i % 2 == 0 else seam + turn + end
        return text

    def whole(tokenizer: Tokenizer, prompt: str, answer: str) -> str:
        """Return the text of prompt and answer."""
        answered = answer.lstrip(" ") if seam else answer
        return opening(tokenizer, prompt) + seam + answered

    return Template(name, opening, whole, joins=not seam)


def messages_of(turns: Sequence[str]) -> list[tuple[str, str]]:
    """Return turns of user and assistant, the user first, as messages: role and content."""
    return list(zip(cycle(("user", "assistant")), turns, strict=False))


def _chat(tokenizer: Tokenizer, prompt: str, **options: Any) -> str:
    """Return the chat text before the answer."""
    return rendered(tokenizer, messages_of(turns_of(prompt)), opened=True, **options)


def _chatted(tokenizer: Tokenizer, prompt: str, answer: str, **options: Any) -> str:
    """Return the chat text of prompt and answer."""
    messages = [*messages_of(turns_of(prompt)), (ANSWER, answer)]
    return rendered(tokenizer, messages, opened=False, **options)


# --- the chat template of a tokenizer -------------------------------------------------------------

ANSWER = "answer"  # the role of an assistant's message that is to be judged
# what a template makes of a word that none writes itself shows how it reads a message
MARKERS = [(role, f"marked{role}") for role in CHAT_ROLES]
# the roles whose content is a list of parts: none, all, or as in templates that mix both
IN_PARTS = [roles for n in (0, 3, 1, 2) for roles in combinations(CHAT_ROLES, n)]
AS_DATA = re.compile(r"""["']text["']:""")  # a list of parts that was written as it is
Messages = Sequence[tuple[str, str]]  # role and content
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# what writes the date for a template, where it is not that of the clock
STRFTIME: ContextVar[Callable[[str], str] | None] = ContextVar("strftime", default=None)


class Reading(NamedTuple):
    """How a chat template reads messages.

    Attributes
    ----------
    program : str
        The template.
    in_parts : tuple of str
        The roles whose content it takes as a list of parts; that of the others is a text.
    written : str
        What it writes of a message of each role.
    """

    program: str | dict[str, str]
    in_parts: tuple[str, ...]
    written: str


_READINGS: WeakKeyDictionary[Tokenizer, Reading] = WeakKeyDictionary()


def reading_of(tokenizer: Tokenizer, options: Options) -> Reading:
    """Return how the chat template of a tokenizer reads messages, found once by `MARKERS`."""
    known = _READINGS.get(tokenizer)
    if known is None or known.program != tokenizer.chat_template:
        known = _tried(tokenizer, options)
        if known.written:  # else other options may help
            _READINGS[tokenizer] = known
    return known


def _tried(tokenizer: Tokenizer, options: Options) -> Reading:
    """Return the first reading in which all markers arrive, each as a text."""
    # some refuse or leave out a system's message, and some read a single one
    for markers in (MARKERS, MARKERS[1:], MARKERS[1:2]):
        for in_parts in IN_PARTS:
            with suppress(Exception):  # third-party code may raise anything
                text = _written_text(tokenizer, markers, in_parts, opened=False, **options)
                if not AS_DATA.search(text) and all(marker in text for _, marker in markers):
                    return Reading(tokenizer.chat_template, in_parts, text)
    return Reading(tokenizer.chat_template, (), "")


def _written_text(
    tokenizer: Tokenizer, messages: Messages, in_parts: Sequence[str], opened: bool, **options: Any
) -> str:
    """Return what a chat template writes of messages."""
    given: list[dict[str, object]] = []
    for role, said in messages:
        role = "assistant" if role == ANSWER else role
        content = [{"type": "text", "text": said}] if role in in_parts else said
        given.append({"role": role, "content": content})
    return str(
        tokenizer.apply_chat_template(
            given,
            chat_template=_with_date(tokenizer.chat_template),
            add_generation_prompt=opened,
            tokenize=False,
            **options,
        )
    )


def _with_date(program: str | dict[str, str]) -> str | None:
    """Return a chat template that writes the date by `STRFTIME`, or None to use it as it is."""
    strftime = STRFTIME.get()
    if strftime is None or not isinstance(program, str):
        return None
    return TODAY.sub(lambda call: json.dumps(strftime(call[2])), program)


def written_by(tokenizer: Tokenizer) -> str:
    """Return a tokenizer's chat template and what it writes around messages; empty without one."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return str(tokenizer.chat_template) + reading_of(tokenizer, {}).written


def rendered(tokenizer: Tokenizer, messages: Messages, opened: bool, **options: Any) -> str:
    """Return messages, each a role and a content, in the chat template of a tokenizer.

    Parameters
    ----------
    messages : sequence of (str, str)
        The role of an assistant's message that is to be judged is `ANSWER`.
    opened : bool
        Whether the text ends where the assistant begins another turn.
    options
        What else the template reads.

    Raises
    ------
    ParameterError
        When the template refuses the messages, such as a system's, or fails, and when it leaves out
        any part of what system and user say or of the answer, but spaces around it.
    """
    in_parts = reading_of(tokenizer, options).in_parts
    try:
        text = _written_text(tokenizer, messages, in_parts, opened, **options)
    except Exception as error:  # third-party code may raise anything
        raise ParameterError(
            f"the chat template refuses these messages ({one_line(error):.200}); give those that "
            "it takes, or correct it or choose another template"
        ) from error
    if lost := left_out(text, messages):
        role, said = lost
        raise ParameterError(
            f"the chat template leaves out the {role}'s message {said!r:.80}, or a part of it; "
            "say it in another message or in other words, or choose another template, such as raw "
            "(chat_template = None in a pair)"
        )
    return text


def left_out(text: str, messages: Messages) -> tuple[str, str] | None:
    """Return the first message that a text does not contain as a whole, or None.

    A system's message may be anywhere, and an earlier turn of the assistant may be shortened. Each
    message of the user, and the answer, must follow the one before, so a prompt that quotes the
    answer does not count as the answer.
    """
    after = 0
    for role, content in messages:
        said = content.strip()
        place = text.find(said, 0 if role == "system" else after)
        if place < 0 and role != "assistant":
            return role, content
        if role in ("user", ANSWER):
            after = place + len(said)
    return None


CHAT = Template("chat", _chat, _chatted, special=False)  # the tokenizer's own
HUMAN_ASSISTANT = plain_text(  # HH-RLHF, ARGS
    "human-assistant", "", "\n\nHuman: {}\n\nAssistant:", seam=" ", end=""
)
# other packages may add their own
TEMPLATES = {template.name: template for template in (RAW, CHAT, HUMAN_ASSISTANT)}
TextFormat = Annotated[str, one_of(TEMPLATES)]


def template_of(
    tokenizer: Tokenizer, name: str | None, owner: str, options: Options | None
) -> Template:
    """Return a template by name, with options for the tokenizer's chat template if given.

    By default it is that of the tokenizer, or none. Errors are those of `check_chat`.
    """
    name = name or ("chat" if tokenizer.chat_template else "raw")
    check_chat(tokenizer, name, owner, options)
    if not options:
        return TEMPLATES[name]
    opening, whole = partial(_chat, **options), partial(_chatted, **options)
    return replace(CHAT, opening=opening, whole=whole, options=options)


def check_chat(tokenizer: Tokenizer, form: str, name: str, options: Options | None = None) -> None:
    """Refuse a text format if its chat template is missing, and options that no template reads."""
    if form == "chat" and not tokenizer.chat_template:
        raise ParameterError(f"{name} has no chat template; choose one of {', '.join(TEMPLATES)}")
    for option in options or ():
        if form != "chat" or option not in str(tokenizer.chat_template):
            raise ParameterError(
                f"chat_options of {name} has {option!r}, which its template {form!r} does not "
                "read; correct the name, or leave it out"
            )
