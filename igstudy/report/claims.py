"""Claims named before their runs: what is compared, and what would decide it.

A claims file names regimes, the arms in them, and a few primary claims about them. Holm's
correction is over these alone; every other comparison is exploratory, those that the file names as
estimates included. The file is registered before its runs start, and a file that was edited since
decides nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from igcore.errors import ParameterError, unknown_name
from igcore.files import file_digest
from igcore.methods import METHODS
from igcore.settings import Budget, Count, Options, Positive, one_of, settings
from igserve.yamlfile import read_yaml

from ..linefile import RECORD_FIELDS
from ..prompts import SPLITS
from ..settings import FolderName
from . import paired

COLUMNS = (*RECORD_FIELDS, "run", "critic_control")  # of the lines of runs
MOST_CLAIMS = 6  # primary claims: each one more makes all others harder to resolve


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
        By which its answers are judged; a search may have had another one.
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
                _check_known(
                    f"column of {named}", column, (*RECORD_FIELDS, "run", "critic_control")
                )
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
