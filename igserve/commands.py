"""The command line: ``igserve serve``, ``igserve batch`` and ``igserve verify-receipt``."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from igcore.errors import IgcoreError, ParameterError
from igcore.models.prompts import file_texts
from igcore.streaming import LATE, shows_parts

from .client import is_local, url_of
from .recipe import guard_of, read_recipe
from .trust import add_allow_option

ERRORS = 3  # exit code: a receipt does not hold
KEY = "IGSERVE_KEY"  # the environment variable with the key of a server


def add_guard_options(parser: argparse.ArgumentParser) -> None:
    """Add the recipe of a guard, and the modules that it may name."""
    about = "the recipe of a guard: policy, cost, budget and any setting of the search"
    parser.add_argument("--guard", type=Path, required=True, metavar="guard.yaml", help=about)
    add_allow_option(parser)


def serve(guard: Path, allow: Sequence[str], host: str, port: int, **given: Any) -> int:
    """Serve a guard behind OpenAI's interface."""
    from .serve import Service, Terms, listen, server_of  # here: a batch needs no server

    key = os.environ.get(KEY, "").strip()
    if not key and not is_local(url_of(host)):
        raise ParameterError(
            f"host is {host}, where others reach the server; put a key into the environment "
            f"variable {KEY}, or leave --host out"
        )
    recipe = read_recipe(guard, allow)
    given["name"] = given["name"] or Path(recipe.policy.name).name or "guarded"
    terms = Terms(key=key, **given)
    with listen(host, port) as own:  # before a policy is loaded, which may take minutes
        service = Service(guard_of(recipe, guard.parent), terms)
        address = f"{url_of(host)}:{own.getsockname()[1]}/v1"
        print(f"igserve answers at {address} as {given['name']!r}", flush=True)
        if not shows_parts(service.guard):
            print(LATE.format(service.guard.method), flush=True)
        server_of(service, host).run(sockets=[own])
    return 0


def batch(guard: Path, allow: Sequence[str], rows: Path, out: Path, shard: str, column: str) -> int:
    """Guard a file of prompts, and print a summary."""
    from . import batch as own  # here: a server needs no tables

    i, n = own.shard_of(shard)
    path = own.path_of(out, i, n)
    recipe = read_recipe(guard, allow)
    prompts = own.part_of(file_texts(rows, column), recipe.group_size, i, n)
    print(own.run(guard_of(recipe, guard.parent), prompts, path))
    return 0


def verify_receipt(guard: Path, allow: Sequence[str], answers: Path, set_name: str) -> int:
    """Check answers by their receipts, and print a line for each that does not hold."""
    from . import verify_receipt as own

    recipe = read_recipe(guard, allow)
    claims = list(own.claims_in(answers))
    mine, problems = guard_of(recipe, guard.parent), []
    for where, claim in claims:
        problems.append(own.problem_of(claim, mine, set_name))
        if problems[-1]:
            print(f"{where} does not hold: {problems[-1]}", flush=True)
    print(own.report(problems))
    return ERRORS if any(problems) or not problems else 0


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
    own.add_argument("--name", help="of the model; by default the last part of the policy's")
    own.add_argument("--waiting", type=int, default=64, help="requests that may wait; 503 beyond")
    own.add_argument("--seconds", type=float, default=300.0, help="for a request, waiting included")
    own.add_argument("--body-bytes", type=int, default=1_000_000, help="of a request")
    about = "a web page that may ask from a browser, such as http://localhost:3000"
    own.add_argument("--origin", action="append", dest="origins", default=[], help=about)
    about = "guard a file of prompts; goes on after a stop"
    own = commands.add_parser("batch", help=about, description=f"{about}.")
    own.set_defaults(run=batch)
    about = "a table of prompts: .jsonl, .csv, .tsv, .parquet, ..., or .txt with one in each line"
    own.add_argument("rows", type=Path, metavar="IN", help=about)
    own.add_argument("out", type=Path, metavar="OUT", help="JSON lines, in the order of IN")
    add_guard_options(own)
    about = "i/n: part i of n, in a file of its own that is named after OUT"
    own.add_argument("--shard", default="1/1", metavar="i/n", help=about)
    own.add_argument("--column", default="prompt", help="of the prompts in the table")
    about = "check answers by their receipts with a guard of your own"
    own = commands.add_parser("verify-receipt", help=about, description=f"{about}.")
    own.set_defaults(run=verify_receipt)
    about = "JSON lines of guard.map or igserve batch, or with request and response"
    own.add_argument("answers", type=Path, metavar="ANSWERS", help=about)
    add_guard_options(own)
    about = "the name of the prompt set, which decides the samples; by default that of a bare text"
    own.add_argument("--set", dest="set_name", default="user", metavar="NAME", help=about)
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
