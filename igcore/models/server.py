"""A server of a language model, as the served engine asks it."""

from collections.abc import Sequence
from typing import Any

from ..errors import PolicyError
from .client import Client, Failed, Request


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
