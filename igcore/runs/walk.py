"""papermill as the Snakefile calls it: ``python -m igcore.runs.walk NOTEBOOK OUTPUT ...``.

It leaves out what no notebook needs: jsonschema builds a grammar of international addresses
whenever it finds the package for it, which takes a second of every job.
"""

import sys

if __name__ == "__main__":
    sys.modules["rfc3987_syntax"] = None  # as if it were not installed
    from papermill.__main__ import papermill

    papermill()
