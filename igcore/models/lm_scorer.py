"""Scores read from a language model's last hidden state.

Within one group of prompts a `Session` keeps a KV cache, so that a longer text costs only its new
tokens. Scorers on one `Backbone` share its session::

    backbone = Backbone(model, tokenizer)
    cost = LMScorer("my-cost", backbone, cost_head, "higher is worse", digest="v1")
    reward = LMScorer("my-reward", backbone, reward_head, "higher is better", digest="v1")

A scorer outside a session is an uncached scorer. The final check of an answer uses one, so that
what is emitted does not rest on a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix

import numpy as np
import torch

from ..engine.grouped_rows import borders_of
from ..engine.kv_cache import forward, padded, positions_of
from ..errors import ParameterError
from ..rendering import neutral
from .session import Session

# short responses: what the ids of all of them share is the prompt's
OPENINGS = ("", "a", " a", "\n", "9", ".")
# a template that trims answers, or a tokenizer that drops spaces, shows at the last character
PROBE = "How are you?", "Well, and you?\n"


def joined(prompt: str, response: str) -> str:
    """Return prompt and response joined as they are."""
    return prompt + response


def context_of(model) -> int:
    """Return the most tokens that a model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def check_length(tokens: int, context: int) -> None:
    """Raise ``ParameterError`` for a text longer than a context.

    Truncated, it would be another text.
    """
    if tokens > context:
        raise ParameterError(
            f"a text has {tokens} tokens, which exceeds the scorer's context of {context}; shorten "
            "the prompts, lower max_new_tokens, or choose a model with a longer context"
        )


class Backbone:
    """A language model that reads prompts and responses.

    A text that its context does not hold is refused, and one without any token is read as the end
    token. Strings in them that stand for special tokens are broken up, see
    `igcore.rendering.neutral`.

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
    anchor : sequence of int
        Ids in the text before the response. Where they are given, the hidden state at the first of
        them is put beside that of the last token: (R, H) becomes (R, 2 H). Where the ids occur more
        than once, the last time counts.

    Attributes
    ----------
    batch : int
        Texts encoded at a time without a session.
    """

    batch = 32

    def __init__(
        self,
        model,
        tokenizer,
        template: Callable[[str, str], str] = joined,
        end_id: int | None = None,
        *,
        special: bool = True,
        anchor: Sequence[int] = (),
    ):
        """Keep the model without its head."""
        self.model = getattr(model, "base_model", model)
        self.tokenizer = tokenizer
        self.template = template
        self.special = special
        self.end_id = end_id
        self.anchor = list(anchor)

    @property
    def reads_tokens(self) -> bool:
        """Whether the state after every token of a response is that of a part of the response.

        The text must end with the response and its last token, and a fast tokenizer must tell
        where each token stands.
        """
        fast = getattr(self.tokenizer, "is_fast", False)
        if not fast or self.end_id is not None or self.anchor:
            return False
        prompt, response = PROBE
        text = self.template(prompt, response)
        if text != self.template(prompt, "") + response:
            return False
        encoding = self._encoding(text)
        return encoding.char_to_token(len(text) - 1) == len(encoding["input_ids"]) - 1

    def ids(self, prompt: str, response: str) -> list[int]:
        """Return the ids of one text; raise ``ParameterError`` when they exceed the context."""
        parts = [neutral(self.tokenizer, part) for part in (prompt, response)]
        return self._ids_of(self._encoding(self.template(*parts)))

    def ids_and_ends(self, prompt: str, response: str, since: int) -> tuple[list[int], list[int]]:
        """Return the ids of one text, and where its tokens end that end after part of the response.

        The part is the first `since` characters; the ends are characters of the response. Where it
        is not certain which tokens these are, they are all tokens of the response, and end with it.
        The last token always counts.
        """
        asked, answer = (neutral(self.tokenizer, part) for part in (prompt, response))
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

    def _encoding(self, text: str):
        """Return what the tokenizer makes of a text."""
        return self.tokenizer(text, add_special_tokens=self.special)

    def _ids_of(self, encoding) -> list[int]:
        """Return the ids to be read of an encoded text."""
        ids = list(encoding["input_ids"])
        if self.end_id is not None:
            ids.append(self.end_id)
        check_length(len(ids), context_of(self.model))
        return ids or [self.tokenizer.eos_token_id]

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids with which every text of a prompt starts, whatever the response.

        They are fewer than the prompt's own ids, because a tokenizer may merge across the seam.
        """
        openings = [self.ids(prompt, response) for response in OPENINGS]
        ids = list(commonprefix(openings))
        return ids[: self.anchored(ids)] if self.anchor else ids

    def anchored(self, ids: Sequence[int]) -> int:
        """Return the number of ids up to the first id of the anchor's last occurrence.

        That id counts too.

        Raises
        ------
        ParameterError
            When the anchor does not occur in the ids.
        """
        n = len(self.anchor)
        for start in reversed(range(len(ids))):
            run = list(ids[start : start + n])
            if run == self.anchor:
                return start + 1
        raise ParameterError(
            f"the text does not hold the tokens {self.anchor}, after which the scorer expects "
            "the answer; use the chat template that it was trained with"
        )

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
        # with LongRoPE the longest text of a batch decides how all are read
        size = 1 if borders_of(self.model.config) else self.batch
        for at in range(0, len(sequences), size):
            batch, kept = (part[at : at + size] for part in (sequences, counts))
            ids, mask = padded(batch, self.model.device)
            hidden, _ = forward(
                self.model,
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions_of(mask),
                logits_to_keep=max(kept),
            )
            for row, sequence, count in zip(hidden, batch, kept, strict=True):
                states = row[-count:]
                if self.anchor:
                    # from the end: padding is on the left
                    anchor = row[self.anchored(sequence) - 1 - len(sequence)]
                    states = torch.cat([states, anchor.expand_as(states)], dim=-1)
                found.append(states.float())
        return found


@dataclass(frozen=True)
class LMScorer:
    """A cost or reward that a head reads from the last hidden state of a response.

    Attributes
    ----------
    name, sign, unit, digest : str
        See `igcore.scorers.Scorer`.
    backbone : Backbone
        Scorers that are given the same one share its work.
    head : callable
        (R, H) float32 -> (R,) numbers.
    session : Session or None
        The KV cache in use. None scores uncached, the texts of each prompt by themselves: a score
        then does not depend on other prompts, which matters in bfloat16, and anybody can compute
        a reported score again.
    files : dict of str to str
        What it was loaded from, see `igcore.models.pretrained.contents_of`, if it was.
    """

    name: str
    backbone: Backbone
    head: Callable[[torch.Tensor], torch.Tensor]
    sign: str
    digest: str
    unit: str = "points"
    session: Session | None = None
    files: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,); every caller refuses a head with several outputs."""
        with torch.inference_mode():
            if self.session:
                states = self.session.hidden(prompts, responses)
                scores = self.head(states)
            else:  # row by row: a batch may round otherwise
                states = self._uncached_states(prompts, responses)
                scores = torch.cat([self.head(row[None]) for row in states])
        return _numbers(scores, len(prompts)).numpy()

    @property
    def reads_tokens(self) -> bool:
        """Whether one pass gives the score after every token, see `Backbone.reads_tokens`."""
        return self.backbone.reads_tokens

    def token_scores(
        self, prompts: Sequence[str], responses: Sequence[str], since: Sequence[int]
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return the scores after the tokens of each response, from one pass over its text.

        The tokens are those of the encoded text, so that a score is that of the text's first ids.

        Parameters
        ----------
        since : sequence of int
            Characters of each response whose tokens are left out, 0 for none. A token that ends
            after them counts, and so does one that begins in the prompt and ends in the response.

        Returns
        -------
        list of (ends, scores)
            Where the tokens end, in characters of the response, and the scores (k,) there, float64.
            The last is the score of the whole response, also of an empty one. Where it is not
            certain which tokens to leave out, none is, and all ends are that of the response.

        Raises
        ------
        ParameterError
            For a scorer that does not read tokens, and for a text longer than its context.
        """
        if not self.reads_tokens:
            raise ParameterError(
                f"scorer {self.name!r} has no score after every token, because its text does not "
                "end with the response or its tokenizer does not tell where tokens stand; check "
                "the score at the ends of words"
            )
        texts = zip(prompts, responses, since, strict=True)
        asked = [self.backbone.ids_and_ends(*text) for text in texts]
        sequences = [ids for ids, _ in asked]
        counts = [len(ends) for _, ends in asked]
        with torch.inference_mode():
            if self.session:
                states = self.session.states(prompts, sequences, counts)
                scores = self.head(torch.cat(states))
            else:  # row by row: a batch may round otherwise
                states = [self.backbone.states([ids], [len(ends)])[0] for ids, ends in asked]
                scores = torch.cat([self.head(rows) for rows in states])
        split = _numbers(scores, sum(counts)).split(counts)
        return [(ends, part.numpy()) for (_, ends), part in zip(asked, split, strict=True)]

    def _uncached_states(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden states (R, H) of texts; no two prompts share a batch or a cache."""
        groups: dict[str, list[str]] = {}
        for prompt, response in zip(prompts, responses, strict=True):
            groups.setdefault(prompt, []).append(response)
        states = {prompt: iter(self._states(prompt, texts)) for prompt, texts in groups.items()}
        return torch.stack([next(states[prompt]) for prompt in prompts])

    def _states(self, prompt: str, responses: list[str]) -> torch.Tensor:
        """Return the hidden states (R, H) of the texts of one prompt."""
        if len(responses) == 1:  # as in the final check, which uses no session
            return self.backbone.encode([self.backbone.ids(prompt, *responses)])
        return self.open_cache([prompt]).hidden([prompt] * len(responses), responses)

    def open_cache(self, prompts: Sequence[str]) -> Session:
        """Return a new session of its backbone over a group of prompts."""
        return Session(self.backbone, prompts)

    def with_cache(self, session: Session) -> "LMScorer":
        """Return the same scorer reading through a session of its backbone."""
        if session.backbone is not self.backbone:
            raise ParameterError(f"scorer {self.name!r} needs a session of its own backbone")
        return replace(self, session=session)

    def uncached(self) -> "LMScorer":
        """Return the same scorer outside any session."""
        return replace(self, session=None)


def _numbers(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Return what a head gives as n float64 numbers, (n,), of a head with k outputs (n, k)."""
    return scores.double().reshape(n, -1).squeeze(1).cpu()
