"""What answers cost under a budget, and the law beside it, on lines made by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from synthetic import record

from igcore.errors import RunError
from igstudy.report.searches import at_same_seconds, curves, differences, growth, law, with_arms

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
    """Bug: one token more than c L counts, or a text over budget at a word; one does not count that
    kept another constraint; or the tokens of prompts without an answer are left out of the price.
    """
    states = ["verified_safe"] * 2 + [
        "unverified_unsafe",
        "verified_safe",
        "abstained",
        "unverified_unsafe",
    ]
    peaks = [0.1, 0.2, 0.1, 0.3, 0.1, 0.3]
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


def test_arms_are_paired_by_prompt_in_each_cell():
    """Bug: the sign, prompts paired by their place, or an interval without length where no prompt
    differs; lengths that are no cell of their own.
    """
    short = [lines_of("backtracking", [100] * 4), lines_of("rejection", [100, 160, 160, 400])[::-1]]
    long = [lines_of(arm, [150] * 4, 200) for arm in ("backtracking", "rejection")]
    found = compared(*short, *long)
    row = found.loc[(100, "within_1_5")]
    assert row[["difference", "n_prompts", "n_pairs"]].tolist() == [0.75, 4, 4]
    same = found.loc[(200, "within_1_5")]
    assert same["difference"] == 0 and same["low"] < 0 < same["high"]
    assert {length for length, _ in found.index} == {100, 200}


def test_the_same_seconds_by_hand():
    """Bug: a search that reads much beside its tokens is compared at equal tokens alone, or a
    cheap one gets no more tokens.
    """
    arms = [lines_of(arm, [200, 300, 400]) for arm in ("rejection", "backtracking", "guard-n1")]
    lines = with_arms(pd.concat(arms, ignore_index=True))
    lines.loc[lines["arm"] == "backtracking", "cost_s"] = 2.0  # 3.5 seconds, and not 2
    lines.loc[lines["arm"] == "guard-n1", "generate_s"] = 0.0  # a half of 2
    # rejection needs 6 / 900 of a second for a token, so it has 4 / 3 of a second
    shares = at_same_seconds(lines)
    assert (shares * 3).to_dict() == {"rejection": 1, "backtracking": 0, "guard-n1": 3}
    assert not len(at_same_seconds(lines[lines["arm"] != "rejection"]))


def test_answers_that_cost_what_the_law_says_have_no_slope():
    """Bug: x from the draws that are judged, L as the longest answer instead of the mean one, or
    a slope of something else than the logarithm of the ratio.
    """
    parts = []
    for regime, n_safe in (("numbers", 1), ("sentences", 2), ("rude", 3)):
        peaks = [0.1] * n_safe + [0.9] * (4 - n_safe)
        x = -math.log(n_safe / 4)
        tokens = 50 * math.expm1(x) / x  # answers have 50 tokens
        parts += [
            lines_of("plain", [100] * 4, regime=regime, word_peak_cost=peaks),
            lines_of("base", [100] * 4, regime=regime),  # all of them safe, and no part of it
            lines_of("rejection", [tokens] * 4, regime=regime),
            lines_of("backtracking", [60] * 4, regime=regime),
        ]
    table = growth(with_arms(pd.concat(parts, ignore_index=True)))
    cells = table[table["search"] == "rejection"].set_index("regime")
    assert cells["log_ratio"].abs().max() < 1e-9
    assert cells.loc[["numbers", "sentences", "rude"], "S"].tolist() == [0.25, 0.5, 0.75]
    stepping = table[table["search"] == "backtracking"]
    assert stepping[["cost", "low", "high"]].eq(1.2).all(axis=None)
    parts = [part.assign(policy_tokens=part["policy_tokens"] ** 2 / 50) for part in parts]
    (slope,) = growth(with_arms(pd.concat(parts))).query("regime == 'all'")["log_ratio"]
    x = -np.log(cells.loc[["numbers", "sentences", "rude"], "S"])
    assert slope == pytest.approx(np.polyfit(x, np.log(np.expm1(x) / x), 1)[0])


def test_a_run_of_another_name_or_a_prompt_twice_is_refused():
    """Bug: an arm that is lost, or that counts a prompt twice."""
    odd = lines_of("rejection", [1]).assign(run="regime-rejection")
    with pytest.raises(RunError, match="no arm; name runs"):
        with_arms(odd)
    with pytest.raises(RunError, match="occurs twice"):
        with_arms(pd.concat([lines_of("rejection", [1])] * 2, ignore_index=True))


def test_the_law_at_its_ends():
    """By hand: 1 where all answers are kept; at S 1/e it is e - 1; no answer costs for ever."""
    assert law(1.0) == 1.0
    assert law(1 / math.e) == pytest.approx(math.e - 1)
    assert law(0.0) == math.inf
