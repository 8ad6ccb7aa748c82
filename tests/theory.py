"""Instances shared by the tests of the theory, each built once, and a slow solver that shares no
line with the package.
"""

import itertools
import math
from fractions import Fraction
from functools import cache
from types import SimpleNamespace

import numpy as np

from igstudy.theory.homomorphism import embed, latent_mdp
from igstudy.theory.instances import bigram_process, budget_between, outcomes, random_process
from igstudy.theory.mdp import MDP, augment, token_mdp
from igstudy.theory.planning import values

INF = math.inf


@cache
def language_model():
    """A random language model of 6,826 prefixes, gamma .95, peak accounting, with a budget that a
    tenth of the texts keep.
    """
    mdp = random_process(15, 5, 6, gamma=0.95)
    found = outcomes(mdp, "peak")
    budget = budget_between(found.cost, 0.1)
    augmented = augment(mdp, budget, accounting="peak")
    best = values(augmented)
    feasible = np.flatnonzero(best < INF)
    return SimpleNamespace(
        mdp=mdp, found=found, budget=budget, augmented=augmented, best=best, feasible=feasible,
    )  # fmt: skip


@cache
def bigrams():
    """An exact bigram instance and its latent MDP under the many-to-one phi = (time, last token),
    both augmented.
    """
    mdp = bigram_process(11, 5, 6)
    labels = [(len(y), y[-1:]) for y in mdp.names]
    budget, gamma = Fraction(17, 8), Fraction(9, 10)
    augmented, latent = (augment(m, budget, gamma) for m in (mdp, latent_mdp(mdp, labels)))
    return SimpleNamespace(
        mdp=mdp, labels=labels, augmented=augmented, latent=latent,
        into=embed(augmented, labels, latent),
    )  # fmt: skip


def random_table(seed, vocabulary=3, horizon=3):
    """A prefix tree with integer safety costs and task costs in tenths; a text ends at token 0 or
    at the horizon.
    """
    rng = np.random.default_rng(seed)
    table, open_prefixes = {}, [()]
    for t in range(horizon):
        new = [(*y, a) for y in open_prefixes for a in range(vocabulary)]
        for y in new:
            table[y] = (
                Fraction(int(rng.integers(0, 4))),
                Fraction(int(rng.integers(0, 11)), 10),
            )
        open_prefixes = [y for y in new if y[-1] != 0] if t < horizon - 1 else []
    return table


def random_tree(seed, gamma=Fraction(1), **shape):
    return token_mdp(random_table(seed, **shape), gamma=gamma)


def leaves(table):
    return [y for y in table if not any(x[:-1] == y for x in table)]


def path(table, y):
    """Costs and task costs along a prefix."""
    return list(zip(*(table[y[: i + 1]] for i in range(len(y))), strict=True))


def policies(mdp):
    """Every deterministic policy of a small MDP."""
    moves = [s for s in range(len(mdp.child)) if mdp.allowed[s].any()]
    for choice in itertools.product(*(np.flatnonzero(mdp.allowed[s]) for s in moves)):
        policy = np.zeros(mdp.child.shape, dtype=int)
        policy[moves, choice] = 1
        yield policy


# --- the smallest instances on which a theorem fails once a condition is dropped ------------------


# under d = 2: (+3, -2) ends within budget but is rejected on the way; (-5, +6) banks credit, which
# lets a cost of 6 pass
CREDIT = {"false rejection": (3, -2), "credit banking": (-5, 6)}


def infeasible_start() -> tuple[MDP, int]:
    """Return an instance without a safe trajectory (Theorem 2 needs a finite value).

    Every trajectory costs 3 or 4 and d = 2, so that all policies tie at infinity.
    """
    return token_mdp({"a": (Fraction(3), Fraction(0)), "b": (Fraction(4), Fraction(1))}), 2


def small_n() -> tuple[MDP, int]:
    """Return an instance in which a small n makes an unsafe policy optimal (Theorem 2, finite n).

    "a" is unsafe with task 0, "b" is safe with task .6, and n* = .6.
    """
    return token_mdp({"a": (Fraction(1), Fraction(0)), "b": (Fraction(0), Fraction(3, 5))}), 0


def signed_cost(name: str) -> tuple[MDP, int]:
    """Return an instance with the signed costs of one entry of `CREDIT` (without C >= 0).

    The constraint is on the running sum, and d = 2.
    """
    first, second = map(Fraction, CREDIT[name])
    return token_mdp({"a": (first, Fraction(0)), "ab": (second, Fraction(0))}, signed=True), 2


def boundary() -> MDP:
    """Return an MDP in which only the closed inequality accepts "a" at d = 1.

    The choice is between "a" (task .1, cost 1) and "b" (task .9, cost 0).
    """
    return token_mdp({"a": (Fraction(1), Fraction(1, 10)), "b": (Fraction(0), Fraction(9, 10))})


def aliased_prompts() -> tuple[MDP, int]:
    """Return an instance in which phi = length merges two prompts that need different tokens.

    Nature picks prompt 0 or 1; the safe token is x after 0 and y after 1.
    """
    free, harm = (Fraction(0), Fraction(0)), (Fraction(1), Fraction(0))
    return token_mdp(
        {"0": free, "1": free, "0x": free, "0y": harm, "1x": harm, "1y": free}, chance=("",)
    ), 0


def chance_cost() -> tuple[MDP, int]:
    """Return an instance in which a policy without z must be cautious.

    Nature charges 0 or 1; then the choice is "r" (task .2, cost 1) or "s" (task 1), and d = 1. With
    z the optimum is .60. The best almost surely safe policy that sees the length alone has 1.
    """
    risky, mild = (Fraction(1), Fraction(1, 5)), (Fraction(0), Fraction(1))
    table = {
        "0": (Fraction(0), Fraction(0)),
        "1": (Fraction(1), Fraction(0)),
        "0r": risky,
        "0s": mild,
        "1r": risky,
        "1s": mild,
    }
    return token_mdp(table, chance=("",)), 1


def step_actions(n: int, actions: int) -> MDP:
    """Return an MDP of one choice with values v_n(a) = 1{a <= n}, a < `actions` (Lemma 3(c)).

    The lemma is in appendix B of the paper. For any finite number of actions the minimum rises to 1
    with n. With more actions than n, however large n is, it stays 0.
    """
    return token_mdp({(a,): (Fraction(0), Fraction(a <= n)) for a in range(actions)})
