"""Printed rows beside ours, with a verdict that both numbers of prompts support.

The print pairs no prompts, so its numbers and ours are tested as independent samples; where the
prompts are the same, that claims too few differences rather than too many.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import pandas as pd
from scipy import stats
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from ..report.statistics import ALPHA, bootstrap_mean, holm
from . import IDENTITY, contents, measured, printed
from .cells import Cell, cells, readable
from .denominators import denominators, sample_sizes

AGREES, DIFFERS, NOT_RUN, UNRESOLVED = VERDICTS = (
    "agrees",
    "differs",
    "not run",
    "cannot be resolved at this n",
)
# of the interval of a difference: that it lies within +/- something is two one-sided tests at 5 %
LEVEL = 0.90
ROUNDED = 0.005  # half a unit in the last digit of a printed mean
# The least differences that would matter. That of rates is less than the 6.3 points that the
# paper's text says a critic adds on Alpaca-7B (94.46 against 88.14).
RATE = 0.05
SPREADS = 0.2  # standard deviations over prompts: Cohen's small effect
SECONDS = 0.25  # of the printed seconds; other machines differ by more

EMBEDDED = ("smollm2-raw", "smollm2-chat")
# table -> the embedded policy in it, unaligned or aligned as the printed ones are; elsewhere both
STANDING = {
    "main_vicuna": EMBEDDED[:1],
    "main_llama": EMBEDDED[1:],
    "lambda_vicuna": EMBEDDED[:1],
    "ndk": EMBEDDED[:1],
    "win_rates": EMBEDDED[:1],
}


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A kind of printed number, and what it is of here.

    Attributes
    ----------
    label : str
        For people, with the unit.
    printed : str
        Column of `igcore.paper.printed`.
    values : callable
        From the lines of a cell to one number for every independent draw; NaN where there is none.
    matters : callable
        From the printed number and the standard deviation over prompts to the least difference that
        would matter.
    spread : str
        Column of the printed standard deviation over prompts; empty where none is printed.
    is_rate : bool
        Whether it is a share of prompts.
    """

    label: str
    printed: str
    values: Callable[[pd.DataFrame], pd.Series]
    matters: Callable[[float, float], float]
    spread: str = ""
    is_rate: bool = False


def _safe(lines: pd.DataFrame) -> pd.Series:
    return (lines["status"] == "verified_safe").astype(float)


def _numbers(lines: pd.DataFrame, column: str) -> pd.Series:
    return lines[column].astype(float)


def _seconds(lines: pd.DataFrame, columns: list[str]) -> pd.Series:
    """Return a number for each group of prompts, whose mean is that over prompts.

    Prompts decoded together are one draw.

    The seconds per prompt of a group count as often as it has prompts. Their mean is then a ratio
    of two sums over groups, and the variance of the numbers is the one of its linear approximation;
    where all groups are equally large, they are the groups' means.
    """
    parts = lines.sort_values("prompt_id")[columns].astype(float)
    spent = parts.sum(axis=1, skipna=False).reset_index(drop=True).dropna()
    groups = spent.groupby(spent.index // int(lines["group_size"].iloc[0]))
    weights = groups.count() / groups.count().mean()
    return groups.mean() + (weights - 1) * (groups.mean() - spent.mean())


# the least difference that would matter, from the printed number and the spread over prompts


def _matters_of_rate(theirs: float, spread: float) -> float:
    return RATE


def _matters_of_score(theirs: float, spread: float) -> float:
    return SPREADS * spread


def _matters_of_time(theirs: float, spread: float) -> float:
    return SECONDS * theirs


_rate = partial(Measure, matters=_matters_of_rate, is_rate=True)
_score = partial(Measure, matters=_matters_of_score)
_time = partial(Measure, matters=_matters_of_time)

MEASURES = {  # start of the names of columns -> measure
    "safety": _rate("safe %", "safety_rate", _safe),
    "reward": _score(
        "reward", "reward_mean", partial(_numbers, column="reward"), spread="reward_std"
    ),
    "cost": _score("cost", "cost_mean", partial(_numbers, column="cost")),
    "generation": _time(
        "s generating", "generation_seconds", partial(_seconds, columns=["generate_s"])
    ),
    "scoring": _time("s scoring", "scoring_seconds", partial(_seconds, columns=["score_s"])),
    "seconds": _time("s", "seconds", partial(_seconds, columns=["generate_s", "score_s"])),
    "helpfulness": _rate(
        "helpfulness win %", "helpfulness_rate", partial(_numbers, column="helpfulness")
    ),
    "harmlessness": _rate(
        "harmlessness win %", "harmlessness_rate", partial(_numbers, column="harmlessness")
    ),
}


def measures_of(table: str) -> dict[str, Measure]:
    """Return the measures of a printed table."""
    columns = set(printed(table))
    return {name: measure for name, measure in MEASURES.items() if measure.printed in columns}


# --- ours beside theirs ---------------------------------------------------------------------------


@cache
def sizes() -> pd.DataFrame:
    """Return the number of prompts behind the printed numbers, see `denominators.sample_sizes`."""
    return sample_sizes(denominators())


def estimate(values: pd.Series, is_rate: bool) -> dict[str, float]:
    """Return ``ours``, the ends of its 95 % interval ``low`` and ``high``, and ``n``.

    NaN where n is 0.

    The interval of a rate is Wilson's, in which half a win is half a count; that of a mean is
    `igcore.report.statistics.bootstrap_mean`.
    """
    n = len(values)
    if not n:
        return {"ours": math.nan, "low": math.nan, "high": math.nan, "n": 0}
    if is_rate:
        low, high = proportion_confint(values.sum(), n, method="wilson")
    else:
        low, high = bootstrap_mean(values)
    return {"ours": float(values.mean()), "low": float(low), "high": float(high), "n": n}


def rates_apart(ours: float, n: int, theirs: float, size: int) -> dict[str, float]:
    """Return the interval of a difference of two independent rates, and the p value of none.

    The difference is ours minus theirs.

    Newcombe's interval, of two Wilson ones, at `LEVEL`; Fisher's exact test, because rates near 100
    % leave few failures to count.
    """
    counts = ours * n, round(theirs * size)
    low, high = confint_proportions_2indep(
        counts[0], n, counts[1], size, method="newcomb", compare="diff", alpha=1 - LEVEL
    )
    table = [[round(k), of - round(k)] for k, of in zip(counts, (n, size), strict=True)]
    p = stats.fisher_exact(table).pvalue
    return {"gap_low": float(low), "gap_high": float(high), "p": float(p)}


def means_apart(values: pd.Series, theirs: float, spread: float, size: int) -> dict[str, float]:
    """Return the interval of a difference of two independent means, and the p value of none.

    The difference is ours minus theirs.

    Welch's test at `LEVEL`. What rounding may have added to the difference is taken off it for p
    and added to the interval. Where no spread is printed, their mean is taken to be as uncertain as
    ours. Fewer than two values, or equal ones, settle nothing: NaN.
    """
    n, gap = len(values), float(values.mean()) - theirs
    ours = values.var(ddof=1) / n
    other, size = (ours, n) if math.isnan(spread) else (spread**2 / size, size)
    if n < 2 or not ours:
        return {"gap_low": math.nan, "gap_high": math.nan, "p": math.nan}
    error = math.sqrt(ours + other)
    freedom = error**4 / (ours**2 / (n - 1) + other**2 / (size - 1))
    half = stats.t.ppf(0.5 + LEVEL / 2, freedom) * error + ROUNDED
    p = 2 * stats.t.sf(max(0.0, abs(gap) - ROUNDED) / error, freedom)
    return {"gap_low": gap - half, "gap_high": gap + half, "p": float(p)}


def beside(measure: Measure, row: dict, cell: Cell | None, size: int) -> dict[str, float]:
    """Return a printed number, ours (see `estimate`), and how far apart they are.

    ``matters`` is the least difference that would matter. NaN if nothing was run.
    """
    theirs, spread = row[measure.printed], row.get(measure.spread, math.nan)
    values = measure.values(cell.lines).dropna() if cell else pd.Series(dtype=float)
    found = {"paper": theirs} | estimate(values, measure.is_rate)
    if not len(values):
        return found | dict.fromkeys(("gap_low", "gap_high", "p", "matters"), math.nan)
    if measure.is_rate:
        apart = rates_apart(found["ours"], len(values), theirs, size)
    else:
        apart = means_apart(values, theirs, spread, size)
    known_spread = values.std(ddof=1) if math.isnan(spread) else spread
    return found | apart | {"matters": measure.matters(theirs, known_spread)}


def verdict(run: str, p: float, low: float, high: float, matters: float) -> str:
    """Return what may be said of a printed number, given Holm's p and the difference's interval.

    ``differs`` where a difference is resolved, however small; ``agrees`` where none is and every
    one that would matter is excluded.
    """
    if run == NOT_RUN:
        return NOT_RUN
    if p <= ALPHA:
        return DIFFERS
    return AGREES if -matters < low and high < matters else UNRESOLVED


def compared(table: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return one of the printed tables of results with our numbers beside it.

    There is a row per printed row.

    Parameters
    ----------
    table : str
        One of `igcore.paper.TABLES`, the two of hyperparameters excepted
        (`igcore.paper.hyperparameters` has them).
    records : DataFrame
        Lines as `igcore.report.load.load_runs` returns them, of several runs and of any settings;
        for ``win_rates``, as `igcore.paper.report.judged` does. None at all is allowed.

    Returns
    -------
    DataFrame
        `IDENTITY` as printed, ``printed_as``, and ``run``, the run that was read. A cell must have
        all settings of the row; of several, the first of `readable` is read. For each of
        `measures_of`: ``_paper``, ``_ours``, ``_low``, ``_high`` and ``_n`` as in `estimate`
        (shares, rewards, costs, seconds; n counts groups of prompts for seconds), ``_gap_low`` and
        ``_gap_high``, the `LEVEL` interval of ours minus theirs, ``_p``, adjusted by Holm over all
        numbers of the table, ``_matters``, and ``_verdict``, one of `VERDICTS`.
    """
    rows = printed(table)
    theirs = rows.to_dict("records")
    found = readable(table, cells(records))
    chosen = [next((cell for cell in found if cell.is_of(row)), None) for row in theirs]
    names = ["win_rates"] * len(rows) if table == "win_rates" else rows["prompts"]
    n = sizes()["n"].reindex(names).astype(int)
    pairs = list(zip(theirs, chosen, n, strict=True))
    parts = {
        name: pd.DataFrame([beside(measure, *pair) for pair in pairs])
        for name, measure in measures_of(table).items()
    }
    p = holm(pd.concat({name: part["p"] for name, part in parts.items()}))
    result = rows[[*IDENTITY, "printed_as"]].assign(
        run=[cell.run if cell else NOT_RUN for cell in chosen]
    )
    for name, part in parts.items():
        part = part.assign(p=p[name])
        known = part[["p", "gap_low", "gap_high", "matters"]].itertuples(index=False)
        said = [verdict(run, *numbers) for run, numbers in zip(result["run"], known, strict=True)]
        result = result.join(part.assign(verdict=said).add_prefix(f"{name}_"))
    return result


# --- ours alone -----------------------------------------------------------------------------------


def claims(records: pd.DataFrame) -> bool:
    """Say whether records belong beside the print.

    A policy of the paper's is among them, or there are none.
    """
    return not len(records) or bool(set(records["policy"]) & set(measured()["policy"]))


def ours_like(table: str, records: pd.DataFrame, policies: Sequence[str]) -> pd.DataFrame:
    """Return a table of the shape of a printed one, of policies that the paper does not have.

    It is without the paper's numbers.

    Parameters
    ----------
    table, records
        As in `compared`.
    policies : sequence of str
        Those that were run; where there are none but embedded ones, the table has those of
        `STANDING`.

    Returns
    -------
    DataFrame
        For every policy and every method of the printed table a row per prompt set and value of the
        settings that the printed table states: `IDENTITY`, ``run`` and for each of `measures_of`
        ``_ours``, ``_low``, ``_high`` and ``_n``. A method of which nothing was run has one row,
        whose run is `NOT_RUN`.
    """
    found = readable(table, cells(records))
    measures = measures_of(table)
    rows = []
    for policy in STANDING.get(table, EMBEDDED) if set(policies) <= set(EMBEDDED) else policies:
        for method in printed(table)["method"].unique():
            for cell in [*_points(table, policy, method, found)] or [None]:
                about = cell.about if cell else {"policy": policy, "method": method}
                row = about | {"run": cell.run if cell else NOT_RUN}
                for name, measure in measures.items():
                    values = measure.values(cell.lines).dropna() if cell else pd.Series(dtype=float)
                    numbers = estimate(values, measure.is_rate)
                    row |= {f"{name}_{part}": number for part, number in numbers.items()}
                rows.append(row)
    columns = [
        *IDENTITY,
        "run",
        *(f"{name}_{part}" for name in measures for part in ("ours", "low", "high", "n")),
    ]
    whole = dict.fromkeys(["n_samples", "block_size", "keep"], "Int64") | {
        "lagrange_multiplier": float
    }
    return pd.DataFrame(rows, columns=columns).astype(whole)


def _points(table: str, policy: str, method: str, found: list[Cell]) -> Iterator[Cell]:
    """Yield a cell for every value of the settings that a table states, in their order.

    Of several it is the most readily read.
    """
    states = ["prompts", *contents().set_index("table").loc[table, "states"].split()]
    points: dict[tuple, Cell] = {}
    for cell in found:
        if (cell.about["policy"], cell.about["method"]) == (policy, method):
            points.setdefault(tuple(cell.about[name] for name in states), cell)
    for key in sorted(points, key=_none_first):
        yield points[key]


def _none_first(key: tuple) -> list[tuple]:
    """Return a key to sort by, in which None comes before every other value."""
    return [(value is not None, value) for value in key]
