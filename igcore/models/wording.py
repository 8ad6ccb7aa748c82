"""What a guard is given to read of a prompt and a response, and the tokens of its verdict.

A local guard and one behind an endpoint read the same text.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ..errors import ParameterError
from ..policy import rendered, role_and_content
from ..settings import Options, settings
from .templates import check_chat, messages_of, turns_of

# texts, not what YAML reads as true and false: Yes and No stand in quotes
Labels = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
SLOT = re.compile(r"\{(prompt|response)\}")
TURNS = ({"role": "user", "content": "{prompt}"}, {"role": "assistant", "content": "{response}"})


@settings(kw_only=True)
class Wording:
    """How prompt and response become the text after which a guard says its verdict.

    Attributes
    ----------
    unsafe, safe : list of str
        The words of the two verdicts. Each must be one token where it stands; of a longer word give
        the beginning that is one.
    messages : list of mappings, optional
        What the chat template is given, each with a role (``system``, ``user``,
        ``assistant``) and a content in which ``{prompt}`` and ``{response}`` stand: a policy as a
        system turn, a criterion as a turn after the answer, or all of it in one turn. A user's
        turn that is just ``{prompt}`` becomes all turns of a prompt that is a dialogue. By default
        the turns of both, up to where the guard begins to speak.
    chat_options : mapping, optional
        What else the chat template is given by name, such as ``{enable_thinking: false}``.
    prefix : str
        What the guard would write before its verdict, such as an empty piece of reasoning. A space
        between them belongs to the labels.
    """

    unsafe: Labels
    safe: Labels
    messages: list[dict[str, str]] | None = None
    chat_options: Options | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        said = [role_and_content(message)[1] for message in self.messages or TURNS]
        for slot in ("{prompt}", "{response}"):
            if slot not in "\n".join(said):
                raise ParameterError(f"messages has no {slot}; write it into the text")

    def text(self, tokenizer: Any, prompt: str, response: str) -> str:
        """Return the text after which the guard says its verdict."""
        check_chat(tokenizer, "chat", tokenizer.name_or_path)
        options = self.chat_options or {}
        messages = []
        for role, content in map(role_and_content, self.messages or TURNS):
            if (role, content) == ("user", "{prompt}"):  # for all turns of a prompt
                messages += messages_of(turns_of(prompt))
            else:
                messages.append((role, filled(content, prompt, response)))
        return rendered(tokenizer, messages, opened=True, **options) + self.prefix


def filled(template: str, prompt: str, response: str) -> str:
    """Return a template with prompt and response in their places."""
    texts = {"prompt": prompt, "response": response}

    def text_of(slot: re.Match[str]) -> str:
        """Return the text for a slot."""
        return texts[slot[1]]

    # in one go: a prompt may itself hold {response}
    return SLOT.sub(text_of, template)


def label_ids(tokenizer: Any, text: str, labels: Sequence[str]) -> list[int]:
    """Return the token of each label as it is written after a text of a chat template.

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
