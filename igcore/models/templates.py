"""Templates that turn a prompt and an answer into the text that a model was trained on.

The formats of the paper's systems are exact to the last space. A prompt that is itself a dialogue,
as in HH-RLHF ("\\n\\nHuman: ... \\n\\nAssistant: ... \\n\\nHuman: ... \\n\\nAssistant:"), is
split into its turns first.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Annotated, Any

from ..errors import ParameterError
from ..policy import RAW, Template, rendered
from ..settings import Options, one_of

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)

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


def _written(name: str, begin: str, user: str, seam: str, end: str) -> Template:
    """Return a plain-text template.

    Its text is `begin`, the user's turn in `user`, `seam`, and the answer closed by `end`.
    """

    def opening(_: Any, prompt: str) -> str:
        """Return the text before the answer."""
        text = begin
        for i, turn in enumerate(turns_of(prompt)):
            text += user.format(turn) if i % 2 == 0 else seam + turn + end
        return text

    def whole(tokenizer: Any, prompt: str, answer: str) -> str:
        """Return the text of prompt and answer."""
        answered = answer.lstrip(" ") if seam else answer
        return opening(tokenizer, prompt) + seam + answered

    return Template(name, opening, whole, joins=not seam)


def messages_of(turns: Sequence[str]) -> list[tuple[str, str]]:
    """Return turns of user and assistant, the user first, as messages: role and content."""
    return list(zip(cycle(("user", "assistant")), turns, strict=False))


def _chat(tokenizer: Any, prompt: str, **options: Any) -> str:
    """Return the chat text before the answer."""
    return rendered(tokenizer, messages_of(turns_of(prompt)), opened=True, **options)


def _chatted(tokenizer: Any, prompt: str, answer: str, **options: Any) -> str:
    """Return the chat text of prompt and answer."""
    messages = messages_of([*turns_of(prompt), answer])
    return rendered(tokenizer, messages, opened=False, **options)


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


def template_of(name: str, options: Options | None) -> Template:
    """Return a template by name, with options for the tokenizer's chat template if given."""
    if not options:
        return TEMPLATES[name]
    opening, whole = partial(_chat, **options), partial(_chatted, **options)
    return replace(CHAT, opening=opening, whole=whole, options=options)


def check_chat(tokenizer: Any, template: str, name: str, options: Options | None = None) -> None:
    """Refuse `template` if its chat template is missing, and options that no template reads."""
    if template == "chat" and not tokenizer.chat_template:
        raise ParameterError(f"{name} has no chat template; choose one of {', '.join(TEMPLATES)}")
    for option in options or ():
        if template != "chat" or option not in str(tokenizer.chat_template):
            raise ParameterError(
                f"chat_options of {name} has {option!r}, which its template {template!r} does not "
                "read; correct the name, or leave it out"
            )
