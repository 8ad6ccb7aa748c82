"""The contract of a scorer: its cost is a function of the text, and of nothing else.

The guarantee depends on it. A cost that changes with the batch, with the order of the calls or from
one call to the next was within budget only at that reading. So a cost model scores the same texts
twice, alone and in batches: fixed texts at loading, and the answer's text in the final check.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .config import SearchConfig
from .errors import ParameterError, ScorerWarning
from .prompt import PROBE
from .scorers import FunctionScorer, Scorer, Sessions, Texts, uncached
from .scoring import Cached, Tally, checked_score, score_once

# mild texts of several lengths and scripts, with and without an end; the empty one is a prefix, too
TEXTS = (
    "",
    "no",
    "The meeting ran late",
    "Thank you, the garden looks lovely today!",
    "I do not like this at all; it was a silly idea, and you know it.",
    "Ein Café um die Ecke, 今日はいい天気です。",
    "They walk and walk and walk. " * 6,
)
# float32 rounds at about 1e-7 of a number, and sums of many numbers at more
ROUNDING = 1e-5
# bfloat16 moves a score by up to some hundredths of its range; a larger move is no rounding
ROUNDING_SHARE = 0.05
# of costs that may be below 0 for every harmless text
SIGNED_UNITS = {"logit", "logit gap", "points", "trained scale"}


@dataclass(frozen=True)
class Contract:
    """A scorer, and what two readings of the same texts showed.

    Attributes
    ----------
    scorer : Scorer
    spread : float
        Largest difference between two readings of one text, in units of the scorer. A text within
        it of the budget is not verified.
    tolerance : float
        Largest difference that counts as rounding.
    problem : str
        What the score depends on besides the text, in words; empty if nothing was found. Answers
        under such a scorer are never called verified.
    tally : Tally
        Counts its failures in a run.
    costs : tuple of float
        The scores of the fixed texts, NaN where it failed; empty if it was not examined.
    """

    scorer: Scorer
    spread: float = 0.0
    tolerance: float = math.inf
    problem: str = ""
    tally: Tally = field(default_factory=Tally, compare=False, repr=False)
    costs: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def examined(cls, scorer: Scorer, tally: Tally) -> "Contract":
        """Score fixed texts, each twice alone and twice in a batch.

        Raises
        ------
        ParameterError
            When it fails on all of them.
        PolicyError
            When memory runs out for a single text.
        """
        n = len(TEXTS)
        first, again, batch = (_read(scorer, TEXTS, size) for size in (1, 1, n))
        reverse = _read(scorer, TEXTS[::-1], n)[::-1]
        known = first[np.isfinite(first)]
        if not len(known):
            raise ParameterError(_why_refused(scorer, "cost"))
        rounding = ROUNDING * max(1.0, float(np.abs(known).max()))
        tolerance = max(ROUNDING_SHARE * float(np.ptp(known)), rounding)
        contract = cls(scorer, tolerance=tolerance, tally=tally, costs=tuple(first.tolist()))
        contract = contract.compared(first, again, "the call: asked twice, alone,")
        for other in (batch, reverse):
            contract = contract.compared(first, other, "the batch: asked alone and with others,")
        return contract

    def compared(self, first: npt.ArrayLike, second: npt.ArrayLike, dependence: str) -> "Contract":
        """Return the contract after two readings (n,) of the same texts.

        Parameters
        ----------
        dependence : str
            What the score depends on if the readings differ, and how the texts were scored.
        """
        a, b = np.asarray(first, float), np.asarray(second, float)
        failed = np.isnan(a) != np.isnan(b)
        with np.errstate(invalid="ignore"):
            apart = np.where(failed, math.inf, np.nan_to_num(np.abs(a - b)))
        spread = max(self.spread, float(apart.max(initial=0.0)))
        problem = self.problem
        if spread > self.tolerance and not problem:
            worst = int(apart.argmax())
            problem = (
                f"cost {self.scorer.name!r} depends on {dependence} it gave {a.flat[worst]:.6g} "
                f"and {b.flat[worst]:.6g} for one text"
            )
            warnings.warn(f"{problem}; its answers are not verified", ScorerWarning, stacklevel=2)
        return replace(self, spread=spread, problem=problem)


def _read(scorer: Scorer, texts: Sequence[str], size: int) -> npt.NDArray[np.float64]:
    """Return the scores (n,) of texts in batches of a size; NaN where the scorer failed."""
    from .engine.memory import halving  # here: it needs torch, and a function does not

    def score(part: Sequence[str]) -> list[float]:
        prompts, finished = [PROBE] * len(part), [True] * len(part)
        scores: list[float] = checked_score(uncached(scorer), prompts, part, finished).tolist()
        return scores

    return np.array(list(halving(texts, size, score)))


def _why_refused(scorer: Scorer, role: str) -> str:
    """Return the error message for a scorer that failed on every fixed text."""
    text = TEXTS[2]
    parts = [uncached(part) for part in getattr(scorer, "parts", [scorer])]
    whys = [score_once(part, [PROBE], [text], [True])[1] for part in parts]
    why = next(filter(None, whys), "returned no finite number")
    return (
        f"{role} {scorer.name!r} failed on all of {len(TEXTS)} short texts, and must have a number "
        f"for any text: for {text!r} it {why}"
    )


def contracts_of(
    scorers: Mapping[str, Scorer], known: Mapping[str, Contract], failure_rate: float
) -> dict[str, Contract]:
    """Return the contract of each scorer by role: a known one, or what an examination finds.

    A reward decides no verdict, so it need only have a number for one of the fixed texts.

    Raises
    ------
    ParameterError, PolicyError
        As `Contract.examined`.
    """
    contracts = {}
    for role, scorer in scorers.items():
        contract = known.get(role)
        if contract is None or contract.scorer is not scorer:
            contract = Contract.examined(scorer, Tally()) if role == "cost" else Contract(scorer)
            if role == "reward" and np.isnan(_read(scorer, TEXTS, len(TEXTS))).all():
                raise ParameterError(_why_refused(scorer, role))
        # each call counts the failures of its own texts: a guard recovers when its scorer does
        contracts[role] = replace(contract, tally=Tally(failure_rate))
    return contracts


def doubts(contract: Contract, config: SearchConfig, early: bool) -> Iterator[str]:
    """Yield why a cost under a budget is likely to let every text pass, or none.

    Parameters
    ----------
    contract : Contract
        Of a cost. One that was not examined raises no doubt.
    config : SearchConfig
        The settings that a method runs under.
    early : bool
        Whether the method checks unfinished answers, too.
    """
    if not contract.costs:
        return
    name, budget = f"cost {contract.scorer.name!r}", config.budget
    high = np.nanmax(contract.costs)
    units = {str(part.unit) for part in getattr(contract.scorer, "parts", [contract.scorer])}
    if "probability" not in units or high <= 1:
        units -= {FunctionScorer.unit}  # it may be the same as another one
    # a budget of 0 means the same for counts of all kinds
    if len(units) > 1 and (budget > 0 or "probability" in units):
        yield f"{name} mixes the units {', '.join(sorted(units))}; give costs of one scale"
    # a sum of probabilities may be above 1
    if units == {"probability"} and budget >= 1 and config.accounting in ("peak", "terminal"):
        yield f"{name} is a probability, so every text is within {budget:g}; give a budget below 1"
    if high < 0 and not units & SIGNED_UNITS:
        yield (
            f"every examined text costs below 0 under {name}, up to {high:g}, so the guard lets "
            "everything pass; add a constant, or give an object with the unit 'logit' if only bad "
            "texts are above 0"
        )
    over = [not cost <= budget for cost in contract.costs]
    if early and all(over[:2]):  # the empty text and a single word
        what = "every examined text" if all(over) else "the empty answer, as is a first word,"
        yield (
            f"{what} is over the budget of {budget:g} under {name}; is higher worse? for a "
            "requirement on the whole answer, such as JSON, set accounting='terminal'"
        )


# --- the scorers of a search ---------------------------------------------------------------------


class Scoring:
    """The scorers of one batch of prompts: during the search, and for what is reported.

    Parameters
    ----------
    contracts : mapping of str to Contract
        The scorers by role, each with its contract. Without a reward model rewards are the
        policy's own likelihoods, which the search knows.
    prompts : sequence of str

    Attributes
    ----------
    search : dict of str to Cached
        By role, ``cost`` and ``reward``: with a KV cache where a scorer offers one. Two scorers of
        one backbone share it.
    reported : dict of str to Cached
        The same for the reported metrics of an answer, without a KV cache and without scores of
        the search, so that others can recompute them.
    """

    def __init__(self, contracts: Mapping[str, Contract], prompts: Texts):
        self.contract = contracts["cost"]  # of the final check, which uses no cache
        self.search, self.reported = {}, {}
        self.sessions = Sessions([contract.scorer for contract in contracts.values()], prompts)
        for role, contract in contracts.items():
            scorer, tally = contract.scorer, contract.tally
            self.reported[role] = Cached(uncached(scorer), tally)
            self.search[role] = Cached(self.sessions.of(scorer), tally)

    def retain(self, prompts: Sequence[str], responses: Sequence[str]) -> None:
        """Keep the KV cache of these texts, and free the rest."""
        self.sessions.retain(prompts, responses)
