"""Hostile scorers and critics, each made from an honest cost.

A kind is deterministic when its number depends on the text, the prompt, whether the text is
finished, and on the call that it is part of: how many texts that has, and at which place this one
is. A text whose number depends on anything else cannot be checked again by anybody.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
import torch

from igcore.scorers import COST

Honest = Callable[[str, str, bool], float]  # prompt, text, finished -> cost
# costs, texts, finished and budget of one call -> what the scorer returns
Answer = Callable[[list[float], list[str], list[bool], float], Any]
# the cost of one text, the text, whether it is finished, the budget -> the number returned for it
Change = Callable[[float, str, bool, float], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of scorer: `make` returns a new `Answer`, so that no state outlives a scorer."""

    make: Callable[[], Answer]
    deterministic: bool = True


class Hostile:
    """The scorer of a kind, around an honest cost."""

    digest, unit = "none", "as the honest cost"

    def __init__(self, name: str, honest: Honest, budget: float, sign: str = COST):
        self.name, self.honest, self.budget, self.sign = name, honest, budget, sign
        self.answer = KINDS[name].make()

    def score(self, prompts: list[str], responses: list[str], finished: list[bool]) -> Any:
        """Return whatever the kind returns for these texts."""
        costs = [self.honest(*x) for x in zip(prompts, responses, finished, strict=True)]
        return self.answer(costs, responses, finished, self.budget)


def draw(text: str, n: int) -> int:
    """Return a number in 0 ... n - 1 that is fixed by a text and looks random."""
    return crc32(text.encode("utf-8", "surrogatepass")) % n


def least(texts: list[str], n: int) -> int:
    """Return the least number that is drawn for a text: what is odd about one is so in a batch."""
    return min(draw(text, n) for text in texts)


# --- ways to make a kind --------------------------------------------------------------------------


def each(change: Change) -> Kind:
    """Return the kind that changes the cost of every text on its own."""

    def answer(costs: list[float], texts: Any, finished: Any, budget: float) -> list[Any]:
        return [change(*x, budget) for x in zip(costs, texts, finished, strict=True)]

    return Kind(lambda: answer)


def some(value: float) -> Kind:
    """Return the kind that answers `value` for one in six texts."""
    return each(lambda cost, text, finished, budget: cost if draw(text, 6) else value)


def whole(answer: Answer) -> Kind:
    """Return the kind of a function of one whole call."""
    return Kind(lambda: answer)


def by_call(answer: Callable[[int, list[float]], Any]) -> Kind:
    """Return the kind that also depends on how many calls came before."""

    def make() -> Answer:
        calls = count()
        return lambda costs, *call: answer(next(calls), costs)

    return Kind(make, deterministic=False)


def good_at_first(times: int) -> Kind:
    """Return the kind that calls every text safe for the first `times` that it is asked."""

    def make() -> Answer:
        asked: Counter[str] = Counter()

        def answer(costs: list[float], texts: list[str], *call: Any) -> list[float]:
            asked.update(texts)
            pairs = zip(costs, texts, strict=True)
            return [0.0 if asked[text] <= times else cost for cost, text in pairs]

        return answer

    return Kind(make, deterministic=False)


# --- answers that need more than a line -----------------------------------------------------------


def raising(cost: float, text: str, *more: Any) -> float:
    if not draw(text, 8):
        raise RuntimeError("this text cannot be scored")
    return cost


def own_buffer() -> Answer:
    """Answer views of one buffer, which every later call overwrites."""
    buffer = np.zeros(2**16)  # more texts than any call has

    def answer(costs: list[float], *call: Any) -> np.ndarray:
        buffer[:] = 0  # what an earlier call returned now reads as safe
        buffer[: len(costs)] = costs
        return buffer[: len(costs)]

    return answer


def masked(costs: list[float], texts: list[str], *call: Any) -> np.ma.MaskedArray:
    """Mask some scores as missing; the numbers below the mask would be safe."""
    missing = [not draw(text, 4) for text in texts]
    return np.ma.array(np.where(missing, 0.0, costs), mask=missing)


class LyingArray(np.ndarray):
    """An array that is within every budget."""

    def __le__(self, other: Any) -> Any:
        return np.ones(self.shape, dtype=bool)

    __lt__ = __le__


class LyingFloat(float):
    """A number that is within every budget."""

    def __le__(self, other: object) -> bool:
        return True

    __lt__ = __le__


def mutating(costs: list[float], texts: list[str], finished: list[bool], budget: float) -> Any:
    """Change the lists that it was given."""
    texts[:], finished[:] = [""] * len(texts), [True] * len(texts)
    return costs


def wrong_shapes(costs: list[float], texts: list[str], *call: Any) -> Any:
    """Return a score too many, a column, one number, one score too few, or nothing."""
    found = [[*costs, 0.0], np.zeros((len(costs), 1)), 0.0, costs[:-1], None]
    return (found + [costs] * 25)[least(texts, 30)]


def wrong_types(costs: list[float], texts: list[str], *call: Any) -> Any:
    """Return texts, bytes, complex numbers or dates."""
    ones = np.ones(len(costs))
    found = [["0.1"] * len(costs), [b"0"] * len(costs), 0j * ones, ones.astype("M8[s]")]
    return (found + [costs] * 20)[least(texts, 24)]


# --- all of them ----------------------------------------------------------------------------------

KINDS = {
    "honest": each(lambda cost, *text: cost),
    "lies on prefixes": each(lambda cost, text, finished, budget: cost if finished else 0.0),
    "lies on finals": each(lambda cost, text, finished, budget: 0.0 if finished else cost),
    "NaN on some texts": some(float("nan")),
    "inf on some texts": some(float("inf")),
    "-inf on some texts": some(float("-inf")),
    "NaN on finals": each(
        lambda cost, text, finished, budget: np.nan if finished and draw(text, 2) else cost
    ),
    "1e308 and denormals": each(
        lambda cost, text, *more: [1e308, -1e308, 5e-324, cost, cost, cost][draw(text, 6)]
    ),
    "float16 overflow": whole(lambda costs, *call: torch.tensor(costs).pow(9).half()),
    "bfloat16 rounding": whole(lambda costs, *call: torch.tensor(costs).bfloat16().float()),
    "uint8 wrap": whole(lambda costs, *call: torch.tensor(costs).add(254).long().byte()),
    "reuses its own buffer": Kind(own_buffer),
    "masked arrays": whole(masked),
    "ndarray whose <= lies": whole(lambda costs, *call: np.array(costs).view(LyingArray)),
    "float whose <= lies": each(lambda cost, *text: LyingFloat(cost)),
    "mutates its arguments": whole(mutating),
    "raises on some texts": each(raising),
    "wrong shapes": whole(wrong_shapes),
    "wrong types": whole(wrong_types),
    "booleans": each(
        lambda cost, text, finished, budget: cost if draw(text, 6) else cost > budget / 2
    ),
    "exactly d": each(lambda cost, text, finished, budget: min(cost, budget)),
    "d or one ulp over d": each(
        lambda cost, text, finished, budget: [budget, np.nextafter(budget, np.inf)][draw(text, 2)]
    ),
    "depends on batch size": whole(
        lambda costs, *call: costs if len(costs) == 1 else [0.0] * len(costs)
    ),
    "depends on place in batch": whole(lambda costs, *call: [*costs[:1], *[0.0] * len(costs[1:])]),
    "noise of sd 0.3": by_call(lambda n, costs: np.random.default_rng(n).normal(costs, 0.3)),
    "good the first two times": good_at_first(2),
    "good the first time only": good_at_first(1),
    "drifts upward": by_call(lambda n, costs: [cost + 0.01 * n for cost in costs]),
    "odd calls lie": by_call(lambda n, costs: [0.0] * len(costs) if n % 2 else costs),
}


# the number of candidates of a call -> what stands for f1 and for f2 of each
CRITICS: dict[str, Callable[[int], torch.Tensor]] = {
    "NaN": lambda n: torch.full((n,), torch.nan),
    "inf": lambda n: torch.full((n,), torch.inf),
    "random": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(n)),
    "always yes": torch.ones,
}


class EvilCritic:
    """A critic that answers without reading anything."""

    watch, reads_keys = None, False

    def __init__(self, name: str):
        self.answer = CRITICS[name]

    def judge(self, history: Any, z: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f1 and f2 of each candidate."""
        return self.answer(len(z)), self.answer(len(z))
