"""How a prompt and an answer become the text that a model was trained to read. Knows strings and
tokenizers; runs no model.

The formats of the paper's systems are exact to the last space. A prompt that is itself a dialogue,
as those of HH-RLHF are ("\\n\\nHuman: ... \\n\\nAssistant: ... \\n\\nHuman: ... \\n\\nAssistant:"),
is taken apart into its turns first.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import AssetError

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite "
    "answers to the user's questions. "
)
DIALOGUE = re.compile(r"\n\n(Human|Assistant):")


def turns_of(prompt: str) -> list[str]:
    """Return what user and assistant said in turn, the user first and last; a prompt that is no
    dialogue is one turn.
    """
    before, *said = DIALOGUE.split(prompt)
    speakers, texts = said[::2], [text.strip() for text in said[1::2]]
    alternating = speakers == ["Human", "Assistant"] * (len(speakers) // 2)
    if before or not speakers or not alternating or texts[-1] or not all(texts[:-1]):
        return [prompt]
    return texts[:-1]


def special_strings(tokenizer) -> list[str]:
    """Return the strings that a tokenizer reads as special tokens, the longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens}, key=lambda s: (-len(s), s))


def neutral(tokenizer, text: str) -> str:
    """Break up strings such as ``</s>`` in a text, so that it cannot write a template's own tokens."""
    for special in special_strings(tokenizer):
        text = text.replace(special, f"{special[0]} {special[1:]}")
    return text


@dataclass(frozen=True)
class Template:
    """One way of writing a dialogue.

    Attributes
    ----------
    opening : callable
        (tokenizer, prompt) -> the text after which the answer begins.
    whole : callable
        (tokenizer, prompt, answer) -> the text of both.
    special : bool
        Whether the tokenizer adds its own special tokens (BOS) to these texts; a chat template
        writes them itself.
    """

    opening: Callable[[object, str], str]
    whole: Callable[[object, str, str], str]
    special: bool = True


def _written(begin: str, user: str, seam: str, end: str) -> Template:
    """Return a template of plain text: `begin`, then `user` around what the user says, `seam` and
    the answer, closed by `end`.
    """

    def opening(_, prompt: str) -> str:
        *before, last = turns_of(prompt)
        said = [
            user.format(u) + seam + a + end for u, a in zip(before[::2], before[1::2], strict=True)
        ]
        return begin + "".join(said) + user.format(last)

    def whole(tokenizer, prompt: str, answer: str) -> str:
        return opening(tokenizer, prompt) + (seam + answer.lstrip(" ") if seam else answer)

    return Template(opening, whole)


def chatted(tokenizer, turns: Sequence[str], opened: bool) -> str:
    """Return turns of user and assistant in the chat template of a tokenizer, `opened` for one more
    of the assistant.

    Raises
    ------
    AssetError
        When the template is damaged, or refuses the turns.
    """
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
    ]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False)
    except Exception as error:  # a template is a program, which may fail with anything
        reason = next(iter(str(error).strip().splitlines()), "")[:200]
        raise AssetError(
            f"the chat template of {tokenizer.name_or_path} cannot write {len(turns)} "
            f"turn(s) ({type(error).__name__}: {reason}); "
            "choose another format than chat, or fetch the model again"
        ) from error


def _chat(tokenizer, prompt: str) -> str:
    return chatted(tokenizer, turns_of(prompt), opened=True)


def _chatted(tokenizer, prompt: str, answer: str) -> str:
    return chatted(tokenizer, [*turns_of(prompt), answer], opened=False)


TEMPLATES = {
    "raw": Template(lambda _, prompt: prompt, lambda _, prompt, answer: prompt + answer),
    "chat": Template(_chat, _chatted, special=False),  # the tokenizer's own
    "safe-rlhf": _written(
        "BEGINNING OF CONVERSATION: ", "USER: {} ASSISTANT:", seam="", end="</s>"
    ),  # Alpaca and Beaver
    "vicuna": _written(VICUNA, "USER: {} ASSISTANT:", seam=" ", end="</s>"),  # version 1.1
    "human-assistant": _written(
        "", "\n\nHuman: {}\n\nAssistant:", seam=" ", end=""
    ),  # HH-RLHF, ARGS
}
