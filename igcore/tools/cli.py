"""The command line: ``igcore fetch`` downloads the embedded models."""

import argparse
import sys

from ..errors import IgcoreError
from ..models.assets import fetched


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="igcore", description="Guard a language model.")
    commands = parser.add_subparsers(required=True)
    about = "download the embedded models and check the hash of every file"
    models = commands.add_parser("fetch", help=about, description=f"{about}.")
    models.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    try:
        for line in fetched(**vars(parser.parse_args(arguments))):
            print(line, flush=True)
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
