"""Printed rows against one another: repeated, contradicting, and swept over a setting.

A finding says what the numbers imply, never why. `igcore.paper.text` has the sentences of the text.
"""

import math
from itertools import combinations, pairwise

import pandas as pd
from scipy import stats
from statsmodels.stats.proportion import proportions_ztest

from . import IDENTITY, PRINTED, TABLES, measured

NUMBERS = ["reward_mean", "reward_std", "safety_rate", "seconds"]
# what a method is at a multiplier of 0
UNWEIGHTED = {"args-lagrangian": "args", "best-of-n-lagrangian": "best-of-n"}


# --- rows against rows ----------------------------------------------------------------------------


def pairs(rows: pd.DataFrame, sizes: pd.DataFrame) -> pd.DataFrame:
    """Compare every two rows that have a configuration or the measured numbers in common.

    Parameters
    ----------
    rows : DataFrame
        Of `igcore.paper.measured`; rows without a reward are left out.
    sizes : DataFrame
        `igcore.paper.denominators.sample_sizes`.

    Returns
    -------
    DataFrame
        ``kind``: ``repeated`` (same configuration, same numbers), ``other seconds`` (only they
        differ), ``contradiction`` (same configuration, other numbers) or ``duplicate`` (another
        configuration, the same reward, deviation and safety rate). The configuration is as far as
        printed; a Lagrangian method at a multiplier of 0 is the method without one. Numbers are
        reward, its deviation, safety in per cent, and seconds. ``safety_p`` and ``reward_p`` are of
        two-sided z tests that two independent runs over the prompts of `sizes` have the same safety
        rate, and the same mean reward.
    """
    rows = rows[rows["reward_mean"].notna()]
    known = [
        (row, _configuration(row), tuple(row[name] for name in NUMBERS))
        for _, row in rows.iterrows()
    ]
    found = []
    for (a, ours, x), (b, theirs, y) in combinations(known, 2):
        same, equal = ours == theirs, x[:3] == y[:3]  # configuration, and numbers but for seconds
        if same or equal:
            if not same:
                kind = "duplicate"
            elif not equal:
                kind = "contradiction"
            else:
                kind = "repeated" if x == y else "other seconds"
            n = [int(sizes.loc[row["prompts"], "n"]) for row in (a, b)]
            tests = {"safety_p": same_rate(x[2], y[2], *n), "reward_p": _same_mean(a, b, *n)}
            found.append({"kind": kind} | _sides(a, b) | tests)
    sides = [f"{part}_{side}" for part in PARTS for side in "ab"]
    return pd.DataFrame(found, columns=["kind", *sides, "safety_p", "reward_p"])


def _configuration(row: pd.Series) -> tuple:
    settings = {name: None if pd.isna(row[name]) else row[name] for name in IDENTITY}
    if settings["lagrange_multiplier"] == 0 and row["method"] in UNWEIGHTED:
        settings |= {"method": UNWEIGHTED[row["method"]], "lagrange_multiplier": None}
    return tuple(settings.values())


def _sides(a: pd.Series, b: pd.Series) -> dict[str, str]:
    return {
        f"{part}_{side}": text(row)
        for part, text in PARTS.items()
        for side, row in (("a", a), ("b", b))
    }


def named(row: pd.Series) -> str:
    """Return a configuration in words, with the settings that are printed."""
    shown = {"n_samples": "N", "block_size": "d", "keep": "K", "lagrange_multiplier": "lambda"}
    settings = [
        f"{symbol} {row.get(name):g}"
        for name, symbol in shown.items()
        if not pd.isna(row.get(name, math.nan))
    ]
    return ", ".join(
        [f"{row.get('method')} with {row.get('policy')} on {row.get('prompts')}", *settings]
    )


def _place(row: pd.Series) -> str:
    return f"{row['table']} line {row['tex_line']}"


def _numbers(row: pd.Series) -> str:
    shown = ("reward_mean", "reward_std", f"safety{PRINTED}", "seconds")
    return " / ".join(f"{row[name]}" for name in shown)


# what of a row stands side by side with another
PARTS = {"row": _place, "configuration": named, "numbers": _numbers}


def same_rate(a: float, b: float, n_a: int, n_b: int) -> float:
    """Return the two-sided p value of the two-proportion z test.

    The counts are those nearest to the two shares.
    """
    counts, n = [round(a * n_a), round(b * n_b)], [n_a, n_b]
    return 1.0 if counts[0] * n_b == counts[1] * n_a else float(proportions_ztest(counts, n)[1])


def _same_mean(a: pd.Series, b: pd.Series, n_a: int, n_b: int) -> float:
    error = math.sqrt(a["reward_std"] ** 2 / n_a + b["reward_std"] ** 2 / n_b)
    return float(2 * stats.norm.sf(abs(a["reward_mean"] - b["reward_mean"]) / error))


# --- sweeps ---------------------------------------------------------------------------------------

FOLLOWS = ("keep",)  # K is N/4 in these sweeps
# name -> start of the tables' names, setting that rises, measure, the direction in which it should
# go, and settings that follow
SWEEPS = {
    "safety should not fall with lambda": ("lambda", "lagrange_multiplier", "safety_rate", 1, ()),
    "reward should not rise with lambda": ("lambda", "lagrange_multiplier", "reward_mean", -1, ()),
    "reward at lambda 0 should not fall with N": ("lambda", "n_samples", "reward_mean", 1, FOLLOWS),
    "reward should rise with N": ("ndk", "n_samples", "reward_mean", 1, ()),
    "safety should not fall with N": ("ndk", "n_samples", "safety_rate", 1, ()),
    "seconds should not fall with N": ("ndk", "n_samples", "seconds", 1, ()),
    "reward should rise as d falls": ("ndk", "block_size", "reward_mean", -1, ()),
    "safety should rise with d": ("ndk", "block_size", "safety_rate", 1, ()),
    "seconds should rise as d falls": ("ndk", "block_size", "seconds", -1, ()),
}


def steps(
    rows: pd.DataFrame, setting: str, measure: str, direction: int, sizes: pd.DataFrame
) -> pd.DataFrame:
    """Return every step of a sweep: two neighbouring rows that differ in one setting alone.

    Returns
    -------
    DataFrame
        ``change`` of the measure as the setting rises, whether it is ``against`` the direction, and
        ``noise``: how large a change of either sign two independent runs would show in 95 of 100
        cases where nothing changed, given the printed spread and the prompts of `sizes` (NaN for
        seconds, whose spread is not printed). ``beyond_noise`` marks steps against the direction
        that are larger. Methods that choose among the same samples would vary less.
    """
    held = [name for name in ["table", *IDENTITY] if name != setting and name in rows]
    found = []
    for _, sweep in rows[rows[setting].notna()].groupby(held, sort=False, dropna=False):
        ordered = [row for _, row in sweep.sort_values(setting).iterrows()]
        for a, b in pairwise(ordered):
            change, noise = b[measure] - a[measure], _noise(a, b, measure, sizes)
            against = bool(change * direction < 0)
            ends = {"from": a[setting], "to": b[setting], "before": a[measure], "after": b[measure]}
            where = {"sweep": named(a.drop(setting)), "lines": f"{a['tex_line']}, {b['tex_line']}"}
            beyond = against and abs(change) > noise
            verdict = {"change": change, "against": against, "noise": noise, "beyond_noise": beyond}
            found.append(where | ends | verdict)
    return pd.DataFrame(found)


def _noise(a: pd.Series, b: pd.Series, measure: str, sizes: pd.DataFrame) -> float:
    n = int(sizes.loc[a["prompts"], "n"])
    variances = {
        "safety_rate": [row["safety_rate"] * (1 - row["safety_rate"]) for row in (a, b)],
        "reward_mean": [row["reward_std"] ** 2 for row in (a, b)],
        "seconds": [math.nan],
    }
    return float(stats.norm.ppf(0.975) * math.sqrt(sum(variances[measure]) / n))


def sweeps(sizes: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return `steps` of each of `SWEEPS`."""
    found = {}
    for name, (start, setting, measure, direction, follows) in SWEEPS.items():
        tables = tuple(table for table in TABLES if table.startswith(start))
        rows = measured(tables).drop(columns=list(follows))
        if "lambda 0" in name:
            rows = rows[rows["lagrange_multiplier"] == 0]
        found[name] = steps(rows, setting, measure, direction, sizes)
    return found


def monotone(found: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a row for each of `sweeps`, with its sweeps and steps.

    It counts those against the direction, and those beyond noise.
    """
    rows = []
    for name, step in found.items():
        against = step[step["against"]]
        noise_known = step["noise"].notna().any()
        row = {
            "expectation": name,
            "sweeps": step["sweep"].nunique(),
            "sweeps_against": against["sweep"].nunique(),
            "steps": len(step),
            "against": len(against),
            "beyond_noise": int(step["beyond_noise"].sum()) if noise_known else None,
            "largest_against": against["change"].abs().max(),
        }
        rows.append(row)
    return pd.DataFrame(rows)
