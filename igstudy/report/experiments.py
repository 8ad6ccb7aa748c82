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
LAMBDAS = (0.0, 1.0, 2.5, 5.0, 10.0)
SIZES = (4, 8, 16, 32)  # N of Best-of-N, read off one run
EXPERIMENTS = {
    "lambda": RunPatterns(["decode-lambda-*"], ["decode-ndk-*-block_size-8-keep-2"]),
    "ndk": RunPatterns(["decode-ndk-*"]),
    "strict": RunPatterns(["decode-strict-*"]),
    "literal": RunPatterns(["decode-literal-*"]),
    "seeds": RunPatterns(["decode-seeds-*"]),
    "compute": RunPatterns(["decode-compute-*"]),
    "over_refusal": RunPatterns(["decode-benign"]),
    "tune": RunPatterns(["decode-tune-*"]),
    "checks": RunPatterns(["decode-checks-*"]),
    "weights": RunPatterns(["decode-weight-*"]),
    "searches": RunPatterns(["regime-*"]),
    "critic_search": RunPatterns(["decode-finals-*", "decode-shuffled-*", "decode-intermediate-*"]),
}


def matches(run: str, patterns: Sequence[str]) -> bool:
    """True if the name of a run matches one of these patterns."""
    return any(fnmatchcase(run, pattern) for pattern in patterns)
