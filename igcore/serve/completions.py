"""Requests for completions and their replies, as vLLM and llama.cpp's server write them.

A request holds the names of both; each reads its own. Their replies have two forms.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

# the policy's own distribution, whatever a server's or a model's defaults are
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "samplers": ["temperature"],  # llama.cpp's
    "return_tokens": True,  # llama.cpp
    "return_token_ids": True,  # vLLM
    "return_tokens_as_token_ids": True,  # vLLM: names the most probable tokens by their ids
}
ROUNDING = 1e-4  # nats by which the logarithm of a probability may lie above 0
NAMED = re.compile(r"token_id:(\d+)")  # such a name


def request_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the policy's own sampling, and llama.cpp's names beside OpenAI's."""
    llama = {"n_predict": body["max_tokens"], "n_cmpl": body["n"], "n_probs": body["logprobs"]}
    return SAMPLING | llama | body


# --- replies --------------------------------------------------------------------------------------

Token = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False)]


class Reply(BaseModel):
    """A part of a reply: no number in quotes, no true or 1.0 for 1."""

    model_config = ConfigDict(strict=True)


class Ranked(Reply):
    """A token with its reference log-probability (nats)."""

    id: Token
    logprob: LogProb


class Said(Ranked):
    """A token of a sample as llama.cpp describes it."""

    top_logprobs: list[Ranked] = []


class LogProbs(Reply):
    """The log-probabilities of a sample, as vLLM gives them."""

    token_logprobs: list[LogProb]
    top_logprobs: list[dict[str, LogProb] | None] | None = None


class Choice(Reply):
    """One sample of vLLM."""

    index: int
    logprobs: LogProbs
    token_ids: list[Token]

    @property
    def sample(self) -> tuple[list[int], list[float]]:
        """Its tokens and their log-probabilities; ``ValueError`` where the two do not match."""
        log_p = self.logprobs.token_logprobs
        if len(self.token_ids) != len(log_p):
            raise ValueError("tokens and log-probabilities differ in number")
        return self.token_ids, [min(x, 0.0) for x in log_p]

    @property
    def most_probable(self) -> list[tuple[int, float]]:
        """The first tokens that are told by their ids, with their log-probabilities."""
        first = (self.logprobs.top_logprobs or [None])[0] or {}
        names = [NAMED.fullmatch(name) for name in first]
        named = zip(names, first.values(), strict=True)
        return [(int(name[1]), log_p) for name, log_p in named if name]


class Told(Reply):
    """One sample of llama.cpp's server.

    Its OpenAI-compatible route leaves out the tokens inside a character, this one only their
    probabilities.
    """

    index: int
    tokens: list[Token]
    completion_probabilities: list[Said]

    @property
    def sample(self) -> tuple[list[int], list[float]]:
        """Its tokens and their log-probabilities, all NaN where one of them is missing."""
        said = self.completion_probabilities
        if [token.id for token in said] != self.tokens:
            return self.tokens, [math.nan] * len(self.tokens)
        return self.tokens, [min(token.logprob, 0.0) for token in said]

    @property
    def most_probable(self) -> list[tuple[int, float]]:
        """The most probable first tokens, with their log-probabilities."""
        first = self.completion_probabilities[:1]
        return [(top.id, top.logprob) for token in first for top in token.top_logprobs]


class Completion(Reply):
    """A reply to a request for samples, as far as it is read here."""

    choices: list[Choice]


class Tokens(Reply):
    """A reply to a text that is to be cut into tokens."""

    tokens: list[Token]


# llama.cpp's server gives a sample alone, or a list of several
REPLIES = TypeAdapter(Completion | list[Told] | Told)


def samples_in(content: bytes) -> Sequence[Choice | Told]:
    """Return the samples of a reply, in its order; ``ValueError`` for any other content."""
    found = REPLIES.validate_json(content)
    if isinstance(found, Completion):
        return found.choices
    return [found] if isinstance(found, Told) else found
