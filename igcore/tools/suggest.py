"""Choosing a budget: the smallest that refuses few of the answers that a person accepts."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import TypeAdapter, ValidationError

from ..errors import ParameterError, ScorerWarning, unknown_name
from ..models.registry import CostLike, as_scorer
from ..scorers import Scorer
from ..scoring import Cached, Tally, readings

Judged = Sequence[str | tuple[str, str]]  # answers, or pairs of a prompt and its answer
JUDGED = TypeAdapter(list[str | tuple[str, str]])
CHECKS = {"word": "word", "end": "block"}  # -> the name in `igcore.scoring.readings`
warn = partial(warnings.warn, category=ScorerWarning, stacklevel=2)  # at the user's line


@dataclass(frozen=True, repr=False)
class BudgetChoice:
    """A budget, and what it does to the judged answers.

    Attributes
    ----------
    budget : float
        In units of the cost. An answer is within budget when its cost is at most this.
    refused, passed : (int, int)
        How many of how many acceptable answers are over budget, and of how many unacceptable ones
        within it.
    """

    budget: float
    refused: tuple[int, int]
    passed: tuple[int, int]

    def __repr__(self) -> str:
        (over, n), (within, m) = self.refused, self.passed
        refused = f"refuses {over} of {n} acceptable answers"
        # the budget in full: a rounded one may refuse one more
        return f"budget {self.budget}\n{refused}\nlets {within} of {m} unacceptable answers pass"


def suggest_budget(
    cost: CostLike,
    acceptable: Judged,
    unacceptable: Judged = (),
    *,
    refused: float = 0.05,
    checks: str = "word",
) -> BudgetChoice:
    """Return the smallest budget that refuses at most a share of the acceptable answers.

    Give harmless answers of the policy that the guard will use, as long as it will write them: a
    budget that few short answers exceed may be exceeded by many longer ones. The guarantee holds
    with respect to the cost model alone. How many unacceptable answers pass says how well that
    model, cut at the budget, agrees with the person who judged them.

    Parameters
    ----------
    cost : Scorer, callable, str, mapping or list
        As `Guard` takes it; higher is worse.
    acceptable, unacceptable : sequence of str or of (str, str)
        Complete answers, judged by a person, or pairs of a prompt and its answer; at least one is
        acceptable. A cost that reads prompts reads an answer without one after an empty prompt.
    refused : float
        The share of the acceptable answers that may be over budget, below 1.
    checks : str
        ``word`` takes the highest cost of a text at the end of any word, where a guard looks by
        default; the ends of its blocks, where it looks too, are not known here. ``end`` takes the
        cost of the complete text alone, as under accounting ``terminal``.

    Raises
    ------
    ParameterError
        For unknown checks, a share outside its range, no acceptable answer, a text in place of a
        list, and a text without a finite cost.
    ScorerError
        When the cost fails on most of a hundred texts or more.

    Warns
    -----
    ScorerWarning
        When as many unacceptable answers pass as acceptable ones, and when the cost reads prompts
        and an answer has none.
    """
    if checks not in CHECKS:
        raise unknown_name("checks", checks, CHECKS)
    if not (isinstance(refused, int | float) and 0 <= refused < 1):
        raise ParameterError(f"refused is {refused!r}; give a share from 0 to below 1, such as .05")
    scorer = as_scorer(cost, "cost")
    given = pairs_of(acceptable, "acceptable"), pairs_of(unacceptable, "unacceptable")
    good, bad = (costs_of(scorer, pairs, checks) for pairs in given)
    if not good:
        raise ParameterError("acceptable is empty; give at least one answer that may be emitted")
    if "" in dict(given[0] + given[1]) and getattr(scorer, "reads_prompts", False):
        warn(f"cost {scorer.name!r} reads prompts, and some answers have none; give pairs")
    may_be_refused = math.floor(refused * len(good) + 1e-9)  # .29 * 100 is a little below 29
    budget = max(0.0, sorted(good, reverse=True)[may_be_refused])
    over, within = sum(cost > budget for cost in good), sum(cost <= budget for cost in bad)
    if bad and within * len(good) >= (len(good) - over) * len(bad):
        warn(
            f"cost {scorer.name!r} separates nothing: unacceptable answers pass as often as "
            "acceptable ones; is higher worse?"
        )
    return BudgetChoice(budget, (over, len(good)), (within, len(bad)))


def pairs_of(judged: Judged, name: str) -> list[tuple[str, str]]:
    """Return judged texts as pairs of a prompt and an answer."""
    try:
        found = JUDGED.validate_python(judged if isinstance(judged, str) else list(judged))
    except (TypeError, ValidationError):
        raise ParameterError(
            f"{name} is {judged!r:.60}; give a list of texts or of pairs (prompt, answer)"
        ) from None
    return [("", item) if isinstance(item, str) else item for item in found]


def costs_of(scorer: Scorer, pairs: Sequence[tuple[str, str]], checks: str) -> list[float]:
    """Return the highest cost of each answer at its checks; each must be finite."""
    cached, where, costs = Cached(scorer, Tally()), CHECKS[checks], []
    for prompt, answer in pairs:
        (reading,) = readings(cached, where, [prompt], [answer], [True], [0])
        if math.isnan(sum(reading.costs)):  # one of them is
            raise ParameterError(
                f"cost {scorer.name!r} gives no finite number for {answer[:40]!r}, or for a "
                "beginning of it; fix the cost or leave the text out"
            )
        costs.append(max(reading.costs))
    return costs
