"""The verdicts on registered claims, from the lines of the runs that they compare."""

from typing import Any

import pandas as pd

from igcore.errors import RunError

from ..prompts import split_of
from . import paired
from . import statistics as metrics
from .claims import CLAIM_OUTCOMES, Claim, ClaimsFile, Comparison, Regime

VERDICTS = {
    "held": "Holm's p is at most .05 in the named direction, and the difference may matter",
    "failed": "the 95 % interval holds no difference that matters in the named direction",
    "not resolved": "neither: more prompts would decide it",
}


def matching(regime: Regime, label: str, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines with the columns of an arm, however many there are."""
    for column, value in regime.columns(label).items():
        lines = lines[lines[column] == value]
    return lines


def lines_of(regime: Regime, label: str, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of an arm.

    Raises
    ------
    RunError
        Unless they are there, of as many prompts as were named, and all of the split.
    """
    wanted, chosen = regime.columns(label), matching(regime, label, lines)
    if len(chosen) != regime.n_prompts or chosen["prompt_id"].nunique() != regime.n_prompts:
        settings = ", ".join(f"{column} {value}" for column, value in wanted.items())
        raise RunError(
            f"the claims ask for {regime.n_prompts} prompts of {label!r} ({settings}), and the "
            f"finished runs hold {len(chosen)} lines of it; decode what is missing"
        )
    texts = [prompt for prompt in chosen["prompt"] if isinstance(prompt, str)]  # else a digest
    others = {split_of(text) for text in texts} - {regime.split}
    if others and regime.split != "all":
        raise RunError(
            f"the claims ask for prompts of the split {regime.split!r}, and {label!r} has some of "
            f"{min(others)!r}; decode prompts of that split"
        )
    return chosen.assign(budget=regime.budget)


def decide(file: ClaimsFile, lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each comparison of each claim, with the verdict on the claim.

    Parameters
    ----------
    lines : DataFrame
        Lines of all runs that the file names, as `igstudy.report.load.load_runs` gives them.

    Returns
    -------
    DataFrame
        ``difference`` is arm minus reference with its 95 % interval, over the prompts where both
        have the outcome, of which ``value`` and ``reference_value`` are the means; ``tokens`` and
        ``reference_tokens`` are the policy's, sampled for a prompt; ``p_holm`` and ``verdict``, one
        of `VERDICTS`, are those of the claim.

    Raises
    ------
    RunError
        See `lines_of`.
    """
    rows, p_values, failed = [], {}, {}
    for name, claim in file.claims.items():
        own = [compared(file, claim, each, lines) for each in claim.comparisons]
        p_values[name], failed[name] = tested(pd.DataFrame(own))
        rows += [{"claim": name, **row} for row in own]
    adjusted = dict(zip(p_values, metrics.holm(pd.Series(p_values, dtype=float)), strict=True))
    for row in rows:
        row["p_holm"] = adjusted[row["claim"]]
        row["verdict"] = verdict_of(row["p_holm"], failed[row["claim"]])
        row["claims_sha256"] = file.digest
    return pd.DataFrame(rows).drop(columns=["gain", "most"], errors="ignore")


def estimated(file: ClaimsFile, lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each comparison of each estimate, as `decide` does, without a verdict."""
    rows = [
        {"claim": name, **compared(file, claim, each, lines)}
        for name, claim in file.estimates.items()
        for each in claim.comparisons
    ]
    return pd.DataFrame(rows).drop(columns=["gain", "most"], errors="ignore")


def tested(rows: pd.DataFrame) -> tuple[float, bool]:
    """Return the p value of a claim, before Holm, and whether it failed.

    Parameters
    ----------
    rows : DataFrame
        All comparisons of the claim, see `against`.
    """
    rivals = [rows["regime"], rows["reference"]]
    towards = rows["p"].where(rows["gain"] > 0, 1.0)
    best = towards.groupby(rivals).min() * rows["outcome"].nunique()
    # the most that the interval leaves open in the direction that was named
    matters = (rows["most"] >= rows["matters"]) | rows["most"].isna()
    failed = not matters.groupby(rivals).any().all()
    # every reference must be beaten (intersection-union), each in one outcome (Bonferroni)
    return min(float(best.max()), 1.0), failed


def verdict_of(p_holm: float, failed: bool) -> str:
    """Return one of `VERDICTS`."""
    held = "held" if p_holm <= metrics.ALPHA else "not resolved"
    return "failed" if failed else held


def compared(
    file: ClaimsFile, claim: Claim, each: Comparison, lines: pd.DataFrame
) -> dict[str, Any]:
    """Return the row of one comparison, see `against`, with the claim's words and tokens."""
    regime = file.regimes[each.regime]
    both = outcomes(regime, claim, each, lines).dropna()
    means = {"value": both["ours"].mean(), "reference_value": both["others"].mean()}
    named = ("sentence", "source", "falsified")
    return {
        **{name: getattr(claim, name) for name in named},
        **{"regime": each.regime, "arm": claim.arm},
        **against(claim, each, gains(regime, claim, each, lines)),
        **means,
        "tokens": lines_of(regime, claim.arm, lines)["policy_tokens"].mean(),
        "reference_tokens": lines_of(regime, each.reference, lines)["policy_tokens"].mean(),
    }


def against(claim: Claim, each: Comparison, found: pd.Series) -> dict[str, Any]:
    """Return the test of an arm's differences from a reference.

    Besides the values of `igstudy.report.paired.clustered` it has ``gain`` and ``most``, the
    difference and the better end of its interval in the claimed direction.
    """
    outcome = CLAIM_OUTCOMES[each.outcome]
    row = paired.clustered(found, outcome.verdict)
    return {
        **each._asdict(),
        "better": "higher" if outcome.sign > 0 else "lower",
        "matters": claim.outcomes[each.outcome],
        **row,
        "gain": outcome.sign * row["difference"],
        "most": row["high"] if outcome.sign > 0 else -row["low"],
    }


def outcomes(regime: Regime, claim: Claim, each: Comparison, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the outcome by prompt of a claim's arm, ``ours``, and of a reference, ``others``.

    It is NaN where one has no such outcome.
    """
    measure = CLAIM_OUTCOMES[each.outcome].measure
    found = {
        name: measure(lines_of(regime, label, lines).set_index("prompt_id")).astype(float)
        for name, label in (("ours", claim.arm), ("others", each.reference))
    }
    return pd.DataFrame(found)


def gains(regime: Regime, claim: Claim, each: Comparison, lines: pd.DataFrame) -> pd.Series:
    """Return the claim's arm minus a reference by prompt; NaN where one has no such outcome."""
    both = outcomes(regime, claim, each, lines)
    return both["ours"] - both["others"]


# --- in words -------------------------------------------------------------------------------------


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Return what is claimed and what came out, a row for each claim and regime.

    It has the claim's first outcome, and of the rivals the nearest one: that with the smallest gain
    of the arm.
    """
    rows = []
    for _, own in table.groupby(["claim", "regime"], sort=False):
        first = own[own["outcome"] == own["outcome"].iloc[0]]
        gain = first["difference"].where(first["better"] == "higher", -first["difference"])
        near = first.loc[gain.idxmin()]
        low, high = (paired.short(near[end]) for end in ("low", "high"))
        meant = {"failed": near["falsified"], "not resolved": "More prompts would decide it."}
        verdict = near["verdict"]
        rows.append(
            {
                "claim": near["claim"],
                "under": near["regime"],
                "measured": near["outcome"],
                "the arm": f"{near['arm']}: {_value(near, 'value')}",
                "the nearest rival": f"{near['reference']}: {_value(near, 'reference_value')}",
                "difference": f"{paired.short(near['difference'], '+.3f')} [{low}, {high}]",
                "verdict": f"{verdict}: {meant[verdict]}" if verdict in meant else verdict,
            }
        )
    return pd.DataFrame(rows)


def _value(row: pd.Series, column: str) -> str:
    """Return a mean outcome as people read it: of verdicts how many of how many."""
    if CLAIM_OUTCOMES[row["outcome"]].verdict:
        return f"{row[column] * row['n_pairs']:.0f} of {row['n_pairs']}"
    return paired.short(row[column])


def labelled(regime: Regime, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of all arms of a regime, with their label as ``arm``."""
    parts = [lines_of(regime, label, lines).assign(arm=label) for label in regime.arms]
    return pd.concat(parts, ignore_index=True)
