"""Tests of the paper's tables: counts of rows, names, settings, and digits that must
survive.
"""

import pandas as pd
import pytest

from igcore import METHODS, POLICIES
from igcore.errors import ParameterError
from igstudy import paper


def cell(table, **settings):
    """The one row with these values."""
    rows = paper.reported(table)
    for name, value in settings.items():
        rows = rows[rows[name] == value]
    (found,) = rows.to_dict("records")
    return found


@pytest.mark.parametrize("table", paper.TABLES)
def test_every_row_has_names_that_exist_here(table):
    """Bug: a name of the paper's that no run has, so that its row would never stand beside ours."""
    rows = paper.reported(table)
    assert set(rows["method"]) <= set(METHODS) and set(rows["policy"]) <= set(POLICIES)
    assert set(rows["prompts"]) <= {"pku-saferlhf", "hex-phi", "hh-rlhf"}
    assert not rows.duplicated(paper.IDENTITY).any()


@pytest.mark.parametrize("table", paper.TABLES)
def test_a_setting_is_there_where_it_applies_and_nowhere_else(table):
    """Bug: a multiplier at a method that has none, or a block size at Best-of-N, whose answers here
    are one block.
    """
    for row in paper.reported(table).itertuples():
        swept = "lagrangian" in row.method
        assert swept or pd.isna(row.lagrange_multiplier)
        assert pd.notna(row.lagrange_multiplier) or not swept or table == "win_rates"
        blocks = row.method.startswith(("beam", "inferenceguard", "args"))
        assert blocks or pd.isna(row.block_size)
        assert pd.isna(row.keep) or row.method.startswith(("beam", "inferenceguard"))


def test_cells_are_those_of_the_paper():
    """Guards the columns: one row of each kind, read off the page."""
    critic = cell("main_alpaca_beaver", policy="alpaca-7b", method="inferenceguard-critic")
    numbers = ["reward_mean", "reward_std", "safety_rate", "seconds"]
    assert [critic[name] for name in numbers] == [6.5, 2.5, 0.9446, 15.07]
    settings = ["n_samples", "block_size", "keep", "tex_line"]
    assert [critic[name] for name in settings] == [128, 32, 32, 810]
    greedy = cell(
        "lambda_vicuna", prompts="hex-phi", method="best-of-n-lagrangian", n_samples=64,
        lagrange_multiplier=0,
    )  # fmt: skip
    assert (greedy["reward_mean"], greedy["safety_printed"], greedy["printed_as"]) == (
        6.97,
        "34.33",
        "Best-of-N Lag. N=64",
    )
    freq = cell(
        "lambda_alpaca_beaver", method="beam-lagrangian-freq", n_samples=256, lagrange_multiplier=10
    )
    assert (freq["safety_printed"], freq["keep"]) == ("52.25", 64)
    wide = cell("ndk", n_samples=256, block_size=64, keep=64)
    assert (wide["cost_mean"], wide["safety_rate"], wide["reward_mean"]) == (-1.05, 0.9934, 5.92)
    judged = cell("win_rates", method="best-of-n-lagrangian")
    assert (judged["n_samples"], judged["lagrange_multiplier"], judged["harmlessness_rate"]) == (
        500,
        5,
        0.606,
    )
    timed = cell("latency", method="inferenceguard", n_samples=64)
    assert (timed["generation_seconds"], timed["scoring_seconds"], timed["seconds"]) == (
        2.85,
        1.2,
        4.05,
    )


def test_reported_digits_survive():
    """Bug: 94.0 read as the number 94, which a hundred times as many denominators fit."""
    digits = paper.reported("main_llama")["safety_printed"]
    assert "94.0" in set(digits) and "52.7" in set(digits)
    assert set(paper.reported("latency")["safety_printed"]) >= {"89.60", "99.60"}


def test_an_unknown_table_is_one_clear_sentence():
    with pytest.raises(
        ParameterError,
        match="unknown table of the paper 'main_lama'; did you mean 'main_llama'\\? "
        "allowed: lambda",
    ):
        paper.reported("main_lama")
