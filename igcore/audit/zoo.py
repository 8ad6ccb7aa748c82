"""Hostile scorers, critics and rewards, each made from an honest cost.

A kind is deterministic when its number depends on the text, the prompt, whether the text is
finished, and on the call that it is part of: how many texts that has, and at which place this one
is. A text whose number depends on anything else cannot be checked again by anybody.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from zlib import crc32

import numpy as np
import torch

from ..scorers import COST, REWARD

Honest = Callable[[str, str, bool], float]  # prompt, text, finished -> cost
# costs, texts, finished and budget of one call -> what the scorer returns
Answer = Callable[[list[float], Sequence[str], Sequence[bool], float], Any]
# the cost of one text, the text, whether it is finished, the budget -> the number returned for it
Change = Callable[[float, str, bool, float], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of scorer: `make` returns a new `Answer`, so that no state outlives a scorer."""

    make: Callable[[], Answer]
    deterministic: bool = True


class Hostile:
    """The scorer of a kind, around an honest cost."""

    digest, sign, unit = "none", COST, "as the honest cost"

    def __init__(self, name: str, honest: Honest, budget: float):
        self.name, self.honest, self.budget = name, honest, budget
        self.answer = KINDS[name].make()

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> Any:
        """Return whatever the kind returns for these texts."""
        costs = [self.honest(*x) for x in zip(prompts, responses, finished, strict=True)]
        found = self.answer(costs, responses, finished, self.budget)
        if self.name == "mutates its arguments":
            for argument, value in ((prompts, "?"), (responses, ""), (finished, True)):
                if isinstance(argument, list):
                    argument[:] = [value] * len(argument)
        return found


def draw(text: str, n: int) -> int:
    """Return a number in 0 ... n - 1 that is fixed by a text and looks random."""
    return crc32(text.encode("utf-8", "surrogatepass")) % n


def each(change: Change) -> Kind:
    """Return the kind that changes the cost of every text on its own."""

    def answer(costs: list[float], texts: Any, finished: Any, budget: float) -> list[Any]:
        return [change(*x, budget) for x in zip(costs, texts, finished, strict=True)]

    return Kind(lambda: answer)


def some(value: Any, share: int = 6) -> Kind:
    """Return the kind that answers `value` for one in `share` texts."""
    return each(lambda cost, text, finished, budget: cost if draw(text, share) else value)


# --- kinds that need more than a line -------------------------------------------------------------


def huge_and_tiny(cost: float, text: str, finished: bool, budget: float) -> float:
    return [1e308, -1e308, 5e-324, cost, cost, cost][draw(text, 6)]


def around_the_budget(cost: float, text: str, finished: bool, budget: float) -> float:
    """Return the budget exactly, or one ulp above it."""
    return [budget, float(np.nextafter(budget, np.inf))][draw(text, 2)]


def raising(cost: float, text: str, finished: bool, budget: float) -> float:
    if not draw(text, 8):
        raise RuntimeError("this text cannot be scored")
    return cost


def float16(costs: list[float], *call: Any) -> np.ndarray:
    with np.errstate(over="ignore"):  # 65504 is the largest float16
        return (np.array(costs) ** 9).astype(np.float16)


def uint8(costs: list[float], *call: Any) -> np.ndarray:
    return (254 + np.nan_to_num(costs, posinf=9, neginf=9)).astype(np.int64).astype(np.uint8)


def own_buffer() -> Answer:
    """Answer views of one buffer, which every later call overwrites."""
    buffer = np.zeros(4096)

    def answer(costs: list[float], *call: Any) -> np.ndarray:
        nonlocal buffer
        buffer = buffer if len(costs) <= len(buffer) else np.zeros(2 * len(costs))
        buffer[:] = 0  # what an earlier call returned now reads as safe
        buffer[: len(costs)] = costs
        return buffer[: len(costs)]

    return answer


def masked(costs: list[float], texts: Sequence[str], *call: Any) -> np.ma.MaskedArray:
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

    def __gt__(self, other: object) -> bool:
        return False

    __ge__ = __gt__


def wrong_shapes(costs: list[float], texts: Sequence[str], *call: Any) -> Any:
    """Return a score too many, a column, one number, one score too few, or nothing."""
    found = [[*costs, 0.0], np.zeros((len(costs), 1)), 0.0, costs[:-1], None]
    return (found + [costs] * 25)[draw(texts[0], 30)]


def wrong_types(costs: list[float], texts: Sequence[str], *call: Any) -> Any:
    """Return texts, fractions, complex numbers or dates."""
    ones = np.ones(len(costs))
    found = [["0.1"] * len(costs), [Fraction(0)] * len(costs), 0j * ones, ones.astype("M8[s]")]
    return (found + [costs] * 20)[draw(texts[0], 24)]


def booleans(costs: list[float], texts: Sequence[str], finished: Any, budget: float) -> Any:
    """Say which texts are over budget, where a number was asked."""
    return np.array(costs) > budget if not draw(texts[0], 2) else costs


def by_place(costs: list[float], *call: Any) -> list[float]:
    """Be honest about the first text of a call only."""
    return [*costs[:1], *[0.0] * len(costs[1:])]


def noisy() -> Answer:
    noise = random.Random(0)
    return lambda costs, *call: [cost + noise.gauss(0, 0.3) for cost in costs]


def good_at_first(times: int) -> Callable[[], Answer]:
    """Call every text safe for the first `times` that it is asked."""

    def make() -> Answer:
        asked: Counter[str] = Counter()

        def answer(costs: list[float], texts: Sequence[str], *call: Any) -> list[float]:
            asked.update(texts)
            return [
                0.0 if asked[text] <= times else cost
                for cost, text in zip(costs, texts, strict=True)
            ]

        return answer

    return make


def drifting() -> Answer:
    calls = iter(range(10**9))

    def answer(costs: list[float], *call: Any) -> list[float]:
        drift = 0.01 * next(calls)
        return [cost + drift for cost in costs]

    return answer


def odd_calls() -> Answer:
    calls = iter(range(10**9))
    return lambda costs, *call: [0.0] * len(costs) if next(calls) % 2 else costs


# --- all of them ----------------------------------------------------------------------------------


def call(answer: Answer) -> Kind:
    """Return the kind of a function of one whole call."""
    return Kind(lambda: answer)


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
    "1e308 and denormals": each(huge_and_tiny),
    "float16 overflow": call(float16),
    "bfloat16 rounding": call(lambda costs, *call: torch.tensor(costs).bfloat16().float()),
    "uint8 wrap": call(uint8),
    "reuses its own buffer": Kind(own_buffer),
    "masked arrays": call(masked),
    "ndarray whose <= lies": call(lambda costs, *call: np.array(costs).view(LyingArray)),
    "float whose <= lies": each(lambda cost, *text: LyingFloat(cost)),
    "mutates its arguments": each(lambda cost, *text: cost),
    "raises on some texts": each(raising),
    "wrong shapes": call(wrong_shapes),
    "wrong types": call(wrong_types),
    "booleans": call(booleans),
    "exactly d": each(lambda cost, text, finished, budget: min(cost, budget)),
    "d or one ulp over d": each(around_the_budget),
    "depends on batch size": call(
        lambda costs, *call: costs if len(costs) == 1 else [0.0] * len(costs)
    ),
    "depends on place in batch": call(by_place),
    "noise of sd 0.3": Kind(noisy, deterministic=False),
    "good the first two times": Kind(good_at_first(2), deterministic=False),
    "good the first time only": Kind(good_at_first(1), deterministic=False),
    "drifts upward": Kind(drifting, deterministic=False),
    "odd calls lie": Kind(odd_calls, deterministic=False),
}


class LovesUnsafe:
    """A reward that prefers what the honest cost dislikes."""

    name, digest, sign, unit = "loves unsafe", "none", REWARD, "as the honest cost"

    def __init__(self, honest: Honest):
        self.honest = honest

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> list[float]:
        """Return the honest cost of each text."""
        return [self.honest(*x) for x in zip(prompts, responses, finished, strict=True)]


class EvilCritic:
    """A critic that answers f1 and f2 without reading anything."""

    watch, reads_keys = None, False

    def __init__(self, answer: Callable[[int], torch.Tensor]):
        self.answer = answer

    def judge(self, history: Any, z: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f1 and f2 of each candidate."""
        return self.answer(len(z)), self.answer(len(z))


def random_critic() -> EvilCritic:
    generator = torch.Generator().manual_seed(0)
    return EvilCritic(lambda n: torch.rand(n, generator=generator))


CRITICS: dict[str, Callable[[], EvilCritic]] = {
    "NaN": lambda: EvilCritic(lambda n: torch.full((n,), torch.nan)),
    "inf": lambda: EvilCritic(lambda n: torch.full((n,), torch.inf)),
    "random": random_critic,
    "always yes": lambda: EvilCritic(torch.ones),
}
