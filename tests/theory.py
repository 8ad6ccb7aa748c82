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
from igstudy.theory.mdp import augment, token_mdp
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
        mdp=mdp,
        found=found,
        budget=budget,
        augmented=augmented,
        best=best,
        feasible=feasible,
    )


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
        mdp=mdp,
        labels=labels,
        augmented=augmented,
        latent=latent,
        into=embed(augmented, labels, latent),
    )


def random_table(seed, vocabulary=3, horizon=3, signed=False):
    """A prefix tree with integer safety costs and task costs in tenths; a text ends at token 0 or
    at the horizon.
    """
    rng = np.random.default_rng(seed)
    table, open_prefixes = {}, [()]
    for t in range(horizon):
        new = [(*y, a) for y in open_prefixes for a in range(vocabulary)]
        for y in new:
            table[y] = (
                Fraction(int(rng.integers(-3 if signed else 0, 4))),
                Fraction(int(rng.integers(0, 11)), 10),
            )
        open_prefixes = [y for y in new if y[-1] != 0] if t < horizon - 1 else []
    return table


def random_tree(seed, gamma=Fraction(1), **shape):
    return token_mdp(random_table(seed, **shape), gamma=gamma, signed=shape.get("signed", False))


def leaves(table):
    return [y for y in table if not any(x[:-1] == y for x in table)]


def path(table, y):
    """Costs and task costs along a prefix."""
    return list(zip(*(table[y[: i + 1]] for i in range(len(y))), strict=True))


def slow_value(table, budget, n, gamma=1, gamma_safety=1, y=(), z=None):
    """V^{*,n} of a prefix by recursion over the table."""
    z = budget if z is None else z
    if z < 0:
        return n / (1 - gamma) if gamma < 1 else n
    totals = []
    for x, (cost, task) in table.items():
        if x[:-1] == y:
            totals.append(
                task
                + gamma
                * slow_value(table, budget, n, gamma, gamma_safety, x, (z - cost) / gamma_safety)
            )
    return min(totals, default=0)


def policies(mdp):
    """Every deterministic policy of a small MDP."""
    moves = [s for s in range(len(mdp.child)) if mdp.allowed[s].any()]
    for choice in itertools.product(*(np.flatnonzero(mdp.allowed[s]) for s in moves)):
        policy = np.zeros(mdp.child.shape, dtype=int)
        policy[moves, choice] = 1
        yield policy
