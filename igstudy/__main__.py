"""``python -m igstudy``, see `igstudy.commands`."""

import sys

from .commands import main

sys.exit(main())
