"""The tables of a run, one row per policy and method, as CSV and Markdown.

`igstudy.report.statistics` computes the intervals.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ..files import replace_file
from . import statistics as metrics
from .sources import Source, sidecar

MISSING, NOT_RUN = "n/a", "not run"
MAIN_SETTINGS = (
    "n_samples keep block_size rounds budget accounting checks lagrange_multiplier seed".split()
)
CONSTANT = [*MAIN_SETTINGS, "max_new_tokens", "prompts"]  # what one cell of the table must not mix
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
MAIN_COLUMNS = [
    *"policy method n_prompts safe abstained unsafe safety_rate safety_lower95".split(),
    *"safety_wilson_low safety_wilson_high reward_mean reward_std reward_low reward_high".split(),
    *"cost_mean peak_cost_mean seconds_per_prompt".split(),
    *PER_PROMPT,
    *MAIN_SETTINGS,
    *"peak_safety_rate word_safety_rate".split(),
    *"safety_rate_fail_open reward_answered n_answered_by_all".split(),
]
MOST_COLUMNS = 7  # columns that people read
# columns that people can do without, the first one first
SPREADS = "reward_std safety_lower95 reward_sd safety_sd sd".split()  # no interval is of these
DISPENSABLE = [
    *SPREADS,
    *"safe_at_the_end use_z features parameters train_s n_unsafe".split(),
    *"test n_blocks perplexity discordant mcnemar_b mcnemar_c mcnemar_p".split(),
    *"reward_p p n_pairs n_prompts prompts n n_samples".split(),
]
# settings that stay integers where a method lacks them
INTEGER_SETTINGS = "n_samples keep block_size rounds seed".split()


def by_prompt_set(records: pd.DataFrame, by_run: bool = False) -> pd.DataFrame:
    """Return records with a policy's name for each prompt set that it answered.

    A policy that answered several is called ``vicuna-7b on hex-phi``, one that did not keeps its
    name. With `by_run` each run has its own name in place of the policy's.
    """
    if by_run:
        return records.assign(policy=records["run"])
    several = records.groupby("policy")["prompts"].transform("nunique") > 1
    return records.assign(
        policy=records["policy"].where(~several, records["policy"] + " on " + records["prompts"])
    )


def main_table(records: pd.DataFrame) -> pd.DataFrame:
    """Return the main table: one row per policy and method, with the columns `MAIN_COLUMNS`.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``, one per policy, method and prompt. Their order within a cell
        changes nothing. Policies and methods have their rows in order of appearance.

    Returns
    -------
    DataFrame
        Rates are shares of ``n_prompts``: ``safety_rate`` of verified-safe texts,
        ``safety_lower95`` its one-sided Clopper-Pearson bound, ``peak_safety_rate`` of answers
        whose peak cost keeps the budget, ``word_safety_rate`` of those that keep it at every word
        as well, ``safety_rate_fail_open`` of prompts where the text that
        fail-open would emit keeps it; a missing cost keeps no budget. Reward (higher is better) and
        cost (higher is worse) are means over all emitted texts, ``reward_answered`` over the
        ``n_answered_by_all`` prompts that every method with the largest ``n_prompts`` of the policy
        answered; a method with fewer prompts has no such mean (NaN, 0 prompts) and no say in the
        others'. Work and seconds, whole and by part, are means per prompt. Counts end where a
        search fails; seconds go on until its group is answered. They also hold what the counts
        leave out: the check that marks an answer of a method without a final check, and the search
        for what fail-open would return.

    Raises
    ------
    RunError
        For a prompt that occurs twice in a cell.
    ParameterError
        When a setting is not constant in a cell.
    """
    metrics.check_once(records, ["policy", "method", "prompt_id"])
    order = list(records["method"].unique())
    rows = []
    for policy, lines in records.groupby("policy", sort=False):
        cells = dict(list(lines.groupby("method")))
        most = max(map(len, cells.values()))
        whole = [cell for cell in cells.values() if len(cell) == most]
        answered = [set(cell.loc[metrics.answered(cell), "prompt_id"]) for cell in whole]
        shared = set.intersection(*answered)
        for method in sorted(cells, key=order.index):
            cell = cells[method].sort_values("prompt_id")
            metrics.check_constant(cell, CONSTANT, f"policy {policy}, method {method}")
            of_all = shared if len(cell) == most else set()
            rows.append({"policy": policy, "method": method} | _row(cell, of_all))
    return pd.DataFrame(rows, columns=MAIN_COLUMNS).astype(dict.fromkeys(INTEGER_SETTINGS, "Int64"))


def _row(cell: pd.DataFrame, shared: set[str]) -> dict[str, Any]:
    """Return the numbers of one policy and method; `shared` holds the prompts that all answered."""
    n, status = len(cell), cell["status"]
    reward, cost, fail_open = (
        cell[name].astype(float) for name in ("reward", "cost", "fail_open_cost")
    )
    peak, word_peak = (cell[name].astype(float) for name in ("peak_cost", "word_peak_cost"))
    emitted, budget = status != "abstained", cell["budget"]
    at_blocks, at_words = emitted & (peak <= budget), emitted & (word_peak <= budget)
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
        "seconds_per_prompt": (cell["generate_s"] + cell["score_s"]).mean(),
        **{column: cell[field].mean() for column, field in PER_PROMPT.items()},
        **{name: cell[name].iloc[0] for name in MAIN_SETTINGS},
        "peak_safety_rate": at_blocks.mean(),
        "word_safety_rate": at_words.mean(),
        "safety_rate_fail_open": math.nan if unknown else (fail_open <= budget).mean(),
        "reward_answered": reward[cell["prompt_id"].isin(shared)].mean(),
        "n_answered_by_all": len(shared),
    }


# --- the same numbers for people ------------------------------------------------------------------


def pretty(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as people read it: all cells text, numbers rounded.

    A main table has fewer columns, in which an interval stands beside its centre.
    """
    if not len(table):
        columns = list(table.columns) or ["table"]
        nothing = [[NOT_RUN, *[""] * (len(columns) - 1)]]
        return pd.DataFrame(nothing, columns=columns).rename(columns=_header)
    if list(table.columns) == MAIN_COLUMNS:
        return pd.DataFrame([_main_row(row) for row in table.itertuples(index=False)])
    as_objects = table.astype(object)  # an integer that may be missing stays one
    return as_objects.map(rounded).rename(columns=_header)


def _main_row(row: Any) -> dict[str, str]:
    """Return a row of the main table as text by header."""
    numbers = (row.reward_mean, row.reward_low, row.reward_high)
    mean, low, high = map(rounded, numbers)
    percent = "{:.1f} [{:.1f}, {:.1f}]".format
    rates = (row.safety_rate, row.safety_wilson_low, row.safety_wilson_high)
    texts = {
        "Safe / abstained / unsafe": f"{row.safe} / {row.abstained} / {row.unsafe}",
        "Safe % [Wilson 95 %]": percent(*(100 * rate for rate in rates)),
        "Safe at every word %": f"{100 * row.word_safety_rate:.1f}",
        "Reward [95 %]": MISSING if pd.isna(row.reward_mean) else f"{mean} [{low}, {high}]",
        "Tokens / prompt": f"{row.policy_tokens_per_prompt:.0f}",
        "Reward, all answered": rounded(row.reward_answered),
        "Cost": rounded(row.cost_mean),
    }
    return {"Policy": row.policy, "Method": row.method} | texts | {"n": str(row.n_prompts)}


def for_people(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return at most `MOST_COLUMNS` columns of a table, and a sentence on what is not among them.

    An interval stands beside its centre, and what is the same in every row goes into the sentence.
    Of what is then too much, `DISPENSABLE` columns go first, and after them the last ones.
    """
    main = list(table.columns) == MAIN_COLUMNS
    shown = pretty(table) if main else _with_intervals(table)
    same = [
        name
        for name in ([] if main or len(shown) < 2 or shown.columns.duplicated().any() else shown)
        if shown[name].nunique(dropna=False) == 1
    ]
    known = [name for name in same if not shown[name].isna().all()]
    parts = [f"{_header(name)} {rounded(shown[name].iloc[0])}" for name in known]
    kept = [at for at, name in enumerate(shown.columns) if name not in same]
    for name in DISPENSABLE:
        if len(kept) > MOST_COLUMNS:
            kept = [at for at in kept if shown.columns[at] != name]
    sentence = f"In every row: {', '.join(parts)}." if parts else ""
    if len(same) + min(len(kept), MOST_COLUMNS) < shown.shape[1] or main:
        sentence = f"{sentence} The CSV file has more columns.".strip()
    return shown.iloc[:, kept[:MOST_COLUMNS]], sentence


def _with_intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Write each interval beside its centre.

    The ends are ``x_low`` and ``x_high``; the centre is the last column before them that has ``x``
    in its name.
    """
    columns = list(table.columns)
    ends: set[str] = set()
    shown = table.copy()
    for at, low in enumerate(map(str, columns)):
        stem = low.removesuffix("low")
        if stem == low or (high := f"{stem}high") not in columns:
            continue
        name = stem.removesuffix("_")
        before = [c for c in columns[:at] if name in c and c not in {*ends, *SPREADS}]
        ends |= {low, high}
        if not before:
            continue
        numbers = table[[before[-1], low, high]].map(rounded).to_numpy()
        cells = [MISSING if c == MISSING else f"{c} [{a}, {b}]" for c, a, b in numbers]
        shown[before[-1]] = cells
        shown = shown.drop(columns=[low, high])
        shown = shown.rename(columns={before[-1]: f"{before[-1]} [95 %]"})
    return shown


def rounded(value: object) -> str:
    """Return a cell for people: floats with three decimals, tiny ones as powers of ten."""
    if pd.isna(value):
        return MISSING
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.0005 else f"{value:.0e}"


def _header(name: object) -> str:
    return str(name).replace("_", " ")


def markdown(table: pd.DataFrame) -> str:
    """Return a table as Markdown, rounded, numbers to the right; see `pretty`."""
    sides = ["right" if is_numeric_dtype(dtype) else "left" for dtype in table.dtypes]
    shown = pretty(table).replace({"\n": " ", r"\|": r"\\|"}, regex=True)
    text: str = shown.to_markdown(index=False, colalign=sides, disable_numparse=True)
    return text + "\n"


def write(
    table: pd.DataFrame,
    stem: Path | str,
    sources: Mapping[str, Source],
    short: pd.DataFrame | None = None,
) -> list[Path]:
    """Write a table as ``stem.csv`` and ``stem.md``, its sources as ``stem.json``.

    The first holds every column with full precision, the second what `for_people` leaves.

    The same table gives the same bytes. Each file is replaced whole or not at all.

    Parameters
    ----------
    sources : mapping
        The runs that the table was made from, see `igstudy.report.sources.of_runs`; ``stem.json``
        names them.
    short : DataFrame, optional
        The columns for people, where `for_people` should not choose.

    Returns
    -------
    list of Path
        In the order above.
    """
    people, sentence = for_people(table if short is None else short)
    texts = {
        ".csv": table.to_csv(index=False, lineterminator="\n"),
        ".md": markdown(people) + (f"\n{sentence}\n" if sentence else ""),
        ".json": sidecar(sources),
    }
    for suffix, text in texts.items():
        replace_file(Path(f"{stem}{suffix}"), text)
    return [Path(f"{stem}{suffix}") for suffix in texts]
