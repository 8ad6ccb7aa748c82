"""What is measured, once and in all repeats: CPU seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from benchmarks.models import Models

SPREAD = ["min", "median", "max"]
Variant = Callable[[Models, "Case", Sequence[str], int], list[str]]
Pair = tuple["Case", "Case"]


@dataclass(frozen=True)
class Case:
    """One row of the table: a variant under one setting.

    Attributes
    ----------
    variant : str
        What is run, a key of `benchmarks.plan.VARIANTS`.
    cost, checks : str
        The cost of a guard, a key of `benchmarks.models.COSTS`, and where it looks at it.
    prompts, prompt_tokens : int
        How many prompts, of how many tokens each.
    n_samples, new_tokens : int
        Answers, or beams, and their tokens.
    block : int
        Tokens after which a search chooses.
    """

    variant: str
    cost: str = "free"
    checks: str = "word"
    prompts: int = 1
    prompt_tokens: int = 40
    n_samples: int = 16
    new_tokens: int = 32
    block: int = 8

    @property
    def keep(self) -> int:
        """How many beams go on after a block."""
        return max(1, self.n_samples // 4)

    @property
    def size(self) -> str:
        """The sizes as text."""
        sizes = f"{self.prompts} × {self.prompt_tokens} tokens, N = {self.n_samples}"
        return f"{sizes}, {self.new_tokens} new"

    @property
    def name(self) -> str:
        """The variant with its cost as text."""
        where = f" at every {self.checks}" if self.cost == "smollm2-harm-2" else ""
        return self.variant + (f", {self.cost}{where}" if self.cost != "free" else "")

    def __str__(self) -> str:
        """Return name and sizes."""
        return f"{self.name}: {self.size}"


def timed(work: Callable[[], list[str]], prompts: int) -> float:
    """Do a piece of work once and return its CPU seconds.

    Raises
    ------
    AssertionError
        Unless it answers every prompt.
    """
    begun = time.process_time()
    answers = work()
    seconds = time.process_time() - begun
    assert len(answers) == prompts and all(isinstance(answer, str) for answer in answers)
    return seconds


def line(case: Case, repeat: int, seconds: float) -> dict:
    """Return what was measured: case, repeat and CPU seconds."""
    return {"case": repr(case), "repeat": repeat, "cpu_s": seconds}


def table(lines: Sequence[dict], cases: Sequence[Case]) -> pd.DataFrame:
    """Return one row per case: its settings, and the CPU seconds per prompt of its repeats.

    ``tokens_per_s`` counts sampled tokens, n_samples * new_tokens of every prompt, in the median.
    """
    made = seconds_of(lines)
    rows = []
    for case in dict.fromkeys(cases):
        seconds = made.loc[repr(case)].dropna() / case.prompts
        spread = {f"cpu_s_{name}": seconds.agg(name) for name in SPREAD}
        rate = case.n_samples * case.new_tokens / seconds.median()
        rows.append(asdict(case) | spread | {"tokens_per_s": rate, "repeats": len(seconds)})
    return pd.DataFrame(rows)


def ratios(lines: Sequence[dict], pairs: Sequence[Pair]) -> pd.DataFrame:
    """Return one row per pair: how often the CPU seconds of the second go into the first's.

    The two of a repeat were measured one after the other, and each repeat has a ratio of its own.
    """
    made = seconds_of(lines)
    rows = []
    for first, second in pairs:
        found = (made.loc[repr(first)] / made.loc[repr(second)]).dropna()
        names = {"first": first.name, "second": second.name, "size": first.size}
        rows.append(names | {name: found.agg(name) for name in SPREAD})
    return pd.DataFrame(rows)


def seconds_of(lines: Sequence[Mapping]) -> pd.DataFrame:
    """Return the CPU seconds by case and repeat."""
    return pd.DataFrame(lines).pivot(index="case", columns="repeat", values="cpu_s")
