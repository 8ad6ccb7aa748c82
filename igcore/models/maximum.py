"""Several costs as one: their maximum, so a text is within budget if every cost is.

If one of the costs fails on a text, the maximum is NaN, which is never safe.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ParameterError
from ..files import digest_of
from ..scorers import COST, Scorer, Sessions, check_sign, keeps_cache, reads_prompts, uncached
from ..scoring import Tally, checked_score


def maximum_of(costs: Sequence[Scorer]) -> "MaximumScorer":
    """Return the maximum of loaded costs; it keeps a KV cache if one of them does.

    Raises
    ------
    ParameterError
        For a reward among them, and for fewer than two costs.
    """
    if len(costs) < 2:
        raise ParameterError(f"a maximum needs two or more costs, not {len(costs)}; give another")
    parts = tuple(check_sign(cost, "cost") for cost in costs)
    return (CachingMaximum if any(map(keeps_cache, parts)) else MaximumScorer)(parts)


@dataclass(frozen=True)
class MaximumScorer:
    """The maximum of costs without KV caches.

    Attributes
    ----------
    parts : tuple of Scorer
    """

    parts: tuple[Scorer, ...]
    sign = COST

    @property
    def name(self) -> str:
        """The names of all."""
        return f"maximum({', '.join(part.name for part in self.parts)})"

    @property
    def digest(self) -> str:
        """Hash of all parts, in any order."""
        return digest_of(["maximum", sorted([part.name, part.digest] for part in self.parts)])

    @property
    def unit(self) -> str:
        """The units of all."""
        return " or ".join(dict.fromkeys(part.unit for part in self.parts))

    @property
    def reads_prompts(self) -> bool:
        """True if one of them reads prompts."""
        return any(map(reads_prompts, self.parts))

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,) float64, NaN where one of the costs fails.

        A warning names the cost and the reason.
        """
        texts = (prompts, responses, finished)
        # each cost is checked alone, so that after one raises the others do not score again; this
        # tally never stops a run, because the run's own tally counts the texts
        found = [checked_score(part, *texts, Tally(rate=1.0)) for part in self.parts]
        return np.asarray(np.max(found, axis=0))  # NaN if any cost is


class CachingMaximum(MaximumScorer):
    """The maximum of costs with KV caches; costs of one backbone share theirs."""

    @property
    def backbone(self) -> tuple[Scorer, ...]:
        """The parts, which open their caches together."""
        return self.parts

    def open_cache(self, prompts: Sequence[str]) -> Sessions:
        """Return a new KV cache of every backbone."""
        return Sessions(self.parts, prompts)

    def with_cache(self, session: Sessions) -> "CachingMaximum":
        """Return the same scorer with these caches."""
        return replace(self, parts=tuple(map(session.of, self.parts)))

    def uncached(self) -> "CachingMaximum":
        """Return the scorer without a KV cache."""
        return replace(self, parts=tuple(map(uncached, self.parts)))
