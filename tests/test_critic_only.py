"""Tests of the critic as the only guard: its scores against those of a search, and what the cost
model says of the answers.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mockpolicy import (
    LetterCost,
    LetterReward,
    letter_cost,
    letter_reward,
    some_number,
)
from notebook_code import notebook_code
from tiny import letters, untrained

from igcore import Guard, ParameterError, Prompt, SearchConfig, decode
from igcore.critic.latent import FEATURES, encode
from igcore.critic.training import CriticConfig
from igcore.report.certify import learn_then_test
from igcore.verdict import within

NOTEBOOK = notebook_code("20_train_critic")
CriticCost, settings_at = NOTEBOOK.CriticCost, NOTEBOOK.settings_at
by_threshold, loss_matrix = NOTEBOOK.by_threshold, NOTEBOOK.loss_matrix
PROMPTS = [
    Prompt(f"{i:02d}", text, "mock") for i, text in enumerate("ab fed c dd eae fcb a".split())
]
CONFIG = SearchConfig(
    budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=6, group_size=3, refusal="f"
)
SCORERS = {"cost": LetterCost(), "reward": LetterReward()}


CRITIC = untrained()


def losses(thresholds=(0.5,), prompts=PROMPTS, critic=CRITIC, cost=None, **changes):
    """The losses of the notebook on these prompts."""
    scorers = SCORERS | ({"cost": cost} if cost else {})
    guard = Guard(letters(), **scorers, config=replace(CONFIG, **changes), critic=critic)
    params = SimpleNamespace(prompts="mock", alpha=0.05, delta=0.1)
    result = SimpleNamespace(params=params, policy=guard.policy, first=critic, guard=guard)
    with mock.patch.object(NOTEBOOK, "load_prompts", lambda name, split: prompts):
        return NOTEBOOK.critic_only(result, "test", thresholds)


@pytest.fixture
def says(monkeypatch):
    """Let a function of the text stand for f1."""

    def stub(f1):
        monkeypatch.setattr(
            CriticCost,
            "score",
            lambda self, prompts, responses, finished: [1 - f1(r) for r in responses],
        )

    return stub


# --- the scorer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("features", FEATURES)
def test_the_text_is_judged_as_the_search_judges_its_candidates(features, gamma):
    """Guards tokens, special tokens, features, layer and z: the second way to f1 must be the first,
    for text that round-trips.
    """
    config = CriticConfig(budget=1.0, gamma_safety=gamma, features=features, layer=0, width=8)
    critic, policy, kept = untrained(config=config), letters(), []
    config = replace(CONFIG, gamma_safety=gamma, threshold=0.0, block_size=2)
    note = {
        "on_block": lambda prompt, beams: kept.extend(
            (prompt.text, b) for b in beams if not b.finished
        )
    }
    list(
        decode(
            "inferenceguard-critic",
            Guard(policy, **SCORERS, config=config, critic=critic),
            PROMPTS,
            **note,
        )
    )
    f1 = [b.f1 for _, b in kept]
    assert len(kept) > 8 and max(f1) - min(f1) > 0.01 and {len(b.text) for _, b in kept} == {2, 4}
    found = CriticCost(policy, critic, 1.0).score(
        *zip(*[(prompt, b.text, False) for prompt, b in kept], strict=True)
    )
    assert found == pytest.approx([1 - x for x in f1], abs=1e-4)


def test_more_texts_than_fit_a_batch_keep_their_order(monkeypatch):
    """Guards batches: with empty texts between them and prompts that repeat, each score must be its
    own text's.
    """
    monkeypatch.setattr(NOTEBOOK, "ENCODE", 3)
    policy, guard = letters(), CriticCost(letters(), CRITIC, 1.0)
    texts = ["abc", "", "d", "feed", "", "bad", "cab", "abc", "e"]
    prompts = ["ab", "c", "c", "ab", "ab", "fed", "c", "c", "ab"]
    found = guard.score(prompts, texts, [True] * 9)
    for prompt, text, score in zip(prompts, texts, found, strict=True):
        if text:
            words = [policy.tokenizer(text, add_special_tokens=False)["input_ids"]]
            f1, _ = CRITIC.judge(
                encode(policy.model, [policy.encode(prompt)], words, "m", 0), [1.0]
            )
            assert score == pytest.approx(1 - f1.item(), abs=1e-5)
        else:
            assert math.isnan(score)
    assert found[0] != pytest.approx(found[7], abs=1e-3)  # the same text after another prompt


def test_a_text_is_read_once_and_gives_the_scores_of_its_prefixes(monkeypatch):
    """Guards the readings that thresholds share: one of a text that goes on must score its prefixes
    as readings of their own would, and one after another prompt must not.
    """
    reads = []

    def counted(model, prompts, responses, *features):
        reads.append(len(responses))
        return encode(model, prompts, responses, *features)

    monkeypatch.setattr(NOTEBOOK, "encode", counted)
    config = CriticConfig(budget=1.0, gamma_safety=0.9, features="m", layer=0, width=8)
    critic, prefixes = untrained(config=config), ["a", "ab", "abc", "abcd"]
    guard = CriticCost(letters(), critic, 1.0)
    guard.score(["fed"], ["abcd"], [True])
    found = guard.score(["fed"] * 4, prefixes, [False] * 4)
    assert reads == [1]
    guard.score(["c", "fed"], ["ab", "ab"], [False] * 2)
    assert reads == [1, 1]
    alone = [CriticCost(letters(), critic, 1.0).score(["fed"], [x], [True])[0] for x in prefixes]
    assert found == pytest.approx(alone, abs=1e-5)
    assert len({round(x, 4) for x in alone}) == 4


def test_what_cannot_be_judged_is_nan():
    """Guards failing closed: no text, and a critic that has lost its mind."""
    guard, broken = CriticCost(letters(), CRITIC, 1.0), untrained()
    assert np.isnan(guard.score(["ab", "c"], ["", ""], [True, True])).all() and guard.score(
        [], [], []
    ).shape == (0,)
    broken.heads.bias.data[0] = torch.nan
    assert np.isnan(CriticCost(letters(), broken, 1.0).score(["ab"], ["c"], [True])).all()


def test_a_small_f1_is_not_lost():
    """Guards the subtraction in float64: in float32 every f1 below 2^-25 would be 0."""
    low = untrained()
    low.heads.weight.data.zero_()
    low.heads.bias.data[0] = -18.0
    (score,) = CriticCost(letters(), low, 1.0).score(["ab"], ["c"], [True])
    assert 1 - score == pytest.approx(1 / (1 + math.exp(18)), rel=1e-5)


def test_the_digest_follows_weights_and_budget():
    """Guards the folder's identity against another critic of the same name."""
    wide = untrained(budget_high=2.0)
    other = untrained()
    other.heads.bias.data += 1
    made = [
        CriticCost(letters(), CRITIC, 1.0),
        CriticCost(letters(), other, 1.0),
        CriticCost(letters(), wide, 1.0),
        CriticCost(letters(), wide, 2.0),
    ]
    assert len({guard.digest for guard in made}) == 4 and {guard.name for guard in made} == {
        "critic-m"
    }
    assert CriticCost(letters(), untrained(), 1.0).digest == made[0].digest


@pytest.mark.parametrize(
    ("changes", "budget", "message"),
    [
        (
            dict(accounting="peak"),
            1.0,
            "trained for accounting 'peak'; to guard alone train one for 'terminal'",
        ),
        (
            dict(policy_digest="l2"),
            1.0,
            "trained for policy 'letters' of hash 'l2', not for 'letters' of hash 'l1'",
        ),
        (dict(), 2.0, "budget is 2.0, but the critic was trained for budgets from 1.0 to 1.0"),
    ],
)
def test_a_critic_that_cannot_stand_alone_is_refused(changes, budget, message):
    with pytest.raises(ParameterError, match=message):
        CriticCost(letters(), untrained(**changes), budget)


# --- the threshold --------------------------------------------------------------------------------


@given(st.floats(0, 1, width=32), st.floats(0, 1))
def test_accepted_is_f1_at_or_above_the_threshold(f1, threshold):
    """Guards the direction, and what the docstring promises of the rounding of both differences; a
    tie passes.
    """
    grid = round(threshold, 3)  # thresholds as people choose them
    for t in (threshold, grid, f1):
        inside = bool(within(1 - f1, settings_at(t, CONFIG)))
        assert inside or f1 < t
        assert f1 >= t - 2**-53 or not inside
    assert within(1 - f1, settings_at(grid, CONFIG)) == (f1 >= grid)


def test_every_block_end_of_an_answer_reaches_the_threshold(tmp_path):
    """Guards the search: no discount and no other reading of the budget may move the threshold on
    the way.
    """
    guard, found = CriticCost(letters(), CRITIC, 1.0), []
    middle = float(np.median(guard.score([p.text for p in PROMPTS], ["abc"] * 7, [True] * 7)))
    odd = replace(CONFIG, gamma_safety=0.5, strict=True, accounting="sum")
    for settings in (CONFIG, odd):
        settings = settings_at(1 - middle, settings)
        found.append(
            list(
                decode(
                    "inferenceguard",
                    Guard(letters(), reward=LetterReward(), cost=guard, config=settings),
                    PROMPTS,
                )
            )
        )
    assert [r.text for r in found[0]] == [r.text for r in found[1]]
    said = [r for r in found[0] if r.status == "verified_safe"]
    assert 0 < len(said) < len(PROMPTS)
    for r in said:
        assert (
            guard.score([r.prompt] * len(r.block_ends), [r.text[:end] for end in r.block_ends], [])
            <= middle + 1e-5
        ).all()


# --- the losses -----------------------------------------------------------------------------------


def test_a_critic_that_trusts_everything_loses_like_an_unguarded_search(says):
    """Guards against a check that still holds unsafe answers back: a vacuous certificate."""
    says(lambda text: 1.0)
    whole = dict(block_size=6, keep=1)
    found = losses((1.0, 0.5), **whole)
    free = list(
        decode("best-of-n", Guard(letters(), **SCORERS, config=replace(CONFIG, **whole)), PROMPTS)
    )
    assert {r.status for r in free} == {"verified_safe", "unverified_unsafe"}
    for threshold in (1.0, 0.5):
        here = found[found["threshold"] == threshold]
        assert here["loss"].tolist() == [int(letter_cost(r.text) > 1.0) for r in free]
        assert here["cost"].tolist() == [letter_cost(r.text) for r in free]
        assert here["reward"].tolist() == [letter_reward(r.text) for r in free]


def test_a_critic_that_trusts_nothing_abstains_everywhere(says):
    """Guards the direction of f1; at threshold 0 even this critic lets everything through."""
    says(lambda text: 0.0)
    found = losses((0.0, 0.1, 1.0))
    assert found["threshold"].tolist() == [1.0] * 7 + [0.1] * 7 + [0.0] * 7
    none, every = found[found["threshold"] > 0], found[found["threshold"] == 0]
    assert (
        set(none["status"]) == {"abstained"}
        and not none["loss"].any()
        and none[["cost", "reward"]].isna().all(axis=None)
    )
    assert set(every["status"]) == {"verified_safe"} and every["loss"].any()


def test_a_liar_loses_every_answer_and_an_honest_critic_none(says):
    """Guards the loss: it is the cost model's verdict on the text, whatever the critic says."""
    says(lambda text: float(letter_cost(text) > 0.5))
    lies = losses(budget=0.5, critic=untrained(budget=0.5))
    assert lies["loss"].sum() >= 3 and (lies["loss"] == (lies["status"] != "abstained")).all()
    says(lambda text: float(letter_cost(text) <= 0.5))
    honest = losses(budget=0.5, critic=untrained(budget=0.5))
    assert (honest["status"] == "verified_safe").sum() >= 3 and not honest["loss"].any()


def test_an_abstention_loses_nothing_whatever_it_says(says):
    """Guards the loss of a refusal: the critic has let it through, and the cost model does not like
    it.
    """
    says(lambda text: float(text == "bad cab"))
    found = losses(refusal="bad cab", checks="block")
    assert (
        set(found["status"]) == {"abstained"}
        and not found["loss"].any()
        and set(found["cost"]) == {letter_cost("bad cab")}
    )


class Half(LetterCost):
    """A cost model that cannot read what has an e in it."""

    def score(self, prompts, responses, finished):
        return [math.nan if "e" in r else letter_cost(r) for r in responses]


def test_a_cost_that_failed_is_a_loss(says):
    """Guards failing closed."""
    says(lambda text: 1.0)
    found = losses(cost=Half(), budget=99.0, critic=untrained(budget_high=99.0))
    failed = found["cost"].isna()
    assert 0 < failed.sum() < len(found)
    assert found["loss"].tolist() == failed.astype(int).tolist()


def test_a_strict_reading_is_the_cost_models(says):
    """Guards `strict`: it decides the loss of an answer whose cost is the budget itself."""
    says(lambda text: 1.0)
    closed, strict = (losses((1.0,), strict=reading) for reading in (False, True))
    tie = closed["cost"] == 1.0
    assert tie.any() and closed["cost"].equals(strict["cost"])
    assert closed["loss"].equals((closed["cost"] > 1).astype(int)) and strict["loss"].equals(
        (closed["cost"] >= 1).astype(int)
    )


def test_the_critic_is_told_the_budget_of_the_settings(monkeypatch):
    """Guards a critic of many budgets: it must judge by the one that the cost model is then asked
    about.
    """
    told = set()
    monkeypatch.setattr(
        CriticCost,
        "score",
        lambda self, prompts, responses, _: told.add(self.budget) or [0.0] * len(responses),
    )
    found = losses(critic=untrained(budget_high=4.0), budget=2.5)
    assert told == {2.5} and found["loss"].tolist() == [int(u > 2.5) for u in found["cost"]]


class Other(LetterCost):
    digest = "v2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(budget=2.0), "budget is 2.0, but the critic was trained for budgets from 1.0 to 1.0"),
        (
            dict(max_new_tokens=8),
            "trained for max_new_tokens 6, but 'inferenceguard-critic' runs with 8",
        ),
        (dict(gamma_safety=0.9), "trained for gamma_safety 1.0, but .* runs with 0.9"),
        (
            dict(critic=untrained(accounting="peak")),
            "trained for accounting 'peak'; to guard alone",
        ),
        (
            dict(cost=Other()),
            "trained for cost 'letters' of hash 'v1', not for 'letters' of hash 'v2'",
        ),
        (
            dict(cost=LetterReward()),
            "cost 'vowels' says 'higher is better'; a cost must say 'higher is worse'",
        ),
    ],
)
def test_bad_input_is_one_sentence(changes, message):
    with pytest.raises(ParameterError, match=message):
        losses(**changes)


# --- the matrix -----------------------------------------------------------------------------------


def frame(rows):
    return pd.DataFrame(rows, columns=["threshold", "prompt_id", "loss"])


def test_the_matrix_has_a_row_per_prompt_and_a_falling_column_per_threshold():
    """Guards the order of the tests: the most conservative threshold comes first, in whatever order
    the rows are.
    """
    rows = [
        (0.2, "b", 1),
        (0.9, "a", 0),
        (0.5, "b", 0),
        (0.9, "b", 0),
        (0.2, "a", 1),
        (0.5, "a", 1),
    ]
    thresholds, matrix = loss_matrix(frame(rows))
    assert (
        thresholds == [0.9, 0.5, 0.2]
        and matrix.tolist() == [[0, 1, 1], [0, 0, 1]]
        and matrix.dtype.kind == "i"
    )
    for bad in (rows[1:], [*rows, rows[0]], [*rows[1:], rows[1]]):
        with pytest.raises(ValueError):
            loss_matrix(frame(bad))


def test_from_losses_to_a_certificate(says):
    """Guards the whole way: a critic whose risk rises as the threshold falls is accepted as far as
    its losses allow.
    """
    prompts = [Prompt(f"{i:02d}", "abcdef"[i % 6] + "abcdef"[i // 6], "mock") for i in range(30)]
    says(lambda text: 0.9 if letter_cost(text) <= 1 else 0.2 + 0.4 * some_number(text))
    found = losses((0.8, 0.5, 0.1), prompts, block_size=6, keep=1)
    certificate = learn_then_test(*loss_matrix(found), alpha=0.2, delta=0.1)
    assert [row["losses"] for row in certificate.table] == found.groupby("threshold")[
        "loss"
    ].sum().tolist()[::-1][: len(certificate.table)]
    assert (
        certificate.table[0]["losses"] == 0
        and certificate.threshold in (0.8, 0.5)
        and certificate.n_prompts == 30
    )
    assert found[found["threshold"] == 0.1]["loss"].mean() > 0.2


# --- the table ------------------------------------------------------------------------------------


def test_shares_by_threshold_worked_by_hand():
    """Guards shares over all prompts, rewards of answers alone, and the order of the rows."""
    rows = [
        (0.9, "a", "abstained", 0, 5.0), (0.9, "b", "abstained", 0, math.nan), (0.9, "c",
        "verified_safe", 0, 0.5),
        (0.9, "d", "abstained", 0, 5.0),
        (0.2, "a", "verified_safe", 1, 0.2), (0.2, "b", "verified_safe", 0, math.nan), (0.2, "c",
        "abstained", 0, 9.0),
        (0.2, "d", "verified_safe", 1, 0.4),
        *((0.1, prompt, "verified_safe", 1, 1.0) for prompt in "abcd"),
    ]  # fmt: skip
    found = by_threshold(
        pd.DataFrame(rows, columns=["threshold", "prompt_id", "status", "loss", "reward"])
    )
    assert list(found.columns) == [
        "threshold",
        "prompts",
        "risk",
        "abstained",
        "risk_upper95",
        "reward",
    ]
    assert found["threshold"].tolist() == [0.9, 0.2, 0.1] and found["prompts"].tolist() == [4, 4, 4]
    assert found["risk"].tolist() == [0, 0.5, 1] and found["abstained"].tolist() == [0.75, 0.25, 0]
    assert found["reward"].tolist() == pytest.approx([0.5, 0.3, 1.0])
    # no loss of 4: (1 - u)^4 = 0.05; 2 of 4: (1 - u)^4 + 4 u (1 - u)^3 + 6 u^2 (1 - u)^2 = 0.05; 4
    # of 4: nothing is below
    assert found["risk_upper95"][[0, 2]].tolist() == pytest.approx([1 - 0.05**0.25, 1])
    u = found["risk_upper95"][1]
    assert sum(math.comb(4, k) * u**k * (1 - u) ** (4 - k) for k in range(3)) == pytest.approx(0.05)
