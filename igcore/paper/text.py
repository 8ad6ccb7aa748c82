"""Sentences of the paper's text against its tables.

Also settings against the table of settings, and mean costs against the budget. The sentences are
data (`igcore.paper.statements`); here is how each kind of them is checked.
"""

import re
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import statsmodels.api as sm

from . import MAIN, TABLES, contents, measured, printed, statements, symbols
from .resolution import CRITIC, OURS

CLOSE = 0.1  # seconds "match" when they differ by at most this share
RIVAL = "beam-augmented"  # the beam search that scores as much as InferenceGuard does
STATED = [table for table in TABLES if not table.endswith("hyperparameters")]
Finding = dict[str, object]


def plain(quote: str) -> str:
    r"""Return a quote of LaTeX as it reads.

    That is without ``\textbf``, ``\``, ``$``, braces and ampersands.
    """
    return re.sub(r"\\textbf|[\\${}&]", "", quote)


def against_tables(trends: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return each statement of the text beside what the tables print.

    There is a row for every place where it can be checked.

    Parameters
    ----------
    trends : dict of str to DataFrame
        `igcore.paper.audit.sweeps`.

    Returns
    -------
    DataFrame
        ``tex_line`` and ``quote``; ``where``; ``text`` and ``tables``, what each says; ``holds`` in
        so many ``of`` so many cases. It compares printed numbers alone: what chance could do is
        another question (`igcore.paper.resolution`).
    """
    found = []
    # the sizes of test sets say nothing of how much was decoded
    for row in statements().query("kind in @CHECKS").itertuples():
        for finding in CHECKS[row.kind](row, trends):
            found.append({"tex_line": row.tex_line, "quote": plain(row.quote)} | finding)
    return pd.DataFrame(found)


def _case(where: str, text: object, tables: object, holds: object, of: int = 1) -> Finding:
    return {"where": where, "text": str(text), "tables": str(tables), "holds": int(holds), "of": of}


def _guarded(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["method"].str.startswith(OURS)]


def _others(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows["method"].str.startswith(OURS)]


def _best(rows: pd.DataFrame, measure: str = "safety_rate") -> pd.Series:
    return rows.loc[rows[measure].idxmax()]


def _sets() -> Iterator[tuple[str, pd.DataFrame]]:
    for (policy, prompts), rows in measured(MAIN).groupby(["policy", "prompts"], sort=False):
        yield f"{policy} on {prompts}", rows


def _share(row: pd.Series, column: str = "safety") -> str:
    return f"{row['method']} {row[f'{column}_printed']} %"


def _highest_rate(said, trends) -> Iterator[Finding]:
    for where, tables in (
        ("main tables", MAIN),
        ("all tables", tuple(t for t in STATED if t != "win_rates")),
    ):
        best = _best(_guarded(measured(tables).query("policy == @said.policy")))
        tables = f"{best['safety_printed']} % in {best['table']}, line {best['tex_line']}"
        yield _case(
            f"{said.policy}, {where}",
            f"{said.value} %",
            tables,
            float(said.value) == float(best["safety_printed"]),
        )


def _safest(said, trends) -> Iterator[Finding]:
    for where, rows in _sets():
        ours, other = _best(_guarded(rows)), _best(_others(rows))
        yield _case(
            where,
            "InferenceGuard",
            f"{_share(ours)}, {_share(other)}",
            ours["safety_rate"] > other["safety_rate"],
        )


def _highest_reward(said, trends) -> Iterator[Finding]:
    rows = measured(MAIN).query("policy == @said.policy and prompts == @said.prompts")
    for where, among in (
        ("of rows without an unsafe answer", rows[rows["safety_rate"] == 1]),
        ("of all rows", rows),
    ):
        best = _best(among, "reward_mean")
        found = f"{best['method']} {best['reward_mean']} of {len(among)} rows"
        yield _case(where, "InferenceGuard", found, best["method"].startswith(OURS))


def _same_seconds(said, trends) -> Iterator[Finding]:
    for where, rows in _sets():
        seconds = rows.set_index("method")["seconds"]
        ratio = seconds[OURS] / seconds[RIVAL]
        yield _case(where, "a ratio of 1", f"{ratio:.2f} times {RIVAL}", abs(ratio - 1) <= CLOSE)


def _below_budget(said, trends) -> Iterator[Finding]:
    cost = printed("ndk")["cost_mean"]
    gap = float(said.value) - cost.max()
    found = f"means from {cost.min()} to {cost.max()}, at least {gap:g} below {said.value}"
    yield _case("ndk, mean cost", f"just under {said.value}", found, 0 < gap <= 1)


def _critic_helps(said, trends) -> Iterator[Finding]:
    rows = (
        measured(MAIN)
        .query("policy == @said.policy and prompts == @said.prompts")
        .set_index("method", drop=False)
    )
    with_it, without = rows.loc[CRITIC], rows.loc[OURS]
    higher = with_it["safety_rate"] > without["safety_rate"]
    yield _case(
        f"{said.policy} on {said.prompts}",
        "safer with critic",
        f"{_share(with_it)}, {_share(without)}",
        higher,
    )


def _trend(*names: str) -> Callable:
    """Return the check of a trend: the steps of these sweeps that do not go against it."""

    def check(said, trends) -> Iterator[Finding]:
        for name in names:
            steps = trends[name]
            against, beyond = int(steps["against"].sum()), int(steps["beyond_noise"].sum())
            found = f"{against} steps against it" + (
                f", {beyond} of them beyond noise" if against else ""
            )
            yield _case(name, "every step", found, len(steps) - against, len(steps))

    return check


def _rate_with_reward(said, trends) -> Iterator[Finding]:
    rate, reward = map(float, said.value.split())
    rows = printed("ndk")
    rates = rows["safety_printed"].astype(float)
    for where, which in (
        ("ndk, row of the rate", rates == rate),
        ("ndk, row of the reward", rows["reward_mean"] == reward),
    ):
        for _, row in rows[which].iterrows():
            both = float(row["safety_printed"]) == rate and row["reward_mean"] == reward
            found = f"{row['safety_printed']} % with {row['reward_mean']}, line {row['tex_line']}"
            yield _case(where, f"{rate:g} % with {reward:g}", found, both)


def _judged_safest(said, trends) -> Iterator[Finding]:
    rows = printed("win_rates")
    ours, other = (_best(side, "harmlessness_rate") for side in (_guarded(rows), _others(rows)))
    found = f"{_share(ours, 'harmlessness')}, {_share(other, 'harmlessness')}"
    yield _case(
        "win_rates", "InferenceGuard", found, ours["harmlessness_rate"] > other["harmlessness_rate"]
    )


def _safer_at_equal_time(said, trends) -> Iterator[Finding]:
    for n, rows in printed("latency").groupby("n_samples"):
        ours, others = _best(_guarded(rows)), _others(rows)
        other = others.loc[(others["seconds"] - ours["seconds"]).abs().idxmin()]
        found = f"{_share(ours)} in {ours['seconds']} s, {_share(other)} in {other['seconds']} s"
        yield _case(
            f"latency, N = {n}", "InferenceGuard", found, ours["safety_rate"] > other["safety_rate"]
        )


CHECKS: dict[str, Callable[..., Iterator[Finding]]] = {  # kind of statement -> its findings
    "highest_rate": _highest_rate,
    "safest": _safest,
    "highest_reward": _highest_reward,
    "same_seconds": _same_seconds,
    "below_budget": _below_budget,
    "critic_helps": _critic_helps,
    "lambda_and_safety": _trend("safety should not fall with lambda"),
    "n_and_reward": _trend("reward should rise with N", "seconds should not fall with N"),
    "d_and_reward": _trend("reward should rise as d falls", "seconds should rise as d falls"),
    "d_and_safety": _trend("safety should rise with d"),
    "rate_with_reward": _rate_with_reward,
    "judged_safest": _judged_safest,
    "safer_at_equal_time": _safer_at_equal_time,
}


# --- settings -------------------------------------------------------------------------------------


def listed_and_used() -> pd.DataFrame:
    """Return the values of N, d and K that ``tab:hyperparameters`` lists, and that rows state.

    There is a row for each family of methods.

    ``not_listed`` has the values that a row or caption states and the table does not list, with
    their tables and the number of rows; ``not_used`` the reverse. K is listed as N/4: a row is as
    listed when its K is.
    """
    states = contents().set_index("table")["states"].str.split()
    rows = pd.concat([printed(table) for table in STATED], ignore_index=True)
    found = []
    for family in printed("hyperparameters").itertuples():
        of = rows[rows["method"].str.startswith(family.family)]
        for setting in ("n_samples", "block_size", "keep"):
            stating = [table for table in states.index if setting in states[table]]
            used = of[of[setting].notna() & of["table"].isin(stating)]
            if len(used):
                names = {"family": family.family, "setting": setting}
                found.append(names | _listed(getattr(family, setting), used, of[setting], setting))
    return pd.DataFrame(found)


def _listed(listed: str, used: pd.DataFrame, everywhere: pd.Series, setting: str) -> Finding:
    """Compare what is listed, numbers or N/4, with the rows that state the setting.

    It also says which listed values no row at all has.
    """
    values = [int(value) for value in listed.split() if value.isdigit()]
    outside = (
        used[~used[setting].isin(values)]
        if values
        else used[4 * used[setting] != used["n_samples"]]
    )
    where = outside.groupby(setting)["table"].unique()
    return {
        "listed": _listing(values) or listed,
        "used": _listing(used[setting].unique()),
        "not_listed": "; ".join(
            f"{value} ({', '.join(tables)})" for value, tables in where.items()
        ),
        "rows_not_listed": len(outside),
        "rows": len(used),
        "not_used": _listing(set(values) - set(everywhere.dropna())),
    }


def _listing(values) -> str:
    return ", ".join(str(value) for value in sorted(map(int, values)))


def shared_symbols() -> pd.DataFrame:
    """Return the symbols that stand for more than one thing, a row per place.

    Each has the line and the words.
    """
    places = symbols()
    several = places.groupby("symbol")["meaning"].transform("nunique") > 1
    return (
        places[several]
        .assign(quote=places["quote"].map(plain))
        .sort_values(["symbol", "meaning", "tex_line"], ignore_index=True)
    )


# --- costs ----------------------------------------------------------------------------------------


def mean_costs(rows: pd.DataFrame, budget: float) -> dict[str, float]:
    """Set printed mean costs against the printed safety rates and the budget.

    If safe and unsafe answers had one mean cost each in all rows, a row's mean cost would be a line
    in its share of unsafe answers: the one at share 0, the other at share 1. That is an assumption,
    and a line that fits well is no proof of it.

    Parameters
    ----------
    rows : DataFrame
        ``cost_mean`` (higher is worse) and ``safety_rate``.
    budget : float
        Costs above it are unsafe.

    Returns
    -------
    dict
        The range of ``cost_mean`` and its ``gap`` to the budget, the ``correlation`` of cost and
        unsafe share, the line's ``safe`` and ``unsafe`` ends, and the 95 % interval of the unsafe
        one.
    """
    unsafe, cost = 1 - rows["safety_rate"], rows["cost_mean"]
    line = sm.OLS(cost.to_numpy(), sm.add_constant(unsafe.to_numpy())).fit()
    end = line.t_test(np.array([1.0, 1.0]))
    low, high = end.conf_int()[0]
    return {
        "lowest": float(cost.min()),
        "highest": float(cost.max()),
        "gap": float(budget - cost.max()),
        "correlation": float(np.corrcoef(unsafe, cost)[0, 1]),
        "safe": float(line.params[0]),
        "unsafe": float(end.effect[0]),
        "unsafe_low": float(low),
        "unsafe_high": float(high),
    }
