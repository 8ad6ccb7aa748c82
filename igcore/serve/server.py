"""A server of a language model, as the served engine asks it, and what it says of itself."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import PolicyError, unknown_name
from .client import Client, Failed, Request
from .completions import Tokens

ANY = 10**6  # samples
UNLIMITED = 2**31  # tokens of a context that nobody tells
TEXT = "The quick brown fox jumps over 13 lazy dogs"  # read by both tokenizers


class Software(NamedTuple):
    """What is known of a server's software.

    Attributes
    ----------
    name : str
    where, version : str
        A path, and the field of the reply that holds the version.
    samples : int or str
        Samples that a request may ask for, or the field of the same reply that says it.
    completes : str
        The path where it completes prompts.
    """

    name: str
    where: str
    version: str
    samples: int | str
    completes: str = "/v1/completions"


# by what /v1/models says in ``owned_by``
SOFTWARE = {
    "vllm": Software("vLLM", "/version", "version", ANY),
    # its /v1/completions gives no ids of tokens inside a character
    "llamacpp": Software(
        "llama.cpp", "/props", "build_info", "total_slots", completes="/completion"
    ),
}
OTHER = Software("unknown", "", "", 1)


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
        self.vocabulary = UNLIMITED  # number above all ids of the policy's tokenizer

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the replies to requests for completions, see `ask`."""
        return self.ask([Request(self.path, {"model": self.model} | body) for body in bodies])

    def ask(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the replies to requests, in their order.

        Raises
        ------
        PolicyError
            When one of them has no reply that can be used. The others are given up.
        """
        try:
            return self.client.ask(requests)
        except Failed as error:
            raise PolicyError(
                f"the server at {self.url} {error}; then run again, which goes on where this "
                "stopped"
            ) from None


# --- what a server says of itself ----------------------------------------------------------------


def described(server: Server) -> tuple[dict[str, Any], Software, str, int]:
    """Ask a server about its model.

    Returns
    -------
    entry : dict
        What it says about the model.
    software : Software
    version : str
    samples : int
        That one request may ask for.
    """
    models = asked(server, "/v1/models").get("data")
    entries = {}
    for entry in models if isinstance(models, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            others = entry.get("aliases")
            names = [entry["id"], *(others if isinstance(others, list) else [])]
            entries |= {name: entry for name in names if isinstance(name, str)}
    if server.model not in entries:
        raise unknown_name(f"model of the server at {server.url}:", server.model, entries)
    entry = entries[server.model]
    software = SOFTWARE.get(str(entry.get("owned_by")), OTHER)
    facts = asked(server, software.where) if software.where else {}
    version = str(facts.get(software.version, "unknown"))[:100]
    samples = software.samples
    if isinstance(samples, str):
        told = facts.get(samples)
        samples = told if type(told) is int and told > 0 else 1
    return entry, software, version, samples


def asked(server: Server, path: str) -> dict[str, Any]:
    """Return what a server says at a path; ``PolicyError`` unless it is a JSON mapping."""
    (content,) = server.ask([Request(path)])
    try:
        return dict(json.loads(content).items())
    except (ValueError, AttributeError, RecursionError):
        raise PolicyError(
            f"the server at {server.url} does not answer {path} as vLLM and llama.cpp's server "
            "do; correct the address"
        ) from None


def limit_of(server: Server, entry: Mapping[str, Any]) -> int:
    """Return the longest sequence of a model; ``PolicyError`` for one that is no number."""
    limit, meta = entry.get("max_model_len"), entry.get("meta")
    if limit is None:
        limit = (meta.get("n_ctx") if isinstance(meta, dict) else meta) or UNLIMITED
    if type(limit) is int and limit > 0:
        return limit
    raise PolicyError(
        f"the server at {server.url} gives {str(limit)[:50]!r} as the longest sequence of "
        f"{server.model}, which is no whole number above 0; correct the address"
    )


def check_tokenizer(server: Server, tokenizer: Any) -> None:
    """Refuse another tokenizer than the server's, as far as it shows its own."""
    body = {"model": server.model, "prompt": TEXT, "add_special_tokens": False}
    llama = {"content": TEXT, "add_special": False}
    try:
        (reply,) = server.client.ask([Request("/tokenize", llama | body)])
        theirs = Tokens.model_validate_json(reply).tokens
    except (Failed, ValueError):  # not every server has this
        return
    ours = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    # in characters: a token of a space, or a cut elsewhere, makes no other tokenizer
    read, meant = ("".join(tokenizer.decode(ids).split()) for ids in (theirs, ours))
    if read != meant:
        raise PolicyError(
            f"the server at {server.url} has another tokenizer than the policy: its tokens of "
            f"{TEXT!r} are {read[:50]!r} here; give the tokenizer of the model that it serves"
        )
