#!/usr/bin/env bash
# Measures how long each notebook takes, and writes figures/tables/notebooks.csv for README's table. A reader takes a minute for
# 200 words or 20 lines of code. Cells are run as they are committed, each notebook once, on one core:
#     bash benchmarks/notebooks.sh
set -euo pipefail
times=$(mktemp)
trap 'rm -f "$times"' EXIT
OMP_NUM_THREADS=1 .venv/bin/python -m pytest --quiet --numprocesses 0 --junitxml "$times" notebooks
.venv/bin/python - "$times" > figures/tables/notebooks.csv <<'END'
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

def text(notebook, kind):
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind)


print("notebook,words,code_lines,minutes_to_read,minutes_to_run")
timed = list(ElementTree.parse(sys.argv[1]).iter("testcase"))
for path in sorted(Path("notebooks").glob("*.ipynb")):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    words = len(text(notebook, "markdown").split())
    lines = sum(bool(line.strip()) for line in text(notebook, "code").splitlines())
    seconds = sum(float(cell.get("time")) for cell in timed if path.stem in cell.get("classname"))
    print(f"{path.stem},{words},{lines},{words / 200 + lines / 20:.1f},{seconds / 60:.2f}")
END
