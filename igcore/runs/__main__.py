"""Run the command line of `igcore.runs.cli`: ``python -m igcore.runs``."""

import sys

from .cli import main

sys.exit(main())
