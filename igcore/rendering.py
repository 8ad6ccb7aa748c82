"""How a prompt becomes the text that a model reads: templates, and a tokenizer's chat template.

A chat template is a program of whoever made the model. It runs in a sandbox of transformers, and
here within limits of time and length.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import AssetError, ParameterError

SECONDS = 10.0  # that a chat template may take for one prompt
LONGEST = 2**24  # characters that it may write


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
        When the template itself refuses the messages, such as a system's.
    AssetError
        When it fails, takes longer than `SECONDS` or writes more than `LONGEST`.
    """
    given: list[Any] = [{"role": role, "content": content} for role, content in messages]

    def write() -> Any:
        return tokenizer.apply_chat_template(
            given, add_generation_prompt=opened, tokenize=False, **options
        )

    text, error = within(SECONDS, write)
    said = messages[-1][1].strip()
    if error is None and said not in text:  # of models with pictures it reads a list of parts
        given = [{"role": role, "content": [{"type": "text", "text": x}]} for role, x in messages]
        other, failed = within(SECONDS, write)
        text = other if failed is None and said in other else text
    reason = " ".join(str(error).split())[:200]
    # of jinja2, by its name: its subclasses are faults, and itself is what a template raises
    if type(error).__name__ == "TemplateError":
        raise ParameterError(
            f"the chat template refuses these messages: {reason}; give those that it takes"
        )
    if error is not None:
        raise AssetError(
            f"the chat template fails ({type(error).__name__}: {reason}); correct it, or choose "
            "another template"
        )
    if len(text) > LONGEST:
        raise AssetError(
            f"the chat template writes {len(text)} characters, and may write {LONGEST}; correct "
            "it, or choose another template"
        )
    return str(text)


def within(seconds: float, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what `call` returns and what it raises: ``TimeoutError`` where it takes longer.

    It runs in a thread of its own: a process has one alarm, which is the user's, and only the main
    thread hears it.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # a program of somebody else's may raise anything
            outcome.append((None, error))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        worker.join(seconds)
    finally:  # also after Ctrl-C and after an alarm of the user's
        late = not outcome
        if late:  # ends a loop of Python code
            ident = ctypes.c_ulong(worker.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
    return (None, TimeoutError(f"not done in {seconds:g} seconds")) if late else outcome[0]
