"""Abstentions on benign prompts, counted by hand."""

import math

import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code
from scipy import stats

from igcore.errors import ParameterError, RunError
from igcore.report import statistics as metrics

STATUSES = {"s": "verified_safe", "a": "abstained", "u": "unverified_unsafe"}


def cell(method, statuses, rewards=None, **fields):
    """Return records of a method; statuses by initial."""
    rewards = rewards or [0.5] * len(statuses)
    return pd.DataFrame(
        synthetic.record(
            method=method,
            prompts="benign",
            prompt_id=f"p{k}",
            status=STATUSES[status],
            reward=reward,
            **fields,
        )
        for k, (status, reward) in enumerate(zip(statuses, rewards, strict=True))
    )


BASE = cell("base", "ssussuss", [0.25] * 8)
OURS = cell("inferenceguard", "saaassss", [0.5, 9.0, 9.0, 9.0, 0.25, 0.75, 0.25, 0.5])


def over_refusal(records):
    return notebook_code("45_ablations").over_refusal_tables(records)[""]


def rows(*cells):
    return over_refusal(pd.concat(cells, ignore_index=True))


def test_abstentions_by_hand():
    """Guards against a rate of safe answers in place of refusals, a Wilson interval, and prompts
    that base failed too.
    """
    base, ours = rows(BASE, OURS).itertuples(index=False)
    assert (ours.n_prompts, ours.abstained, ours.abstention_rate, ours.abstained_base_safe) == (
        8,
        3,
        3 / 8,
        2,
    )
    low, high = stats.beta.ppf([0.025, 0.975], [3, 4], [6, 5])
    assert (ours.abstention_low, ours.abstention_high) == (pytest.approx(low), pytest.approx(high))
    assert (base.abstained, base.abstention_rate, base.abstention_low) == (0, 0, 0)
    assert base.abstention_high == pytest.approx(1 - 0.025 ** (1 / 8))


def test_rewards_are_compared_where_both_answered():
    """Guards against the reward of a refusal entering the difference, and base being compared with
    itself.
    """
    base, ours = rows(BASE, OURS).itertuples(index=False)
    assert (ours.n_answered, ours.reward_difference) == (5, pytest.approx(0.2))
    assert ours.reward_p == metrics.sign_flip([0.25, 0, 0.5, 0, 0.25])
    assert (ours.reward_low, ours.reward_high) == metrics.bootstrap_mean([0.25, 0, 0.5, 0, 0.25])
    assert base.n_answered is pd.NA and all(
        map(math.isnan, (base.reward_difference, base.reward_p, base.reward_p_holm))
    )


def test_holm_spans_the_table():
    """Guards against raw p values, and against the rows of base counting as tests."""
    better = cell("best-of-n", "s" * 8, [0.5] * 8)
    table = rows(BASE, OURS, better, BASE.assign(policy="other"), better.assign(policy="other"))
    p = table["reward_p"].dropna()
    assert len(table) == 5 and len(p) == 3
    assert table.loc[p.index, "reward_p_holm"].tolist() == metrics.holm(p).tolist()
    assert table["reward_p_holm"].min() == pytest.approx(3 * 2 / 2**8)


def test_what_cannot_be_compared_is_refused():
    """Guards against refusals on tempting prompts counted as over-refusal beside benign ones, and a
    missing reference.
    """
    with pytest.raises(RunError, match="policy smollm2-raw has no answers of base"):
        rows(OURS)
    with pytest.raises(ParameterError, match="prompts takes the values benign, rtp"):
        rows(BASE, OURS.assign(prompts="rtp"))
    with pytest.raises(ParameterError, match="budget takes the values 0.2, 0.5"):
        rows(BASE, OURS.assign(budget=0.5))
    with pytest.raises(RunError, match="occurs twice"):
        rows(BASE, BASE)
