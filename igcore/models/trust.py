"""What a params file may send to an endpoint, and what of an endpoint's words is shown.

A params file may come from anybody: it chooses only among environment variables that were meant for
a judge, a scorer or the server of a policy.
"""

import os
import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from ..errors import ParameterError

# of the environment variables that a params file may name as the key
JUDGE, SCORER, SERVER = "IGCORE_JUDGE_", "IGCORE_SCORER_", "IGCORE_SERVER_"
# such a variable holds the name of one more, which only who starts the run can set
ALLOWED = "KEY_FROM"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# a client can call these addresses, and they hold nothing that may be a key
NAME = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
PORT = r"(?::[0-6]?[0-9]{1,4})?"
PATH = r"""(?:/[!"$->A-~]{0,1000})?"""  # ASCII without spaces, #, ? and @
ADDRESS = re.compile(rf"https?://({NAME}|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]){PORT}{PATH}")
NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}|.*:.*")  # a host that is no name
LOOPBACK = re.compile(r"localhost|::1|127(\.\d+){3}")
SHOWN = 8  # this many characters of a key in a row are never shown


def is_address(url: str) -> bool:
    """Say whether a client can call this address, and it holds nothing that may be a key."""
    found = ADDRESS.fullmatch(url)
    if found and NUMBERS.fullmatch(host := found[1].strip("[]")):
        try:
            ip_address(host)
        except ValueError:
            return False
    return found is not None


def is_local(url: str) -> bool:
    """Say whether an address is on this computer."""
    return bool(LOOPBACK.fullmatch(urlsplit(url).hostname or ""))


def check_variable(name: str, prefix: str) -> None:
    """Raise ``ParameterError`` unless this environment variable may be sent to an endpoint.

    `prefix` is `JUDGE`, `SCORER` or `SERVER`.
    """
    allowed = prefix + ALLOWED
    if not name.startswith(prefix) and name != os.environ.get(allowed):
        raise ParameterError(
            f"api_key_env names the environment variable {name}, which a params file alone may not "
            f"send away; put the key into {prefix}KEY or another one that begins with {prefix}, or "
            f"allow this one by setting {allowed} to its name"
        )


def without_key(text: str, key: str) -> str:
    """Return the beginning of what an endpoint said, on one line; nothing if it repeats the key."""
    size = min(SHOWN, len(key))
    parts = [key[start : start + size] for start in range(len(key) - size + 1)]
    if key and any(part in text for part in parts):
        return "its words repeat the key"
    return " ".join(text.split())[:200]
