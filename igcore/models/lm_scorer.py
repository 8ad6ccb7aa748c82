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
from itertools import pairwise
from os.path import commonprefix

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
        self.tokenizer, self.template, self.special = tokenizer, template, special
        self.end_id, self.anchor = end_id, list(anchor)

    def ids(self, prompt: str, response: str) -> list[int]:
        """Return the ids of one text; raise ``ParameterError`` when they exceed the context."""
        text = self.template(neutral(self.tokenizer, prompt), neutral(self.tokenizer, response))
        ids = list(self.tokenizer(text, add_special_tokens=self.special)["input_ids"])
        if self.end_id is not None:
            ids.append(self.end_id)
        check_length(len(ids), context_of(self.model))
        return ids or [self.tokenizer.eos_token_id]

    def prefix(self, prompt: str) -> list[int]:
        """Return the ids with which every text of a prompt starts, whatever the response.

        They are fewer than the prompt's own ids, because a tokenizer may merge across the seam.
        """
        ids = list(commonprefix([self.ids(prompt, response) for response in OPENINGS]))
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
        starts = [i for i in range(len(ids)) if list(ids[i : i + n]) == self.anchor]
        if not starts:
            raise ParameterError(
                f"the text does not hold the tokens {self.anchor}, after which the scorer expects "
                "the answer; use the chat template that it was trained with"
            )
        return starts[-1] + 1

    def encode(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the last hidden state of whole sequences, (R, H) float32, in padded batches."""
        parts = []
        for at in range(0, len(sequences), self.batch):
            batch = sequences[at : at + self.batch]
            ids, mask = padded(batch, self.model.device)
            where = {"attention_mask": mask, "position_ids": positions_of(mask)}
            hidden, _ = forward(self.model, input_ids=ids, **where, logits_to_keep=1)
            last = hidden[:, -1]
            if self.anchor:
                # from the end: padding is on the left
                back = [self.anchored(sequence) - 1 - len(sequence) for sequence in batch]
                last = torch.cat([last, hidden[range(len(batch)), back]], dim=-1)
            parts.append(last.float())
        return torch.cat(parts)


@dataclass
class _Known:
    """A text whose KV cache and hidden states a session holds."""

    ids: list[int]  # after the prompt's prefix
    rows: SharedRows
    row: int


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
        self.prompts = list(dict.fromkeys(prompts))
        self.prefixes = {prompt: backbone.prefix(prompt) for prompt in self.prompts}
        self.encoded = 0
        self.root: SharedRows | None = None
        if fits(backbone.model) and all(self.prefixes.values()):
            self.root = SharedRows.open(backbone.model, list(self.prefixes.values()))
            self.encoded = sum(map(len, self.prefixes.values()))
        self.known = {
            prompt: [] if self.root is None else [_Known([], self.root, i)]
            for i, prompt in enumerate(self.prompts)
        }

    def hidden(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden state of the last token of each text, (R, H) float32."""
        ids = [self.backbone.ids(*text) for text in zip(prompts, responses, strict=True)]
        with_cache, whole = [], []
        for i, prompt in enumerate(prompts):
            (with_cache if self._starts_with_prefix(prompt, ids[i]) else whole).append(i)
        states: dict[int, torch.Tensor] = {}
        if whole:
            states |= zip(whole, self.backbone.encode([ids[i] for i in whole]), strict=True)
            self.encoded += sum(len(ids[i]) for i in whole)
        if with_cache:
            texts = [self._after_prefix(prompts[i], ids[i]) for i in with_cache]
            states |= zip(with_cache, self._read_on(texts), strict=True)
        return torch.stack([states[i] for i in range(len(ids))])

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Free all of the cache but what longer texts that begin with these can use."""
        if self.root is None:
            return
        nearest = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = self.backbone.ids(prompt, response)
            if self._starts_with_prefix(prompt, ids):
                known, _ = self._nearest(*self._after_prefix(prompt, ids))
                nearest.append((prompt, known))
        self.known = {prompt: [_Known([], self.root, i)] for i, prompt in enumerate(self.prompts)}
        if not nearest:
            return
        rows = self.root.gather([(known.rows, known.row) for _, known in nearest])
        for row, (prompt, known) in enumerate(nearest):
            self.known[prompt].append(_Known(known.ids, rows, row))

    def _starts_with_prefix(self, prompt: str, ids: list[int]) -> bool:
        """Say whether the cached prefix of a prompt begins these ids."""
        prefix = self.prefixes.get(prompt)
        return self.root is not None and prefix is not None and ids[: len(prefix)] == prefix

    def _after_prefix(self, prompt: str, ids: list[int]) -> tuple[str, list[int]]:
        """Return a prompt, and the ids of a text of it after the cached prefix."""
        return prompt, ids[len(self.prefixes[prompt]) :]

    def _nearest(self, prompt: str, ids: list[int]) -> tuple[_Known, int]:
        """Return the known text that shares most tokens, and how many."""
        shared = [len(commonprefix([known.ids, ids])) for known in self.known[prompt]]
        most = max(shared)
        return self.known[prompt][shared.index(most)], most

    def _read_on(self, texts: Sequence[tuple[str, list[int]]]) -> list[torch.Tensor]:
        """Return the hidden states of texts whose prefixes are cached, encoding only new tokens."""
        new = [text for text in texts if self._nearest(*text)[1] < len(text[1])]
        if new:
            self._encode(_longest(new))
        nearest = [self._nearest(*text) for text in texts]
        last = [known.rows.last_hidden(known.row, shared).float() for known, shared in nearest]
        if not self.backbone.anchor:
            return last
        # where the prefix ends
        at = [self.root.last_hidden(self.prompts.index(prompt), 0).float() for prompt, _ in texts]
        return [torch.cat(pair) for pair in zip(last, at, strict=True)]

    def _encode(self, texts: Sequence[tuple[str, list[int]]]) -> None:
        """Encode what texts add to their nearest known text, and keep their cache."""
        nearest = [self._nearest(*text) for text in texts]
        longest = max(len(ids) for _, ids in texts)
        room = max(0, longest - max(len(known.ids) for known, _ in nearest))
        rows = self.root.gather([(known.rows, known.row) for known, _ in nearest], room)
        rows.lengths = [shared for _, shared in nearest]  # crop the cache to the shared tokens
        new = [ids[n:] for (_, ids), n in zip(texts, rows.lengths, strict=True)]
        self.encoded += sum(map(len, new))
        rows.extend(new)
        for row, (prompt, ids) in enumerate(texts):
            self.known[prompt].append(_Known(ids, rows, row))


def _longest(texts: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Return the (prompt, ids) that no other one begins with, of equal ones one.

    Encoding these caches all of the texts.
    """
    # a text stands right before one that begins with it
    ordered = sorted(texts)
    begins = [
        (prompt, ids) == (other, others[: len(ids)])
        for (prompt, ids), (other, others) in pairwise(ordered)
    ]
    return [text for text, more in zip(ordered, [*begins, False], strict=True) if not more]


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
                scores = self.head(self.session.hidden(prompts, responses))
            else:  # row by row: a batch may round otherwise
                states = self._uncached_states(prompts, responses)
                scores = torch.cat([self.head(row[None]) for row in states])
            return scores.double().reshape(len(prompts), -1).squeeze(1).cpu().numpy()

    def _uncached_states(self, prompts: Sequence[str], responses: Sequence[str]) -> torch.Tensor:
        """Return the hidden states (R, H) of texts; no two prompts share a batch or a cache."""
        states: dict[int, torch.Tensor] = {}
        for prompt in dict.fromkeys(prompts):
            rows = [i for i, other in enumerate(prompts) if other == prompt]
            of_prompt = [responses[i] for i in rows]
            if len(rows) == 1:  # as in the final check, which uses no session
                hidden = self.backbone.encode([self.backbone.ids(prompt, *of_prompt)])
            else:
                hidden = Session(self.backbone, [prompt]).hidden([prompt] * len(rows), of_prompt)
            states |= zip(rows, hidden, strict=True)
        return torch.stack([states[i] for i in range(len(prompts))])

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
