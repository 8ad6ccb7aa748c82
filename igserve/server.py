"""A vLLM server of a language model: its description, requests for completions, and replies."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AliasPath, BaseModel, Field

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
    "logprobs": 1,
    "return_token_ids": True,
    # a server with a watermark, from 0.30 on, marks every text that does not opt out. Its key then
    # takes part in the choice of tokens: they are not the policy's samples
    "watermarking": False,
}
CERTAIN = -1e-6  # nats; no next token of TEXT is so likely
ROUNDING = 1e-4  # nats by which rounding may raise a log-probability above 0


class Server:
    """A model on a server.

    Parameters
    ----------
    client : Client
        Sends the requests; its address is without ``/v1``.
    model : str
        Its name on the server.
    """

    def __init__(self, client: Client, model: str):
        self.client, self.model = client, model
        self.url = client.url
        self.vocabulary = UNLIMITED  # one more than the highest id of the policy's tokenizer
        self.text = [1]  # the ids of TEXT
        self.checked = False  # whether its log-probabilities are known to be the model's own

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the replies to requests for completions, see `send`."""
        same = {"model": self.model}
        return self.send([Request("/v1/completions", same | body) for body in bodies])

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
    limit: Positive | None = Field(None, validation_alias="max_model_len")


class Models(Reply):
    """The models of a server."""

    data: list[Entry]


class Version(Reply):
    """A reply of /version."""

    version: str = Field("unknown", max_length=100)


class Tokens(Reply):
    """A reply of /tokenize."""

    tokens: list[int]


def describe(server: Server) -> tuple[Entry, str]:
    """Return a server's model and version."""
    entries = {entry.id: entry for entry in fetch_json(server, Request("/v1/models"), Models).data}
    if server.model not in entries:
        raise unknown_name(f"model of the server at {server.url}:", server.model, entries)
    entry = entries[server.model]
    if entry.owned_by != "vllm":
        raise PolicyError(f"the server at {server.url} is not vLLM; serve the model with it")
    return entry, fetch_json(server, Request("/version"), Version).version


def fetch_json(server: Server, request: Request, form: type[Form]) -> Form:
    """Return a server's reply to a request; raise ``PolicyError`` if it is malformed."""
    (content,) = server.send([request])
    try:
        return form.model_validate_json(content)
    except ValueError:
        raise PolicyError(
            f"the server at {server.url} does not answer {request.path} as vLLM does; correct the "
            "address"
        ) from None


def check_tokenizer(server: Server, tokenizer: Any) -> None:
    """Raise ``PolicyError`` unless the server's tokenizer reads a text as this one does."""
    body = {"model": server.model, "prompt": TEXT, "add_special_tokens": False}
    theirs = fetch_json(server, Request("/tokenize", body), Tokens).tokens
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


Token = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False)]


class Sample(Reply):
    """One sample: its tokens and their log-probabilities."""

    index: int
    tokens: list[Token] = Field(validation_alias="token_ids")
    log_p: list[LogProb] = Field(validation_alias=AliasPath("logprobs", "token_logprobs"))


class Completion(Reply):
    """The samples of a request, in any order."""

    choices: list[Sample]
