"""What methods spent, by hand."""

import math

import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code

from igcore.errors import ParameterError
from igstudy.report import tables

COLUMNS = [*notebook_code("40_tables").WORK, "forward_tokens_per_emitted"]


def compute_table(records, order=None):
    return notebook_code("40_tables").compute_table(tables.main_table(records, order), records)


def spent(method="base", prompt_id="a", **fields) -> dict:
    return synthetic.record(
        method=method, prompt_id=prompt_id, n_samples={"base": 1}.get(method, 8), **fields
    )


def test_work_of_each_method_by_hand():
    """Guards against a mean of ratios, abstentions whose reading is forgotten, and prompts pooled
    over methods or policies.
    """
    lines = [
        spent(
            "inferenceguard",
            "a",
            n_tokens=10,
            forward_tokens=120,
            generate_s=1.0,
            score_s=0.5,
            cost_s=0.5,
            reward_s=0.0,
        ),
        spent(
            "inferenceguard",
            "b",
            n_tokens=0,
            forward_tokens=90,
            status="abstained",
            samples_drawn=24,
        ),
        spent("inferenceguard", "c", n_tokens=30, forward_tokens=270),
        spent(
            "base",
            "a",
            n_tokens=20,
            forward_tokens=30,
            samples_drawn=1,
            scorer_calls=0,
            scorer_tokens=0,
        ),
        spent("base", "a", n_tokens=0, forward_tokens=30, policy="smollm2-chat"),
    ]
    table = compute_table(pd.DataFrame(lines), order=["base", "inferenceguard"])
    assert list(table.columns) == COLUMNS
    base, ours, chat = table.itertuples(index=False)
    assert [tuple(row[:4]) for row in (base, ours, chat)] == [
        ("smollm2-raw", "base", 1, 1),
        ("smollm2-raw", "inferenceguard", 3, 8),
        ("smollm2-chat", "base", 1, 1),
    ]
    assert (ours.samples_per_prompt, ours.forward_tokens_per_prompt) == pytest.approx((40 / 3, 160))
    assert ours.forward_tokens_per_emitted == 480 / 40
    assert (ours.generate_seconds_per_prompt, ours.cost_seconds_per_prompt) == pytest.approx(
        (2 / 3, 0.8 / 3)
    )
    assert ours.seconds_per_prompt == pytest.approx((1.5 + 0.75 + 0.75) / 3)
    assert (
        base.scorer_calls_per_prompt,
        base.scorer_tokens_per_prompt,
        base.forward_tokens_per_emitted,
    ) == (0, 0, 1.5)
    assert math.isnan(chat.forward_tokens_per_emitted)


def test_records_that_make_no_table_are_refused():
    """Guards against means over two numbers of samples; none at all make a table without rows."""
    records = pd.DataFrame([spent("best-of-n", "a"), spent("best-of-n", "b") | {"n_samples": 4}])
    with pytest.raises(
        ParameterError,
        match="n_samples takes the values 4, 8 in policy smollm2-raw, method best-of-n",
    ):
        compute_table(records)
    empty = compute_table(records.iloc[:0], order=["best-of-n"])
    assert list(empty.columns) == COLUMNS and not len(empty)
