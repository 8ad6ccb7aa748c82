"""Finite-sample behaviour of Algorithm 1 (paper, appendix C), about which the theorems are silent.

The algorithm looks one block ahead, samples from the reference policy, and samples finitely often.
All probabilities here are exact; nothing is sampled. p_b is the reference's mass of safe and viable
next blocks at block b, N the samples in a round and M the rounds. Of costs, higher is worse.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise, product

import numpy as np

from ..engine.diversity import DIVERSITIES, Failures
from .mdp import MDP, Augmented
from .planning import values

Block = tuple[int, ...]


# --- myopia and support ---------------------------------------------------------------------------


def myopic_search(
    mdp: Augmented, partial: np.ndarray, keep: int = 1, block: int = 1, viable: bool = False
) -> int | None:
    """Return the best final state of Algorithm 1 with E_inter, or None, for N and M infinite.

    Every round then has all continuations.

    Parameters
    ----------
    mdp : Augmented
        The instance.
    partial : ndarray, shape (S,)
        Task score of every augmented state, finished or not; what E_inter ranks safe prefixes by.
    keep : int
        K, beams kept after each block.
    block : int
        Tokens in a block.
    viable : bool
        Whether prefixes without any safe continuation are dropped as well.
    """
    hopeless = ~mdp.safe
    if viable:
        hopeless |= values(mdp) == math.inf
    beams = [0] if not hopeless[0] else []
    while mdp.allowed[beams].any():
        for _ in range(block):
            beams = [y for s in beams for y in _continuations(mdp, s)]
        going = [s for s in beams if not hopeless[s]]
        beams = sorted(going, key=partial.__getitem__)[:keep]
    return beams[0] if beams else None


def _continuations(mdp: MDP, s: int) -> list[int]:
    """Return the states one token after s; s itself when it has ended."""
    children = mdp.child[s]
    return children[children >= 0].tolist() or [s]


# --- the chance of finding nothing ----------------------------------------------------------------


def abstention_bound(masses: Sequence[float], n_samples: int, rounds: int = 1) -> float:
    """Return sum_b (1 - p_b)^{N M} >= P(abstain), capped at 1.

    It is an equality for one block without a penalty.

    Parameters
    ----------
    masses : sequence of float
        p_b for each block b: the least over the prefixes that may be kept there.
    n_samples, rounds : int
        N and M.
    """
    draws = n_samples * rounds
    return min(1, sum((1 - p) ** draws for p in masses))


# --- diversity ------------------------------------------------------------------------------------


def retry_mass(
    blocks: Mapping[Block, float],
    safe: Collection[Block],
    failed: Sequence[Block],
    diversity: str,
    sample: int = 0,
    n_samples: int = 1,
) -> float:
    """Return the chance that one sample is safe after a round with only `failed` blocks.

    It shows the effect of the paper's "Sampling Diversity" (section 5.2). For one-token blocks, the
    ban by position (``paper``) makes it the safe mass not banned over (1 - banned mass). Under
    ``sequence`` it is p / (1 - m), never below p, with m the mass of the failed blocks.

    Parameters
    ----------
    blocks : mapping of tuple of int to float
        Reference probability of every block; they sum to one.
    safe : collection of tuple
        The safe ones.
    failed : sequence of tuple
        The blocks of the failed round, all of one parent.
    diversity : str
        A key of `igcore.engine.diversity.DIVERSITIES`; no token is spared and n_2 is infinite.
    sample, n_samples : int
        Number of the sample in the next round, from 0, and N. ``half`` samples the first ceil(N /
        2) from the reference.
    """
    failures = Failures(frozenset(), None)
    for y in failed:
        masses = [_mass(blocks, y[:i]) for i in range(len(y) + 1)]
        log_p = [math.log(after / before) for before, after in pairwise(masses)]
        failures.add(0, y, log_p)
    factors_of = DIVERSITIES[diversity](failures, 0, sample, n_samples)
    return sum(_probability(y, blocks, factors_of) for y in safe)


def _mass(blocks: Mapping[Block, float], prefix: Block) -> float:
    """Return the probability that a block begins with a prefix."""
    return sum(p for y, p in blocks.items() if y[: len(prefix)] == prefix)


def _probability(
    y: Block,
    blocks: Mapping[Block, float],
    factors_of: Callable[[Block], Mapping[int, float]] | None,
) -> float:
    """Return the probability of a block under the reference times factors, token by token."""
    total = 1
    for i, token in enumerate(y):
        prefix = y[:i]
        same = [block for block in blocks if block[:i] == prefix and len(block) > i]
        following = {block[i] for block in same}
        reference = {t: _mass(blocks, (*prefix, t)) for t in following}
        factors = factors_of(prefix) if factors_of else {}
        weighted = {t: p * factors.get(t, 1) for t, p in reference.items()}
        if not sum(weighted.values()) > 0:
            weighted = reference  # every token is banned
        total *= weighted[token] / sum(weighted.values())
    return total


def two_round_failure(
    blocks: Mapping[Block, float], safe: Collection[Block], diversity: str, n_samples: int = 1
) -> float:
    """Return P(no safe block in two rounds of N samples), by enumerating all failed first rounds.

    Given the first round, the samples of the second are independent. Their distributions may
    differ: ``half`` penalises only some of them.
    """

    unsafe = [y for y in blocks if y not in safe]
    total = 0
    for failed in product(unsafe, repeat=n_samples):
        chance = math.prod(blocks[y] for y in failed)
        for k in range(n_samples):
            chance *= 1 - retry_mass(blocks, safe, failed, diversity, k, n_samples)
        total += chance
    return total
