"""The output of the benchmark: a table, and the comparisons."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.measure import Case
from igcore.files import replace_file
from igstudy.report import tables

CACHED = ("B", "sample dynamic")  # runs that hold a KV cache for as long as ours do
COMPARED = ["first / second", "first, CPU s / prompt", "second", "ratio", "ratio of KV cache bytes"]


def compared(table: pd.DataFrame, ratios: Sequence[tuple[str, Case, Case]]) -> pd.DataFrame:
    """Return each comparison: both CPU seconds per prompt, their ratio, and that of KV cache bytes.

    The latter is given only if both cases have a KV cache.
    """
    seconds, kv_bytes = table["cpu_s_per_prompt"], table["kv_bytes"]
    rows = []
    for label, first, second in ratios:
        a, b = repr(first), repr(second)
        if a in table.index and b in table.index:
            memory = kv_bytes[a] / kv_bytes[b] if first.run in CACHED else None
            rows.append((label, seconds[a], seconds[b], memory))
    text, first, second, _, memory = COMPARED
    result = pd.DataFrame(rows, columns=[text, first, second, memory])
    result["ratio"] = result[first] / result[second]
    return result[COMPARED].astype(dict.fromkeys(COMPARED[1:], float))


def readable_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return seven columns of the table; the CSV file has all."""
    cells = table.astype(str)
    size = cells["prompts"] + " × " + cells["prompt_tokens"] + " tokens, N = " + cells["n_samples"]
    return pd.DataFrame(
        {
            "variant": table["variant"],
            "prompts": size + ", " + cells["new_tokens"] + " new",
            "dtype": table["dtype"],
            "CPU s / prompt": table["cpu_s_per_prompt"],
            "s / prompt": table["wall_s_per_prompt"],
            "tokens / s": table["tokens_per_s"],
            "forward tokens": table["forward_tokens"],
        }
    )


def write(
    table: pd.DataFrame,
    ratios: Sequence[tuple[str, Case, Case]],
    processor: str,
    notes: Sequence[str],
    out: Path,
) -> list[Path]:
    """Write ``tables/bench.csv`` and ``.md``, and ``tables/bench_ratios.md``.

    The Markdown ends with the processor and the notes.
    """
    bullets = "".join(f"* {note}\n" for note in (f"measured on {processor}", *notes))
    pairs = compared(table, ratios)
    pairs = pairs.astype(object).where(pairs.notna(), None)
    texts = {
        "bench.csv": table.to_csv(index=False, float_format="%.6g", lineterminator="\n"),
        "bench.md": tables.markdown(readable_columns(table)) + "\n" + bullets,
        "bench_ratios.md": pairs.to_markdown(index=False, floatfmt=".2f") + "\n\n" + bullets,
    }
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_file(folder / name, text)
    return [folder / name for name in texts]
