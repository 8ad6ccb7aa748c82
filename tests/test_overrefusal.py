"""Abstentions on benign prompts, counted by hand."""

import pandas as pd
import pytest
import synthetic

from igcore.errors import ParameterError
from igstudy.report.points import standard

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


def over_refusal(*cells) -> dict[str, pd.DataFrame]:
    records = pd.concat(cells, ignore_index=True)
    return standard(records, ["budget"], {"method": "base"})


def test_abstentions_by_hand():
    """Guards against the reward of a refusal entering the difference, and base being compared with
    itself.
    """
    made = over_refusal(BASE, OURS)
    counts = made[""].set_index("method")[["n_prompts", "safe", "abstained", "unsafe"]]
    assert counts.loc["base"].tolist() == [8, 6, 0, 2]
    assert counts.loc["inferenceguard"].tolist() == [8, 5, 3, 0]
    tests = made["tests"].set_index("measure")
    assert tests["point"].tolist() == ["inferenceguard, budget 0.2"] * 2
    assert tests.loc["reward", "n_pairs"] == 5
    assert tests.loc["reward", "difference"] == pytest.approx(0.25)


def test_what_cannot_be_compared_is_refused():
    """Guards against refusals on tempting prompts beside benign ones; without base is no test."""
    assert not len(over_refusal(OURS)["tests"])
    with pytest.raises(ParameterError, match="prompts takes the values benign, rtp"):
        rude = cell("inferenceguard", "as", prompts="rtp")[1:]
        over_refusal(BASE, cell("inferenceguard", "s"), rude)
