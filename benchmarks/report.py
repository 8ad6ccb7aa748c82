"""The output of the benchmark: a table, the comparisons and the figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from benchmarks import ours
from benchmarks.measure import Case
from igcore.files import replace_file
from igstudy.figures import style
from igstudy.report import tables

OURS, BASELINE = style.style("inferenceguard")[0], style.style("base")[0]
CACHED = ("B", "sample dynamic")  # runs that hold a KV cache for as long as ours do
PANELS = {  # section -> title
    "guarded search": "guarded search, two scorers",
    "plain sampling": "16 candidates, free reward",
    "other sizes": "the same with another size",
}
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
    sections: Mapping[str, Sequence[Case]],
    ratios: Sequence[tuple[str, Case, Case]],
    processor: str,
    notes: Sequence[str],
    out: Path,
) -> list[Path]:
    """Write ``tables/bench.csv`` and ``.md``, ``tables/bench_ratios.md`` and the figure.

    The Markdown ends with the processor and the notes. The figure, ``bench.png`` and ``bench.pdf``,
    is left out where there is nothing to draw.
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
    paths = [folder / name for name in texts]
    bars = _bars(table, sections)
    return [*paths, *style.save(picture(bars, processor), out / "bench")] if bars else paths


def _bars(table: pd.DataFrame, sections: Mapping[str, Sequence[Case]]) -> dict[str, pd.DataFrame]:
    """Return for each panel a row per bar: its label, its colour and the CPU seconds per prompt."""
    panels = {}
    for section, title in PANELS.items():
        rows = []
        for case in sections[section]:
            if repr(case) in table.index:
                label = case.variant
                label += f", {case.prompts} prompts" if case.prompts > 2 else ""
                label += ", bfloat16" if case.dtype == "bfloat16" else ""
                colour = OURS if case.run in ours.VARIANTS else BASELINE
                rows.append((label, colour, table.loc[repr(case), "cpu_s_per_prompt"]))
        if rows:
            panels[title] = pd.DataFrame(rows, columns=["label", "colour", "seconds"])
    return panels


@matplotlib.rc_context(style.RC)
def picture(panels: Mapping[str, pd.DataFrame], processor: str) -> Figure:
    """Draw CPU seconds per prompt; short bars are better.

    The panels compare the same search in baselines and in this package, then plain sampling.
    """
    counts = [len(bars) for bars in panels.values()]
    height = 1.0 + 0.35 * sum(counts) + 0.6 * len(counts)
    fig = Figure(figsize=(style.WIDTH, height), layout="constrained")
    axes = fig.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in counts])[:, 0]
    for ax, (title, bars) in zip(axes, panels.items(), strict=True):
        drawn = ax.barh(bars["label"], bars["seconds"], color=bars["colour"])
        ax.bar_label(drawn, fmt="%.1f", padding=4, color=style.INK)
        ax.set_title(title, loc="left")
        ax.margins(x=0.1)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
    # of the whole figure: the name of a processor is longer than the axes are wide
    fig.supxlabel(f"CPU seconds per prompt, one thread\n{processor}", fontsize="medium")
    return fig
