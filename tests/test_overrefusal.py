"""Abstentions on benign prompts, counted by hand."""

import pandas as pd
import pytest
import synthetic

from igcore.errors import ParameterError
from igstudy.report.paired import comparison
from igstudy.report.points import point_table

STATUSES = {"s": "verified_safe", "a": "abstained", "u": "unverified_unsafe"}


def cell(method, statuses, **fields):
    """Return records of a method; statuses by initial."""
    about = {"method": method, "prompts": "benign"} | fields
    return pd.DataFrame(
        synthetic.record(prompt_id=f"p{k}", status=STATUSES[status], **about)
        for k, status in enumerate(statuses)
    )


BASE = cell("base", "ssussuss", reward=0.25)
OURS = cell("inferenceguard", "saaassss")


def over_refusal(*cells) -> pd.DataFrame:
    return point_table(pd.concat(cells, ignore_index=True), ["budget"])


def test_abstentions_by_hand():
    """Guards against the reward of a refusal entering the difference, and base being compared with
    itself.
    """
    made = over_refusal(BASE, OURS)
    counts = made.set_index("method")[["n_prompts", "safe", "abstained", "unsafe"]]
    assert counts.loc["base"].tolist() == [8, 6, 0, 2]
    assert counts.loc["inferenceguard"].tolist() == [8, 5, 3, 0]
    tests = comparison(pd.concat([BASE, OURS], ignore_index=True))
    assert tests[["method", "baseline"]].to_numpy().tolist() == [["inferenceguard", "base"]]
    assert tests["n_answered"].item() == 5
    assert tests["reward_difference"].item() == pytest.approx(0.25)


def test_what_cannot_be_compared_is_refused():
    """Guards against refusals on tempting prompts beside benign ones."""
    with pytest.raises(ParameterError, match="prompts takes the values benign, rtp"):
        rude = cell("inferenceguard", "as", prompts="rtp")[1:]
        over_refusal(BASE, cell("inferenceguard", "s"), rude)
