"""The output of the benchmark: two tables, and what they say in words."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.measure import Case, Pair, ratios, table
from igstudy.files import replace_file


def in_words(found: pd.DataFrame) -> str:
    """Return a sentence for each two variants: the least and the largest median ratio."""
    lines = []
    for (first, second), rows in found.groupby(["first", "second"], sort=False):
        least, most = rows["median"].min(), rows["median"].max()
        lines.append(f"* {first} / {second}: {least:.2f} to {most:.2f}")
    return "\n".join(lines) + "\n"


def write(
    lines: Sequence[dict],
    cases: Sequence[Case],
    pairs: Sequence[Pair],
    notes: Sequence[str],
    out: Path,
) -> list[Path]:
    """Write ``bench.csv``, ``bench_ratios.csv``, and ``bench_words.md``, notes last."""
    folder, found = out / "tables", ratios(lines, pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {"bench": table(lines, cases), "bench_ratios": found}.items():
        text = rows.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        replace_file(folder / f"{name}.csv", text)
    words = in_words(found) + "".join(f"* {note}\n" for note in notes)
    replace_file(folder / "bench_words.md", words)
    return sorted(folder.iterdir())
