"""papermill as the Snakefile calls it: ``python -m igcore.runs.walk NOTEBOOK OUTPUT ...``.

It blocks one import that no notebook needs: where the package rfc3987_syntax is installed,
jsonschema builds a grammar of international addresses with it, which costs every job a second.
"""

import sys

if __name__ == "__main__":
    sys.modules["rfc3987_syntax"] = None  # as if it were not installed
    from papermill.__main__ import papermill

    papermill()
