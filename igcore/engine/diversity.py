"""How a retry avoids failed blocks: the paper's sampling diversity, and a safer form of it.

The module imports no torch, so that notebook 10 can use it alone. Every prompt has a new `Failures`
in every block.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

Factors = dict[int, float]  # token -> factor on its reference probability
# (failures, sample, n_samples) -> the sample's penalty, or None where nothing changes
Diversity = Callable[["Failures", int, int], "Penalty | None"]


@dataclass(frozen=True, eq=False)
class Penalty:
    """Factors on reference probabilities by position in a block, for samples that share them.

    Attributes
    ----------
    factors : dict of int to Factors
        By position in the block.
    """

    factors: dict[int, Factors]

    def at(self, prefix: Sequence[int]) -> Factors:
        """Return the factors of some next tokens after a prefix; other tokens keep theirs.

        Rows with the same factors get the same object, which no caller may change: `draw` builds
        one table per object.
        """
        return self.factors.get(len(prefix), {})


class Failures:
    """The samples of the failed rounds of one block.

    Parameters
    ----------
    spared : collection of int
        End tokens; the penalty leaves them alone.
    penalty : float or None
        n_2 of the paper, subtracted from the logits of penalised tokens (nats); None stands for
        infinity.

    Attributes
    ----------
    seen : dict of int to set of int
        Position in the block -> tokens that failed blocks have there, the paper's F > 0.
    """

    def __init__(self, spared: frozenset[int], penalty: float | None):
        self.spared = spared
        # subtracting n_2 from a logit multiplies the weight of its token by exp(-n_2)
        self.factor = 0.0 if penalty is None else math.exp(-penalty)
        self.seen: dict[int, set[int]] = defaultdict(set)

    def add(self, tokens: Sequence[int]) -> None:
        """Note a failed block."""
        vars(self).pop("penalty", None)  # that of the last round does not know this block
        for i, token in enumerate(tokens):
            # F > 0: a set, since the paper's penalty does not grow with the number of failures
            self.seen[i].add(token)

    @cached_property
    def penalty(self) -> Penalty:
        """The factor of each token that a failed block has at a position; built once a round."""
        # end tokens are spared, or a retry could not end where a failed block did
        tokens = {i: sorted(seen - self.spared) for i, seen in self.seen.items()}
        return Penalty({i: dict.fromkeys(own, self.factor) for i, own in tokens.items()})


def diversity_penalty(failures: Failures, sample: int, n_samples: int) -> Penalty | None:
    """Return the paper's sampling diversity (section 5.2, "Sampling Diversity"; appendix C).

    Step i of a retry samples from softmax(W o - n_2 [F_i > 0]): every token that a failed block has
    at this position loses n_2 from its logit, after any beginning. Subtracting n_2 from a
    logit multiplies the probability by exp(-n_2).

    Parameters
    ----------
    failures : Failures
        The failed rounds of this block, with n_2.
    sample, n_samples : int
        Number of the sample among those of its parent, from 0, and how many there are.

    Returns
    -------
    Penalty or None
        None changes nothing.
    """
    return failures.penalty


def penalty_of_half(failures: Failures, sample: int, n_samples: int) -> Penalty | None:
    """Penalise the smaller half of a parent's samples; the others stay reference samples.

    The chance that all fail is then bounded, see `half_bound` in notebook 10; the
    penalty alone may ban the only safe block.
    """
    # ceil: a parent with a single sample draws it from the reference
    if sample < math.ceil(n_samples / 2):
        return None
    return diversity_penalty(failures, sample, n_samples)


def no_penalty(failures: Failures, sample: int, n_samples: int) -> None:
    """Sample every retry from the reference."""


DIVERSITIES: dict[str, Diversity] = {
    "none": no_penalty,
    "paper": diversity_penalty,
    "half": penalty_of_half,
}
