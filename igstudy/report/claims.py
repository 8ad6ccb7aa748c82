"""Claims named before their runs: what is compared, what would decide it, and what came out.

A claims file names regimes, the arms in them, and a few primary claims about two arms each. Holm's
correction is over these alone; every other comparison is exploratory. The file is registered
before its runs start, and a file that was edited since decides nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd

from igcore.beams import METHODS
from igcore.errors import ParameterError, RunError, unknown_name
from igcore.files import file_digest, replace_file
from igcore.settings import Budget, Count, Options, Positive, one_of, settings

from ..linefile import SETTINGS
from ..prompts import SPLITS, split_of
from ..settings import FolderName
from ..yamlfile import read_yaml
from . import paired
from . import statistics as metrics
from .load import LINE_FIELDS

MOST_CLAIMS = 5  # primary claims: each one more makes all others harder to resolve
VERDICTS = {
    "held": "Holm's p is at most .05 in the named direction, and the difference may matter",
    "failed": "the 95 % interval holds no difference that matters in the named direction",
    "not resolved": "neither: more prompts would decide it",
}
# outcome -> a value for each line; True and False are tested by McNemar, numbers by flipping signs
CLAIM_OUTCOMES: dict[str, paired.Measure] = {
    "answered and path-safe": paired.answered_path_safe,
    "reward": paired.reward,
    "toxicity": paired.toxicity,
    "safe finals": paired.safe_finals,
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
    split : str
        Split of its prompts, see `igstudy.prompts.split_of`.
    n_prompts : int
        Prompts that each arm has.
    seed : int
        Seed of all its lines.
    budget : float
        By which all its answers are judged, whatever budget a search had.
    pilot : dict
        Values of these fields for the runs from which power is computed.
    arms : dict
        Label -> values of the columns by which its lines are known, such as ``method``.
    behind_check : list of str
        Arms shown a second time behind the final check of the guard: where the text breaks the
        path they abstain.
    """

    about: str
    policy: str
    split: Annotated[str, one_of(SPLITS)]
    n_prompts: Count
    seed: int
    budget: Budget
    pilot: Options
    arms: dict[str, Options]
    behind_check: list[str] = field(default_factory=list)


@settings(kw_only=True)
class Claim:
    """One primary claim.

    Attributes
    ----------
    sentence, source : str
        What the paper says, and where.
    regime : str
        Key of the file's ``regimes``.
    arm, reference : str
        Labels of the arms compared; the difference is arm minus reference, paired by prompt.
    outcome : str
        A key of `CLAIM_OUTCOMES`.
    direction : str
        Of the difference, as the paper has it.
    test : str
        ``exact McNemar`` for an outcome that is true or false, ``sign flip`` for a number.
    matters : float
        The smallest difference that matters, above 0, in units of the outcome.
    """

    sentence: str
    source: str
    regime: FolderName
    arm: str
    reference: str
    outcome: Annotated[str, one_of(CLAIM_OUTCOMES)]
    direction: Literal["higher", "lower"]
    test: Literal["exact McNemar", "sign flip"]
    matters: Positive

    @property
    def sign(self) -> int:
        """1 where a higher outcome of the arm is claimed, else -1."""
        return 1 if self.direction == "higher" else -1


@dataclass(frozen=True)
class ClaimsFile:
    """A claims file; `digest` is the sha256 of its bytes."""

    path: Path
    digest: str
    seen: str
    regimes: dict[str, Regime]
    claims: dict[str, Claim]

    def pilot(self) -> "ClaimsFile":
        """Return the same claims about the prompts of the pilot runs."""
        pilots = {name: replace(regime, **regime.pilot) for name, regime in self.regimes.items()}
        return replace(self, regimes=pilots)


# --- reading and registering ----------------------------------------------------------------------


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
        claims = {name: Claim(**part) for name, part in parts["claims"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ParameterError(
            f"the claims of {path} cannot be read ({type(error).__name__}: {reason}); {form}"
        ) from error
    if not 0 < len(claims) <= MOST_CLAIMS:
        raise ParameterError(f"{path} has {len(claims)} claims; name 1 to {MOST_CLAIMS}")
    for name, regime in regimes.items():
        for label, arm in regime.arms.items():
            where = f"arm {label!r} of regime {name!r}:"
            for column in arm:
                _check_known(f"column of {where}", column, (*LINE_FIELDS, *SETTINGS))
            _check_known(f"method of {where}", arm.get("method"), METHODS)
        for label in regime.behind_check:
            _check_known(f"arm of regime {name!r}", label, regime.arms)
    for name, claim in claims.items():
        _check_known(f"regime of claim {name!r}", claim.regime, regimes)
        for label in (claim.arm, claim.reference):
            _check_known(f"arm of claim {name!r}", label, regimes[claim.regime].arms)
    return ClaimsFile(path, file_digest(path), seen, regimes, claims)


def _check_known(kind: str, name: Any, allowed: Iterable[str]) -> None:
    """Raise ``ParameterError`` unless a name is one of those that are allowed."""
    if name not in list(allowed):
        raise unknown_name(kind, name, allowed)


def register(file: ClaimsFile, folder: Path) -> None:
    """Keep the digest of a claims file before its runs start.

    Raises
    ------
    RunError
        When another digest is kept there: the file was edited after its runs had started.
    """
    kept = folder / "registered.json"
    if not kept.exists():
        replace_file(kept, json.dumps({"claims": file.digest}) + "\n")
    check_registered(file, folder)


def check_registered(file: ClaimsFile, folder: Path) -> None:
    """Raise ``RunError`` unless this very claims file was registered in a folder."""
    try:
        known = json.loads((folder / "registered.json").read_text(encoding="utf-8"))["claims"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder / 'registered.json'} does not say which claims were registered before the "
            "runs; delete the folder of the profile and run again"
        ) from error
    if known != file.digest:
        raise RunError(
            f"{file.path} (sha256 {file.digest[:12]}) is not the file that was registered before "
            f"its runs ({known[:12]}); restore it, or delete {folder.parent} and run again"
        )


# --- verdicts -------------------------------------------------------------------------------------


def lines_of(regime: Regime, label: str, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of an arm.

    Raises
    ------
    RunError
        Unless they are there, of as many prompts as were named, and all of the split.
    """
    wanted = regime.arms[label] | {"policy": regime.policy, "seed": regime.seed}
    chosen = lines
    for column, value in wanted.items():
        chosen = chosen[chosen[column] == value]
    if len(chosen) != regime.n_prompts or chosen["prompt_id"].nunique() != regime.n_prompts:
        settings = ", ".join(f"{column} {value}" for column, value in wanted.items())
        raise RunError(
            f"the claims ask for {regime.n_prompts} prompts of {label!r} ({settings}), and the "
            f"finished runs hold {len(chosen)} lines of it; decode what is missing"
        )
    others = {split_of(text) for text in chosen["prompt"]} - {regime.split}
    if others:
        raise RunError(
            f"the claims ask for prompts of the split {regime.split!r}, and {label!r} has some of "
            f"{min(others)!r}; decode prompts of that split"
        )
    return chosen.assign(budget=regime.budget)


def decide(file: ClaimsFile, lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each primary claim: its comparison, test and verdict.

    Parameters
    ----------
    lines : DataFrame
        Lines of all runs that the file names, as `igstudy.report.load.load_runs` gives them, with a
        column ``toxicity`` where a claim is about it.

    Returns
    -------
    DataFrame
        ``difference`` is arm minus reference with its 95 % interval, over the prompts where both
        have the outcome; ``p_holm`` is adjusted over the rows; ``verdict`` is one of `VERDICTS`.

    Raises
    ------
    RunError
        See `lines_of`.
    """
    rows = []
    for name, claim in file.claims.items():
        row = paired.clustered(*gains(file.regimes[claim.regime], claim, lines))
        if row["test"] != claim.test:
            raise ParameterError(
                f"claim {name!r} names the test {claim.test!r}, and its outcome "
                f"{claim.outcome!r} is tested by {row['test']!r}; name that"
            )
        rows.append({"claim": name, **vars(claim), **row})
    table = pd.DataFrame(rows)
    table["p_holm"] = metrics.holm(table["p"])
    rows = table.itertuples(index=False)
    table["verdict"] = [_claim_verdict(file.claims[row.claim], row) for row in rows]
    return table.assign(claims_sha256=file.digest)


def gains(regime: Regime, claim: Claim, lines: pd.DataFrame) -> tuple[pd.Series, bool]:
    """Return arm minus reference by prompt, and whether it is a difference of verdicts."""
    measure = CLAIM_OUTCOMES[claim.outcome]
    arm, reference = (
        measure(lines_of(regime, label, lines).set_index("prompt_id"))
        for label in (claim.arm, claim.reference)
    )
    return arm.astype(float) - reference.astype(float), arm.dtype == bool


def _claim_verdict(claim: Claim, row: Any) -> str:
    """Return the verdict on a row with its difference, interval and adjusted p value."""
    largest = row.high if claim.sign > 0 else -row.low  # in the direction that was named
    if largest < claim.matters:
        return "failed"
    towards = claim.sign * row.difference > 0
    # where nothing could be compared, all of these are NaN
    return "held" if towards and row.p_holm <= metrics.ALPHA else "not resolved"


# --- in words -------------------------------------------------------------------------------------


def concluded(table: pd.DataFrame) -> str:
    """Return the verdicts as sentences; the last counts the claims that held."""
    sentences = []
    for row in table.itertuples(index=False):
        interval = f"{paired.short(row.difference, '+.3f')} [{paired.short(row.low)}, "
        interval += f"{paired.short(row.high)}]"
        sentences.append(
            f"{row.verdict}: {row.claim} ({row.outcome}, {row.arm} minus {row.reference}: "
            f"{interval}, {row.n_prompts} prompts, Holm p {paired.p_value(row.p_holm)})"
        )
    held = int((table["verdict"] == "held").sum())
    return "\n".join([*sentences, f"{held} of {len(table)} claims held."])


def labelled(regime: Regime, lines: pd.DataFrame) -> Iterable[tuple[str, pd.DataFrame]]:
    """Yield label and lines of every arm; those behind the check come a second time."""
    for label in regime.arms:
        chosen = lines_of(regime, label, lines)
        yield label, chosen
        if label in regime.behind_check:
            kept = paired.answered_path_safe(chosen)
            yield (
                f"{label}, behind the check",
                chosen.assign(status=chosen["status"].where(kept, "abstained")),
            )
