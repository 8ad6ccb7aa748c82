"""What methods spent, and methods at equal seconds, by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code

from igcore.errors import ParameterError, RunError
from igcore.report import tables

COLUMNS = [*notebook_code("40_tables").WORK, "forward_tokens_per_emitted"]
at_equal_seconds = notebook_code("45_ablations").at_equal_seconds


def compute_table(records, order=None):
    return notebook_code("40_tables").compute_table(tables.main_table(records, order), records)


def spent(method="base", prompt_id="a", **fields) -> dict:
    return synthetic.record(
        method=method, prompt_id=prompt_id, n_samples={"base": 1}.get(method, 8), **fields
    )


def by_samples(
    *rows: tuple, columns=("policy", "method", "n_samples", "seconds_per_prompt")
) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns))


# --- what was spent -------------------------------------------------------------------------------


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
    with pytest.raises(RunError, match="status 'safe'"):
        compute_table(records.assign(status="safe"))


# --- equal seconds --------------------------------------------------------------------------------

ROWS = by_samples(
    ("raw", "base", 1, 0.2),
    ("raw", "best-of-n", 16, 1.9),
    ("raw", "best-of-n", 4, 0.6),
    ("raw", "best-of-n", 8, 1.0),
    ("raw", "args", 8, 4.0),
    ("raw", "args", 4, 3.0),
    ("raw", "inferenceguard", 4, 0.5),
    ("raw", "inferenceguard", 8, 1.0),
    ("raw", "beam-augmented", 4, np.nan),
    ("raw", "beam-augmented", 8, 0.9),
    ("raw", "beam-augmented", 16, np.nan),
    ("chat", "inferenceguard", 8, 0.5),
    ("chat", "best-of-n", 4, 0.6),
    ("chat", "best-of-n", 8, 0.4),
)


def test_equal_seconds_by_hand():
    """Guards against the nearest row taken for one within the limit, a limit of another policy, and
    a method that silently drops out because none of its rows fits. As many seconds as the reference
    still fit."""
    table = at_equal_seconds(ROWS)
    assert list(table.columns) == [*ROWS.columns, "seconds_ratio", "fits"]
    assert table[["policy", "method", "n_samples", "fits"]].to_numpy().tolist() == [
        ["raw", "base", 1, True],
        ["raw", "best-of-n", 8, True],
        ["raw", "args", 4, False],
        ["raw", "inferenceguard", 8, True],
        ["raw", "beam-augmented", 8, True],
        ["chat", "inferenceguard", 8, True],
        ["chat", "best-of-n", 8, True],
    ]
    assert table["seconds_ratio"].tolist() == pytest.approx([0.2, 1, 3, 1, 0.9, 1, 0.8])


def test_order_and_index_of_the_rows_change_nothing():
    """Guards against picking the last row, and against rows with the same label in tables that were
    joined.
    """
    joined = pd.concat([ROWS.iloc[:7], ROWS.iloc[7:].reset_index(drop=True)])
    keys = ["policy", "method"]
    expected = at_equal_seconds(ROWS).sort_values(keys, ignore_index=True)
    for rows in (joined, ROWS.sample(frac=1, random_state=2)):
        found = at_equal_seconds(rows).sort_values(keys, ignore_index=True)
        pd.testing.assert_frame_equal(found, expected)


def test_a_policy_without_the_reference_is_refused():
    """Guards against a limit of another policy or N."""
    with pytest.raises(RunError, match="raw has no inferenceguard with N = 8"):
        at_equal_seconds(ROWS.drop(index=7))
