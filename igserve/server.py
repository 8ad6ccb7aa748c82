"""A server of a language model: its description, requests for completions, and replies.

A request for completions has the parameter names of both vLLM and llama.cpp's server; each ignores
those of the other. The models of replies accept the field names of both.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, Field, TypeAdapter

from igcore.errors import PolicyError, unknown_name

from .client import Client, Failed, Request

UNLIMITED = 2**31  # tokens
TEXT = "The quick brown fox jumps over 13 lazy dogs"  # both tokenizers read it
# beside temperature, top_p and top_k: override all other defaults of server and model, and return
# token ids with the log-probabilities of the model itself
SAMPLING = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "samplers": ["temperature", "top_k", "top_p"],  # llama.cpp, in this order
    "logprobs": 1,
    "n_probs": 1,  # llama.cpp
    "return_tokens": True,  # llama.cpp
    "return_token_ids": True,  # vLLM
}
CERTAIN = -1e-6  # nats; no next token of TEXT is so likely
ROUNDING = 1e-4  # nats by which rounding may raise a log-probability above 0

# ``owned_by`` in /v1/models -> name, path of its version, path of completions, own parameters
SOFTWARE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # a server with a watermark, from 0.30 on, marks every text that does not opt out. Its key then
    # takes part in the choice of tokens: they are not the policy's samples
    "vllm": ("vLLM", "/version", "/v1/completions", {"watermarking": False}),
    # its /v1/completions leaves out the ids of tokens inside a character
    "llamacpp": ("llama.cpp", "/props", "/completion", {}),
}


class Server:
    """A model on a server.

    Parameters
    ----------
    client : Client
        Sends the requests; its address is without ``/v1``.
    model : str
        Its name on the server.

    Attributes
    ----------
    samples : int
        Most samples of one request.
    path : str
        Path of completions.
    own : dict
        Parameters of completions that only its software knows.
    """

    def __init__(self, client: Client, model: str):
        self.client, self.model = client, model
        # until `describe` knows them
        self.samples, self.path, self.own = 1, "/v1/completions", dict[str, Any]()
        self.url = client.url
        self.vocabulary = UNLIMITED  # one more than the highest id of the policy's tokenizer
        self.text = [1]  # the ids of TEXT
        self.checked = False  # whether its log-probabilities are known to be the model's own

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the replies to requests for completions, see `send`."""
        same = {"model": self.model, **self.own}
        return self.send([Request(self.path, same | body) for body in bodies])

    def send(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the replies to requests, in their order.

        Raises
        ------
        PolicyError
            When a request fails.
        """
        found: dict[int, Any] = dict(self.client.replies(requests))
        for reply in found.values():
            if isinstance(reply, Failed):
                raise PolicyError(
                    f"the server at {self.url} {reply}; then run again, which continues where "
                    "this run stopped"
                )
        return [found[place] for place in range(len(requests))]


# --- the server's description ---------------------------------------------------------------------

Positive = Annotated[int, Field(gt=0)]


class Reply(BaseModel, strict=True):
    """A part of a reply; strict, so that "1", true and 1.0 are no integers."""


Form = TypeVar("Form", bound=Reply)


class Entry(Reply):
    """A model in /v1/models; `limit` is its longest sequence, in tokens."""

    id: str
    owned_by: str = ""
    root: str | None = None
    meta: dict[str, Any] | None = None  # llama.cpp
    limit: Positive | None = Field(
        None, validation_alias=AliasChoices("max_model_len", AliasPath("meta", "n_ctx"))
    )


class Models(Reply):
    """The models of a server."""

    data: list[Entry]


class Facts(Reply):
    """Version and limits of a server's software."""

    version: str = Field(
        "unknown", max_length=100, validation_alias=AliasChoices("version", "build_info")
    )
    total_slots: Positive = 10**6  # most samples of one request


class Tokens(Reply):
    """A reply of /tokenize."""

    tokens: list[int]


def describe(server: Server) -> tuple[Entry, str, str]:
    """Return a server's model, software and version; record its request format."""
    entries = {entry.id: entry for entry in fetch_json(server, Request("/v1/models"), Models).data}
    if server.model not in entries:
        raise unknown_name(f"model of the server at {server.url}:", server.model, entries)
    entry = entries[server.model]
    if entry.owned_by not in SOFTWARE:
        raise PolicyError(
            f"the server at {server.url} is neither vLLM nor llama.cpp's server; serve the model "
            "with one of them"
        )
    software, where, server.path, server.own = SOFTWARE[entry.owned_by]
    facts = fetch_json(server, Request(where), Facts)
    server.samples = facts.total_slots
    return entry, software, facts.version


def fetch_json(server: Server, request: Request, form: type[Form]) -> Form:
    """Return a server's reply to a request; raise ``PolicyError`` if it is malformed."""
    (content,) = server.send([request])
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
    theirs = fetch_json(server, Request("/tokenize", llama | body), Tokens).tokens
    ours = server.text = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    # compared as text without spaces: a leading space or another split is no other tokenizer
    read, meant = ("".join(tokenizer.decode(ids).split()) for ids in (theirs, ours))
    if read != meant:
        raise PolicyError(
            f"the server at {server.url} has another tokenizer than the policy: its tokens of "
            f"{TEXT!r} decode to {read[:50]!r} with the policy's; give the tokenizer of the served "
            "model"
        )


# --- completions ----------------------------------------------------------------------------------


def number_in(part: Any) -> Any:
    """Return a token's log-probability, which llama.cpp's server wraps in a mapping."""
    return part.get("logprob") if isinstance(part, dict) else part


Token = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False), BeforeValidator(number_in)]


class Sample(Reply):
    """One sample.

    llama.cpp's server omits the log-probabilities of tokens inside a character.
    """

    index: int
    tokens: list[Token] = Field(validation_alias=AliasChoices("token_ids", "tokens"))
    log_probs: list[LogProb] = Field(
        validation_alias=AliasChoices(
            AliasPath("logprobs", "token_logprobs"), "completion_probabilities"
        )
    )

    @property
    def log_p(self) -> list[float]:
        """The log-probabilities of its tokens; all are NaN if one is missing."""
        if len(self.log_probs) != len(self.tokens):
            return [math.nan] * len(self.tokens)
        return [min(x, 0.0) for x in self.log_probs]


class Completion(Reply):
    """The samples in a reply of vLLM."""

    choices: list[Sample]


# llama.cpp's server returns one sample, or a list of several
REPLIES: TypeAdapter[Any] = TypeAdapter(Completion | list[Sample] | Sample)


def samples_in(content: bytes) -> list[Sample]:
    """Return the samples of a reply, in its order; raise ``ValueError`` if it is malformed."""
    found = REPLIES.validate_json(content)
    samples: list[Any] = found.choices if isinstance(found, Completion) else found
    return samples if isinstance(samples, list) else [samples]
