"""Which numbers of prompts make the printed percentages: what n lets each of them be k/n."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from . import IDENTITY, PRINTED, measured, printed, statements

# of the denominators tried; from 10,000 on every percentage with two decimals is k/n
LARGEST = 4000
# a denominator is implied when chance would give so good a fit among all those tried less often
CHANCE = 0.01


def digits(percentage: str) -> tuple[int, int]:
    """Return a printed percentage as an integer, and 100 % as one in the same last digit.

    ``"94.3"`` is 943 of 1000.
    """
    whole, _, decimals = percentage.partition(".")
    return int(whole + decimals), 100 * 10 ** len(decimals)


def fits(percentage: str, largest: int = LARGEST) -> tuple[np.ndarray, np.ndarray]:
    """Say which denominators n a percentage can have: some k makes 100 k/n print as it does.

    Parameters
    ----------
    percentage : str
        As printed, such as ``"94.30"``: its digits decide.
    largest : int
        Of the n tried, from 1.

    Returns
    -------
    rounded, cut : ndarray of bool, shape (largest,)
        Entry n - 1: whether some k/n gives it when rounded to the printed digits (a half may go
        either way), and whether some k/n does when the further digits are cut off.
    """
    value, whole = digits(percentage)
    n = np.arange(1, largest + 1)
    low = value * n // whole  # the nearest k are this and the next
    gap = value * n - low * whole  # from low up to the percentage, in 1/n of a last digit
    rounded = (2 * gap <= n) | (2 * (whole - gap) <= n)
    cut = np.where(gap == 0, True, whole - gap < n)
    return rounded, cut


def curve(percentages: Sequence[str], largest: int = LARGEST) -> pd.DataFrame:
    """Return for every ``n`` how many distinct percentages it ``fits``, and how many ``by_chance``.

    A percentage fits when some k/n rounds to it.

    By chance: percentages with as many digits that are spread evenly; about n of them are some k/n,
    or all.
    """
    distinct = list(dict.fromkeys(percentages))
    n = np.arange(1, largest + 1)
    return pd.DataFrame(
        {
            "n": n,
            "fits": sum(fits(p, largest)[0] for p in distinct),
            "by_chance": _chances(distinct, n).sum(0),
        }
    )


def _chances(percentages: Sequence[str], n: np.ndarray) -> np.ndarray:
    """Return the chance (percentages, n) that each percentage is some k/n.

    It is a last digit around every k/n.
    """
    return np.minimum(1, [n / digits(p)[1] for p in percentages])


def implied(percentages: Sequence[str], largest: int = LARGEST) -> dict:
    """Return the denominator that a group of printed percentages implies, if it implies one.

    Each n is judged by the number of distinct percentages that it fits with rounding, against the
    chance that numbers with as many digits, spread evenly, would fit as well; ``p`` is that chance
    times the number of n that chance does not fit anyway.

    Returns
    -------
    dict
        ``rates`` distinct percentages; the best ``n``, the number that it ``fits``, the number
        expected ``by_chance``, ``p``, and whether n is ``implied`` (p at most `CHANCE`);
        ``common``, the smallest n that fits all with rounding, and ``common_cut``, the smallest
        that does when some may be cut off instead; 0 where none does up to `largest`.
    """
    distinct = list(dict.fromkeys(percentages))
    both = np.array([fits(p, largest) for p in distinct])  # (rates, 2, n)
    rounded, cut = both[:, 0], both[:, 1]
    n = np.arange(1, largest + 1)
    chance = _chances(distinct, n)
    p = _tail(chance, rounded.sum(0))
    best = int(np.argmin(p))
    adjusted = min(1.0, float(p[best]) * int((chance.min(0) < 1).sum()))
    return {
        "rates": len(distinct),
        "n": best + 1,
        "fits": int(rounded[:, best].sum()),
        "by_chance": float(chance[:, best].sum()),
        "p": adjusted,
        "implied": adjusted <= CHANCE,
        "common": _first(rounded.all(0)),
        "common_cut": _first((rounded | cut).all(0)),
    }


def _first(where: np.ndarray) -> int:
    """Return the smallest n that is marked, 0 for none."""
    return int(np.argmax(where)) + 1 if where.any() else 0


def _tail(chance: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return P(at least `seen` successes) of independent trials with chances (trials, n).

    For every n it is that of a Poisson binomial.
    """
    mass = np.zeros((len(chance) + 1, chance.shape[1]))
    mass[0] = 1
    for done, each in enumerate(chance, 2):
        mass[1:done] = mass[1:done] * (1 - each) + mass[: done - 1] * each
        mass[0] *= 1 - each
    return np.where(np.arange(len(mass))[:, None] >= seen, mass, 0).sum(0)


def groups() -> dict[str, list[str]]:
    """Return the printed percentages by group.

    Groups are each prompt set over all tables, each table with its policy and prompt set, and the
    win rates.
    """
    rows = measured()
    found = {
        prompts: list(group[f"safety{PRINTED}"])
        for prompts, group in rows.groupby("prompts", sort=False)
    }
    for (table, policy, prompts), group in rows.groupby(["table", "policy", "prompts"], sort=False):
        found[f"{table}: {policy} on {prompts}"] = list(group[f"safety{PRINTED}"])
    wins = printed("win_rates")
    return found | {"win_rates": [p for name in wins if name.endswith(PRINTED) for p in wins[name]]}


def denominators(largest: int = LARGEST) -> pd.DataFrame:
    """Return `implied` of each of `groups`, a row each."""
    return pd.DataFrame(
        [{"percentages": name} | implied(group, largest) for name, group in groups().items()]
    )


def sample_sizes(found: pd.DataFrame) -> pd.DataFrame:
    """Return the number of prompts ``n`` behind each prompt set's rates and behind the win rates.

    ``from`` says where it comes from.

    Parameters
    ----------
    found : DataFrame
        `denominators`.

    Returns
    -------
    DataFrame
        By name. ``implied`` by the percentages; where they imply none, ``stated`` is the size of
        the test set in the text, and for the win rates, of whose prompts the text says nothing,
        ``smallest`` is the smallest n that fits all of them.
    """
    found = found.set_index("percentages")
    stated = statements().query("kind == 'prompt_count'").set_index("prompts")["value"].astype(int)
    otherwise = {name: (n, "stated") for name, n in stated.items()} | {
        "win_rates": (found.loc["win_rates", "common"], "smallest")
    }
    rows = {
        name: (found.loc[name, "n"], "implied") if found.loc[name, "implied"] else n
        for name, n in otherwise.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["n", "from"])


def row_denominators(sizes: pd.DataFrame, largest: int = LARGEST) -> pd.DataFrame:
    """Return of every printed safety rate which denominators fit it.

    That is the smallest n that does, how many do, and whether the n of its prompt set does.

    ``n`` is that of `sample_sizes`; ``on_grid`` says how the rate is k/n: ``rounded``, ``cut off``
    or ``no``.
    """
    rows = measured()
    found = []
    for row in rows.itertuples():
        n = int(sizes.loc[row.prompts, "n"])
        rounded, cut = fits(row.safety_printed, max(largest, n))
        fit = (rounded | cut)[:largest]
        how = "rounded" if rounded[n - 1] else "cut off" if cut[n - 1] else "no"
        found.append(
            {"smallest_n": _first(fit), "n_that_fit": int(fit.sum()), "n": n, "on_grid": how}
        )
    return pd.concat(
        [rows[["table", "tex_line", *IDENTITY, f"safety{PRINTED}"]], pd.DataFrame(found)], axis=1
    )
