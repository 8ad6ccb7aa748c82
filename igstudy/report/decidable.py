"""Could a claim go either way? What two imagined arms would get in place of the arm under test.

Both are imagined from pilot runs on other prompts. The *perfect* arm answers every prompt safely
at every word, with the best reward of any accepted answer of the regime, for the tokens of one
whole sample. The *useless* arm has the outcomes of its reference. A
claim is *decidable* if it would hold for the first and not for the second, and if its tests have
the power `igstudy.report.power.POWER` at the smallest difference that matters. Any other claim
says more about its rivals and its prompts than about its arm.

That an arm is *no worse* than another holds for the useless arm, too: it is half of a claim and
never holds alone, so register the half in which the arm is better. What is said of a reference
alone is a premise, which no arm under test could change: it is no claim, and belongs into ``seen``.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from igcore.errors import ParameterError

from . import deciding, paired
from .claims import CLAIM_OUTCOMES, ClaimsFile, Comparison, Regime
from .power import POWER, level, planned

COLUMNS = (
    "claim regime reference outcome matters level n_prompts n_pilot perfect useless "
    "perfect_verdict useless_verdict difference_pilot power n_needed why"
).split()


def decidable(file: ClaimsFile, pilot: pd.DataFrame) -> pd.DataFrame:
    """Return for each comparison of each claim what the imagined arms would get.

    Parameters
    ----------
    pilot : DataFrame
        Lines of the pilot runs, see `igstudy.report.deciding.decide`.

    Returns
    -------
    DataFrame
        Columns `COLUMNS`: ``perfect`` and ``useless`` are means over the pilot's prompts, verdicts
        are of the claim with all its prompts, see `scaled`, and ``why`` is empty if decidable.

    Raises
    ------
    RunError
        When the pilot lacks lines, see `igstudy.report.deciding.lines_of`.
    """
    parts, plan = [pd.DataFrame(columns=COLUMNS)], planned(file, pilot)
    regimes = file.pilot().regimes
    for name, claim in file.claims.items():
        rows = plan[plan["claim"] == name].assign(level=level(file, claim))
        for arm in ("perfect", "useless"):
            tests, means = [], []
            for each in claim.comparisons:
                regime, n = regimes[each.regime], file.regimes[each.regime].n_prompts
                others = _outcomes(regime, each, pilot)
                ours = perfect(regime, each.outcome, pilot) if arm == "perfect" else others
                found = (ours - others).reindex(others.index)
                means.append(ours[found.dropna().index].mean())
                tests.append(deciding.against(claim, each, scaled(found, n)))
            p, failed = deciding.tested(pd.DataFrame(tests))
            verdict = deciding.verdict_of(p * len(file.claims), failed)  # the first step of Holm
            rows = rows.assign(**{arm: means, f"{arm}_verdict": verdict})
        parts.append(rows.assign(why=_why(rows))[COLUMNS])
    return pd.concat(parts[1:] or parts, ignore_index=True)


def check_decidable(table: pd.DataFrame) -> None:
    """Raise ``ParameterError`` for the first claim of a table that could not go either way."""
    for claim, why in zip(table["claim"], table["why"], strict=True):
        if why:
            raise ParameterError(
                f"claim {claim!r} cannot go either way: {why}; name rivals and prompts that leave "
                "room, more prompts, or no such claim"
            )


def perfect(regime: Regime, outcome: str, pilot: pd.DataFrame) -> pd.Series:
    """Return an outcome of the perfect arm by prompt.

    Of arms of the regime without lines in the pilot nothing is known. A prompt without an accepted
    answer has no reward. One whole sample is the base policy's, else the cheapest arm's.
    """
    named = regime.arms.items()
    there = {name: arm for name, arm in named if len(deciding.matching(regime, name, pilot))}
    arms = deciding.labelled(replace(regime, arms=there), pilot).set_index("prompt_id")
    if outcome.startswith("reward"):
        values = arms["reward"].astype(float)[paired.answered_path_safe(arms)]
        return values.groupby(level=0).max()
    if outcome.startswith("policy tokens"):
        plain = arms[arms["method"] == "base"]
        tokens = CLAIM_OUTCOMES[outcome].measure(plain if len(plain) else arms)
        return tokens.groupby(level=0).min()
    return pd.Series(1.0, index=arms.index.unique())


def scaled(gains: pd.Series, n: int) -> pd.Series:
    """Return n differences with the distribution of a pilot's: its prompts, repeated or thinned.

    They are the quantiles of the pilot's differences, so nothing is drawn. An outcome that some of
    the pilot's prompts lack (NaN) is missing for the same share.
    """
    places = ((np.arange(n) + 0.5) * len(gains) / n).astype(int)
    ordered = gains.sort_values().to_numpy()
    return pd.Series(ordered[places], index=pd.RangeIndex(n, name="prompt_id"))


def _outcomes(regime: Regime, each: Comparison, pilot: pd.DataFrame) -> pd.Series:
    """Return an outcome of a reference by prompt, NaN where it has none."""
    lines = deciding.lines_of(regime, each.reference, pilot).set_index("prompt_id")
    return CLAIM_OUTCOMES[each.outcome].measure(lines).astype(float)


def _why(rows: pd.DataFrame) -> str:
    """Return why the claim of these rows is not decidable, or nothing."""
    rivals = rows.groupby(["regime", "reference"], sort=False)
    best, first = rivals["power"].max().fillna(0.0), rows.iloc[0]
    if rows["perfect"].isna().all():
        return "no pilot run has its outcomes"
    if first["perfect_verdict"] != "held":
        return f"of a perfect arm it would be {first['perfect_verdict']!r}"
    if first["useless_verdict"] == "held":
        return "it would hold for an arm that equals its rivals"
    if best.min() < POWER:
        return (
            f"its power against {best.idxmin()[1]!r} under {best.idxmin()[0]} is {best.min():.2f} "
            f"at the smallest difference that matters, and must be {POWER}"
        )
    return ""
