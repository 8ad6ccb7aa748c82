"""What a certified threshold promises, and on what terms: the certificate that prints itself."""

import math
from dataclasses import dataclass

import pandas as pd

from .tables import markdown

ALWAYS = (  # what every certificate assumes
    "The calibration prompts and the prompts served are exchangeable: drawn independently from one "
    "distribution, each used once.",
    "Serving uses the same reference policy, scorer, accounting and budget, the same N samples, "
    "M rounds, K beams and block size, and the same temperature.",
    "No calibration prompt was used to train, stop or choose the critic, nor to choose the "
    "settings of the search: the split is disjoint from both.",
    "Unsafe means what the cost model says at the end of the text; the cost model's own errors are "
    "not covered.",
)
METHODS = {  # method -> (its loss, what it assumes besides)
    "learn-then-test": (
        "1 when the text that the critic alone lets through is unsafe by its terminal cost, "
        "else 0; abstaining is 0.",
        "The final gate was off (behind it the loss would be 0 at every threshold and the "
        "certificate vacuous), and the thresholds and their order were fixed before any loss was "
        "seen.",
    ),
    "simultaneous-conformal": (
        "1 when any candidate that is unsafe by its terminal cost scores above the threshold, "
        "else 0.",
        "The candidates of a prompt do not depend on the threshold, as in best-of-N or in the last "
        "block of a search.",
    ),
    "conformal-risk-control": (
        "A number in [0, 1] for each prompt that never falls as the threshold does; abstaining is "
        "0.",
        "The loss of every prompt is monotone in the threshold: checked on the calibration "
        "prompts, assumed of new ones.",
    ),
}


@dataclass(frozen=True)
class Certificate:
    """A threshold and what it promises; prints itself with its assumptions.

    Attributes
    ----------
    threshold : float or None
        Accept critic scores above it. None: no threshold passed, so always abstain. -inf accepts
        and +inf rejects everything.
    alpha, delta : float
        The risk (expected loss of a prompt) tolerated, and the chance that it is exceeded; None
        where an expectation is bounded.
    """

    method: str  # a key of METHODS
    threshold: float | None
    alpha: float
    delta: float | None
    n_prompts: int
    loss: str  # what is counted
    bound: str  # what is promised
    assumptions: tuple[str, ...]  # what the promise rests on
    table: tuple[dict, ...]  # what was tested, a row each, in the order of the tests

    def asdict(self) -> dict:
        """Return the fields as plain JSON values.

        An infinite threshold becomes the text "inf" or "-inf", which float() reads.
        """
        table = [row | {"threshold": _json(row["threshold"])} for row in self.table]
        return vars(self) | {
            "threshold": _json(self.threshold),
            "assumptions": list(self.assumptions),
            "table": table,
        }

    def __str__(self) -> str:
        # in full: a rounded threshold may accept more
        threshold = "none, always abstain" if self.threshold is None else self.threshold
        levels = f"alpha {self.alpha:g}" + ("" if self.delta is None else f", delta {self.delta:g}")
        rows = [row | {"threshold": f"{row['threshold']:g}"} for row in self.table]
        return (
            f"**Threshold: {threshold}** ({self.method}, {levels}, {self.n_prompts} prompts)\n\n"
            f"**Promise.** {self.bound}\n\n**Loss.** {self.loss}\n\n**Only if**\n\n"
            + "".join(f"- {sentence}\n" for sentence in self.assumptions)
            + f"\n**Tested**\n\n{markdown(pd.DataFrame(rows))}"
        )

    _repr_markdown_ = __str__


def _json(threshold: float | None) -> float | str | None:
    return str(threshold) if threshold is not None and math.isinf(threshold) else threshold


def certificate(
    method: str, threshold, alpha, delta, n_prompts: int, bound: str, table: list[dict]
) -> Certificate:
    loss, more = METHODS[method]
    bound = (
        "No threshold passed: abstain on every prompt, which has loss 0."
        if threshold is None
        else bound
    )
    return Certificate(
        method, threshold, alpha, delta, n_prompts, loss, bound, (*ALWAYS, more), tuple(table)
    )
