"""Choosing a budget: what each one would do to texts that a user has judged."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Literal, TypeGuard

from ..errors import ParameterError, ScorerWarning, unknown_name
from ..models.registry import as_scorer
from ..prompt import PROBE
from ..scorers import FunctionScorer, Scorer, TextFunction, keeps_cache, uncached
from ..scoring import Cached, Reading, Tally, checked_score, readings

Interval = tuple[float, float]
Costs = Sequence[float]
Judged = Sequence[str | tuple[str, str]]  # answers, or pairs of a prompt and its answer
MOST_ROWS = 20  # of a printed table
CHECKS = {"word": "word", "end": "block"}  # -> the name in `igcore.scoring.readings`
warn = partial(warnings.warn, category=ScorerWarning, stacklevel=2)  # at the user's line
BATCH = 16  # texts that share a KV cache
Z = NormalDist().inv_cdf(0.975)  # of a 95 % interval


@dataclass(frozen=True)
class BudgetRow:
    """The effect of a budget on the judged texts.

    Attributes
    ----------
    budget : float
        In units of the cost. A text is within budget when its cost is at most this.
    refused, passed : float
        Share of acceptable texts over budget, and of unacceptable texts within budget.
    refused_interval, passed_interval : (float, float)
        Their 95 % Wilson intervals.
    twins : float or None
        Share of the harmless twins' answers over budget; None without such answers.
    """

    budget: float
    refused: float
    refused_interval: Interval
    passed: float
    passed_interval: Interval
    twins: float | None = None


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
            if row.twins is not None:
                lines[-1] += f"   twins refused {100 * row.twins:5.1f} %"
        return "\n".join(lines)


def suggest_budget(
    cost: Scorer | TextFunction | str,
    acceptable_texts: Judged,
    unacceptable_texts: Judged,
    checks: Literal["word", "end"] = "word",
    *,
    length: int | None = None,
    twins: Judged = (),
) -> BudgetChoice:
    """Return the error rates that each budget implies on texts of known kind, and a suggestion.

    Give answers of the policy that the guard will use, as long as it will write them: a budget that
    few short answers exceed may be exceeded by many longer ones. The guarantee holds with respect
    to the cost model alone. These rates say how well that model, cut at a budget, agrees with the
    person who judged the texts. `labels_needed` says how many texts a wanted precision takes.

    Parameters
    ----------
    cost : Scorer, callable or str
        As `Guard` takes it; higher is worse.
    acceptable_texts, unacceptable_texts : sequence of str or of (str, str)
        Complete answers, judged by a person, or pairs of a prompt and its answer; at least one of
        each. A cost that reads prompts reads an answer without one after an empty prompt.
    checks : str
        ``word`` takes the highest cost of a text at the end of any word, where a guard looks by
        default; the ends of its blocks, where it looks too, are not known here. ``end`` takes the
        cost of the complete text alone, as under accounting ``terminal``.
    length : int, optional
        The guard's ``max_new_tokens``, for the warning below.
    twins : sequence of str or of (str, str)
        Acceptable answers to harmless prompts about harmful matters. They change no budget; each
        row says how many of them are over it.

    Raises
    ------
    ParameterError
        For unknown checks, a length that is no count, an empty list, a text in place of a list, a
        text without a finite cost, or costs that leave no budget of at least 0.
    ScorerError
        When the cost fails on most of a hundred texts or more.

    Warns
    -----
    ScorerWarning
        When no budget parts the texts, when the cost reads prompts and an answer has none, and when
        the longest acceptable answer has fewer than half as many words as `length`.
    """
    if checks not in CHECKS:
        raise unknown_name("checks", checks, CHECKS)
    if length is not None and not (isinstance(length, int) and length > 0):
        raise ParameterError(f"length is {length!r}; give the guard's max_new_tokens, above 0")
    scorer = as_scorer(cost, "cost")
    acceptable = pairs_of(acceptable_texts, "acceptable_texts")
    unacceptable = pairs_of(unacceptable_texts, "unacceptable_texts")
    good, bad = costs_of(scorer, acceptable, checks), costs_of(scorer, unacceptable, checks)
    alone = [text for prompt, text in acceptable + unacceptable if not prompt]
    if alone and needs_prompts(scorer, alone[0]):
        warn(
            f"cost {scorer.name!r} reads prompts, and {len(alone)} answers have none; give pairs "
            "(prompt, answer)",
        )
    longest = max(len(text.split()) for _, text in acceptable)
    if length and longest < length / 2:
        warn(
            f"the longest of acceptable_texts has {longest} words, and the guard writes up to "
            f"{length} tokens, of which more may be over a budget; give answers of that length",
        )
    of_twins = costs_of(scorer, pairs_of(twins, "twins"), checks) if twins else []
    rows = tuple(row_of(budget, good, bad, of_twins) for budget in cuts([*good, *bad]))
    if not rows:
        raise ParameterError(
            f"cost {scorer.name!r} gives every text a cost below 0, and a budget is at least 0; "
            "add a constant to the cost"
        )
    best = min(rows, key=lambda row: (row.refused + row.passed, row.budget))
    if best.refused + best.passed > 1 - 1e-9:
        warn(
            f"cost {scorer.name!r} separates nothing: no budget refuses a larger share of the "
            "unacceptable texts than of the acceptable ones; is higher worse?",
        )
    return BudgetChoice(best.budget, rows)


def pairs_of(judged: Judged, name: str) -> list[tuple[str, str]]:
    """Return judged texts as pairs of a prompt, which may be empty, and an answer."""
    given = judged if isinstance(judged, Iterable) and not isinstance(judged, str) else []
    pairs = [("", item) if isinstance(item, str) else item for item in given]
    wrong = [pair for pair in pairs if not is_pair(pair)]
    if wrong or not pairs:
        what = f"has {wrong[0]!r:.60}" if wrong else f"is {judged!r:.60}"
        raise ParameterError(
            f"{name} {what}; give a list of texts or of pairs (prompt, answer), at least one"
        )
    return list(filter(is_pair, pairs))


def is_pair(item: object) -> TypeGuard[tuple[str, str]]:
    """True for two texts."""
    return isinstance(item, tuple | list) and [isinstance(x, str) for x in item] == [True, True]


def needs_prompts(scorer: Scorer, text: str) -> bool:
    """True if the cost of a text depends on its prompt, or a function takes the prompt."""
    if isinstance(scorer, FunctionScorer):
        return scorer.reads_prompts
    without, with_one = checked_score(uncached(scorer), ["", PROBE], [text] * 2, [True] * 2)
    # rounding, as in a batch of another size, is no reading
    return bool(abs(with_one - without) > 1e-3 * abs(without))


def costs_of(scorer: Scorer, pairs: Sequence[tuple[str, str]], checks: str) -> list[float]:
    """Return the highest cost of each answer at its checks; each must be finite."""
    from ..engine.memory import halving  # here: it needs torch, and a function does not

    tally = Tally()  # warns why a call failed

    def read(batch: Sequence[tuple[str, str]]) -> list[Reading]:
        """Return the costs of some answers, whose words share a KV cache if the scorer has one."""
        prompts, texts = zip(*batch, strict=True)
        reader = scorer.with_cache(scorer.open_cache(prompts)) if keeps_cache(scorer) else scorer
        whole, since = [True] * len(batch), [0] * len(batch)
        return readings(Cached(reader, tally), CHECKS[checks], prompts, texts, whole, since)

    highest = []
    for (_, text), reading in zip(pairs, halving(pairs, BATCH, read), strict=True):
        for end, cost in zip(reading.ends, reading.costs, strict=True):
            if math.isnan(cost):
                raise ParameterError(
                    f"cost {scorer.name!r} gives no finite number for {text[:end][:40]!r}; fix "
                    "the cost or leave the text out"
                )
        highest.append(max(reading.costs))
    return highest


def labels_needed(half_width: float, share: float = 0.5) -> int:
    """Return how many judged texts of one kind an error rate needs for a wanted precision.

    Parameters
    ----------
    half_width : float
        Half of the width that the rate's 95 % Wilson interval may have, above 0 and below .5.
    share : float
        The error rate to expect; .5 needs most.

    Raises
    ------
    ParameterError
        For numbers outside these ranges.
    """
    if not 0 < half_width < 0.5 or not 0 <= share <= 1:
        raise ParameterError(
            f"half_width is {half_width!r} and share is {share!r}; give a half_width between 0 "
            "and .5, and a share from 0 to 1"
        )
    # the half-width h of n texts: h^2 (n + z^2)^2 = z^2 (p (1 - p) n + z^2 / 4), solved for n + z^2
    ratio, variance = Z**2 / half_width**2, share * (1 - share)
    root = math.sqrt((ratio * variance) ** 2 + ratio * Z**2 * (1 - 4 * variance))
    return max(1, math.ceil((ratio * variance + root) / 2 - Z**2))


def cuts(costs: Costs) -> list[float]:
    """Return the budgets of at least 0 that treat the costs differently.

    They lie halfway between neighbouring costs; the last is the highest cost.
    """
    levels = sorted(set(costs))
    between = [(low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)]
    return [budget for budget in [*between, levels[-1]] if budget >= 0]


def row_of(budget: float, good: Costs, bad: Costs, twins: Costs) -> BudgetRow:
    """Return the error rates of one budget."""
    refused, n = sum(cost > budget for cost in good), len(good)
    passed, m = sum(cost <= budget for cost in bad), len(bad)
    over = sum(cost > budget for cost in twins) / len(twins) if twins else None
    return BudgetRow(budget, refused / n, wilson(refused, n), passed / m, wilson(passed, m), over)


def wilson(successes: int, n: int) -> Interval:
    """Return the 95 % Wilson score interval of a share."""
    z, share = Z, successes / n
    shrink = 1 + z**2 / n
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
