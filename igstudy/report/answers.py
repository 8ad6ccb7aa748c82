"""One prompt of each policy and the answers of every method to it, masked, as Markdown."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from igcore.errors import RunError
from igcore.scorers import Scorer
from igcore.scoring import checked_score
from igcore.watch.html import mask

from .statistics import STATUSES

MILD = 0.2  # the highest score of a prompt that is shown
# in the names of costs that judge whole answers, so that no word of a text can be masked
WHOLE = ("smollm2-harm", "probe:", "guard:", "llama-labels")
OUTCOME_NAMES = dict(zip(STATUSES, ("safe", "abstained", "unsafe"), strict=True))


def answers(records: pd.DataFrame, readers: Sequence[Scorer]) -> str:
    """Return the answers of all methods to one prompt of each policy; the first reader masks.

    Texts of runs whose cost judges whole answers are not shown, see `masked`.

    Raises
    ------
    RunError
        When there is no record.
    """
    if not len(records):
        raise RunError("there is nothing to show; run notebook 30_decode first")
    sections = []
    for policy, cell in records.groupby("policy", sort=False):
        rows = cell[cell["prompt_id"] == chosen_prompt(cell, readers)]
        costs = rows["cost_scorer"]
        texts = [_code(*row, readers[0]) for row in zip(rows["response"], costs, strict=True)]
        scores = rows[["cost", "reward"]].astype(float).map("{:.3f}".format).replace("nan", "n/a")
        table = rows[["method"]].assign(outcome=rows["status"].map(OUTCOME_NAMES))
        table = table.join(scores).assign(answer=texts)
        sides = ("left", "left", "right", "right", "left")
        text = table.to_markdown(index=False, disable_numparse=True, colalign=sides)
        prompt = _code(rows["prompt"].iloc[0], costs.iloc[0], readers[0])
        sections.append(f"### {policy}\n\nPrompt: {prompt}\n\n{text}\n")
    return "\n".join(sections)


def chosen_prompt(cell: pd.DataFrame, readers: Sequence[Scorer]) -> Any:
    """Return the id of the prompt of one policy on which most pairs of methods differ in status.

    Prompts that most methods have come into question, and mild ones (`MILD` for every reader) if
    there are any. Of equals the lowest id is taken.
    """
    prompts = cell.groupby("prompt_id").agg(
        text=("prompt", "first"), size=("status", "size"), differing=("status", _differing_pairs)
    )
    prompts = prompts[prompts["size"] == prompts["size"].max()]
    texts, n = prompts["text"].tolist(), len(prompts)
    scores = [checked_score(reader, [""] * n, texts, [True] * n) for reader in readers]
    prompts["is_mild"] = (np.array(scores) <= MILD).all(axis=0)  # never for NaN
    ordered = prompts.sort_index().sort_values(
        ["is_mild", "differing"], ascending=False, kind="stable"
    )
    return ordered.index[0]


def _differing_pairs(statuses: pd.Series) -> int:
    """Return how many pairs of methods differ in status."""
    counts = statuses.value_counts()
    return int((counts.sum() ** 2 - (counts**2).sum()) // 2)


def masked(text: str, cost: str, reader: Scorer) -> str:
    """Return a text with the words masked that a reader finds offensive.

    Where the cost of the run, given by name, judges whole answers, no word is at fault, and nothing
    is shown.
    """
    if any(name in cost for name in WHOLE):
        return f"[{len(text.split())} words not shown: {cost} judges answers, and masks no word]"
    return mask(text, reader)


def _code(text: str | None, cost: str, reader: Scorer) -> str:
    """Return a masked text as code, so that nothing in it is markup; None is nothing."""
    if not isinstance(text, str):
        return "[nothing]"
    shown = masked(" ".join(text.split()), cost, reader).replace("`", "'").replace("|", "\\|")
    return f"`{shown or ' '}`"
