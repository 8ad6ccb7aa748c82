"""Tests of what answers cost under a budget, on lines made by hand."""

import math

import pandas as pd
import pytest
from synthetic import record

from igcore.errors import RunError
from igstudy.report.law import curves, differences, with_arms

SECONDS = {"generate_s": 1.0, "cost_s": 0.5, "reward_s": 0.5, "critic_s": 0.0}


def lines_of(arm, tokens, length=100, regime="numbers", **columns):
    """Return an answer of 50 tokens for each number of sampled tokens."""
    run = f"regime-{regime}-{arm}-{length}"
    lines = []
    for i, policy_tokens in enumerate(tokens):
        own = {name: values[i] for name, values in columns.items()}
        own |= {"policy_tokens": policy_tokens, "max_new_tokens": length, "n_tokens": 50}
        lines.append(record(prompt_id=f"p{i}", **own, **SECONDS) | {"run": run})
    return pd.DataFrame(lines)


def compared(*parts):
    found = differences(with_arms(pd.concat(parts, ignore_index=True)))
    return found.set_index(["length", "measure"])


def test_an_answer_counts_up_to_its_tokens_if_it_is_safe_at_every_word():
    """Bug: one token more than c L counts, as does a text over budget at a word, or one that was
    emitted unverified; or the tokens of prompts without an answer are left out of the price.
    """
    states = ["verified_safe"] * 4 + ["abstained", "unverified_unsafe"]
    peaks = [0.1, 0.2, 0.1, 0.3, 0.1, 0.1]
    own = {"status": states, "word_peak_cost": peaks, "reward": [1.0, 2.0, 3.0, 9.0, None, 9.0]}
    arm = lines_of("rejection-all", [100, 101, 300, 50, 300, 50], **own)
    base = lines_of("base", [100] * 4, word_peak_cost=[0.1, 0.3, 0.2, 0.3])
    row = curves(with_arms(pd.concat([arm, base]))).set_index("arm").loc["rejection-all"]
    shares = row[["within_1", "within_1_5", "within_2", "within_3", "answered"]] * 6
    assert shares.round(9).tolist() == [1, 2, 2, 3, 3]
    prices = ["tokens_per_answer", "tokens_per_token", "reward", "seconds_per_answer", "S"]
    assert row[prices].tolist() == [901 / 300, 901 / 150, 2.0, 6 * 2.0 / 3, 0.5]


def test_an_arm_without_an_answer_has_no_price():
    """Bug: a division by zero, or a price of zero."""
    (row,) = curves(with_arms(lines_of("rejection", [9], status=["abstained"]))).to_dict("records")
    assert row["answered"] == 0 and math.isnan(row["tokens_per_answer"] + row["S"])


def test_prompts_are_paired_and_their_lengths_averaged_first():
    """Bug: the sign, prompts paired by their place, or twice the prompts when lengths are pooled;
    an interval without length where no prompt differs.
    """
    short = [lines_of("backtracking", [100] * 4), lines_of("rejection", [100, 160, 160, 400])[::-1]]
    long = [lines_of(arm, [150] * 4, 200) for arm in ("backtracking", "rejection")]
    found = compared(*short, *long)
    values = found[["difference", "n_prompts", "n_pairs"]]
    assert values.loc[(100, "within_1_5")].tolist() == [0.75, 4, 4]
    assert values.loc[("all", "within_1_5")].tolist() == [0.375, 4, 8]
    same = found.loc[(200, "within_1_5")]
    assert same["difference"] == 0 and same["low"] < 0 < same["high"]
    assert found.loc[("all", "within_1_5"), "high"] == 0.5


def test_a_run_of_another_name_or_a_prompt_twice_is_refused():
    """Bug: an arm that is lost, or that counts a prompt twice."""
    odd = lines_of("rejection", [1]).assign(run="regime-rejection")
    with pytest.raises(RunError, match="no arm; name runs"):
        with_arms(odd)
    with pytest.raises(RunError, match="occurs twice"):
        with_arms(pd.concat([lines_of("rejection", [1])] * 2, ignore_index=True))
