"""Claims named before their runs: what is compared, what would decide it, and what came out.

A claims file names regimes, the arms in them, and a few primary claims about them. Holm's
correction is over these alone; every other comparison is exploratory, those that the file names as
estimates included. A file without claims only names arms. The file is registered before its runs
start, and a file that was edited since decides nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
from pydantic import Field

from igcore.errors import ParameterError, RunError, unknown_name
from igcore.files import file_digest
from igcore.methods import METHODS
from igcore.settings import Budget, Count, Options, Positive, one_of, settings

from ..linefile import SETTINGS
from ..prompts import SPLITS, split_of
from ..settings import FolderName
from ..yamlfile import read_yaml
from . import paired
from . import statistics as metrics
from .load import LINE_FIELDS

MOST_CLAIMS = 6  # primary claims: each one more makes all others harder to resolve
VERDICTS = {
    "held": "Holm's p is at most .05 in the named direction, and the difference may matter",
    "failed": "the 95 % interval holds no difference that matters in the named direction",
    "not resolved": "neither: more prompts would decide it",
}


class Outcome(NamedTuple):
    """A value for each line, and whether a higher one is better (1) or worse (-1).

    A verdict is 0 or 1, and one per prompt is tested by McNemar; other numbers by flipping signs.
    """

    measure: paired.Measure
    sign: int = 1
    verdict: bool = True


CLAIM_OUTCOMES = {
    "safe at the end": Outcome(paired.answered_safely),  # the paper's Safety Rate
    "answered and path-safe": Outcome(paired.answered_path_safe),
    "answered within 2 L": Outcome(partial(paired.answered_within, most=2.0)),
    "answered within 8 L": Outcome(partial(paired.answered_within, most=8.0)),
    "reward": Outcome(paired.reward, verdict=False),
    "reward, 0 unless path-safe": Outcome(paired.reward_or_nothing, verdict=False),
    "harm by the judge": Outcome(paired.judged_harmful, sign=-1),
    "policy tokens": Outcome(paired.policy_tokens, sign=-1, verdict=False),
    "policy tokens in L": Outcome(paired.tokens_in_length, sign=-1, verdict=False),
}


@settings(kw_only=True)
class Regime:
    """Prompts and settings under which arms are compared.

    Attributes
    ----------
    about : str
        What it is, in a sentence.
    policy : str
        Name of the policy.
    prompts : str
        Name of the prompt set.
    split : str
        Split of its prompts, see `igstudy.prompts.load_prompts`.
    n_prompts : int
        Prompts that each arm has.
    seed : int
        Seed of all its lines.
    budget : float
        By which its answers are judged, whatever budget a search had; those of an arm that names a
        budget by that one.
    pilot : dict
        Values of these fields for the runs from which power is computed.
    arms : dict
        Label -> values of the columns by which its lines are known, such as ``method``.
    """

    about: str
    policy: str
    prompts: str
    split: Annotated[str, one_of(("all", *SPLITS))]
    n_prompts: Count
    seed: int
    budget: Budget
    pilot: Options
    arms: dict[str, Options]

    def columns(self, label: str) -> Options:
        """Return the values of the columns by which the lines of an arm are known."""
        shared = {"policy": self.policy, "prompts": self.prompts, "seed": self.seed}
        return self.arms[label] | shared


class Comparison(NamedTuple):
    """What a claim compares its arm with, and where."""

    regime: str
    reference: str
    outcome: str


@settings(kw_only=True)
class Claim:
    """One primary claim: an arm is better than every reference, in at least one of the outcomes.

    It says so of each of its regimes, and holds only if it holds in all of them.

    Attributes
    ----------
    sentence, source : str
        What the paper says, and where.
    falsified : str
        The result that would have refuted it.
    regime : str or list of str
        Keys of the file's ``regimes``.
    arm : str
        Label of the arm that is claimed to be better, the same in every regime.
    references : list of str
        Labels of the arms that it is compared with, paired by prompt.
    outcomes : dict of str to float
        Key of `CLAIM_OUTCOMES` -> the smallest difference that matters, above 0, in units of the
        outcome.
    """

    sentence: str
    source: str
    falsified: str
    regime: FolderName | Annotated[list[FolderName], Field(min_length=1)]
    arm: str
    references: Annotated[list[str], Field(min_length=1)]
    outcomes: Annotated[dict[str, Positive], Field(min_length=1)]

    @property
    def regimes(self) -> list[str]:
        """The regimes, one or more."""
        return [self.regime] if isinstance(self.regime, str) else self.regime

    @property
    def comparisons(self) -> Iterator[Comparison]:
        """Every comparison: each outcome of each reference in each regime."""
        return map(Comparison._make, product(self.regimes, self.references, self.outcomes))


@dataclass(frozen=True)
class ClaimsFile:
    """A claims file; `digest` is the sha256 of its bytes.

    `estimates` have the form of claims. They were not registered, because they could not go either
    way, and are measured all the same.
    """

    path: Path
    digest: str
    seen: str
    regimes: dict[str, Regime]
    claims: dict[str, Claim]
    estimates: dict[str, Claim] = field(default_factory=dict)

    def pilot(self) -> "ClaimsFile":
        """Return the same claims about the prompts of the pilot runs."""
        pilots = {name: replace(regime, **regime.pilot) for name, regime in self.regimes.items()}
        return replace(self, regimes=pilots)

    def compared(self, runs: Mapping[str, dict[str, Any]]) -> set[str]:
        """Return the names of the runs whose lines the claims compare; without claims, of all arms.

        Parameters
        ----------
        runs : mapping
            Name of each run -> its settings.
        """
        claims, every = self.claims.values(), self.regimes.items()
        pairs = [
            (regime, arm)
            for claim in claims
            for regime, arm in product(claim.regimes, (claim.arm, *claim.references))
        ]
        found = set()
        for name, arm in pairs or [(name, arm) for name, regime in every for arm in regime.arms]:
            wanted = self.regimes[name].columns(arm)
            method = wanted.pop("method")
            fit = [run for run, given in runs.items() if wanted.items() <= (wanted | given).items()]
            found |= {run for run in fit if method in runs[run]["methods"]}
        return found


# --- reading --------------------------------------------------------------------------------------


def load_claims(path: Path) -> ClaimsFile:
    """Read a claims file.

    Raises
    ------
    ParameterError
        When it cannot be read, or names a column, method, split, regime, arm, outcome or test that
        there is not.
    """
    form = "it must have seen, regimes and claims"
    parts = read_yaml(path, form)
    try:
        seen = str(parts["seen"])
        regimes = {name: Regime(**part) for name, part in parts["regimes"].items()}
        for regime in regimes.values():
            replace(regime, **regime.pilot)  # checks its values
        claims, estimates = (
            {name: Claim(**part) for name, part in named.items()}
            for named in (parts["claims"], parts.get("estimates", {}))
        )
    except (KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ParameterError(
            f"the claims of {path} cannot be read ({type(error).__name__}: {reason}); {form}"
        ) from error
    if len(claims) > MOST_CLAIMS:
        raise ParameterError(f"{path} has {len(claims)} claims; name at most {MOST_CLAIMS}")
    for name, regime in regimes.items():
        for label, arm in regime.arms.items():
            named = f"arm {label!r} of regime {name!r}:"
            for column in arm:
                _check_known(f"column of {named}", column, (*LINE_FIELDS, *SETTINGS))
            _check_known(f"method of {named}", arm.get("method"), METHODS)
    for name, claim in (claims | estimates).items():
        for where in claim.regimes:
            _check_known(f"regime of claim {name!r}", where, regimes)
            for label in (claim.arm, *claim.references):
                _check_known(f"arm of claim {name!r}", label, regimes[where].arms)
        for outcome in claim.outcomes:
            _check_known(f"outcome of claim {name!r}", outcome, CLAIM_OUTCOMES)
    return ClaimsFile(path, file_digest(path), seen, regimes, claims, estimates)


def _check_known(kind: str, name: Any, allowed: Iterable[str]) -> None:
    """Raise ``ParameterError`` unless a name is one of those that are allowed."""
    if name not in list(allowed):
        raise unknown_name(kind, name, allowed)


# --- verdicts -------------------------------------------------------------------------------------


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
    return chosen.assign(budget=regime.arms[label].get("budget", regime.budget))


def decide(file: ClaimsFile, lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each comparison of each claim, with the verdict on the claim.

    Parameters
    ----------
    lines : DataFrame
        Lines of all runs that the file names, as `igstudy.report.load.load_runs` gives them, with a
        column ``harm`` where a claim is about it.

    Returns
    -------
    DataFrame
        ``difference`` is arm minus reference with its 95 % interval, over the prompts where both
        have the outcome; ``tokens`` and ``reference_tokens`` are the policy's, sampled for a
        prompt; ``p_holm`` and ``verdict``, one of `VERDICTS`, are those of the claim.

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
    named = ("sentence", "source", "falsified")
    return {
        **{name: getattr(claim, name) for name in named},
        **{"regime": each.regime, "arm": claim.arm},
        **against(claim, each, gains(regime, claim, each, lines)),
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


def gains(regime: Regime, claim: Claim, each: Comparison, lines: pd.DataFrame) -> pd.Series:
    """Return the claim's arm minus a reference by prompt; NaN where one has no such outcome."""
    measure = CLAIM_OUTCOMES[each.outcome].measure
    ours, others = (
        measure(lines_of(regime, label, lines).set_index("prompt_id"))
        for label in (claim.arm, each.reference)
    )
    return ours.astype(float) - others.astype(float)


# --- in words -------------------------------------------------------------------------------------


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's statement and our result, a row for each claim.

    The difference is of the claim's first outcome; where rivals differ, from the least to the most.
    """
    rows = []
    for _, own in table.groupby("claim", sort=False):
        first = own.iloc[0]
        found = own.loc[own["outcome"] == first["outcome"], "difference"]
        ends = dict.fromkeys(paired.short(end, "+.3f") for end in (found.min(), found.max()))
        verdict = first["verdict"]
        meant = {"failed": first["falsified"], "not resolved": "More prompts would decide it."}
        rows.append(
            {
                "the paper says": first["sentence"],
                "here": f"{verdict}: {meant[verdict]}" if verdict in meant else verdict,
                "measured": f"{first['outcome']}: {' to '.join(ends)}",
                "prompts": own["n_prompts"].max(),
            }
        )
    return pd.DataFrame(rows)


def labelled(regime: Regime, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of all arms of a regime, with their label as ``arm``."""
    parts = [lines_of(regime, label, lines).assign(arm=label) for label in regime.arms]
    return pd.concat(parts, ignore_index=True)
