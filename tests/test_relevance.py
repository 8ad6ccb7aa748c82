"""The relevance of answers: likelihoods one token at a time."""

import math

import pandas as pd
import pytest
import torch
from tiny import letters

from igstudy.report.relevance import log_likelihood, relevance, unprompted


@pytest.fixture
def policy():
    return letters()


def test_likelihoods_are_those_of_one_token_at_a_time(policy):
    """Guards a shift by one token."""
    openings, answers = [[3], [4, 5, 6], [2, 1]], [[6, 3, 4], [5], [6, 2, 1, 5, 3]]
    expected = []
    for opening, answer in zip(openings, answers, strict=True):
        total = 0.0
        for k, token in enumerate(answer):
            ids = torch.tensor([[*opening, *answer[:k]]])
            with torch.inference_mode():
                log_p = policy.model(ids).logits[0, -1].float().log_softmax(-1)
            total += log_p[token].item()
        expected.append(total / len(answer))
    found = [
        log_likelihood(policy, opening, answer)
        for opening, answer in zip(openings, answers, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-5)


def test_relevance_is_what_the_prompt_adds(policy):
    """Guards an answer that another prompt's answer with the same text stands for, and silence."""
    told = pd.DataFrame(
        {
            "prompt_id": ["a", "b", "a", "c"],
            "prompt": ["ab", "cd", "ab", "ef"],
            "response": ["x", "x", "x", None],
            "tokens": [[6, 3], [6, 3], [6, 3], []],
        }
    )
    found = relevance(policy, told)
    alone = log_likelihood(policy, unprompted(policy), [6, 3])
    of_a, of_b = (log_likelihood(policy, policy.encode(x), [6, 3]) for x in ("ab", "cd"))
    assert found[:3].tolist() == pytest.approx([of_a - alone, of_b - alone, of_a - alone])
    assert math.isnan(found[3]) and of_a != of_b
