"""How a prompt and an answer become the text that a model was trained to read.

The formats of the paper's systems are exact to the last space. A prompt that is itself a dialogue,
as those of HH-RLHF are ("\\n\\nHuman: ... \\n\\nAssistant: ... \\n\\nHuman: ... \\n\\nAssistant:"),
is taken apart into its turns first.
"""

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from ..errors import AssetError, ParameterError
from ..policy import RAW, Template
from ..settings import one_of

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)


SECONDS = 10.0  # that a chat template may take for one prompt
LONGEST = 2**24  # characters that it may write
DIALOGUE = re.compile(r"\n\n(Human|Assistant):")


def turns_of(prompt: str) -> list[str]:
    """Return what user and assistant said in turn, the user first and last.

    A prompt that is no dialogue is one turn.
    """
    before, *said = DIALOGUE.split(prompt)
    speakers = said[::2]
    texts = [text.strip() for text in said[1::2]]
    alternating = speakers == ["Human", "Assistant"] * (len(speakers) // 2)
    if before or not speakers or not alternating or texts[-1] or not all(texts[:-1]):
        return [prompt]
    return texts[:-1]


def _written(name: str, begin: str, user: str, seam: str, end: str) -> Template:
    """Return a plain-text template.

    Its text is `begin`, then `user` around what the user says, `seam` and the answer, closed by
    `end`.
    """

    def opening(_, prompt: str) -> str:
        """Return the text up to where the answer begins."""
        text = begin
        for i, turn in enumerate(turns_of(prompt)):
            said = user.format(turn) if i % 2 == 0 else seam + turn + end
            text += said
        return text

    def whole(tokenizer, prompt: str, answer: str) -> str:
        """Return the text of prompt and answer."""
        answered = answer.lstrip(" ") if seam else answer
        return opening(tokenizer, prompt) + seam + answered

    return Template(name, opening, whole)


def chatted(tokenizer, turns: Sequence[str], opened: bool, **options) -> str:
    """Return turns of user and assistant in the chat template of a tokenizer, see `rendered`."""
    roles = ("user", "assistant")
    messages = [(roles[i % 2], text) for i, text in enumerate(turns)]
    return rendered(tokenizer, messages, opened, **options)


def rendered(tokenizer, messages: Sequence[tuple[str, str]], opened: bool, **options) -> str:
    """Return messages, each a role and a content, in the chat template of a tokenizer.

    Parameters
    ----------
    opened : bool
        Whether the text ends where the assistant begins another turn.
    options
        What else the template reads.
    """
    given = [{"role": role, "content": content} for role, content in messages]
    try:
        with within(SECONDS):
            text = tokenizer.apply_chat_template(
                given, add_generation_prompt=opened, tokenize=False, **options
            )
    except Exception as error:  # it is a program of whoever made the model, and may raise anything
        reason = " ".join(str(error).split())[:200]
        raise AssetError(
            f"the chat template fails ({type(error).__name__}: {reason}); correct it, or choose "
            f"another of {', '.join(TEMPLATES)}"
        ) from None
    if len(text) > LONGEST:
        raise AssetError(
            f"the chat template writes {len(text)} characters, and may write {LONGEST}; correct "
            f"it, or choose another of {', '.join(TEMPLATES)}"
        )
    return text


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in Python code that takes longer; threads but the main one may."""

    def stop(*_) -> None:
        raise TimeoutError(f"not done in {seconds:g} seconds")

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _chat(tokenizer, prompt: str) -> str:
    """Return the chat text up to where the answer begins."""
    return chatted(tokenizer, turns_of(prompt), opened=True)


def _chatted(tokenizer, prompt: str, answer: str) -> str:
    """Return the chat text of prompt and answer."""
    return chatted(tokenizer, [*turns_of(prompt), answer], opened=False)


CHAT = Template("chat", _chat, _chatted, special=False)  # the tokenizer's own
SAFE_RLHF = _written(  # Alpaca and Beaver
    "safe-rlhf", "BEGINNING OF CONVERSATION: ", "USER: {} ASSISTANT:", seam="", end="</s>"
)
VICUNA_1_1 = _written("vicuna", VICUNA, "USER: {} ASSISTANT:", seam=" ", end="</s>")
HUMAN_ASSISTANT = _written(  # HH-RLHF, ARGS
    "human-assistant", "", "\n\nHuman: {}\n\nAssistant:", seam=" ", end=""
)
KNOWN = (RAW, CHAT, SAFE_RLHF, VICUNA_1_1, HUMAN_ASSISTANT)
TEMPLATES = {template.name: template for template in KNOWN}
TextFormat = Annotated[str, one_of(TEMPLATES)]


def check_chat(tokenizer, template: str, name: str) -> None:
    """Raise ``ParameterError`` when a tokenizer lacks the chat template that `template` needs."""
    if template == "chat" and not tokenizer.chat_template:
        raise ParameterError(f"{name} has no chat template; choose one of {', '.join(TEMPLATES)}")
