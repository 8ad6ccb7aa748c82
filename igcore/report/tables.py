"""The tables of a run, one row per policy and method, as CSV, Markdown and LaTeX.

`igcore.report.statistics` computes the intervals.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from ..errors import RunError, unknown_name
from . import statistics as metrics
from .as_text import MISSING, NOT_RUN, PRETTY, any_row, main_row
from .sources import sidecar

SETTINGS = "n_samples keep block_size rounds budget accounting lagrange_multiplier seed".split()
CONSTANT = [*SETTINGS, "max_new_tokens", "prompts"]  # what one cell of the table must not mix
# how the names of methods begin; base is of no family
FAMILIES = ("best-of-n", "beam", "args", "re-control", "inferenceguard")
PER_PROMPT = {  # column -> field of a record, of which it is the mean over prompts
    "policy_tokens_per_prompt": "policy_tokens",
    "scorer_calls_per_prompt": "scorer_calls",
    "samples_per_prompt": "samples_drawn",
    "forward_tokens_per_prompt": "forward_tokens",
    "scorer_tokens_per_prompt": "scorer_tokens",
    "generate_seconds_per_prompt": "generate_s",
    "cost_seconds_per_prompt": "cost_s",
    "reward_seconds_per_prompt": "reward_s",
    "critic_seconds_per_prompt": "critic_s",
}
COLUMNS = [
    *("policy", "method", "n_prompts", "safe", "abstained", "unsafe"),
    *("safety_rate", "safety_lower95", "safety_wilson_low", "safety_wilson_high"),
    *("reward_mean", "reward_std", "reward_low", "reward_high", "cost_mean", "peak_cost_mean"),
    "seconds_per_prompt",
    *PER_PROMPT,
    *SETTINGS,
    *("peak_safety_rate", "safety_rate_fail_open", "reward_answered", "n_answered_by_all"),
]
# settings that stay integers where a method lacks them
WHOLE = ["n_samples", "keep", "block_size", "rounds", "seed"]


def by_prompt_set(records: pd.DataFrame) -> pd.DataFrame:
    """Return records with a policy's name for each prompt set that it answered.

    A policy that answered several is called ``vicuna-7b on hex-phi``, one that did not keeps its
    name.
    """
    several = records.groupby("policy")["prompts"].transform("nunique") > 1
    return records.assign(
        policy=records["policy"].where(~several, records["policy"] + " on " + records["prompts"])
    )


def main_table(records: pd.DataFrame, order: Sequence[str] | None = None) -> pd.DataFrame:
    """Return the main table: one row per policy and method, with the columns `COLUMNS`.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``, one per policy, method and prompt. Their order within a cell
        changes nothing.
    order : sequence of str, optional
        Methods in the order of their rows; by default in order of appearance, as the policies
        always are. Without any record each of them has a row with 0 prompts.

    Returns
    -------
    DataFrame
        Rates are shares of ``n_prompts``: ``safety_rate`` of verified-safe texts,
        ``safety_lower95`` its one-sided Clopper-Pearson bound, ``peak_safety_rate`` of answers
        whose peak cost keeps the budget, ``safety_rate_fail_open`` of prompts where the text that
        fail-open would emit keeps it; a missing cost keeps no budget. Reward (higher is better) and
        cost (higher is worse) are means over all emitted texts, ``reward_answered`` over the
        ``n_answered_by_all`` prompts that every method with the largest ``n_prompts`` of the policy
        answered; a method with fewer prompts has no such mean (NaN, 0 prompts) and no say in the
        others'. Work and seconds, whole and by part, are means per prompt, see `work`.

    Raises
    ------
    RunError, ParameterError
        See `cells`.
    """
    found = cells(records, order)
    rows = []
    for policy, method, cell in found:
        rivals = [lines for name, _, lines in found if name == policy]
        shared = _answered_by_all(cell, rivals)
        rows.append({"policy": policy, "method": method} | _row(cell, shared))
    rows = rows or [{"policy": MISSING, "method": method, "n_prompts": 0} for method in order or ()]
    return pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(WHOLE, "Int64"))


def cells(
    records: pd.DataFrame, order: Sequence[str] | None = None
) -> list[tuple[str, str, pd.DataFrame]]:
    """Return policy, method and lines (by prompt) of each row of a table.

    Arguments are as in `main_table`; without a record there is no row.

    Raises
    ------
    RunError
        For an unknown status, a prompt that occurs twice in a cell, or records that do not count
        their work.
    ParameterError
        When a setting is not constant in a cell, or `order` lacks a method.
    """
    metrics.check_records(records, may_be_empty=True)
    for field in PER_PROMPT.values():
        if field not in records:
            raise RunError(
                f"the records have no {field!r}, so they are of an older version; decode "
                f"again with notebook 30_decode"
            )
    methods = list(records["method"].unique())
    order = methods if order is None else list(order)
    for method in methods:
        if method not in order:
            raise unknown_name("method", method, order, hint=" (the methods of order)")
    found = []
    for policy, lines in records.groupby("policy", sort=False):
        for method in sorted(lines["method"].unique(), key=order.index):
            cell = lines[lines["method"] == method].sort_values("prompt_id")
            metrics.check_constant(cell, CONSTANT, f"policy {policy}, method {method}")
            found.append((policy, method, cell))
    return found


def work(cell: pd.DataFrame) -> dict[str, float]:
    """Return what a method spent, in means per prompt.

    ``seconds_per_prompt`` in all, and the columns `PER_PROMPT`.

    Counts end where a search fails; seconds go on until its group is answered. They also hold what
    the counts leave out: the check that marks an answer of a method without a gate, and the search
    for what fail-open would emit.
    """
    seconds = {"seconds_per_prompt": (cell["generate_s"] + cell["score_s"]).mean()}
    return seconds | {column: cell[field].mean() for column, field in PER_PROMPT.items()}


def _answered_by_all(cell: pd.DataFrame, rivals: Sequence[pd.DataFrame]) -> set[str]:
    """Return the prompts on which the reward of a method may be read beside its rivals'.

    None where it has fewer prompts.
    """
    n = max(map(len, rivals))
    answered = [
        set(lines.loc[metrics.answered(lines), "prompt_id"]) for lines in rivals if len(lines) == n
    ]
    return set.intersection(*answered) if len(cell) == n else set()


def _row(cell: pd.DataFrame, shared: set[str]) -> dict:
    """Return the numbers of one policy and method.

    `shared` holds the prompts of `_answered_by_all`.
    """
    n, status = len(cell), cell["status"]
    reward, cost, peak, fail_open = (
        cell[name].astype(float) for name in ("reward", "cost", "peak_cost", "fail_open_cost")
    )
    # an abstention after which nobody searched on leaves the rate unknown
    unknown = ((status == "abstained") & fail_open.isna()).any()
    safe, abstained, unsafe = (int((status == name).sum()) for name in metrics.STATUSES)
    wilson_low, wilson_high = metrics.wilson(safe, n)
    reward_low, reward_high = metrics.bootstrap_mean(reward)
    return {
        "n_prompts": n,
        "safe": safe,
        "abstained": abstained,
        "unsafe": unsafe,
        "safety_rate": safe / n,
        "safety_lower95": metrics.safety_lower(safe, n),
        "safety_wilson_low": wilson_low,
        "safety_wilson_high": wilson_high,
        "reward_mean": reward.mean(),
        "reward_std": reward.std(ddof=1),
        "reward_low": reward_low,
        "reward_high": reward_high,
        "cost_mean": cost.mean(),
        "peak_cost_mean": peak.mean(),
        **work(cell),
        **{name: cell[name].iloc[0] for name in SETTINGS},
        "peak_safety_rate": ((status != "abstained") & (peak <= cell["budget"])).mean(),
        "safety_rate_fail_open": math.nan if unknown else (fail_open <= cell["budget"]).mean(),
        "reward_answered": reward[cell["prompt_id"].isin(shared)].mean(),
        "n_answered_by_all": len(shared),
    }


def summary(records: pd.DataFrame) -> pd.DataFrame:
    """Return what a run did, a row per method: counts by status, reasons, work and seconds.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl`` of one policy.
    """
    rows = []
    for method, cell in records.groupby("method", sort=False):
        reasons = cell.loc[cell["reason"] != "", "reason"].value_counts()
        rows.append(
            {
                "method": method,
                **{status: int((cell["status"] == status).sum()) for status in metrics.STATUSES},
                "reasons": ", ".join(f"{reason} {count}" for reason, count in reasons.items()),
                "rounds per prompt": cell["rounds_used"].mean(),
                "tokens drawn": cell["policy_tokens"].sum(),
                "near_ties": cell["near_ties"].sum(),
                "seconds": (cell["generate_s"] + cell["score_s"]).sum(),
            }
        )
    return pd.DataFrame(rows).round(2)


# --- the same numbers for people ------------------------------------------------------------------

ESCAPES = {character: "\\" + character for character in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"$<$",
    ">": r"$>$",
}
LATEX = str.maketrans(ESCAPES)


def _pretty(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of text; where nothing was run, that is what they say."""
    if list(table.columns) == COLUMNS:
        headers, as_text = list(PRETTY), main_row
    else:
        headers, as_text = [str(name).replace("_", " ") for name in table.columns], any_row
    rows = [as_text(row) for row in table.itertuples(index=False)]
    return headers, rows or [[NOT_RUN, *[""] * (len(headers) - 1)]]


def pretty(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as `markdown` shows it, for a notebook."""
    headers, rows = _pretty(table)
    return pd.DataFrame(rows, columns=headers)


def _alignment(table: pd.DataFrame, headers: list[str]) -> list[str]:
    """Return l for text columns and r for numbers.

    The main table starts with its two columns of text.
    """
    if list(table.columns) == COLUMNS:
        return ["l" if name in ("Policy", "Method") else "r" for name in headers]
    return ["r" if pd.api.types.is_numeric_dtype(dtype) else "l" for dtype in table.dtypes]


def markdown(table: pd.DataFrame) -> str:
    """Return a table as GitHub Markdown, rounded; the main table in its `PRETTY` columns."""
    headers, rows = _pretty(table)
    rules = [{"l": ":--", "r": "--:"}[side] for side in _alignment(table, headers)]
    cells = [
        [cell.replace("|", r"\|").replace("\n", " ") for cell in row]
        for row in (headers, rules, *rows)
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def latex(table: pd.DataFrame) -> str:
    """Return a table as a LaTeX tabular (package booktabs), rounded.

    The main table has its `PRETTY` columns.
    """
    headers, rows = _pretty(table)
    lines = [
        " & ".join(cell.replace("\n", " ").translate(LATEX) for cell in row) + r" \\"
        for row in (headers, *rows)
    ]
    alignment = "".join(_alignment(table, headers))
    top = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", lines[0], r"\midrule"]
    bottom = [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*top, *lines[1:], *bottom]) + "\n"


def write(
    table: pd.DataFrame,
    stem: Path | str,
    sources: Mapping[str, dict],
    short: pd.DataFrame | None = None,
) -> list[Path]:
    """Write a table as ``stem.csv``, ``stem.md`` and ``stem.tex``, its sources as ``stem.json``.

    The first holds every column with full precision; the others are rounded.

    The same table gives the same bytes. Each file is replaced whole or not at all.

    Parameters
    ----------
    sources : mapping
        The runs of which the table was made, see `igcore.report.sources.of_runs`; ``stem.json``
        names them.
    short : DataFrame, optional
        The table as people read it, where `markdown` does not know how.

    Returns
    -------
    list of Path
        In the order above.
    """
    stem, people = Path(stem), table if short is None else short
    stem.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        ".csv": table.to_csv(index=False, lineterminator="\n"),
        ".md": markdown(people),
        ".tex": latex(people),
        ".json": sidecar(sources),
    }
    paths = [stem.with_name(stem.name + suffix) for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        replace_file(path, text)
    return paths


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)
