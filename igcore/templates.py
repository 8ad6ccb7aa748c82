"""How a prompt and an answer become the text that a model was trained to read. Knows strings and tokenizers; runs no model.

The formats of the paper's systems are exact to the last space. A prompt that is itself a dialogue, as those of HH-RLHF are
("\\n\\nHuman: ... \\n\\nAssistant: ... \\n\\nHuman: ... \\n\\nAssistant:"), is taken apart into its turns first.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite "
    "answers to the user's questions. "
)
DIALOGUE = re.compile(r"\n\n(Human|Assistant):")


def turns_of(prompt: str) -> list[str]:
    """Return what user and assistant said in turn, the user first and last; a prompt that is no dialogue is one turn."""
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
        Whether the tokenizer adds its own special tokens (BOS) to these texts; a chat template writes them itself.
    """

    opening: Callable[[object, str], str]
    whole: Callable[[object, str, str], str]
    special: bool = True


def _written(begin: str, user: str, seam: str, end: str) -> Template:
    """Return a template of plain text: `begin`, then `user` around what the user says, `seam` and the answer, closed by `end`."""

    def opening(_, prompt: str) -> str:
        *before, last = turns_of(prompt)
        said = [user.format(u) + seam + a + end for u, a in zip(before[::2], before[1::2], strict=True)]
        return begin + "".join(said) + user.format(last)

    def whole(tokenizer, prompt: str, answer: str) -> str:
        return opening(tokenizer, prompt) + (seam + answer.lstrip(" ") if seam else answer)

    return Template(opening, whole)


def _messages(turns: Sequence[str]) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def _chat(tokenizer, prompt: str) -> str:
    return tokenizer.apply_chat_template(_messages(turns_of(prompt)), add_generation_prompt=True, tokenize=False)


def _chatted(tokenizer, prompt: str, answer: str) -> str:
    return tokenizer.apply_chat_template(_messages([*turns_of(prompt), answer]), tokenize=False)


TEMPLATES = {
    "raw": Template(lambda _, prompt: prompt, lambda _, prompt, answer: prompt + answer),
    "chat": Template(_chat, _chatted, special=False),  # the tokenizer's own
    "safe-rlhf": _written("BEGINNING OF CONVERSATION: ", "USER: {} ASSISTANT:", seam="", end="</s>"),  # Alpaca and Beaver
    "vicuna": _written(VICUNA, "USER: {} ASSISTANT:", seam=" ", end="</s>"),  # version 1.1
    "human-assistant": _written("", "\n\nHuman: {}\n\nAssistant:", seam=" ", end=""),  # HH-RLHF, ARGS
}
