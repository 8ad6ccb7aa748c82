"""The output of the benchmark: a table, the notes beside it and the figures."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.measure import COLUMNS, SETTING, Case
from benchmarks.plan import A1, A2, A3, ARGS, ARGS_RIVALS, GENERATE, ITS_HUB, PEERS, B, C
from igcore.figures import style as figures
from igcore.report import tables

OURS, RIVAL = figures.style("inferenceguard")[0], figures.style("base")[0]
CARRIED = ("B", "sample dynamic")  # runs that hold keys and values for as long as ours do
# seconds per prompt of the paper: a 7B policy, 32 samples, 128 tokens, blocks of 64, on an unnamed
# device
PAPER_S = 2.02
PANELS = {  # title -> bars: label, variant, whether it is ours
    "guarded search, two scorers": [
        ("one beam at a time", A1.variant, False),
        ("batched generate", A2.variant, False),
        ("+ batched scoring", A3.variant, False),
        ("igcore, DynamicCache", B.variant, True),
        ("igcore", C.variant, True),
    ],
    "ARGS over 16 tokens, one scorer": [
        ("all encoded again", ARGS_RIVALS[1].variant, False),
        ("whole texts scored", ARGS_RIVALS[0].variant, False),
        ("igcore", ARGS.variant, True),
    ],
    "16 candidates, free reward": [
        ("transformers generate", GENERATE.variant, False),
        ("its_hub Best-of-N", ITS_HUB[0].variant, False),
        ("igcore best-of-n", PEERS[0].variant, True),
        ("its_hub beam search", ITS_HUB[1].variant, False),
        ("igcore beam search", PEERS[1].variant, True),
    ],
}


def with_earlier(table: pd.DataFrame, out: Path) -> pd.DataFrame:
    """Return a table with the rows that it lacks, as an earlier `write` left them in `out`.

    They keep their places.
    """
    path = out / "tables" / "bench.csv"
    if not path.exists():
        return table
    new, old = table.set_index(SETTING), pd.read_csv(path).set_index(SETTING)
    order = old.index.append(new.index.difference(old.index, sort=False))
    both = pd.concat([new, old[~old.index.isin(new.index)]]).loc[order].reset_index()[list(table)]
    return both.fillna({"measured": "at a time that is not recorded"})


def measured(table: pd.DataFrame, case: Case) -> pd.Series | None:
    """Return the row of a case, None where it was not measured."""
    rows = table[(table[SETTING] == [getattr(case, name) for name in SETTING]).all(axis=1)]
    return rows.iloc[0] if len(rows) else None


def ratio_table(table: pd.DataFrame, ratios: Sequence[tuple[str, Case, Case]]) -> pd.DataFrame:
    """Return each comparison: both CPU seconds per prompt, their ratio, and that of KV cache bytes.

    The latter stands only where both cases have a KV cache.
    """
    rows = []
    for text, *pair in ratios:
        a, b = (measured(table, case) for case in pair)
        if a is not None and b is not None:
            text += "" if a.measured == b.measured else ", of two measurements"
            seconds = (a.cpu_s_per_prompt, b.cpu_s_per_prompt)
            rows.append(
                (
                    text,
                    *seconds,
                    seconds[0] / seconds[1],
                    a.kv_bytes / b.kv_bytes if pair[0].run in CARRIED else float("nan"),
                )
            )
    return pd.DataFrame(
        rows, columns=["compared", "first_cpu_s", "second_cpu_s", "ratio", "kv_ratio"]
    )


def summary(table: pd.DataFrame, ratios: Sequence[tuple[str, Case, Case]]) -> str:
    """Return the comparisons as Markdown, and what a 7B model does on a GPU, if one was there."""
    lines = [
        "| first / second | first, CPU s / prompt | second | ratio "
        "| ratio of key and value bytes |",
        "| :-- | --: | --: | --: | --: |",
    ]
    for r in ratio_table(table, ratios).itertuples():
        memory = "" if pd.isna(r.kv_ratio) else f"{r.kv_ratio:.2f}"
        lines.append(
            f"| {r.compared} | {r.first_cpu_s:.2f} | {r.second_cpu_s:.2f} | {r.ratio:.2f} | "
            f"{memory} |"
        )
    seven = table[table["variant"].str.endswith("random 7B")]
    for r in seven.itertuples():
        name = (
            f"paper / {r.variant}, {r.n_samples} samples, {r.prompts} prompts, on {r.device}, "
            f"seconds elapsed"
        )
        lines.append(
            f"| {name} | {PAPER_S} | {r.wall_s_per_prompt:.2f} | "
            f"{PAPER_S / r.wall_s_per_prompt:.2f} | |"
        )
    if seven.empty:
        lines.append(
            f"| paper / random 7B model on a GPU, seconds elapsed | {PAPER_S} | not measured | | |"
        )
    return "\n".join(lines)


def notes(
    table: pd.DataFrame, ratios: Sequence[tuple[str, Case, Case]], skipped: Sequence[str]
) -> list[str]:
    """Return what the table alone does not say, a sentence each."""
    lines = [f"{r.compared}: {r.ratio:.2f}" for r in ratio_table(table, ratios).itertuples()]
    for row in table[table["variant"].str.endswith("random 7B")].itertuples():
        per_second = 1 / row.wall_s_per_prompt
        size = f"{row.n_samples} samples, {row.prompts} prompts"
        lines.append(
            f"{row.variant}, {size}: {per_second:.2f} prompts/s on {row.device}; the paper's "
            f"{PAPER_S} s are {1 / PAPER_S:.2f}"
        )
    padded = [
        f"{row.variant} {row.padding / row.forward_tokens:.1%}"
        for row in table.itertuples()
        if row.padding > 0
    ]
    lines.append(
        f"padding encoded besides, as a share of the forward tokens: {', '.join(padded) or 'none'}"
    )
    lines.append(
        f"repeats, of which the medians are shown: {table['repeats'].min():.0f} to "
        f"{table['repeats'].max():.0f}"
    )
    lines += [
        f"measurement {number}: {when}"
        for number, when in enumerate(table["measured"].unique(), start=1)
    ]
    return [*lines, *skipped]


def write(table: pd.DataFrame, lines: Sequence[str], compared: str, out: Path) -> list[Path]:
    """Write ``tables/bench.csv`` and ``.md``, ``tables/bench_ratios.md`` and the figure.

    The figure, ``bench.png`` and ``bench.pdf``, is left out where there is nothing to draw. Where
    rows are of different measurements, ``bench.md`` numbers these as `notes` does, and the figure
    says so.
    """
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "bench.csv", folder / "bench.md", folder / "bench_ratios.md"]
    tables.replace_file(
        paths[0], table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    )
    shown = table[COLUMNS]
    if _several(table):
        shown = shown.assign(measurement=pd.factorize(table["measured"])[0] + 1)
    text = tables.markdown(shown) + "\n" + "".join(f"* {line}\n" for line in lines)
    tables.replace_file(paths[1], text)
    tables.replace_file(paths[2], compared + "\n")
    return (
        [*paths, *figures.save(picture(table), out / "bench")]
        if any(map(len, _bars(table).values()))
        else paths
    )


def _several(table: pd.DataFrame) -> bool:
    """Say whether the rows are of more than one measurement."""
    return table["measured"].nunique() > 1


def _bars(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return for each panel the CPU seconds per prompt: one row per bar, one column per dtype.

    Few prompts come before many.
    """
    panels = {}
    for title, bars in PANELS.items():
        rows = []
        for label, variant, ours in bars:
            same = table[
                (table["variant"] == variant)
                & (table["prompt_tokens"] == table["prompt_tokens"].min())
            ]
            for many in sorted({count > 2 for count in same["prompts"]}):
                some = same[(same["prompts"] > 2) == many]
                name = f"{label}, {some['prompts'].max()} prompts" if many else label
                rows.append(
                    {"label": name, "ours": ours}
                    | dict(zip(some["dtype"], some["cpu_s_per_prompt"], strict=True))
                )
        panels[title] = pd.DataFrame(rows)
    return panels


@matplotlib.rc_context(figures.RC | {"font.size": 14, "axes.titlesize": 15})
def picture(table: pd.DataFrame) -> Figure:
    """Draw CPU seconds per prompt; short bars are better.

    The panels compare the same search in baselines and in this package, then other libraries.
    """
    panels = {title: bars for title, bars in _bars(table).items() if len(bars)}
    dtypes = [name for name in ("float32", "bfloat16") if name in table["dtype"].unique()]
    counts = [
        sum(bars[dtype].notna().sum() for dtype in dtypes if dtype in bars)
        for bars in panels.values()
    ]
    fig = Figure(figsize=(7.2, 1.5 + sum(0.36 * n + 0.6 for n in counts)), layout="constrained")
    axes = fig.subplots(len(panels), 1, squeeze=False, height_ratios=[n + 1 for n in counts])[:, 0]
    for ax, (title, bars) in zip(axes, panels.items(), strict=True):
        _panel(ax, bars, [dtype for dtype in dtypes if dtype in bars])
        ax.set_title(title, loc="left")
    apart = "; not all measured together" if _several(table) else ""
    axes[-1].set_xlabel(f"CPU seconds per prompt, one thread{apart}")
    return fig


def _panel(ax, bars: pd.DataFrame, dtypes: list[str]) -> None:
    """Draw one bar per row and dtype that was measured; bfloat16 is hatched and says so."""
    place, ticks = 0.0, []
    for row in bars.itertuples():
        measured = [dtype for dtype in dtypes if pd.notna(getattr(row, dtype))]
        ticks.append(place + (len(measured) - 1) / 2)
        for dtype in measured:
            seconds, half = getattr(row, dtype), dtype == "bfloat16"
            colour = OURS if row.ours else RIVAL
            ax.barh(
                place,
                seconds,
                color="white" if half else colour,
                ec=colour,
                hatch="///" if half else None,
                height=0.8,
            )
            number = f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.1f}"
            ax.text(
                seconds,
                place,
                f" {number}{' bf16' if half else ''}",
                va="center",
                color=figures.INK,
            )
            place += 1
        place += 0.35
    ax.set(yticks=ticks, yticklabels=bars["label"])
    ax.margins(x=0.18)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
