"""A language model that reads prompts and responses, and the KV cache over a group of prompts.

A longer text costs only its new tokens: its ids are compared with the cached ones, and what follows
the longest common prefix is encoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

import torch

from ..engine.agreement import fits
from ..engine.kv_cache import forward, inputs_of, padded
from ..engine.prefix_cache import SharedRows
from ..errors import ParameterError
from ..policy import context_of, escape_special_tokens

# short responses: what the ids of all of them share is the prompt's
OPENINGS = ("", "a", " a", "\n", "9", ".")
# a template that trims answers, or a tokenizer that drops spaces, shows at the last character
PROBE = "How are you?", "Well, and you?\n"


def joined(prompt: str, response: str) -> str:
    """Return prompt and response joined as they are."""
    return prompt + response


class Backbone:
    """A language model that reads prompts and responses.

    A text that its context does not hold is refused, and one without any token is read as the end
    token. Strings in them that stand for special tokens are broken up, see
    `igcore.policy.escape_special_tokens`.

    Parameters
    ----------
    model : transformers model
        Decoder-only, with its head or without; only hidden states after the final norm are used.
    tokenizer
        Its tokenizer.
    template : callable
        (prompt, response) -> the text to be encoded, the response after the prompt.
    end_id : int, optional
        Token that is appended to every response, also to a part of one, if the model was trained
        to read one.
    special : bool
        Whether the tokenizer adds its own special tokens to the text; a chat template writes them
        itself.

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
        """Whether the state after every token of a response is that of a part of the response.

        The text must end with the response and its last token, and a fast tokenizer must tell
        where each token stands.
        """
        fast = getattr(self.tokenizer, "is_fast", False)
        if not fast or self.end_id is not None:
            return False
        prompt, response = PROBE
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
        """Return the ids of one text, and where its tokens end that end after part of the response.

        The part is the first `since` characters; the ends are characters of the response. Where it
        is not certain which tokens these are, they are all tokens of the response, and end with it.
        The last token always counts.
        """
        asked, answer = (escape_special_tokens(self.tokenizer, part) for part in (prompt, response))
        text = self.template(asked, answer)
        encoding = self._encoding(text)
        ids = self._ids_of(encoding)
        start = len(self.template(asked, ""))
        # from the end, because a template may cut leading spaces off the response
        rest = response[since:]
        known = answer == response and text.endswith(rest)
        if known:
            start = max(start, len(text) - len(rest))
        if start >= len(text):
            return ids, [len(response)]
        first = encoding.char_to_token(start)
        if first is None:  # no token holds this character
            first = len(commonprefix([self.ids(prompt, ""), ids]))
        ends = []
        for token in range(first, len(ids) - 1):
            span = encoding.token_to_chars(token) if known else None
            after = len(text) - span.end if span else 0
            ends.append(max(since, len(response) - after))
        return ids, [*ends, len(response)]

    def _encoding(self, text: str) -> Any:
        """Encode a text with the tokenizer."""
        return self.tokenizer(text, add_special_tokens=self.special)

    def _ids_of(self, encoding: Any) -> list[int]:
        """Return the ids to be read of an encoded text."""
        ids = list(encoding["input_ids"])
        if self.end_id is not None:
            ids.append(self.end_id)
        context = context_of(self.model)
        if len(ids) > context:  # truncated, it would be another text
            raise ParameterError(
                f"a text has {len(ids)} tokens, which exceeds the scorer's context of {context}; "
                "shorten the prompts, lower max_new_tokens, or choose a model with a longer context"
            )
        return ids or [self.tokenizer.eos_token_id]

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids with which every text of a prompt starts, whatever the response.

        They are fewer than the prompt's own ids, because a tokenizer may merge across the seam.
        """
        openings = [self.ids(prompt, response) for response in OPENINGS]
        return list(commonprefix(openings))

    def encode(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the last hidden state of whole sequences, (R, H) float32, in padded batches."""
        return torch.cat(self.states(sequences, [1] * len(sequences)))

    def states(
        self, sequences: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the hidden states of the last tokens of whole sequences, in padded batches.

        They are one (count, H) float32 for each sequence.
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
        """Return the input of a head at the last tokens of a text, (count, H).

        `row` has the hidden states of all its tokens, padded on the left.
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
    """A text whose KV cache and hidden states a session holds."""

    ids: list[int]  # after the prompt's prefix
    place: tuple[SharedRows, int]  # a state, and a row of it

    def shared(self, ids: list[int]) -> int:
        """Return the number of first tokens that ids share with it."""
        return len(commonprefix([self.ids, ids]))


class Session:
    """The KV cache of one backbone over the texts of one group of prompts.

    Attributes
    ----------
    encoded : int
        Tokens that went through the model so far.
    """

    def __init__(self, backbone: Backbone, prompts: Sequence[str]):
        """Prefill the prompts' common prefixes where the model fits the shared cache."""
        self.backbone = backbone
        self.prefixes = {prompt: backbone.prefix(prompt) for prompt in prompts}
        self.encoded = 0
        self.root: SharedRows | None = None  # row by row the prefixes
        self.known: dict[str, list[CachedText]] = {}
        if fits(backbone.model) and all(self.prefixes.values()):
            prefixes = list(self.prefixes.values())
            self.root = SharedRows.open(backbone.model, prefixes)
            self.encoded = sum(map(len, prefixes))
            self._forget()

    def hidden(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden state of the last token of each text, (R, H) float32."""
        sequences = [self.backbone.ids(p, r) for p, r in zip(prompts, responses, strict=True)]
        return torch.cat(self.states(prompts, sequences, [1] * len(sequences)))

    def states(
        self, prompts: Sequence[str], sequences: Sequence[list[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the hidden states of the last tokens of each text, one (count, H) float32 each.

        `sequences` are the ids of whole texts. The tokens asked for come after the prefix of the
        prompt; only the last token of a text may belong to it.
        """
        pairs = zip(prompts, sequences, strict=True)
        texts = [self._after_prefix(prompt, ids) for prompt, ids in pairs]
        others = [at for at, text in enumerate(texts) if text is None]
        whole = [sequences[at] for at in others]
        self.encoded += sum(map(len, whole))
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
            ids = self.backbone.ids(prompt, response)
            text = self._after_prefix(prompt, ids)
            if text:
                kept.append((prompt, self._nearest(text)))
        self._forget()
        if kept and self.root:
            rows = self.root.gather([known.place for _, known in kept])
            for row, (prompt, known) in enumerate(kept):
                self.known[prompt].append(CachedText(known.ids, (rows, row)))

    def _forget(self) -> None:
        """Know nothing but the prompts' prefixes."""
        if self.root:
            for row, prompt in enumerate(self.prefixes):
                self.known[prompt] = [CachedText([], (self.root, row))]

    def _after_prefix(self, prompt: str, ids: list[int]) -> Text | None:
        """Return a text after the cached prefix of its prompt, or None if it begins otherwise."""
        prefix = self.prefixes.get(prompt)
        if self.root is None or prefix is None or ids[: len(prefix)] != prefix:
            return None
        return Text(prompt, ids[len(prefix) :])

    def _nearest(self, text: Text) -> CachedText:
        """Return the known text that shares most tokens."""

        def shared(known: CachedText) -> int:
            """Return how many."""
            return known.shared(text.ids)

        return max(self.known[text.prompt], key=shared)

    def _read_on(self, texts: Sequence[Text]) -> None:
        """Encode the new tokens of texts whose prefixes are cached."""
        new = []
        for text in texts:
            shared = self._nearest(text).shared(text.ids)
            if shared < len(text.ids):
                new.append(text)
        if new and self.root:
            self._encode(self.root, _longest(new))

    def _states_of(self, text: Text, count: int) -> torch.Tensor:
        """Return the hidden states (count, H) of the last tokens of a text that is known."""
        rows, row = self._nearest(text).place
        return rows.last_hidden(row, len(text.ids), count).float()

    def _encode(self, root: SharedRows, texts: Sequence[Text]) -> None:
        """Encode the tokens of texts after their nearest known text, and keep their cache."""
        nearest = [self._nearest(text) for text in texts]
        longest = max(len(text.ids) for text in texts)
        longest_known = max(len(known.ids) for known in nearest)
        room = max(0, longest - longest_known)
        rows = root.gather([known.place for known in nearest], room)
        new = []
        for row, (text, known) in enumerate(zip(texts, nearest, strict=True)):
            shared = known.shared(text.ids)
            rows.lengths[row] = shared  # crop the cache to the shared tokens
            new.append(text.ids[shared:])
        self.encoded += sum(map(len, new))
        rows.read(new)
        for row, text in enumerate(texts):
            self.known[text.prompt].append(CachedText(text.ids, (rows, row)))


def _longest(texts: Sequence[Text]) -> list[Text]:
    """Return the texts that no other one begins with, of equal ones one.

    Encoding these caches all of the texts.
    """
    kept: list[Text] = []
    # backwards: a text stands right before one that begins with it
    for prompt, ids in sorted(texts, reverse=True):
        if not kept or (prompt, ids) != (kept[-1].prompt, kept[-1].ids[: len(ids)]):
            kept.append(Text(prompt, ids))
    return kept[::-1]
