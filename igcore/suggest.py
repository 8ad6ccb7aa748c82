"""Choosing a budget: what each one would do to texts that a user has judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from .errors import ParameterError, unknown_name
from .scorers import Scorer, TextFunction, as_scorer
from .scoring import Tally, checked_score, word_ends

Interval = tuple[float, float]
MOST_ROWS = 20  # of a printed table
CHECKS = ("word", "end")


@dataclass(frozen=True)
class BudgetRow:
    """What a budget does to the judged texts.

    Attributes
    ----------
    budget : float
        In units of the cost. A text is within budget when its cost is at most this.
    refused, passed : float
        Share of acceptable texts over budget, and of unacceptable texts within budget.
    refused_interval, passed_interval : (float, float)
        Their 95 % Wilson intervals.
    """

    budget: float
    refused: float
    refused_interval: Interval
    passed: float
    passed_interval: Interval


@dataclass(frozen=True, repr=False)
class BudgetChoice:
    """The suggested budget and the error rates of all; printing it shows the table.

    Attributes
    ----------
    budget : float
        The one with the smallest sum of both error rates (Youden's index); of equal ones the
        smallest.
    rows : tuple of BudgetRow
        Every budget that treats the texts differently, in ascending order.
    """

    budget: float
    rows: tuple[BudgetRow, ...]

    def __repr__(self) -> str:
        step = math.ceil(len(self.rows) / MOST_ROWS)
        shown = [
            row for i, row in enumerate(self.rows) if i % step == 0 or row.budget == self.budget
        ]
        lines = ["    budget   acceptable refused    unacceptable passed"]
        for row in shown:
            mark = "->" if row.budget == self.budget else "  "
            refused = percent(row.refused, row.refused_interval)
            passed = percent(row.passed, row.passed_interval)
            lines.append(f"{mark}{row.budget:10.4g}   {refused}   {passed}")
        return "\n".join(lines)


def suggest_budget(
    cost: Scorer | TextFunction | str,
    acceptable_texts: Sequence[str],
    unacceptable_texts: Sequence[str],
    checks: Literal["word", "end"] = "word",
) -> BudgetChoice:
    """Return the error rates that each budget implies on texts of known kind, and a suggestion.

    The guarantee holds with respect to the cost model alone. These rates say how well that model,
    cut at a budget, agrees with the person who judged the texts.

    Parameters
    ----------
    cost : Scorer, callable or str
        As `Guard` takes it; higher is worse. It sees the texts without a prompt.
    acceptable_texts, unacceptable_texts : sequence of str
        Complete answers, judged by a person; at least one of each.
    checks : str
        ``word`` takes the highest cost of a text at the end of any word, where a guard looks by
        default; the ends of its blocks, where it looks too, are not known here. ``end`` takes the
        cost of the complete text alone, as under accounting ``terminal``; with a large cost model
        it is faster.

    Raises
    ------
    ParameterError
        For unknown checks, an empty list, a text in place of a list, a text without a finite cost,
        or costs that leave no budget of at least 0.
    ScorerError
        When the cost fails on most of a hundred texts or more.
    """
    if checks not in CHECKS:
        raise unknown_name("checks", checks, CHECKS)
    scorer = as_scorer(cost, "cost")
    good = costs_of(scorer, acceptable_texts, "acceptable_texts", checks)
    bad = costs_of(scorer, unacceptable_texts, "unacceptable_texts", checks)
    rows = tuple(row_of(budget, good, bad) for budget in cuts([*good, *bad]))
    if not rows:
        raise ParameterError(
            f"cost {scorer.name!r} gives every text a cost below 0, and a budget is at least 0; "
            "add a constant to the cost"
        )
    best = min(rows, key=lambda row: (row.refused + row.passed, row.budget))
    return BudgetChoice(best.budget, rows)


def costs_of(scorer: Scorer, texts: Sequence[str], name: str, checks: str) -> list[float]:
    """Return the cost of each text, of those at its checks the highest; each must be finite."""
    if isinstance(texts, str) or not len(texts) or not all(isinstance(t, str) for t in texts):
        raise ParameterError(f"{name} is {texts!r:.60}; give a list of texts, at least one")
    words = [word_ends(text) if checks == "word" else [] for text in texts]
    read = [(i, text[:end]) for i, text in enumerate(texts) for end in [*words[i], len(text)]]
    parts, finished = [part for _, part in read], [part == texts[i] for i, part in read]
    # the tally warns why a call failed
    costs = checked_score(scorer, [""] * len(parts), parts, finished, Tally())
    highest = [-math.inf] * len(texts)
    for (i, part), cost in zip(read, costs, strict=True):
        if math.isnan(cost):
            raise ParameterError(
                f"cost {scorer.name!r} gives no finite number for {part[:40]!r}; fix the cost or "
                "leave the text out"
            )
        highest[i] = max(highest[i], float(cost))
    return highest


def cuts(costs: Sequence[float]) -> list[float]:
    """Return the budgets of at least 0 that treat the costs differently.

    They lie halfway between neighbouring costs; the last is the highest cost.
    """
    levels = sorted(set(costs))
    between = [(low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)]
    return [budget for budget in [*between, levels[-1]] if budget >= 0]


def row_of(budget: float, good: Sequence[float], bad: Sequence[float]) -> BudgetRow:
    """Return the error rates of one budget."""
    refused = sum(cost > budget for cost in good)
    passed = sum(cost <= budget for cost in bad)
    return BudgetRow(
        budget,
        refused / len(good),
        wilson(refused, len(good)),
        passed / len(bad),
        wilson(passed, len(bad)),
    )


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Return the Wilson score interval of a share."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, shrink = successes / n, 1 + z**2 / n
    middle = (share + z**2 / (2 * n)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # at 0 and n the interval ends there exactly; rounding may leave a trace
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == n else middle + half
    return low, high


def percent(share: float, interval: Interval) -> str:
    """Return a share with its interval as text of a fixed width."""
    low, high = interval
    return f"{100 * share:5.1f} % [{100 * low:5.1f}, {100 * high:5.1f}]"
