"""``python -m igstudy``, see `igstudy.runs.cli`."""

import sys

from .runs.cli import main

sys.exit(main())
