"""The experiments of params/ablations: the names of the runs that each of them reads.

Notebook 45 has a section for each, and `igstudy.paper` reads the sweeps.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class Experiment(NamedTuple):
    """Patterns of the names of runs; those borrowed belong to other experiments."""

    runs: list[str]
    borrowed: list[str] = []


OURS = "inferenceguard"  # the method that others are compared with
LAMBDAS = (0.0, 1.0, 2.5, 5.0, 10.0)
SIZES = (4, 8, 16, 32)  # N of Best-of-N, read off one run
EXPERIMENTS = {
    "lambda": Experiment(["decode-lambda-*"], ["decode-ndk-*-block_size-8-keep-2"]),
    "ndk": Experiment(["decode-ndk-*"]),
    "budget": Experiment(["decode-budget-*"], ["decode-seeds-seed-0"]),
    "retries": Experiment(["decode-retries-*"]),
    "factorial": Experiment(["decode-factorial-*"]),
    "literal": Experiment(["decode-literal-*"]),
    "seeds": Experiment(["decode-seeds-*"]),
    "compute": Experiment(["decode-compute-*"]),
    "over_refusal": Experiment(["decode-benign"]),
    "tune": Experiment(["decode-tune-*"]),
    "checks": Experiment(["decode-checks-*"]),
    "weights": Experiment(["decode-weight-*"]),
    "arms": Experiment(["decode-arms-*"]),
    "critic_search": Experiment(["decode-finals-*", "decode-shuffled-*", "decode-intermediate-*"]),
}


def matches(run: str, patterns: Sequence[str]) -> bool:
    """True if the name of a run matches one of these patterns."""
    return any(fnmatchcase(run, pattern) for pattern in patterns)
