"""``python -m igserve`` is the command ``igserve``."""

import sys

from .commands import main

sys.exit(main())
