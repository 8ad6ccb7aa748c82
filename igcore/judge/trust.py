"""What a params file may send to an endpoint, and what of an endpoint's words is shown.

A params file may come from anybody: it chooses only among environment variables that were meant for
a judge.
"""

import os
import re
from ipaddress import IPv6Address
from itertools import groupby
from operator import itemgetter
from urllib.parse import urljoin, urlsplit

from ..errors import ParameterError

PREFIX = "IGCORE_JUDGE_"  # of the environment variables that a params file may name as the key
# holds the name of one more, which only who starts the run can set
ALLOWED = "IGCORE_JUDGE_KEY_FROM"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?|[0-9a-f:.]*:[0-9a-f:.]*")
LONGEST = 2000  # characters of an address
SHOWN = 8  # a run of so many characters of a key is shown nowhere


def check_variable(name: str) -> None:
    """Raise ``ParameterError`` unless the environment variable of this name may be sent away."""
    if not name.startswith(PREFIX) and name != os.environ.get(ALLOWED):
        raise ParameterError(
            f"api_key_env names the environment variable {name}, which a params file alone may not "
            f"send away; put the key into {PREFIX}KEY or another one that begins with {PREFIX}, or "
            f"allow this one by setting {ALLOWED} to its name"
        )


def is_plain(address: str) -> bool:
    """Return whether a client can call an address, and it holds nothing that may be a key."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port  # a port that is none raises
        if "[" in parts.netloc:
            IPv6Address(host)
    except ValueError:
        return False
    readable = address.isascii() and address.isprintable() and len(address) <= LONGEST
    secret = "@" in parts.netloc or parts.query
    return bool(
        readable and not secret and parts.scheme in ("http", "https") and HOST.fullmatch(host)
    )


def host_of(location: str, base_url: str) -> str:
    """Return the host that a redirect points to, and no more of it.

    The rest of an address may hold a key.
    """
    try:
        return urlsplit(urljoin(base_url, location)).hostname or "nowhere"
    except ValueError:
        return "nowhere"


def masked(text: str, key: str) -> str:
    """Return a text with ``***`` for every run of at least `SHOWN` characters of a key.

    A shorter key is hidden as a whole.
    """
    size = min(SHOWN, len(key))
    if not size:
        return text
    hidden = [False] * len(text)
    for start in range(len(text) - size + 1):
        if text[start : start + size] in key:
            hidden[start : start + size] = [True] * size
    shown = []
    for hide, letters in groupby(zip(hidden, text, strict=True), itemgetter(0)):
        shown.append("***" if hide else "".join(letter for _, letter in letters))
    return "".join(shown)
