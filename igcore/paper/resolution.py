"""Which comparisons of printed rates the number of prompts can resolve.

The tables print no pairing of prompts, so every comparison is tested under all of them: McNemar's p
value has a smallest and a largest value given the two counts. Holm adjusts each kind of p value
over the whole family of comparisons.
"""

from collections.abc import Iterator

import pandas as pd
from statsmodels.stats.contingency_tables import mcnemar

from ..report.statistics import ALPHA, holm, safety_lower
from . import MAIN, measured, printed
from .audit import same_rate

OURS = "inferenceguard"
CRITIC = "inferenceguard-critic"
ENOUGH = 10**7  # prompts at which the search for a sample size stops


def mcnemar_bounds(safe: int, others: int, n: int) -> tuple[float, float]:
    """Return the smallest and the largest exact two-sided McNemar p value of two methods.

    They were safe on so many of `n` prompts.

    The smallest when every prompt that only one of them got right is the better one's; the largest
    when as few prompts as possible are safe under both.

    Examples
    --------
    >>> mcnemar_bounds(10, 4, 10)  # the better one is always safe: there is one pairing only
    (0.03125, 0.03125)
    """
    few, many = sorted((safe, others))
    most = min(few, n - many)  # prompts that only the worse method can have got right
    return _mcnemar(many - few, 0), _mcnemar(many - few + most, most)


def _mcnemar(b: int, c: int) -> float:
    return float(mcnemar([[0, b], [c, 0]], exact=True).pvalue)


def prompts_needed(rate: float, other: float) -> int | None:
    """Return about how many prompts make two rates differ at 5 % under every pairing.

    None when that takes over `ENOUGH`.
    """

    def resolved(n: int) -> bool:
        return mcnemar_bounds(round(rate * n), round(other * n), n)[1] <= ALPHA

    high = 1
    while not resolved(high):
        high *= 2
        if high > ENOUGH:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if resolved(middle) else (middle, high)
    return high


def comparisons() -> pd.DataFrame:
    """Return the comparisons that the text makes: what, where, two methods and their printed rates.

    For each model and prompt set the safest variant of InferenceGuard against the safest other
    method; with critic against without; at each N of the latency table against the safest other
    method; and the two win rates in both ways.
    """
    return pd.DataFrame([*_main(), *_latency(), *_wins()])


def _main() -> Iterator[dict]:
    for (policy, prompts), rows in measured(MAIN).groupby(["policy", "prompts"], sort=False):
        yield from _against("safety", f"{policy} on {prompts}", rows, "safety_rate", prompts)


def _latency() -> Iterator[dict]:
    for n, rows in printed("latency").groupby("n_samples"):
        yield from _against(
            "safety",
            f"{rows['policy'].iloc[0]} at N = {n}",
            rows,
            "safety_rate",
            rows["prompts"].iloc[0],
        )


def _wins() -> Iterator[dict]:
    for name in ("harmlessness", "helpfulness"):
        yield from _against(
            f"{name} wins", "judge, alpaca-7b", printed("win_rates"), f"{name}_rate", "win_rates"
        )


def _against(what: str, where: str, rows: pd.DataFrame, column: str, sample: str) -> Iterator[dict]:
    guarded = rows["method"].str.startswith(OURS)
    best, rival = (rows.loc[rows.loc[which, column].idxmax()] for which in (guarded, ~guarded))
    pairs = [(best, rival)]
    if CRITIC in set(rows["method"]):
        pairs.append(
            tuple(rows.set_index("method", drop=False).loc[name] for name in (CRITIC, OURS))
        )
    for ours, theirs in pairs:
        lines = f"{ours['tex_line']}, {theirs['tex_line']}"
        sides = {
            "method": ours["method"],
            "other": theirs["method"],
            "rate": ours[column],
            "other_rate": theirs[column],
        }
        yield {"what": what, "where": where, "sample": sample, "lines": lines} | sides


def resolve(compared: pd.DataFrame, sizes: pd.DataFrame) -> pd.DataFrame:
    """Test every comparison at the number of prompts behind it.

    Parameters
    ----------
    compared : DataFrame
        `comparisons`.
    sizes : DataFrame
        `igcore.paper.denominators.sample_sizes`.

    Returns
    -------
    DataFrame
        With ``n``; Holm-adjusted p values ``best`` and ``worst`` (McNemar, over all pairings) and
        ``unpaired`` (two-proportion); a ``verdict``, and ``prompts_needed``. Counts are the
        integers nearest to rate times n.
    """
    rows = []
    for row in compared.itertuples():
        n = int(sizes.loc[row.sample, "n"])
        best, worst = mcnemar_bounds(round(row.rate * n), round(row.other_rate * n), n)
        tests = {
            "best": best,
            "unpaired": same_rate(row.rate, row.other_rate, n, n),
            "worst": worst,
        }
        rows.append({"n": n} | tests | {"prompts_needed": prompts_needed(row.rate, row.other_rate)})
    tested = pd.DataFrame(rows).astype({"prompts_needed": "Int64"})
    found = pd.concat([compared.reset_index(drop=True), tested], axis=1)
    for name in ("best", "unpaired", "worst"):
        found[name] = holm(found[name])
    return found.assign(verdict=[_verdict(row) for row in found.itertuples()])


def _verdict(row) -> str:
    if row.best > ALPHA:
        return "cannot be resolved"
    higher = row.method if row.rate > row.other_rate else row.other
    return (
        f"{higher} is higher" if row.worst <= ALPHA else f"{higher} is higher under some pairings"
    )


def certified(sizes: pd.DataFrame) -> pd.DataFrame:
    """Return the one-sided 95 % lower bound of the printed safety rates of InferenceGuard.

    There is a row for each of its rows in the main tables.
    """
    rows = measured(MAIN)
    rows = rows[rows["method"].str.startswith(OURS)]
    n = sizes.loc[rows["prompts"], "n"].astype(int).to_numpy()
    bounds = [
        safety_lower(round(rate * size), int(size))
        for rate, size in zip(rows["safety_rate"], n, strict=True)
    ]
    source = sizes.loc[rows["prompts"], "from"].to_numpy()
    shown = rows[["policy", "prompts", "method", "safety_printed"]].assign(
        n=n, lower_bound=bounds, n_from=source
    )
    return shown.reset_index(drop=True)
