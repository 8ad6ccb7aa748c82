"""Tests that the tiny language model is honest: causal, normalised, seeded; and that instances are
what they say.
"""

from fractions import Fraction

import numpy as np
from scipy.special import softmax
from theory import language_model

from igstudy.theory.instances import bigram_process, last_logits, random_model


def tiny_lm(seed):
    return random_model(seed, 5, 6)


def logits(lm, tokens):
    """Logits after every prefix of rows of tokens, (B, t + 1, V)."""
    lengths = range(tokens.shape[1] + 1)
    return np.stack([last_logits(lm, tokens[:, :t]) for t in lengths], axis=1)


def test_attention_is_the_textbook_formula():
    """Guards heads and scale: one layer written with loops over heads and positions gives the same
    numbers.
    """
    lm = tiny_lm(5)
    ids = np.array([5, 1, 4])
    x = lm.tokens[ids] + lm.positions[:3]

    def norm(v):
        return (v - v.mean()) / (v.std() + 1e-5)

    for (wq, wk, wv, wo), wide, narrow in zip(lm.attention, lm.wide, lm.narrow, strict=True):
        h = [norm(row) for row in x]
        new = []
        for i in range(3):
            heads = []
            for part in (slice(0, 8), slice(8, 16)):
                weights = np.exp(
                    [(h[i] @ wq)[part] @ (h[j] @ wk)[part] / 8**0.5 for j in range(i + 1)]
                )
                heads.append(
                    sum(w * (h[j] @ wv)[part] for j, w in enumerate(weights / weights.sum()))
                )
            row = x[i] + np.concatenate(heads) @ wo
            new.append(row + np.maximum(norm(row) @ wide, 0) @ narrow)
        x = np.array(new)
    np.testing.assert_allclose(
        norm(x[-1]) @ lm.head, logits(lm, ids[None, 1:])[0, -1], rtol=0, atol=1e-12
    )


def test_the_reference_is_the_softmax_of_the_first_model():
    """Guards the instance: probabilities, scores and task costs come from three different
    transformers and end with the text.
    """
    model = language_model()
    mdp, index = model.mdp, {y: s for s, y in enumerate(model.mdp.names)}
    y = (3, 1, 4)
    expected = softmax(logits(tiny_lm(12), np.array([y]))[0, -1], axis=-1)
    np.testing.assert_allclose(mdp.reference[index[y]], expected, rtol=0, atol=1e-12)
    scores, tasks = (
        logits(tiny_lm(seed), np.array([[3, 1, 4, 0], [3, 1, 4, 2]]))[:, -1, 0] for seed in (13, 14)
    )
    ratio = (mdp.cost[index[y], 2] - mdp.cost[index[y], 0]) / (scores[1] - scores[0])
    assert ratio > 0
    assert (mdp.cost[mdp.allowed] < 0).any() and mdp.signed
    assert (model.partial[index[(*y, 2)]] > model.partial[index[(*y, 0)]]) == (tasks[1] > tasks[0])
    assert mdp.task[index[y], 0] == model.partial[index[(*y, 0)]]
    assert mdp.task[index[y], 2] == 0 < model.partial[index[(*y, 2)]] < 1


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
