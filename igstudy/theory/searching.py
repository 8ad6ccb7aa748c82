"""How many tokens a search samples until it has an answer: a law, and exact computation.

Three searches take their tokens from pi_ref. Rejection sampling draws whole answers and leaves each
at its first check over budget. Backtracking (`igcore.backtracking`) keeps beams and steps back when
one of them has failed often enough. Algorithm 1 samples whole blocks and never goes back. Only the
last one is in the paper (appendix C).

The law assumes a constant hazard: each token is the first one over budget with the same
probability, after any text. S is the share of plain answers that stay within budget
over their L tokens, and x = -ln S. The exact functions take any `Augmented` MDP of tokens.
"""

import math
from collections import defaultdict
from functools import cache

import numpy as np
from scipy.signal import lfilter
from scipy.special import exprel

from .mdp import MDP

Numbers = float | np.ndarray  # a curve is an array
Series = tuple[np.ndarray, np.ndarray]  # of an answer and of a failure

# --- the law --------------------------------------------------------------------------------------


def rejection_tokens(length: float, share: Numbers) -> Numbers:
    """Return L (e^x - 1) / x, the tokens per answer of rejection sampling that stops early.

    It is the limit of small hazards, x much below L. The exact number of tokens is higher by a
    factor of at most 1 + x / L.

    Parameters
    ----------
    length : float
        L, in tokens.
    share : float or ndarray
        S, above 0 and at most 1.
    """
    tokens: Numbers = length * exprel(-np.log(share))
    return tokens


def stepping_tokens(length: float, share: Numbers, block: float) -> Numbers:
    """Return L (e^(xB/L) - 1) / (xB/L), for one sample at a time, kept after each B tokens.

    Every block is a rejection sampling of its own. It is backtracking that never needs to go back.
    """
    return rejection_tokens(block, share ** (block / length)) * length / block


def blockwise_tokens(length: float, share: Numbers, block: float, n_samples: int) -> Numbers:
    """Return L N / (1 - (1 - q)^N), q = e^(-xB/L), for Algorithm 1 (paper, appendix C).

    It samples N whole blocks of B tokens in a round, and as many rounds as it needs.
    """
    within = share ** (block / length)  # q: one block stays within budget
    found = 1 - (1 - within) ** n_samples
    return length * n_samples / found


# --- exact computation ----------------------------------------------------------------------------


def sampled_block(
    mdp: MDP, start: int, step: int
) -> tuple[np.ndarray, np.ndarray, dict[int, float]]:
    """Return the law of one block: at most `step` tokens of pi_ref, left at the first over budget.

    Returns
    -------
    failed, ended : ndarray, shape (step + 1,)
        Probability that token t, from 1 on, is the first over budget; that it ends an answer.
    later : dict
        Probability of each unfinished state that is within budget after `step` tokens.
    """
    failed, ended = np.zeros((2, step + 1))
    reached = {start: 1.0}
    for t in range(1, step + 1):
        later: defaultdict[int, float] = defaultdict(float)
        for s, mass in reached.items():
            for a in np.flatnonzero(mdp.allowed[s] & (mdp.reference[s] > 0)):
                child, p = int(mdp.child[s, a]), mass * mdp.reference[s, a]
                if not mdp.safe[child]:
                    failed[t] += p
                elif mdp.allowed[child].any():
                    later[child] += p
                else:
                    ended[t] += p
        reached = dict(later)
    return failed, ended, reached


def _root_attempt(mdp: MDP, step: int, tries: int, powers: np.ndarray) -> Series:
    """Return two power series of backtracking, from one draw at the root up to the next one.

    They are sums of probability * x^tokens: over the ways to an answer, and over the ways on which
    every beam above the root is dropped. `powers`, shape (step + 1, terms), has the series of x^t,
    in x or in x - 1.
    """
    terms = powers.shape[1]

    @cache
    def attempt(s: int) -> Series:
        failed, ended, later = sampled_block(mdp, s, step)
        answer, failure = ended @ powers, failed @ powers
        for child, p in later.items():
            one_answer, one_failure = attempt(child)
            left = p * powers[step]  # the beam of the child has no failure yet
            for _ in range(tries):
                answer = answer + np.convolve(left, one_answer)[:terms]
                left = np.convolve(left, one_failure)[:terms]
            failure = failure + left  # the child is dropped, one failure of its parent
        return answer, failure

    return attempt(0)


def answered(mdp: MDP, step: int, tries: int, spend: int) -> np.ndarray:
    """Return P(answered within t tokens) of backtracking, shape (spend + 1,), t = 0, ..., spend.

    A step of the length of the longest answer is rejection sampling.

    Parameters
    ----------
    mdp : Augmented
        The policy is `mdp.reference`. Nature does not move.
    step : int
        Tokens between two beams.
    tries : int
        Failures that drop a beam. The root, the empty answer, is never dropped.
    spend : int
        Tokens in all.
    """
    answer, failure = _root_attempt(mdp, step, tries, np.eye(step + 1, spend + 1))
    # the root is drawn from again after each failure: answer / (1 - failure), as power series
    return np.cumsum(lfilter([1], np.append(1, -failure[1:]), answer))


def expected_tokens(mdp: MDP, step: int, tries: int) -> float:
    """Return the expected tokens of backtracking until an answer; infinite if there is none.

    The arguments are those of `answered`.
    """
    # to first order in x - 1 a series is [probability, probability * mean tokens]
    powers = np.stack([np.ones(step + 1), np.arange(step + 1)], axis=1)
    answer, failure = _root_attempt(mdp, step, tries, powers)
    draws = 1 / answer[0] if answer[0] else math.inf
    return float(draws * (answer[1] + failure[1]))


def answered_at_least(share: float, length: int, step: int, tries: int, spend: int) -> float:
    """Return a lower bound of `answered` at `spend`, which goes to 1 for every S > 0.

    A draw from the root is a plain answer, so it is within budget with probability S. Each level of
    beams above the root multiplies the draws up to the next one by at most `tries`, so there are at
    most tries^(L / step) of them, each of at most L tokens.
    """
    levels = math.ceil(length / step) - 1
    root_draws = spend // (length * tries**levels)
    unanswered: float = (1 - share) ** root_draws
    return 1 - unanswered


def blockwise_answered(
    mdp: MDP, block: int, n_samples: int, rounds: float = math.inf
) -> tuple[float, float]:
    """Return P(answer) of Algorithm 1 with one beam, and its expected tokens (appendix C).

    All candidates have the same reward, so the first one within budget is kept. All blocks have the
    same length, and a sample over budget is continued to the end of its block.
    """

    @cache
    def search(s: int) -> tuple[float, float]:
        failed, ended, later = sampled_block(mdp, s, block)
        missed = failed.sum() ** n_samples  # a round without a candidate
        found = 1 - missed**rounds
        tokens = n_samples * block * (found / (1 - missed) if missed < 1 else rounds)
        answer = found * ended.sum() / (1 - failed.sum()) if found else 0.0
        for child, p in later.items():
            kept, rest = found * p / (1 - failed.sum()), search(child)
            answer, tokens = answer + kept * rest[0], tokens + kept * rest[1]
        return float(answer), float(tokens)

    return search(0)
