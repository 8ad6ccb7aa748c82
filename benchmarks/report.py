"""The output of the benchmark: two tables, and what they say in words."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.measure import SPREAD, Case, Pair, ratios, table
from benchmarks.others import VARIANTS as OTHERS
from benchmarks.plan import ENGINE, PRODUCTS
from igcore.files import replace_file


def readable(cases: Sequence[Case], numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the columns for people; the CSV file has all."""
    names = [(case.name, case.size) for case in cases]
    shown = pd.DataFrame(names, columns=["variant", "prompts"])
    for name in SPREAD:
        shown[f"CPU s / prompt, {name}"] = numbers[f"cpu_s_{name}"]
    return shown.assign(**{"tokens / s": numbers["tokens_per_s"]})


def in_words(found: pd.DataFrame) -> str:
    """Return a sentence for each two variants: the least and the largest median ratio.

    Of two that are compared, one is ahead where it is faster in every repeat.
    """
    lines = []
    for (first, second), rows in found.groupby(["first", "second"], sort=False):
        least, most = rows["median"].min(), rows["median"].max()
        text = f"* {first} / {second}: {least:.2f} to {most:.2f}"
        if first in OTHERS:
            ahead, behind = rows["min"] > 1, rows["max"] < 1
            text += f"; {second} is faster at {ahead.sum()} of {len(rows)} sizes"
            for word, which in (("slower", behind), ("neither", ~ahead & ~behind)):
                if which.any():
                    text += f", {word} at {' and at '.join(rows['size'][which])}"
        if (first, second) == (ENGINE, PRODUCTS):
            text += f"; it reaches {100 / most:.0f} to {100 / least:.0f} % of the peak"
        lines.append(text)
    return "\n".join(lines) + "\n"


def write(
    lines: Sequence[dict],
    cases: Sequence[Case],
    pairs: Sequence[Pair],
    notes: Sequence[str],
    out: Path,
) -> list[Path]:
    """Write ``bench`` and ``bench_ratios`` as CSV and Markdown, and ``bench_words.md``.

    The Markdown ends with the notes.
    """
    cases = list(dict.fromkeys(cases))
    numbers, found = table(lines, cases), ratios(lines, pairs)
    shown = {"bench": readable(cases, numbers), "bench_ratios": found}
    bullets = "".join(f"* {note}\n" for note in notes)
    texts = {"bench_words.md": in_words(found)}
    for name, rows in {"bench": numbers, "bench_ratios": found}.items():
        texts[f"{name}.csv"] = rows.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        people = shown[name].to_markdown(index=False, floatfmt=".2f")
        texts[f"{name}.md"] = f"{people}\n\n{bullets}"
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_file(folder / name, text)
    return [folder / name for name in texts]
