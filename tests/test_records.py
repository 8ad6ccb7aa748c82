"""Tests of one line: its fields, what becomes of numbers, and what its digest covers."""

import json
import math
from dataclasses import replace

from mockpolicy import letter_cost, mock_policy
from mockruns import SCORERS, lines

from igcore import Guard, decode
from igstudy import linefile
from igstudy.runs import records, verify
from igstudy.runs.decode_params import Settings

CONFIG = Settings(budget=0.5, n_samples=4, block_size=3, max_new_tokens=6)


def test_a_line_has_the_columns_that_a_table_of_none_has():
    """Bug: a notebook without runs fails for a column that it would have had."""
    assert tuple(lines(methods=["base"])[0]) == records.RECORD_FIELDS


def test_a_number_that_is_not_finite_becomes_none():
    """Bug: NaN in a file, which is no JSON, from a perplexity or a scorer that failed."""
    guard = Guard(mock_policy(), SCORERS["letters"], SCORERS["vowels"], CONFIG)
    (response,) = decode("base", guard, ["ab"])
    odd = replace(
        response, cost=math.nan, z_trace=[0.5, -math.inf], finals=[[math.inf, None]],
        trace=[{"kl": math.nan, "round": 0}],
    )  # fmt: skip
    line = records.record(odd, "base", guard, seed=0)
    assert (line["cost"], line["z_trace"], line["z_final"], line["finals"]) == (
        None, [0.5, None], None, [[None, None]],
    )  # fmt: skip
    assert line["trace"] == [{"kl": None, "round": 0}]
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_the_digest_covers_all_but_seconds():
    """Guards every field against a change by accident; seconds differ whenever the same work is
    done again.
    """
    line = lines(methods=["base"])[0]
    free = {
        name
        for name in records.RECORD_FIELDS
        if linefile.line_digest(line | {name: "changed"}) == line["digest"]
    }
    assert free == {"generate_s", "cost_s", "reward_s", "critic_s", "score_s", "digest"}


def test_costs_at_the_end_only_are_recorded_and_checked_as_such():
    """Guards the line of E_critic: its accounting is `terminal` whatever was set, and its path is
    the final cost alone.
    """
    written = [
        x
        for d in (0.5, 1.0, 2.0)
        for x in lines(d, ["inferenceguard-critic"], accounting="peak", threshold=0.3)
    ]
    answered = [x for x in written if x["status"] == "verified_safe"]
    assert len(answered) > 4 and {
        (x["accounting"], x["threshold"], x["miss"]) for x in written
    } == {("terminal", 0.3, 0.01)}
    for line in answered:
        assert line["z_trace"] == [line["budget"]] * len(line["block_ends"]) + [
            line["budget"] - line["cost"]
        ]
        assert line["peak_cost"] == max(
            letter_cost(line["response"][:end]) for end in line["grid_ends"]
        )
        assert list(verify.rescored([line], *SCORERS.values())) == []
