"""A server of a language model: what it says of itself, what it is asked, and its replies.

A request for completions holds the names of vLLM and of llama.cpp's server; each reads its own.
So does the form of a reply.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, Field, TypeAdapter

from ..errors import PolicyError, unknown_name
from .client import Client, Failed, Request

UNLIMITED = 2**31  # tokens
TEXT = "The quick brown fox jumps over 13 lazy dogs"  # read by both tokenizers
# the policy's own distribution, whatever a server's or a model's defaults are, and what is told
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "samplers": ["temperature"],  # llama.cpp
    "logprobs": 1,
    "n_probs": 1,  # llama.cpp
    "return_tokens": True,  # llama.cpp
    "return_token_ids": True,  # vLLM
}
ROUNDING = 1e-4  # nats by which the logarithm of a probability may lie above 0

# by what /v1/models says in ``owned_by``: its name, the path that tells its version, and the path
# where it completes prompts
SOFTWARE = {
    "vllm": ("vLLM", "/version", "/v1/completions"),
    # its /v1/completions gives no ids of tokens inside a character
    "llamacpp": ("llama.cpp", "/props", "/completion"),
}


class Server:
    """Asks a server for completions of a model.

    Parameters
    ----------
    client : Client
        The way there; its address is without ``/v1``.
    model : str
        As the server calls it.
    samples : int
        Samples that one request may ask for.
    path : str
        Where it completes prompts.
    """

    def __init__(
        self, client: Client, model: str, *, samples: int = 1, path: str = "/v1/completions"
    ):
        self.client, self.model, self.samples, self.path = client, model, samples, path
        self.url = client.url
        self.vocabulary = UNLIMITED  # number above all ids of the policy's tokenizer

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the replies to requests for completions, see `ask`."""
        return self.ask([Request(self.path, {"model": self.model} | body) for body in bodies])

    def ask(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the replies to requests, in their order.

        Raises
        ------
        PolicyError
            When one of them has no reply that can be used.
        """
        found: dict[int, Any] = dict(self.client.replies(requests))
        for reply in found.values():
            if isinstance(reply, Failed):
                raise PolicyError(
                    f"the server at {self.url} {reply}; then run again, which goes on where this "
                    "stopped"
                )
        return [found[place] for place in range(len(requests))]


# --- what a server says of itself -----------------------------------------------------------------

Positive = Annotated[int, Field(gt=0)]


class Reply(BaseModel, strict=True):
    """A part of a reply: no number in quotes, no true or 1.0 for 1."""


Form = TypeVar("Form", bound=Reply)


class Entry(Reply):
    """What a server says about a model; `limit` is its longest sequence, in tokens."""

    id: str
    owned_by: str = ""
    root: str | None = None
    meta: dict[str, Any] | None = None  # of llama.cpp
    limit: Positive | None = Field(
        None, validation_alias=AliasChoices("max_model_len", AliasPath("meta", "n_ctx"))
    )


class Models(Reply):
    """What a server says about its models."""

    data: list[Entry]


class Facts(Reply):
    """What a server says about its software."""

    version: str = Field(
        "unknown", max_length=100, validation_alias=AliasChoices("version", "build_info")
    )
    total_slots: Positive = 10**6  # samples that one request may ask for


class Tokens(Reply):
    """A reply to a text that is to be cut into tokens."""

    tokens: list[int]


def described(server: Server) -> tuple[Entry, str, str]:
    """Return a server's model, software and version; record its request format."""
    entries = {entry.id: entry for entry in asked(server, Request("/v1/models"), Models).data}
    if server.model not in entries:
        raise unknown_name(f"model of the server at {server.url}:", server.model, entries)
    entry = entries[server.model]
    if entry.owned_by not in SOFTWARE:
        raise PolicyError(
            f"the server at {server.url} is neither vLLM nor llama.cpp's, whose forms of a reply "
            "are read here; serve the model with one of them"
        )
    software, where, server.path = SOFTWARE[entry.owned_by]
    facts = asked(server, Request(where), Facts)
    server.samples = facts.total_slots
    return entry, software, facts.version


def asked(server: Server, request: Request, form: type[Form]) -> Form:
    """Return a server's reply to a request; raise ``PolicyError`` if it is malformed."""
    (content,) = server.ask([request])
    try:
        return form.model_validate_json(content)
    except ValueError:
        raise PolicyError(
            f"the server at {server.url} does not answer {request.path} as vLLM and llama.cpp's "
            "server do; correct the address"
        ) from None


def check_tokenizer(server: Server, tokenizer: Any) -> None:
    """Raise ``PolicyError`` unless the server's tokenizer reads a text as this one does."""
    body = {"model": server.model, "prompt": TEXT, "add_special_tokens": False}
    llama = {"content": TEXT, "add_special": False}
    theirs = asked(server, Request("/tokenize", llama | body), Tokens).tokens
    ours = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    # in characters: a token of a space, or a cut elsewhere, makes no other tokenizer
    read, meant = ("".join(tokenizer.decode(ids).split()) for ids in (theirs, ours))
    if read != meant:
        raise PolicyError(
            f"the server at {server.url} has another tokenizer than the policy: its tokens of "
            f"{TEXT!r} are {read[:50]!r} here; give the tokenizer of the model that it serves"
        )


# --- completions ----------------------------------------------------------------------------------


def number_in(part: Any) -> Any:
    """Return the log-probability of a token, which llama.cpp's server gives in a mapping."""
    return part.get("logprob") if isinstance(part, dict) else part


Token = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False), BeforeValidator(number_in)]


class Sample(Reply):
    """One sample.

    llama.cpp's server leaves out the log-probabilities of tokens inside a character. Its
    OpenAI-compatible route leaves out these tokens, too.
    """

    index: int
    tokens: list[Token] = Field(validation_alias=AliasChoices("token_ids", "tokens"))
    said: list[LogProb] = Field(
        validation_alias=AliasChoices(
            AliasPath("logprobs", "token_logprobs"), "completion_probabilities"
        )
    )

    @property
    def log_p(self) -> list[float]:
        """The log-probabilities of its tokens, all NaN where one of them is missing."""
        if len(self.said) != len(self.tokens):
            return [math.nan] * len(self.tokens)
        return [min(x, 0.0) for x in self.said]


class Completion(Reply):
    """A reply of vLLM to a request for samples, as far as it is read here."""

    choices: list[Sample]


# llama.cpp's server gives a sample alone, or a list of several
REPLIES: TypeAdapter[Any] = TypeAdapter(Completion | list[Sample] | Sample)


def samples_in(content: bytes) -> list[Sample]:
    """Return the samples of a reply, in its order; ``ValueError`` for any other content."""
    found = REPLIES.validate_json(content)
    samples: list[Any] = found.choices if isinstance(found, Completion) else found
    return samples if isinstance(samples, list) else [samples]
