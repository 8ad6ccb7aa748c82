"""The command line: ``igserve serve``, ``igserve batch`` and ``igserve verify-receipt``."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from igcore.errors import IgcoreError, ParameterError

from .client import is_local
from .recipe import guard_of, read_recipe
from .trust import add_allow_option

KEY = "IGSERVE_KEY"  # the environment variable with the key of a server


def add_guard_options(parser: argparse.ArgumentParser) -> None:
    """Add the recipe of a guard, and the modules that it may name."""
    about = "the recipe of a guard: policy, cost, budget and any setting of the search"
    parser.add_argument("--guard", type=Path, required=True, metavar="guard.yaml", help=about)
    add_allow_option(parser)


def serve(guard: Path, allow: Sequence[str], host: str, port: int, **given: Any) -> int:
    """Serve a guard behind OpenAI's interface."""
    from .serve import Service, Terms, bound, run  # here: a batch needs no server

    key = os.environ.get(KEY, "").strip()
    if not key and not is_local(f"http://{host}"):
        raise ParameterError(
            f"host is {host}, where others reach the server; put a key into the environment "
            f"variable {KEY}, or leave --host out"
        )
    recipe = read_recipe(guard, allow)
    own = bound(host, port)  # before a policy is loaded, which may take minutes
    given["name"] = given["name"] or recipe.policy.name or "guarded"
    service = Service(guard_of(recipe, guard.parent), Terms(key=key, **given))
    address = f"http://{host}:{own.getsockname()[1]}/v1"
    print(f"igserve answers at {address} as {given['name']!r}", flush=True)
    run(service, own, host)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = argparse.ArgumentParser(prog="igserve", description="Put a guard in front of people.")
    commands = whole.add_subparsers(required=True)
    about = "serve a guard behind OpenAI's interface"
    own = commands.add_parser("serve", help=about, description=f"{about}.")
    own.set_defaults(run=serve)
    add_guard_options(own)
    own.add_argument("--host", default="127.0.0.1", help="by default this computer alone")
    own.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    own.add_argument("--name", help="of the model; by default the policy's")
    own.add_argument("--waiting", type=int, default=64, help="requests that may wait; 503 beyond")
    own.add_argument("--seconds", type=float, default=300.0, help="for a request, waiting included")
    own.add_argument("--body-bytes", type=int, default=1_000_000, help="of a request")
    about = "a web page that may ask from a browser, such as http://localhost:3000"
    own.add_argument("--origin", action="append", dest="origins", default=[], help=about)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status, 1 after one sentence about bad input."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    given = vars(parser().parse_args(arguments))
    run = given.pop("run")
    try:
        return int(run(**given))
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
