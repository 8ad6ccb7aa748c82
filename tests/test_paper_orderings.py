"""The order of methods beside the paper's: by hand, and rank correlations against scipy."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import record

from igstudy.paper import reported
from igstudy.paper.orderings import agreement, orderings


def test_the_correlation_of_ranks_is_scipys():
    """Guards ties, prompts that a method did not answer, and the sign."""
    rng = np.random.default_rng(0)
    ours = rng.random((40, 6)) + np.arange(6) / 4
    ours[:30, 2] = np.nan
    theirs = np.array([1.0, 2.0, 2.0, 5.0, 4.0, 6.0])
    found = agreement(theirs, ours)
    expected = stats.spearmanr(np.nanmean(ours, axis=0), theirs).statistic
    assert found["spearman"] == pytest.approx(expected)
    assert found["low"] < found["spearman"] <= found["high"] <= 1
    of_others = agreement(-theirs, ours)
    assert of_others["spearman"] == pytest.approx(-expected)
    assert np.isnan(agreement(theirs, np.ones((5, 6)))["spearman"])


def test_an_interval_is_that_of_resampled_prompts():
    """Guards prompts that are resampled for each method by itself."""
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 5, (60, 1))  # moves all methods of a prompt alike
    ours = shared + rng.normal(0, 0.1, (60, 4)) + np.arange(4)
    found = agreement(np.arange(4), ours)
    assert found["low"] == found["spearman"] == found["high"] == pytest.approx(1)


def test_a_policy_stands_for_those_that_are_aligned_as_it_is():
    """Guards the unaligned policy beside Beaver, and abstentions that count as safe."""
    methods = ["base", "beam-lagrangian", "inferenceguard"]
    rates = {"base": 1, "beam-lagrangian": 3, "inferenceguard": 2}
    lines = pd.DataFrame(
        record(
            method=method,
            policy="smollm2-raw",
            prompt_id=f"p{k}",
            status="verified_safe" if k < rates[method] else "abstained",
            lagrange_multiplier=5.0,
        )
        for method in methods
        for k in range(4)
    ).assign(run="decode-raw", critic_control="none")
    table = orderings(lines)
    assert set(table["paper_policy"]) == {"alpaca-7b", "vicuna-7b"}
    assert set(table["policy"]) == {"smollm2-raw"} and (table["n_methods"] == 3).all()
    row = table.query("paper_policy == 'alpaca-7b' and measure == 'safety'").iloc[0]
    printed = reported("main_alpaca_beaver").set_index("policy").loc["alpaca-7b"]
    printed = printed.set_index("method")["safety_rate"][methods]
    expected = stats.spearmanr(printed, [rates[method] for method in methods]).statistic
    assert row["spearman"] == pytest.approx(expected)
