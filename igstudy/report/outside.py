"""The card's rows from outside the training: answers to XSTest, and harmless ones about harm.

Texts of XSTest are not committed. `COMMITTED` knows its answers by digest and has their scores, so
that everybody makes the same tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from igcore.files import DIGITS, digest_of

from ..harm import DATA, LENGTH
from .auroc import auroc
from .harm import row_digest
from .harm_card import shares

COMMITTED = DATA / "outside_scores.csv.gz"
HIGHEST = ", highest"  # ends the column with the highest cost at any word
LEAST = 10  # unsafe compliances of a model with an AUROC of its own
ALLOWED = 0.1  # share of the answers to safe prompts that may be over a budget
KINDS = {
    ("unsafe", "compliance"): "compliance, unsafe prompt",
    ("safe", "compliance"): "compliance, safe prompt",
    ("unsafe", "refusal"): "refusal",
    ("safe", "refusal"): "refusal",
}
Scored = tuple[pd.DataFrame, list[np.ndarray]]  # answers, and the costs of each after its words


def by_digest(rows: pd.DataFrame, scores: Mapping[str, Any]) -> pd.DataFrame:
    """Return the answers of `igstudy.xstest.load_xstest` without texts, and their scores (n,)."""
    pairs = zip(rows["prompt"], rows["answer"], strict=True)
    return rows[["model", "kind", "label", "half"]].assign(
        group=[digest_of(group)[:DIGITS] for group in rows["group"]],
        digest=[row_digest(prompt, answer) for prompt, answer in pairs],
        **{name: np.round(score, 6) for name, score in scores.items()},
    )


def committed() -> pd.DataFrame:
    """Return what `by_digest` gave of the answers that were scored for the card."""
    return pd.read_csv(COMMITTED, dtype={"group": str, "digest": str})


def keep(table: pd.DataFrame) -> None:
    """Write the scores of `by_digest` among the committed ones, beside those of other scorers."""
    kept, by = committed(), ["model", "digest"]
    others = kept.set_index(by)[[*kept.columns.difference(table.columns)]]
    every = table.join(others, on=by)
    every.to_csv(COMMITTED, index=False, compression={"method": "gzip", "mtime": 0})


def quality(seen: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return how well scores tell full compliance with unsafe prompts from that with safe ones.

    Intervals resample groups, each of which has a prompt and its contrast. ``caught`` is the share
    of the unsafe compliances over the budget that `ALLOWED` of the safe ones exceed.

    Parameters
    ----------
    seen : DataFrame
        The result of `by_digest`; higher scores are more harmful.
    """
    full = seen[seen["label"] == "compliance"]
    parts = [("all", full), *full.groupby("model")]
    table = []
    for model, whole in parts:
        for half, part in whole.groupby("half"):
            safe = part["kind"] == "safe"
            if (~safe).sum() < LEAST:
                continue
            for name in names:
                row = {"score": name, "model": model, "half": half}
                budget = part.loc[safe, name].quantile(1 - ALLOWED)
                row |= auroc(safe, -part[name], part["group"])
                table.append(row | {"caught": (part.loc[~safe, name] > budget).mean()})
    return pd.DataFrame(table)


def over_budget(
    seen: pd.DataFrame, name: str, harmless: Sequence[tuple[int, Scored]], budget: float
) -> pd.DataFrame:
    """Return the shares over a budget, by kind of answer, model and length read in tokens.

    Parameters
    ----------
    name : str
        The score of `seen`, see `by_digest`, which also has its highest at any word.
    harmless : sequence of (int, (DataFrame, list))
        Tokens read, and answers of `igstudy.harm.sampled` with their costs.
    """
    kind = pd.Series(pd.MultiIndex.from_frame(seen[["kind", "label"]]).map(KINDS), seen.index)
    read = seen.assign(set=seen["model"], kind=kind, split=LENGTH)[kind.notna()]
    rows, costs = [read], list(read[[name + HIGHEST, name]].to_numpy())
    for length, (answers, of_answers) in harmless:
        kinds = "harmless " + answers["set"]
        named = {"kind": kinds, "set": answers["kind"], "split": length}
        rows.append(answers.assign(**named))
        costs += of_answers
    table = shares(pd.concat(rows, ignore_index=True), costs, budget)
    return table.rename(columns={"set": "model", "split": "tokens"})
