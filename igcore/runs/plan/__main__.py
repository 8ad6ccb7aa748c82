"""Print the plan of params files: ``python -m igcore.runs.plan FILE...``."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import IgcoreError, ParameterError, unknown_name
from .estimate import DEVICES, Assumed
from .report import DEVICE, report


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the runs of params files will need. Estimated, not measured; nothing is loaded."""
    default = Assumed(DEVICES[DEVICE])
    parser = argparse.ArgumentParser(prog="python -m igcore.runs.plan", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", default=DEVICE, help=f"one of {', '.join(DEVICES)}")
    parser.add_argument(
        "--efficiency",
        type=float,
        default=default.efficiency,
        help="share of the data sheet's speed",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=default.prompt_tokens,
        help="tokens of a prompt on average, for hours",
    )
    parser.add_argument(
        "--longest-prompt",
        type=int,
        default=default.longest_prompt,
        help="tokens of the longest, for memory",
    )
    options = parser.parse_args(arguments)
    try:
        if options.device not in DEVICES:
            raise unknown_name("device", options.device, DEVICES)
        if not 0 < options.efficiency <= 1:
            raise ParameterError(
                f"efficiency is {options.efficiency}; it must be above 0 and at most 1"
            )
        given = {
            name: getattr(options, name)
            for name in ("efficiency", "prompt_tokens", "longest_prompt")
        }
        print(
            report(
                options.files,
                replace(default, device=DEVICES[options.device], **given),
                options.device,
            )
        )
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
