"""A language model that reads prompts and responses, and the KV cache over a group of prompts.

A longer text costs only its new tokens: a session compares its ids with the cached ones, and
encodes the ids after the longest common prefix.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

import torch

from ..engine.agreement import supports_shared_prefix
from ..engine.kv_cache import forward, inputs_of, padded
from ..engine.prefix_cache import SharedRows
from ..errors import ParameterError
from ..policy import context_of, escape_special_tokens

# short responses: the ids that all of them share belong to the prompt
OPENINGS = ("", "a", " a", "\n", "9", ".")
# the last character reveals a template that trims answers, or a tokenizer that drops spaces
SAMPLE = "How are you?", "Well, and you?\n"


def joined(prompt: str, response: str) -> str:
    """Return the prompt followed by the response."""
    return prompt + response


class Backbone:
    """A language model that reads prompts and responses.

    A text longer than the context raises ``ParameterError``; a text without tokens is read as the
    end token. Strings of special tokens inside prompts and responses are broken up, see
    `igcore.policy.escape_special_tokens`.

    Parameters
    ----------
    model : transformers model
        Decoder-only, with or without its head; only hidden states after the final norm are used.
    tokenizer
        Its tokenizer.
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
        model: Any,
        tokenizer: Any,
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

    @property
    def reads_tokens(self) -> bool:
        """True if the state after each token of a response is the state of a prefix of it.

        The text must end with the response and its last token, and the tokenizer must be a fast
        one, which knows the position of each token.
        """
        fast = getattr(self.tokenizer, "is_fast", False)
        if not fast or self.end_id is not None:
            return False
        prompt, response = SAMPLE
        text = self.template(prompt, response)
        if text != self.template(prompt, "") + response:
            return False
        encoding = self._encoding(text)
        return bool(encoding.char_to_token(len(text) - 1) == len(encoding["input_ids"]) - 1)

    def ids(self, prompt: str, response: str) -> list[int]:
        """Return the ids of one text; raise ``ParameterError`` when they exceed the context."""
        parts = [escape_special_tokens(self.tokenizer, part) for part in (prompt, response)]
        return self._ids_of(self._encoding(self.template(*parts)))

    def ids_and_ends(self, prompt: str, response: str, since: int) -> tuple[list[int], list[int]]:
        """Return the ids of one text, and the ends of its tokens after part of the response.

        The part is the first `since` characters, and ends are character offsets in the response. If
        the positions of the tokens are uncertain, all tokens of the response are included, and all
        ends are that of the response. The last token is always included.
        """
        parts = [escape_special_tokens(self.tokenizer, part) for part in (prompt, response)]
        escaped_prompt, answer = parts
        text = self.template(escaped_prompt, answer)
        encoding = self._encoding(text)
        ids = self._ids_of(encoding)
        start = len(self.template(escaped_prompt, ""))
        # from the end, because a template may cut leading spaces off the response
        rest = response[since:]
        known = answer == response and text.endswith(rest)
        if known:
            start = max(start, len(text) - len(rest))
        if start >= len(text):
            return ids, [len(response)]
        first = encoding.char_to_token(start)
        if first is None:  # the character is in no token
            first = len(commonprefix([self.ids(prompt, ""), ids]))
        ends = []
        for token in range(first, len(ids) - 1):
            span = encoding.token_to_chars(token) if known else None
            after = len(text) - span.end if span else 0
            ends.append(max(since, len(response) - after))
        return ids, [*ends, len(response)]

    def has_tokens(self, prompt: str, response: str) -> bool:
        """True if a response adds to the text; the template may cut it off, like spaces."""
        return self.template(prompt, response) != self.template(prompt, "")

    def _encoding(self, text: str) -> Any:
        """Encode a text with the tokenizer."""
        return self.tokenizer(text, add_special_tokens=self.special)

    def _ids_of(self, encoding: Any) -> list[int]:
        """Return the ids of an encoded text, with the end token if there is one."""
        ids = list(encoding["input_ids"])
        if self.end_id is not None:
            ids.append(self.end_id)
        context = context_of(self.model)
        if len(ids) > context:  # truncating would score another text
            raise ParameterError(
                f"a text has {len(ids)} tokens, which exceeds the scorer's context of {context}; "
                "shorten the prompts, lower max_new_tokens, or choose a model with a longer context"
            )
        return ids or [self.tokenizer.eos_token_id]

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids at the beginning of every text of a prompt, for any response.

        They are fewer than the prompt's own ids, because a tokenizer may merge the prompt's last
        characters with the response's first.
        """
        openings = [self.ids(prompt, response) for response in OPENINGS]
        return list(commonprefix(openings))

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

    def open_cache(self, prompts: Sequence[str]) -> "Session":
        """Return a new session over a group of prompts."""
        return Session(self, prompts)


class Text(NamedTuple):
    """A text that begins with the cached prefix of its prompt."""

    prompt: str
    ids: list[int]  # after the prefix


@dataclass
class CachedText:
    """A text whose KV cache and hidden states are in a session."""

    ids: list[int]  # after the prompt's prefix
    place: tuple[SharedRows, int]  # a cache, and a row of it

    def shared(self, ids: list[int]) -> int:
        """Return the number of leading tokens that the text shares with ids."""
        return len(commonprefix([self.ids, ids]))


class Session:
    """The KV cache of one backbone for the texts of one group of prompts."""

    def __init__(self, backbone: Backbone, prompts: Sequence[str]):
        """Prefill the prompts' common prefixes if the model supports the shared cache."""
        self.backbone = backbone
        self.prefixes: dict[str, list[int]] = {}
        for prompt in prompts:
            with suppress(ParameterError):  # too long for this model: no text of it has a score
                self.prefixes[prompt] = backbone.prefix(prompt)
        self.root: SharedRows | None = None  # row by row the prefixes
        self.known: dict[str, list[CachedText]] = {}
        prefixes = list(self.prefixes.values())
        if prefixes and all(prefixes) and supports_shared_prefix(backbone.model):
            self.root = SharedRows.open(backbone.model, prefixes)
            self._forget()

    def states(
        self, prompts: Sequence[str], sequences: Sequence[list[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the hidden states of the last tokens of each text, one (count, H) float32 each.

        `sequences` are the ids of whole texts. The counted tokens must come after the prompt's
        prefix; only the last token of a text may belong to it.
        """
        pairs = zip(prompts, sequences, strict=True)
        texts = [self._after_prefix(prompt, ids) for prompt, ids in pairs]
        others = [at for at, text in enumerate(texts) if text is None]
        whole = [sequences[at] for at in others]
        of_whole = iter(self.backbone.states(whole, [counts[at] for at in others]))
        self._read_on([text for text in texts if text])
        return [
            self._states_of(text, count) if text else next(of_whole)
            for text, count in zip(texts, counts, strict=True)
        ]

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Evict everything except prefixes that longer texts can still reuse."""
        kept: list[tuple[str, CachedText]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            with suppress(ParameterError):  # too long for this model
                text = self._after_prefix(prompt, self.backbone.ids(prompt, response))
                if text:
                    kept.append((prompt, self._nearest(text)))
        self._forget()
        if kept and self.root:
            rows = self.root.gather([known.place for _, known in kept])
            for row, (prompt, known) in enumerate(kept):
                self.known[prompt].append(CachedText(known.ids, (rows, row)))

    def _forget(self) -> None:
        """Drop all cached texts except the prompts' prefixes."""
        if self.root:
            for row, prompt in enumerate(self.prefixes):
                self.known[prompt] = [CachedText([], (self.root, row))]

    def _after_prefix(self, prompt: str, ids: list[int]) -> Text | None:
        """Return the text after its prompt's cached prefix, or None if it does not begin so."""
        prefix = self.prefixes.get(prompt)
        if self.root is None or prefix is None or ids[: len(prefix)] != prefix:
            return None
        return Text(prompt, ids[len(prefix) :])

    def _nearest(self, text: Text) -> CachedText:
        """Return the cached text that shares most leading tokens."""
        return max(self.known[text.prompt], key=lambda known: known.shared(text.ids))

    def _read_on(self, texts: Sequence[Text]) -> None:
        """Encode the new tokens of texts whose prefixes are cached."""
        new = [text for text in texts if self._nearest(text).shared(text.ids) < len(text.ids)]
        if new and self.root:
            self._encode(self.root, _longest(new))

    def _states_of(self, text: Text, count: int) -> torch.Tensor:
        """Return the hidden states (count, H) of the last tokens of a cached text."""
        rows, row = self._nearest(text).place
        return rows.last_hidden(row, len(text.ids), count).float()

    def _encode(self, root: SharedRows, texts: Sequence[Text]) -> None:
        """Encode the tokens of texts after their nearest cached texts, and cache them."""
        nearest = [self._nearest(text) for text in texts]
        longest = max(len(text.ids) for text in texts)
        longest_known = max(len(known.ids) for known in nearest)
        reserve = max(0, longest - longest_known)
        rows = root.gather([known.place for known in nearest], reserve)
        new = []
        for row, (text, known) in enumerate(zip(texts, nearest, strict=True)):
            shared = known.shared(text.ids)
            rows.lengths[row] = shared  # crop the cache to the shared tokens
            new.append(text.ids[shared:])
        rows.read(new)
        for row, text in enumerate(texts):
            self.known[text.prompt].append(CachedText(text.ids, (rows, row)))


def _longest(texts: Sequence[Text]) -> list[Text]:
    """Return the distinct texts that are no prefix of another one.

    Encoding them caches all of the texts.
    """
    kept: list[Text] = []
    # backwards: sorting puts a text right before the texts that begin with it
    for prompt, ids in sorted(texts, reverse=True):
        if not kept or (prompt, ids) != (kept[-1].prompt, kept[-1].ids[: len(ids)]):
            kept.append(Text(prompt, ids))
    return kept[::-1]
