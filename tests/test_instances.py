"""Tests that the random language model is normalised and seeded, and instances what they say."""

from fractions import Fraction

import numpy as np
from theory import language_model

from igstudy.theory.instances import bigram_process, random_process


def test_the_random_process_is_an_honest_language_model():
    """Guards the instance: probabilities, scores with a sign, and a task cost of finished texts
    alone.
    """
    mdp = language_model().mdp
    index = {y: s for s, y in enumerate(mdp.names)}
    inner = mdp.allowed.any(axis=1)
    assert (mdp.reference[inner] > 0).all()
    np.testing.assert_allclose(mdp.reference[inner].sum(axis=1), 1, rtol=0, atol=1e-12)
    assert (mdp.cost[mdp.allowed] < 0).any() and mdp.signed
    y = index[3, 1, 4]
    assert 0 < mdp.task[y, 0] < 1 and (mdp.task[y, 1:] == 0).all()
    assert (mdp.task[index[3, 1, 4, 2, 1]] > 0).all()
    again = random_process(15, 5, 6, gamma=0.95)
    assert (again.cost == mdp.cost).all() and (again.reference == mdp.reference).all()


def test_the_bigram_instance_depends_on_time_and_bigram_only():
    """Guards exactness and the ends: quarters and twelfths as rationals, task cost at the end of a
    text only.
    """
    mdp = bigram_process(2, 3, 3)
    index = {y: s for s, y in enumerate(mdp.names)}
    assert all(
        isinstance(x, Fraction) and 0 <= 4 * x <= 4 and (4 * x).denominator == 1
        for x in mdp.cost[mdp.allowed]
    )
    assert (mdp.cost[index[1, 2]] == mdp.cost[index[2, 2]]).all()
    assert (mdp.task[index[1, 2]] == mdp.task[index[2, 2]]).all()
    assert (mdp.task[index[(1,)], 1:] == 0).all() and (mdp.task[0, 1:] == 0).all()
    assert mdp.task[0, 0] >= 1  # an empty answer is two tokens short: 12 twelfths at least
    assert mdp.cost[mdp.allowed].max() > 0
