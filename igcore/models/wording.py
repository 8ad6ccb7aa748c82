"""The text that a generative guard reads, and the tokens of its verdict."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..errors import ParameterError
from ..prompt import role_and_content
from ..settings import Options, settings
from .templates import ANSWER, check_chat, messages_of, rendered, turns_of

# strings: in YAML, quote Yes and No, which are otherwise true and false
Labels = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
SLOT = re.compile(r"\{(prompt|response)\}")
TURNS = ({"role": "user", "content": "{prompt}"}, {"role": "assistant", "content": "{response}"})


@settings(kw_only=True)
class Wording:
    """The text of prompt and response up to a guard's verdict, and the words of the verdict.

    Attributes
    ----------
    unsafe, safe : list of str
        The words of the two verdicts. Each must be one token after the text; for a longer word give
        its first token.
    messages : list of mappings, optional
        Messages for the chat template, each with a role (``system``, ``user``, ``assistant``) and a
        content with the placeholders ``{prompt}`` and ``{response}``: a policy as a system turn, a
        criterion as a turn after the answer, or everything in one turn. A user's turn that is just
        ``{prompt}`` becomes all turns of a prompt that is a dialogue. By default the turns of
        prompt and response.
    chat_options : mapping, optional
        Further variables of the chat template, such as ``{enable_thinking: false}``.
    prefix : str
        Text that the guard would write before its verdict, such as empty reasoning. A space between
        the two belongs to the labels.
    """

    unsafe: Labels
    safe: Labels
    messages: list[dict[str, str]] | None = None
    chat_options: Options | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        contents = [role_and_content(message)[1] for message in self.messages or TURNS]
        for slot in ("{prompt}", "{response}"):
            if slot not in "\n".join(contents):
                raise ParameterError(f"messages has no {slot}; write it into the text")

    def text(self, tokenizer: Tokenizer, prompt: str, response: str) -> str:
        """Return the text before the guard's verdict."""
        check_chat(tokenizer, "chat", tokenizer.name_or_path)
        options = self.chat_options or {}
        messages = []
        for role, content in map(role_and_content, self.messages or TURNS):
            if (role, content) == ("user", "{prompt}"):  # the prompt may be a dialogue
                messages += messages_of(turns_of(prompt))
            else:
                judged = role == "assistant" and "{response}" in content
                messages.append((ANSWER if judged else role, filled(content, prompt, response)))
        return rendered(tokenizer, messages, opened=True, **options) + self.prefix


def filled(template: str, prompt: str, response: str) -> str:
    """Return a template with prompt and response in place of the placeholders."""
    texts = {"prompt": prompt, "response": response}
    # in one pass: a prompt may itself contain {response}
    return SLOT.sub(lambda slot: texts[slot[1]], template)


def label_ids(tokenizer: Tokenizer, text: str, labels: Sequence[str]) -> list[int]:
    """Return the token of each label after a text of a chat template.

    Raises
    ------
    ParameterError
        When labels are not one token each, or not distinct.
    """
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    found: list[int] = []
    for label in labels:
        after = tokenizer(text + label, add_special_tokens=False)["input_ids"]
        new = after[len(before) :]
        if after[: len(before)] != before or len(new) != 1 or new[0] in found:
            pieces = [tokenizer.decode(token) for token in new]
            raise ParameterError(
                f"label {label!r} is not one token of its own after {text[-20:]!r}, but "
                f"{pieces}; give its first token, and put a space before it into the label, "
                "not the prefix"
            )
        found += new
    return found
