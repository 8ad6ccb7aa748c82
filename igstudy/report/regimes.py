"""Go or no-go: can a comparison of searches under a cost be decided at all?

Before a search runs, plain answers show what it would meet. A regime is a policy, its prompts, a
cost and a budget. Where nearly every plain answer stays within budget, no search is needed; where
prompts decide which do, rather than chance, drawing again does not help.
"""

import math
from typing import Any

import pandas as pd

from .statistics import bootstrap_mean

LENGTHS = (32, 64, 96, 128)  # tokens, at which S is read
LEAST_PRICE = 1.6  # of rejection sampling, in L
REGIME = ["regime", "policy", "cost", "budget"]  # columns
MOST_BETWEEN = 0.2  # share of the variance of S that lies between prompts


def kept(draws: pd.DataFrame, length: int) -> pd.Series:
    """Return whether each plain answer is within budget at every check of its first tokens.

    `draws` has ``breach``, the tokens before the first check over budget, NaN for none.
    """
    return ~(draws["breach"] <= length)


def between(values: pd.Series, prompts: pd.Series) -> float:
    """Return the share of the variance of values that lies between prompts.

    It is the intraclass correlation of one-way random effects, by the analysis of variance: near 0
    where chance decides, 1 where the prompt does, and below 0 by chance. Every prompt has as many
    values. It is NaN where all values are equal.
    """
    cells = values.astype(float).groupby(prompts.to_numpy())
    k = int(cells.size().iloc[0])  # values of a prompt
    among = k * cells.mean().var(ddof=1)
    within = cells.var(ddof=1).mean()
    total = among + (k - 1) * within
    return float((among - within) / total) if total else math.nan


def law(share: float) -> float:
    """Return the price of rejection sampling, in L, if breaches come at a constant rate.

    With S the share of plain answers within budget and x = -ln S it is (e^x - 1) / x.
    """
    if share in (0, 1):
        return 1.0 if share else math.inf
    x = -math.log(share)
    return math.expm1(x) / x


def price(draws: pd.DataFrame, length: int) -> float:
    """Return what an answer costs rejection sampling that leaves a sample at its first breach.

    In units of L, the mean tokens of the answers within budget; infinite if there is none.
    """
    fine = kept(draws, length)
    whole = draws["tokens"].clip(upper=length)
    spent = whole.where(fine, draws["breach"])
    return float(spent.sum() / whole[fine].sum()) if fine.any() else math.inf


def go_or_no_go(draws: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each regime, with ``go``: whether it can tell searches apart.

    It can if rejection sampling pays at least `LEAST_PRICE`, and less than `MOST_BETWEEN` of the
    variance lies between prompts. ``alarms`` is the share of answers to harmless prompts over the
    budget at some word.

    Parameters
    ----------
    draws : DataFrame
        A row for each plain answer: those of `REGIME`; ``kind`` of the prompt, ``pilot`` or
        ``harmless``; ``prompt_id``, ``tokens`` and ``breach``, see `kept`. Every prompt has as
        many.
    """
    rows, longest = [], LENGTHS[-1]
    for about, every in draws.groupby(REGIME, sort=False):
        row: dict[str, Any] = dict(zip(REGIME, about, strict=True))
        cell, harmless = (every[every["kind"] == kind] for kind in ("pilot", "harmless"))
        row["n_prompts"] = cell["prompt_id"].nunique()
        row |= {f"S_{length}": kept(cell, length).mean() for length in LENGTHS}
        fine = kept(cell, longest)
        by_prompt = fine.groupby(cell["prompt_id"]).mean()
        low, high = bootstrap_mean(by_prompt.to_numpy())
        row |= {f"S_{longest}_low": low, f"S_{longest}_high": high}
        row |= {"between": between(fine, cell["prompt_id"]), "price": price(cell, longest)}
        row |= {"law": law(fine.mean()), "alarms": 1 - kept(harmless, longest).mean()}
        row["go"] = row["price"] >= LEAST_PRICE and row["between"] < MOST_BETWEEN
        rows.append(row)
    return pd.DataFrame(rows)
