"""Scores read from a language model's last hidden state.

Within one group of prompts a `Session` keeps a KV cache, so that a longer text costs only its new
tokens: its ids are compared with the cached ones, and what follows the longest common prefix is
encoded. Scorers on one `Backbone` share its session::

    backbone = Backbone(model, tokenizer)
    cost = LMScorer("my-cost", backbone, cost_head, "higher is worse", digest="v1")
    reward = LMScorer("my-reward", backbone, reward_head, "higher is better", digest="v1")

A scorer outside a session is an uncached scorer. The final check of an answer uses one, so that
what is emitted does not rest on a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import NamedTuple

import numpy as np
import torch

from ..engine.kv_cache import forward, padded, positions_of
from ..engine.prefix_cache import SharedRows, fits
from ..errors import ParameterError
from ..policy import neutral

# short responses: what the ids of all of them share is the prompt's
OPENINGS = ("", "a", " a", "\n", "9", ".")


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
    `igcore.policy.neutral`.

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
        """Keep the model in evaluation mode and without its head."""
        self.model = getattr(model, "base_model", model).eval()
        self.tokenizer = tokenizer
        self.template = template
        self.special = special
        self.end_id = end_id
        self.anchor = list(anchor)

    def ids(self, prompt: str, response: str) -> list[int]:
        """Return the ids of one text; raise ``ParameterError`` when they exceed the context."""
        parts = [neutral(self.tokenizer, part) for part in (prompt, response)]
        text = self.template(*parts)
        ids = list(self.tokenizer(text, add_special_tokens=self.special)["input_ids"])
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
        parts = []
        for at in range(0, len(sequences), self.batch):
            batch = sequences[at : at + self.batch]
            ids, mask = padded(batch, self.model.device)
            hidden, _ = forward(
                self.model,
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions_of(mask),
                logits_to_keep=1,
            )
            states = hidden[:, -1]
            if self.anchor:
                # from the end: padding is on the left
                back = [self.anchored(sequence) - 1 - len(sequence) for sequence in batch]
                anchors = hidden[range(len(batch)), back]
                states = torch.cat([states, anchors], dim=-1)
            parts.append(states.float())
        return torch.cat(parts)


class Text(NamedTuple):
    """A text that begins with the cached prefix of its prompt."""

    prompt: str
    ids: list[int]  # after the prefix


@dataclass
class Known:
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
        self.known: dict[str, list[Known]] = {}
        if fits(backbone.model) and all(self.prefixes.values()):
            prefixes = list(self.prefixes.values())
            self.root = SharedRows.open(backbone.model, prefixes)
            self.encoded = sum(map(len, prefixes))
            self._forget()

    def hidden(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden state of the last token of each text, (R, H) float32."""
        texts: list[Text | None] = []
        whole: list[list[int]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = self.backbone.ids(prompt, response)
            text = self._after_prefix(prompt, ids)
            texts.append(text)
            if text is None:
                whole.append(ids)
        self.encoded += sum(map(len, whole))
        of_whole = iter(self.backbone.encode(whole) if whole else ())
        of_others = iter(self._read_on([text for text in texts if text]))
        return torch.stack([next(of_others if text else of_whole) for text in texts])

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Free all of the cache but what longer texts that begin with these can use."""
        kept: list[tuple[str, Known]] = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = self.backbone.ids(prompt, response)
            text = self._after_prefix(prompt, ids)
            if text:
                kept.append((prompt, self._nearest(text)))
        self._forget()
        if kept:
            rows = self.root.gather([known.place for _, known in kept])
            for row, (prompt, known) in enumerate(kept):
                self.known[prompt].append(Known(known.ids, (rows, row)))

    def _forget(self) -> None:
        """Know nothing but the prompts' prefixes."""
        for row, prompt in enumerate(self.prefixes):
            self.known[prompt] = [Known([], (self.root, row))]

    def _after_prefix(self, prompt: str, ids: list[int]) -> Text | None:
        """Return what follows the cached prefix of a prompt, or None where another text begins."""
        prefix = self.prefixes.get(prompt)
        if self.root is None or prefix is None or ids[: len(prefix)] != prefix:
            return None
        return Text(prompt, ids[len(prefix) :])

    def _nearest(self, text: Text) -> Known:
        """Return the known text that shares most tokens."""

        def shared(known: Known) -> int:
            """Return how many."""
            return known.shared(text.ids)

        return max(self.known[text.prompt], key=shared)

    def _read_on(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """Return the hidden states of texts whose prefixes are cached, encoding only new tokens."""
        new = []
        for text in texts:
            shared = self._nearest(text).shared(text.ids)
            if shared < len(text.ids):
                new.append(text)
        if new:
            self._encode(_longest(new))
        states = []
        for text in texts:
            rows, row = self._nearest(text).place
            state = rows.last_hidden(row, len(text.ids)).float()
            if self.backbone.anchor:
                # where the prefix ends
                root, row = self.known[text.prompt][0].place
                state = torch.cat([state, root.last_hidden(row, 0).float()])
            states.append(state)
        return states

    def _encode(self, texts: Sequence[Text]) -> None:
        """Encode what texts add to their nearest known text, and keep their cache."""
        nearest = [self._nearest(text) for text in texts]
        longest = max(len(text.ids) for text in texts)
        longest_known = max(len(known.ids) for known in nearest)
        room = max(0, longest - longest_known)
        rows = self.root.gather([known.place for known in nearest], room)
        new = []
        for row, (text, known) in enumerate(zip(texts, nearest, strict=True)):
            shared = known.shared(text.ids)
            rows.lengths[row] = shared  # crop the cache to the shared tokens
            new.append(text.ids[shared:])
        self.encoded += sum(map(len, new))
        rows.extend(new)
        for row, text in enumerate(texts):
            self.known[text.prompt].append(Known(text.ids, (rows, row)))


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
        scores = scores.double().reshape(len(prompts), -1)
        return scores.squeeze(1).cpu().numpy()

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
