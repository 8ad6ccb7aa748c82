"""A client of an endpoint: it follows no redirect, and sends nothing that nobody named.

The judge and the `endpoint` scorer share it. What it may read is bounded by `Bounds`.
"""

import os

from ..errors import IgcoreError, ParameterError, needs
from .bounds import Bounds
from .trust import VARIABLE, check_variable, is_address, is_local

# of a request; the last tells the client what to return
HEADERS = set(
    "host connection accept accept-encoding content-type content-length authorization "
    "x-stainless-raw-response".split()
)


def check_endpoint(field: str, url: str, variable: str, prefix: str) -> None:
    """Raise ``ParameterError`` for an address or the name of a variable that may hold a key itself.

    Parameters
    ----------
    field : str
        The parameter that holds the address.
    variable : str
        Name of the environment variable with the key.
    prefix : str
        With which such names begin.
    """
    if not VARIABLE.fullmatch(variable):
        raise ParameterError(  # without the value, which may be the key
            "parameter api_key_env is no name of an environment variable; give one that "
            f"begins with {prefix}, and put the key there"
        )
    if not is_address(url):
        raise ParameterError(  # without the value, which may hold a key
            f"parameter {field} is no plain http address such as http://localhost:8000/v1; a "
            f"key belongs into the environment variable {variable}"
        )


def key_in(variable: str) -> str:
    """Return the key that an environment variable holds, empty where it is not set."""
    return os.environ.get(variable, "").strip()


def open_client(
    url: str,
    variable: str,
    prefix: str,
    bounds: Bounds,
    retries: int,
    failure: type[IgcoreError],
):
    """Return an ``openai.OpenAI`` for an address that `check_endpoint` has passed.

    Parameters
    ----------
    bounds : Bounds
        Of each request.
    retries : int
        Further attempts that the client makes by itself.
    failure : type
        The error to raise where the variable holds no key; an endpoint on this computer needs none.

    Raises
    ------
    ParameterError
        When the package is missing, or the variable may not be sent to an endpoint.
    """
    check_variable(variable, prefix)
    openai = needs("openai", "judge")
    key = key_in(variable)
    local = is_local(url)
    clean = key.isascii() and key.isprintable()
    if not clean or not (key or local):
        raise failure(
            f"the environment variable {variable} holds no key; put only the key of "
            f"{url} there, without a line break, or any word if it asks for none"
        )
    key = key or "none"

    def strip(request) -> None:
        """Take from a request what the client finds by itself, such as ``OPENAI_ORG_ID``."""
        for name in set(request.headers) - HEADERS:
            del request.headers[name]
        request.headers["authorization"] = f"Bearer {key}"

    http = openai.DefaultHttpxClient(
        trust_env=not local,  # no proxy stands between this computer and itself
        follow_redirects=False,  # prompts go to no host that the params file does not name
        event_hooks={"request": [strip, bounds.begin], "response": [bounds.as_sent]},
    )
    return openai.OpenAI(
        base_url=url,
        api_key=key,
        timeout=bounds.seconds,
        max_retries=retries,
        http_client=http,
    )
