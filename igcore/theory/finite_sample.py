"""Finite-sample behaviour of Algorithm 1 (paper, appendix C), about which the theorems are silent.

The algorithm looks one block ahead, samples from the reference policy, and samples finitely often.
All probabilities here are exact; nothing is sampled. p_b is the reference's mass of safe and viable
next blocks at block b, N the samples in a round and M the rounds. Of costs, higher is worse.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

import numpy as np
from scipy.special import betaln

from ..engine.diversity import DIVERSITIES, Failures
from ..errors import ParameterError
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
    hopeless = ~mdp.safe | (viable & (values(mdp) == math.inf))
    beams = [0] if not hopeless[0] else []
    while any(mdp.allowed[s].any() for s in beams):
        for _ in range(block):
            beams = [y for s in beams for y in _continuations(mdp, s)]
        beams = sorted((s for s in beams if not hopeless[s]), key=partial.__getitem__)[:keep]
    return beams[0] if beams else None


def _continuations(mdp: MDP, s: int) -> list[int]:
    """Return the states one token after s; s itself when it has ended."""
    children = mdp.child[s]
    return children[children >= 0].tolist() or [s]


def top_p(probabilities: np.ndarray, p: float) -> np.ndarray:
    """Return each row (S, A) cut to its fewest most likely tokens of mass >= p, renormalised.

    Raises
    ------
    ParameterError
        When p is outside (0, 1].
    """
    if not 0 < p <= 1:
        raise ParameterError(f"p is {p!r}; it must lie in (0, 1]")
    probabilities = probabilities.astype(float)
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=1)
    ranked[np.cumsum(ranked, axis=1) - ranked >= p] = 0
    cut = np.zeros_like(probabilities)
    np.put_along_axis(cut, order, ranked, axis=1)
    mass = cut.sum(axis=1, keepdims=True)  # 0 where nothing follows
    return np.divide(cut, mass, out=cut, where=mass > 0)


# --- the chance of finding nothing ----------------------------------------------------------------


def _check_mass(p: float) -> None:
    """Raise ``ParameterError`` unless p is a probability."""
    if not 0 <= p <= 1:
        raise ParameterError(
            f"a safe mass is {p!r}; it is a probability, so give a number in [0, 1]"
        )


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
    for p in masses:
        _check_mass(p)
    return min(1, sum((1 - p) ** (n_samples * rounds) for p in masses))


def samples_needed(p: float, blocks: int, delta: float) -> int:
    """Return the least N M with B (1 - p)^{N M} <= delta.

    Raises
    ------
    ParameterError
        Unless 0 < p < 1 and 0 < delta < 1: with p = 0 no number suffices.
    """
    if not (0 < p < 1 and 0 < delta < 1):
        raise ParameterError(
            f"p is {p!r} and delta {delta!r}; both must lie strictly between 0 and 1"
        )
    count = max(1, math.floor(math.log(delta / blocks) / math.log1p(-p)) - 1)
    while blocks * (1 - p) ** count > delta:
        count += 1
    return count


def mass_covered(draws: int, blocks: int, delta: float) -> float:
    """Return the least p for which N M = `draws` samples a block keep B (1 - p)^{N M} <= delta."""
    return 1 - (delta / blocks) ** (1 / draws)


def half_bound(p: float, n_samples: int, rounds: int) -> float:
    """Return (1 - p)^{N (1 + (M - 1) / 2)} >= P(no safe block) under the diversity ``half``.

    Half of the samples of each retry then come from the reference.
    """
    _check_mass(p)
    return (1 - p) ** (n_samples * (1 + (rounds - 1) / 2))


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
    if abs(sum(blocks.values()) - 1) > 1e-9:
        raise ParameterError(
            f"the block probabilities sum to {float(sum(blocks.values())):g}; give numbers >= 0 "
            "with sum 1"
        )
    chances = _conditionals(blocks)
    failures = Failures(frozenset(), None)
    for y in failed:
        log_p = [math.log(chances[y[:i]][token]) for i, token in enumerate(y)]
        failures.add(0, y, log_p)
    avoid = DIVERSITIES[diversity](failures, 0, sample, n_samples) or _no_penalty
    return sum(_probability(y, chances, avoid) for y in safe)


def _no_penalty(prefix: Block) -> dict[int, float]:
    """Return no factors: every token keeps its reference probability."""
    return {}


def _conditionals(blocks: Mapping[Block, float]) -> dict[Block, dict[int, float]]:
    """Return p(token | prefix) at every prefix of the blocks."""
    mass: dict[Block, float] = {}
    for y, p in blocks.items():
        for i in range(len(y) + 1):
            mass[y[:i]] = mass.get(y[:i], 0) + p
    chances: dict[Block, dict[int, float]] = {}
    for y in mass:
        if y:
            chances.setdefault(y[:-1], {})[y[-1]] = mass[y] / mass[y[:-1]]
    return chances


def _probability(
    y: Block,
    chances: Mapping[Block, Mapping[int, float]],
    avoid: Callable[[Block], Mapping[int, float]],
) -> float:
    """Return the probability of a block under the reference times the factors of `avoid`."""
    total = 1
    for i, token in enumerate(y):
        row, factors = chances[y[:i]], avoid(y[:i])
        weighted = {t: p * factors.get(t, 1) for t, p in row.items()}
        if not sum(weighted.values()) > 0:
            weighted = row  # every token is banned: the reference
        total *= weighted[token] / sum(weighted.values())
    return total


def two_round_failure(
    blocks: Mapping[Block, float], safe: Collection[Block], diversity: str, n_samples: int = 1
) -> float:
    """Return P(no safe block in two rounds of N samples), by enumerating all failed first rounds.

    Given the first round, the samples of the second are independent. Their distributions may
    differ: ``half`` penalises only some of them.
    """

    def second_fails(failed: Sequence[Block]) -> float:
        return math.prod(
            1 - retry_mass(blocks, safe, failed, diversity, k, n_samples) for k in range(n_samples)
        )

    unsafe = [y for y in blocks if y not in safe]
    return sum(
        math.prod(blocks[y] for y in failed) * second_fails(failed)
        for failed in product(unsafe, repeat=n_samples)
    )


# --- adaptive rounds ------------------------------------------------------------------------------


def all_fail(a: float, b: float, failures: int, more: int) -> float:
    """Return P(the next `more` samples fail | f failed) under p ~ Beta(a, b).

    With B the beta function it is B(a, b + f + more) / B(a, b + f).
    """
    if not (a > 0 and b > 0):
        raise ParameterError(f"the prior is Beta({a!r}, {b!r}); both parameters must be > 0")
    return math.exp(betaln(a, b + failures + more) - betaln(a, b + failures))


def rounds_worth_taking(a: float, b: float, n_samples: int, least: float, most: int = 1000) -> int:
    """Return after how many failed rounds of N samples to stop.

    Another round is worth taking while it succeeds with chance >= `least`.
    """
    for done in range(most):
        if 1 - all_fail(a, b, done * n_samples, n_samples) < least:
            return done
    return most


def stopped_bound(sample: int, alpha: float = 0.05) -> float:
    """Return a one-sided lower confidence bound on p when sample s was the first safe block.

    It is 1 - (1 - alpha)^{1/s}; the estimate 1/s is no bound.
    """
    if sample < 1:
        raise ParameterError(f"sample is {sample!r}; the first sample is number 1")
    return 1 - (1 - alpha) ** (1 / sample)


# --- what a certificate can promise ---------------------------------------------------------------


def accepted_precision(p: float, false_alarm: float, miss: float) -> float:
    """Return the share of accepted blocks that are truly safe, given the errors of a scorer.

    It is p (1 - fp) / (p (1 - fp) + (1 - p) fn).

    Parameters
    ----------
    p : float
        Share of truly safe blocks among the samples.
    false_alarm, miss : float
        fp, the chance that a scorer rejects a safe block, and fn, that it accepts an unsafe one.
    """
    for share in (p, false_alarm, miss):
        _check_mass(share)
    good, bad = p * (1 - false_alarm), (1 - p) * miss
    return good / (good + bad)
