"""The contract of a scorer: its cost is a function of the text, and of nothing else.

The promise of a guard rests on it. A cost that moves with the batch, with the order of the calls or
from one call to the next was within budget only when it was read. So a cost model is asked for the
same texts twice, alone and in batches: at loading for fixed texts, and in the final check for the
text of the answer.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .errors import ScorerWarning
from .policy import PROBE
from .scorers import Scorer, uncached
from .scoring import Tally, checked_score

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
SHARE = 0.05


@dataclass(frozen=True)
class Contract:
    """A scorer, and what was found when it was asked twice.

    Attributes
    ----------
    scorer : Scorer
    spread : float
        Largest difference between two readings of one text, in units of the scorer. A text within
        it of the budget is not verified.
    tolerance : float
        Largest difference that counts as rounding.
    problem : str
        On what else than the text the score depends, in words; empty where nothing was found. The
        answers of such a scorer are not called verified.
    tally : Tally
        Counts its failures in a run.
    """

    scorer: Scorer
    spread: float = 0.0
    tolerance: float = math.inf
    problem: str = ""
    tally: Tally = field(default_factory=Tally, compare=False, repr=False)

    @classmethod
    def examined(cls, scorer: Scorer, tally: Tally) -> "Contract":
        """Ask a scorer for fixed texts, each twice alone and twice in a batch."""
        fresh, n = uncached(scorer), len(TEXTS)
        alone = [one_by_one(fresh, TEXTS), one_by_one(fresh, TEXTS)]
        batch = checked_score(fresh, [PROBE] * n, TEXTS, [True] * n)
        reverse = checked_score(fresh, [PROBE] * n, TEXTS[::-1], [True] * n)[::-1]
        known = alone[0][np.isfinite(alone[0])]
        if not len(known):  # it may read nothing like these texts; its failures are counted later
            return cls(scorer, tally=tally)
        rounding = ROUNDING * max(1.0, float(np.abs(known).max()))
        tolerance = max(SHARE * float(np.ptp(known)), rounding)
        contract = cls(scorer, tolerance=tolerance, tally=tally)
        contract = contract.compared(alone[0], alone[1], "the call: asked twice, alone,")
        for other in (batch, reverse):
            contract = contract.compared(alone[0], other, "the batch: asked alone and with others,")
        return contract

    def compared(self, first: npt.ArrayLike, second: npt.ArrayLike, dependence: str) -> "Contract":
        """Return the contract after two readings (n,) of the same texts.

        Parameters
        ----------
        dependence : str
            On what the score depends if the readings differ, and how it was asked.
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


def one_by_one(scorer: Scorer, texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return the scores (n,) of texts, each asked alone; NaN where the scorer failed."""
    return np.concatenate([checked_score(scorer, [PROBE], [text], [True]) for text in texts])
