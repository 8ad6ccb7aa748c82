"""The experiments of notebook 45: the names of the runs that each of them reads.

It has a section for each, and `igstudy.paper` reads the sweeps.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class RunPatterns(NamedTuple):
    """Patterns of the names of runs; those borrowed belong to other experiments."""

    runs: list[str]
    borrowed: list[str] = []


OURS = "inferenceguard"  # the method that others are compared with
EXPERIMENTS = {
    "lambda": RunPatterns(["decode-lambda-*"], ["decode-budget-budget-0_2"]),
    "budget": RunPatterns(["decode-budget-*"], ["decode-lambda-lagrange_multiplier-*"]),
    "ndk": RunPatterns(["decode-ndk-*"]),
    "strict": RunPatterns(["decode-strict-*"]),
    "literal": RunPatterns(["decode-literal-*"]),
    "tune": RunPatterns(["decode-tune-*"]),
    "searches": RunPatterns(["regime-*"]),
    "critic_search": RunPatterns(["decode-finals-*", "decode-shuffled-*", "decode-intermediate-*"]),
}


def matches(run: str, patterns: Sequence[str]) -> bool:
    """True if the name of a run matches one of these patterns."""
    return any(fnmatchcase(run, pattern) for pattern in patterns)
