"""``python -m igcore.runs``: see `igcore.runs.cli`."""

import sys

from .cli import main

sys.exit(main())
