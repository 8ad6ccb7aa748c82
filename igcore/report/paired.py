"""Paired tests of one setting against another, corrected for their number.

Every prompt counts once: the seeds of a prompt are averaged first, because they are no new prompts.
Reward: higher is better; cost: higher is worse.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from ..errors import RunError
from . import statistics as metrics

COLUMNS = (
    "policy measure point reference test n_prompts n_pairs difference low high p p_holm".split()
)
MCNEMAR, SIGN_FLIP = "exact McNemar", "sign flip"


def is_safe(lines: pd.DataFrame) -> pd.Series:
    """Say of each line whether its text was verified against the budget, 0 or 1.

    An abstention was not.
    """
    return (lines["status"] == "verified_safe").astype(float)


def has_abstained(lines: pd.DataFrame) -> pd.Series:
    """Say of each line whether the method abstained, 0 or 1."""
    return (lines["status"] == "abstained").astype(float)


def is_safe_along_the_way(lines: pd.DataFrame) -> pd.Series:
    """Say of each line whether it is an answer within budget at every block end, 0 or 1.

    An unknown cost is not.
    """
    return (
        (lines["status"] != "abstained") & (lines["peak_cost"].astype(float) <= lines["budget"])
    ).astype(float)


def reward(lines: pd.DataFrame) -> pd.Series:
    """Return the reward of each line that answers; NaN of all others."""
    return lines["reward"].astype(float).where(metrics.answered(lines))


# one number for each line; NaN: the line has none
MEASURES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "safe": is_safe,
    "abstained": has_abstained,
    "safe along the way": is_safe_along_the_way,
    "reward": reward,
}
VERDICTS = {"safe", "abstained", "safe along the way"}  # measures that are 0 or 1


@dataclass(frozen=True)
class Reference:
    """What points are compared with.

    Attributes
    ----------
    settings : mapping
        In what the reference differs from the point: names among ``method`` and the settings
        varied.
    only : mapping
        Name -> the values of the points that are compared; by default all.
    """

    settings: Mapping[str, object]
    only: Mapping[str, Collection] = field(default_factory=dict)

    def of(self, point: Mapping[str, object]) -> dict | None:
        """Return the point to compare a point with.

        None for itself and for points that are left out.
        """
        other = dict(point) | dict(self.settings)
        wanted = all(point[name] in values for name, values in self.only.items())
        return other if wanted and other != point else None


def clustered(differences: pd.Series, verdict: bool = False) -> dict:
    """Return the mean of paired differences over prompts, with interval and test.

    Parameters
    ----------
    differences : Series of float
        Indexed by ``prompt_id``, alone or with other levels. NaN is skipped; several of one prompt
        are averaged first.
    verdict : bool
        Whether they are differences of 0 and 1. One per prompt is then tested by exact McNemar,
        anything else by flipping signs.

    Returns
    -------
    dict
        ``n_prompts``, ``n_pairs`` (before averaging), ``difference``, its 95 % bootstrap interval
        over prompts ``low`` and ``high``, the two-sided ``p`` and the name of its ``test``. NaN
        stands where there is no pair.
    """
    known = differences.dropna()
    gains = known.groupby(level="prompt_id").mean()
    exact = verdict and len(known) == len(gains)
    low, high = metrics.bootstrap_mean(gains)
    return {
        "test": MCNEMAR if exact else SIGN_FLIP,
        "n_prompts": len(gains),
        "n_pairs": len(known),
        "difference": float(gains.mean()),
        "low": low,
        "high": high,
        "p": metrics.mcnemar_test(gains > 0, gains < 0)["mcnemar_p"]
        if exact
        else metrics.sign_flip(gains),
    }


def compared(
    records: pd.DataFrame,
    varied: Sequence[str],
    references: Sequence[Reference],
    measures: Sequence[str] = ("safe", "reward"),
) -> list[dict]:
    """Compare every point with its reference, paired by prompt and seed.

    A point is a method under one value of each setting.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``, several seeds allowed.
    varied : sequence of str
        The settings that tell points apart, ``seed`` not among them.
    references : sequence of Reference
        Points whose reference was not decoded are left out.
    measures : sequence of str
        Keys of `MEASURES`.

    Returns
    -------
    list of dict
        Rows for `corrected`: ``difference`` is point minus reference over the prompts that both
        have, of ``reward`` over those that both answered.

    Raises
    ------
    RunError
        When a prompt and seed occurs twice in a point.
    """
    rows = []
    for policy, lines in records.groupby("policy", sort=False):
        found = points(lines, varied)
        for one, other in _pairs(found, varied, references):
            ours, theirs = metrics.on_shared_prompts(found[one], found[other])
            names = {"point": named(varied, one), "reference": named(varied, other)}
            for measure in measures:
                gains = MEASURES[measure](ours) - MEASURES[measure](theirs)
                about = {"policy": policy, "measure": measure} | names
                rows.append(about | clustered(gains, measure in VERDICTS))
    return rows


def points(lines: pd.DataFrame, varied: Sequence[str]) -> dict[tuple, pd.DataFrame]:
    """Return the lines of every point of one policy by (method, value, value, ...).

    They are indexed by prompt and seed.
    """
    found = {}
    for key, cell in lines.groupby(["method", *varied], sort=False):
        cell = cell.set_index(["prompt_id", "seed"]).sort_index()
        for prompt_id, seed in cell.index[cell.index.duplicated()]:
            raise RunError(
                f"prompt {prompt_id!r} with seed {seed} occurs twice for "
                f"{named(varied, key)}; give every run once"
            )
        found[key] = cell
    return found


def _pairs(
    found: Collection[tuple], varied: Sequence[str], references: Sequence[Reference]
) -> Iterator[tuple]:
    for reference in references:
        for key in found:
            other = reference.of(dict(zip(["method", *varied], key, strict=True)))
            if other and tuple(other.values()) in found:
                yield key, tuple(other.values())


def named(varied: Sequence[str], key: tuple) -> str:
    """Return a point in words: ``beam-lagrangian, lagrange multiplier 5, n samples 8``."""
    method, *values = key
    settings = [
        f"{name.replace('_', ' ')} {value}" for name, value in zip(varied, values, strict=True)
    ]
    return ", ".join([method, *settings])


def corrected(rows: Sequence[Mapping]) -> pd.DataFrame:
    """Return rows of tests as a table, columns `COLUMNS`.

    Holm adjusts the p values of each measure over its rows.
    """
    table = pd.DataFrame(rows, columns=[name for name in COLUMNS if name != "p_holm"])
    return table.assign(
        p_holm=table.groupby("measure", sort=False)["p"].transform(metrics.holm).astype(float)
    )


def verdicts(tests: pd.DataFrame) -> list[str]:
    """Return a sentence for every difference that may be claimed, then one that counts the others.

    A claim needs a Holm-adjusted p <= .05.
    """
    claimed = tests["p_holm"] <= metrics.ALPHA
    sentences = [_sentence(row) for row in tests[claimed].itertuples(index=False)]
    for measure, rows in tests.groupby("measure", sort=False):
        open_ = int((~claimed[rows.index]).sum())
        sentences.append(
            f"{measure}: in {open_} of {len(rows)} comparisons no difference can be claimed "
            f"(Holm over {len(rows)})."
        )
    return sentences


def _sentence(row) -> str:
    interval = (
        f"{metrics.short(row.difference, '+.3f')} [{metrics.short(row.low)}, "
        f"{metrics.short(row.high)}]"
    )
    tested = (
        f"{row.test} p {metrics.p_value(row.p)}, Holm "
        f"{metrics.p_value(row.p_holm).removeprefix('= ')}"
    )
    way = "higher" if row.difference > 0 else "lower"
    against = (
        f"{way} for {row.point} than for {row.reference}"
        if row.reference
        else f"{way} by {row.point}"
    )
    return (
        f"{row.policy}: {row.measure} is {against}: {interval}, {row.n_prompts} prompts ({tested})."
    )
