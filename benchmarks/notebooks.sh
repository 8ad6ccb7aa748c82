#!/usr/bin/env bash
# Measures how long each notebook takes, and writes figures/tables/notebooks.csv for README's table. A reader takes a minute for
# 200 words or 20 lines of code. Cells are run as they are committed, with the parameters of a short trial, on one core:
#     bash benchmarks/notebooks.sh
set -euo pipefail
times=$(mktemp)
trap 'rm -f "$times"' EXIT
OMP_NUM_THREADS=1 .venv/bin/python -m pytest --quiet --numprocesses 0 --junitxml "$times" notebooks
.venv/bin/python - "$times" > figures/tables/notebooks.csv <<'END'
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
from tests.caps import in_text

print("notebook,words,code_lines,minutes_to_read,minutes_to_run")
timed = list(ElementTree.parse(sys.argv[1]).iter("testcase"))
for path in sorted(Path("notebooks").glob("*.ipynb")):
    text = {"markdown": "", "code": ""}
    for cell in nbformat.read(path, as_version=4).cells:
        text[cell.cell_type] += cell.source + "\n"
    words, lines = len(text["markdown"].split()), in_text(text["code"])
    seconds = sum(float(cell.get("time")) for cell in timed if path.stem in cell.get("classname"))
    print(f"{path.stem},{words},{lines},{words / 200 + lines / 20:.1f},{seconds / 60:.2f}")
END
