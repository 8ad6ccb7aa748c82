"""A language model that reads prompts and responses."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from os.path import commonprefix

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..engine.kv_cache import forward, inputs_of, padded
from ..errors import ParameterError
from ..policy import context_of
from ..scorers import Texts
from ..template import broken_up, reserved_strings
from .texts import Text, Tokens

# short responses: the ids that all of them share belong to the prompt
OPENINGS = ("a", " a", "\n", "9", ".")
# the last character reveals a template that trims answers, or a tokenizer that drops spaces
SAMPLE = "How are you?", "Well, and you?\n"


def joined(prompt: str, response: str) -> str:
    """Return the prompt followed by the response."""
    return prompt + response


class Backbone:
    """A language model that reads prompts and responses.

    A text longer than the context raises ``ParameterError``; a text without tokens is read as the
    end token. Strings of special tokens inside prompts and responses are broken up, see
    `igcore.template.escape_special_tokens`.

    Parameters
    ----------
    model : transformers model
        Decoder-only, with or without its head; only hidden states after the final norm are used.
    tokenizer : Tokenizer
    template : callable
        (prompt, response) -> the text to encode, in which the response follows the prompt.
    end_id : int, optional
        Token to append to every response and every prefix of one, for a model that was trained
        with it.
    special : bool
        True if the tokenizer adds its special tokens to the text; a chat template already contains
        them.

    Attributes
    ----------
    batch : int
        Texts encoded at a time without a session.
    """

    batch = 32

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        template: Callable[[str, str], str] = joined,
        end_id: int | None = None,
        *,
        special: bool = True,
    ):
        """Keep the model without its head."""
        self.model = getattr(model, "base_model", model)
        self.tokenizer = tokenizer
        self.template = template
        self.special = special
        self.end_id = end_id

    @cached_property
    def tokens(self) -> Tokens:
        """How texts become tokens."""
        return Tokens(self.tokenizer, self.special, self.end_id)

    @property
    def reads_tokens(self) -> bool:
        """True if the state after each token of a response is the state of a prefix of it.

        The text must end with the response and its last token, and the tokenizer must be a fast
        one, which knows the position of each token.
        """
        if not self.tokens.fast or self.end_id is not None:
            return False
        prompt, response = SAMPLE
        text = self.template(prompt, response)
        if text != self.template(prompt, "") + response:
            return False
        (pieces,) = self.tokens.whole([text])
        return pieces.ends[-1] == len(text)

    def ids(self, prompt: str, response: str) -> list[int]:
        """Return the ids of one text; raise ``ParameterError`` when they exceed the context."""
        (text,) = self.texts([prompt], [response])
        return text.ids

    def texts(
        self, prompts: Texts, responses: Texts, sources: Sequence[Text | None] | None = None
    ) -> list[Text]:
        """Return the texts of prompts and responses, each encoded from its source.

        Raises
        ------
        ParameterError
            When a text exceeds the context.
        """
        sources = sources or [None] * len(prompts)
        reserved = reserved_strings(self.tokenizer)
        asked = {prompt: broken_up(prompt, reserved) for prompt in prompts}
        answers = [broken_up(response, reserved) for response in responses]
        written = [self.template(asked[p], a) for p, a in zip(prompts, answers, strict=True)]
        known = [(source.written, source.pieces) if source else None for source in sources]
        encoded = self.tokens.after(written, known)
        found = []
        for at, (kept, rest) in enumerate(encoded):
            source = sources[at]
            opening = source.opening if source else self.template(asked[prompts[at]], "")
            verbatim = answers[at] == responses[at]
            text = Text(
                prompts[at], responses[at], opening, written[at], verbatim, source, kept, rest
            )
            self.check_length(text.n_tokens)
            found.append(text)
        return found

    def check_length(self, n_tokens: int, first: int = 0) -> None:
        """Raise ``ParameterError`` for a text beyond the context; `first` is its first position."""
        context = context_of(self.model) - first
        if n_tokens > context:  # truncating would score another text
            raise ParameterError(
                f"a text has {n_tokens} tokens, which exceeds the scorer's context of {context}; "
                "shorten the prompts, lower max_new_tokens, or choose a model with a longer context"
            )

    def ends(self, text: Text, since: int) -> list[int]:
        """Return where the tokens after the first `since` characters of a response end.

        The ends are character offsets in the response. If the positions of the tokens are
        uncertain, all tokens of the response are included, and all ends are that of the response.
        The last token is always included.
        """
        response, written = text.response, text.written
        # from the end, because a template may cut leading spaces off the response
        rest = response[since:]
        known = text.verbatim and written.endswith(rest)
        start = max(len(text.opening), len(written) - len(rest) if known else 0)
        if start >= len(written):
            return [len(response)]
        token_ends = text.pieces.ends
        first = bisect_right(token_ends, start)
        behind = [len(written) - end if known else 0 for end in token_ends[first:-1]]
        return [*(max(since, len(response) - after) for after in behind), len(response)]

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids at the beginning of every text of a prompt, for any response.

        They are fewer than the prompt's own ids, because a tokenizer may merge the prompt's last
        characters with the response's first.
        """
        (bare,) = self.texts([prompt], [""])
        n = len(OPENINGS)
        texts = self.texts([prompt] * n, OPENINGS, [bare] * n)
        return list(commonprefix([bare.ids, *(text.ids for text in texts)]))

    def encode(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Encode whole sequences in padded batches; return their last states, (R, H) float32."""
        return torch.cat(self.states(sequences, [1] * len(sequences)))

    def states(
        self, sequences: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Encode whole sequences in padded batches, and return the states of their last tokens.

        The result has one (count, H) float32 tensor for each sequence.
        """
        found = []
        for at in range(0, len(sequences), self.batch):
            batch, kept = sequences[at : at + self.batch], counts[at : at + self.batch]
            inputs = inputs_of(*padded(batch, self.model.device))
            hidden, _ = forward(self.model, None, None, logits_to_keep=max(kept), **inputs)
            for row, sequence, count in zip(hidden, batch, kept, strict=True):
                found.append(self.states_of(row, sequence, count).float())
        return found

    def states_of(self, row: torch.Tensor, ids: Sequence[int], count: int) -> torch.Tensor:
        """Return the head's input at the last tokens of a text, (count, H).

        `row` holds the hidden states of all tokens of the text, padded on the left.
        """
        return row[-count:]

    def with_opening(self, states: torch.Tensor, opening: torch.Tensor) -> torch.Tensor:
        """Return the head's input at the last tokens of a text in a session, (count, H).

        `states` (count, H) are those of the tokens, and `opening` (1, H) that of the last token of
        the prompt's `prefix`.
        """
        return states
