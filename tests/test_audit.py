"""Tests of notebook 70: percentages, rows and sweeps by hand, and the paper's in slow ways."""

from fractions import Fraction as F
from itertools import product

import numpy as np
import pandas as pd
import pytest
from notebook_code import notebook_code
from scipy.stats import binomtest, norm

from igstudy.paper import IDENTITY, measured, reported

audit = notebook_code("70_paper_audit")

SIZES = pd.DataFrame(
    {"n": [759, 300, 12500, 500], "from": ["implied"] * 4},
    ["pku-saferlhf", "hex-phi", "hh-rlhf", "win_rates"],
)


def rows(*given):
    """Rows as `igstudy.paper.measured` has them; each is a dict of what is not the default."""
    default = {
        **{
            "table": "t",
            "policy": "alpaca-7b",
            "prompts": "pku-saferlhf",
            "method": "best-of-n-lagrangian",
            "n_samples": 128,
        },
        **{
            "block_size": None,
            "keep": None,
            "lagrange_multiplier": 5.0,
            "reward_mean": 6.0,
            "reward_std": 2.0,
            "seconds": 9.0,
        },
    }
    found = pd.DataFrame(
        [
            default | {"safety_rate": 0.5, "tex_line": line} | row
            for line, row in enumerate(given, 1)
        ]
    )
    return found.assign(safety_printed=[f"{100 * rate:g}" for rate in found["safety_rate"]])


# --- denominators ---------------------------------------------------------------------------------


def slow(percentage, n):
    """Whether some k/n prints so, rounded and cut off, in exact rationals."""
    unit = F(1, 10 ** len(percentage.partition(".")[2]))
    values = [F(100 * k, n) for k in range(n + 1)]
    return any(abs(v - F(percentage)) <= unit / 2 for v in values), any(
        0 <= v - F(percentage) < unit for v in values
    )


@pytest.mark.parametrize(
    "percentage",
    ["94.46", "98.15", "29.47", "94.3", "81", "12", "13", "100", "0", "0.01", "99.99", "62.50"],
)
def test_fits_agrees_with_trying_every_k(percentage):
    """Bug: a nearest k that is one off, a k above n, or halves (12.5 of eight) that go one way
    only.
    """
    rounded, cut = audit.fits(percentage, 60)
    assert [(r, c) for r, c in zip(rounded.tolist(), cut.tolist(), strict=True)] == [
        slow(percentage, n) for n in range(1, 61)
    ]


def test_hand_worked_percentages_at_759():
    """94.07 is 714/759; 745/759 = 98.1555... prints 98.15 only if cut off; 29.47 lies between
    223/759 and 224/759.
    """
    at = {
        p: tuple(bool(each[758]) for each in audit.fits(p, 759))
        for p in ("94.07", "98.15", "29.47")
    }
    assert at == {"94.07": (True, True), "98.15": (False, True), "29.47": (False, False)}


def test_percentages_that_only_759_fits():
    """94.07 is 714 of 759, 86.56 is 657, and so on; printed by trying every k of every n, no other
    n up to 1000 has all six.
    """
    counts = [714, 731, 657, 688, 735, 747]
    percentages = [f"{100 * k / 759:.2f}" for k in counts]
    fitting = [
        n
        for n in range(1, 1001)
        if {f"{100 * k / n:.2f}" for k in range(n + 1)} >= set(percentages)
    ]
    found = audit.implied(percentages, 1000)
    assert fitting == [759] and found["common"] == found["n"] == 759 and found["fits"] == 6


def test_chance_implies_nothing():
    """Bug: the best of thousands of denominators taken for a finding."""
    spread = np.random.default_rng(0).integers(0, 10_001, 40) / 100
    found = audit.implied([f"{p:.2f}" for p in spread], 1000)
    assert not found["implied"] and found["p"] > 0.05
    assert not audit.implied(["81", "48", "96"], 1000)[
        "implied"
    ]  # whole numbers fit nearly everything


def test_the_tail_is_that_of_all_outcomes():
    """Against the sum over all outcomes of four unequal trials."""
    chance = np.array([[0.1], [0.5], [0.9], [0.3]])
    for seen in range(5):
        outcomes = [o for o in product((0, 1), repeat=4) if sum(o) >= seen]
        expected = sum(
            np.prod([c if x else 1 - c for x, c in zip(o, chance[:, 0], strict=True)])
            for o in outcomes
        )
        assert audit.tail(chance, np.array([seen]))[0] == pytest.approx(expected)


@pytest.fixture(scope="module")
def found():
    groups = audit.percentages_by_group()
    return pd.DataFrame(
        [{"percentages": name} | audit.implied(group, 1000) for name, group in groups.items()]
    )


def test_what_the_reported_tables_imply(found):
    """759 and 300 stand out for PKU-SafeRLHF and HEx-PHI, nothing for HH-RLHF, and 500 is the least
    that fits the win rates.
    """
    said = audit.statements().query("kind == 'prompt_count'").set_index("prompts")
    sizes = audit.sample_sizes(found, said["value"].astype(int))
    assert sizes["n"].to_dict() == {
        "pku-saferlhf": 759,
        "hex-phi": 300,
        "hh-rlhf": 12500,
        "win_rates": 500,
    }
    assert sizes["from"].tolist() == ["implied", "implied", "stated", "smallest"]
    ndk = found.set_index("percentages").loc["ndk: alpaca-7b on pku-saferlhf"]
    assert (ndk["rates"], ndk["fits"], ndk["common_cut"]) == (24, 23, 759)
    at = [audit.fits(percentage, 4)[0] for percentage in ("50.00", "25.00")]
    assert np.sum(at, axis=0).tolist() == [0, 1, 0, 2]
    chance = audit.chance_of_fit(["50.00", "25.00"], 4)
    assert chance.sum(axis=0)[3] == pytest.approx(2 * 4 / 10_000)


# --- rows -----------------------------------------------------------------------------------------


def kinds(*given):
    return list(audit.row_pairs(rows(*given), SIZES)["kind"])


def test_planted_pairs_are_told_apart():
    """A repeat, a time, a contradiction, a duplicate, and two rows with nothing in common."""
    assert kinds({}, {}) == ["repeated"]
    assert kinds({}, {"seconds": 9.5}) == ["other seconds"]
    assert kinds({}, {"safety_rate": 0.6}) == ["contradiction"]
    assert kinds({}, {"n_samples": 256, "seconds": 12.0}) == ["duplicate"]
    assert kinds({}, {"n_samples": 256, "safety_rate": 0.6}) == []


def test_a_multiplier_of_zero_is_the_method_without_one():
    """Bug: ARGS and ARGS Lagrangian at 0 reported as two configurations that agree by a wonder."""
    assert kinds(
        {"method": "args", "lagrange_multiplier": None},
        {"method": "args-lagrangian", "lagrange_multiplier": 0.0},
    ) == ["repeated"]
    assert kinds(
        {"method": "args", "lagrange_multiplier": None},
        {"method": "args-lagrangian", "lagrange_multiplier": 1.0},
    ) == ["duplicate"]


def test_a_contradiction_carries_the_chance_of_it():
    """380 and 455 of 759 differ by z = 3.87; rewards 6 and 6.1 with deviation 2 by z = .1 / (2
    sqrt(2/759)) = .974.
    """
    (pair,) = audit.row_pairs(
        rows({"safety_rate": 380 / 759}, {"safety_rate": 455 / 759, "reward_mean": 6.1}), SIZES
    ).itertuples()
    pooled = (380 + 455) / (2 * 759)
    z = (455 - 380) / 759 / (pooled * (1 - pooled) * 2 / 759) ** 0.5
    assert pair.safety_p == pytest.approx(2 * norm.sf(z)) and pair.reward_p == pytest.approx(
        2 * norm.sf(0.974), rel=1e-3
    )


def test_what_the_reported_rows_hold():
    """The known pairs of the paper: main 88.14 against ablation 96.3, and a beam row that stands
    for two methods.
    """
    pairs = audit.row_pairs(measured(), SIZES)
    assert pairs["kind"].value_counts().to_dict() == {
        "repeated": 12,
        "contradiction": 5,
        "other seconds": 5,
        "duplicate": 3,
    }
    lines = {(row.row_a, row.row_b) for row in pairs.query("kind == 'duplicate'").itertuples()}
    assert ("main_alpaca_beaver line 818", "lambda_alpaca_beaver line 991") in lines
    (main,) = pairs.query(
        "row_a == 'main_alpaca_beaver line 809' and kind == 'contradiction'"
    ).itertuples()
    assert main.row_b == "ndk line 1130" and main.safety_p < 1e-8


def test_a_sweep_counts_steps_against_it_and_their_noise():
    """Rates .5, .48, .6, .3 over lambda 0, 1, 2, 5: a fall of 2 points is noise at n = 759 (5 would
    be), one of 30 is not.
    """
    given = [
        {"lagrange_multiplier": x, "safety_rate": p}
        for x, p in ((5, 0.3), (1, 0.48), (0, 0.5), (2, 0.6))
    ]
    steps = audit.steps(
        rows(*given, {"n_samples": 64}), "lagrange_multiplier", "safety_rate", 1, SIZES
    )
    assert steps["change"].round(9).tolist() == [-0.02, 0.12, -0.3]
    assert steps["against"].tolist() == [True, False, True] and steps["beyond_noise"].tolist() == [
        False,
        False,
        True,
    ]
    assert steps["noise"].iloc[0] == pytest.approx(
        1.96 * ((0.25 + 0.48 * 0.52) / 759) ** 0.5, rel=1e-4
    )


def test_the_sweeps_of_the_paper():
    """Nine sweeps over lambda fall somewhere; N, d and K are held while another is swept."""
    table = pd.DataFrame(
        [
            audit.monotone(name, audit.steps(audit.rows_of(sweep[0]), *sweep[1:], SIZES))
            for name, sweep in audit.SWEEPS.items()
        ]
    ).set_index("expectation")
    assert table.loc["safety should not fall with lambda", "sweeps_against"] == 9
    assert (
        table["steps"].to_dict()["reward should rise with N"] == 12
    )  # K 16 and 64 twice, 32 with all three N, for each of three d
    ndk = reported("ndk").set_index(["n_samples", "block_size", "keep"])["reward_mean"]
    by_hand = sum((b, d, k) in ndk.index for (a, d, k) in ndk.index for b in [2 * a])
    assert by_hand == 12


# --- text and settings ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked():
    return audit.against_tables()


@pytest.mark.parametrize(
    ("words", "where", "holds"),
    [
        ("94.46% on Alpaca-7B", "alpaca-7b, main tables", 1),
        ("94.46% on Alpaca-7B", "alpaca-7b, all tables", 0),  # 99.34 in the ablation
        ("highest rewards without any unsafe", "of rows without an unsafe answer", 1),
        ("highest rewards without any unsafe", "of all rows", 0),  # beam search, 10.31
        ("matches the decoding cost", "beaver-7b-v3 on pku-saferlhf", 1),
        ("matches the decoding cost", "llama-3.1-8b on pku-saferlhf", 0),  # 10.69 against 8.68 s
    ],
)
def test_statements_against_the_tables(checked, words, where, holds):
    """Each read off the page."""
    (row,) = checked[
        checked["quote"].str.contains(words, regex=False) & (checked["where"] == where)
    ].itertuples()
    assert row.holds == holds


def test_a_rate_and_a_reward_of_one_sentence_stand_in_two_rows(checked):
    """99.34 % goes with 5.92, and a reward of 6.08 with 97.5 %."""
    rows = checked[checked["quote"].str.contains("reward of 6.08", regex=False)]
    assert not rows["holds"].any()
    assert rows["tables"].str.extract(r"([\d.]+) % with ([\d.]+)").to_numpy().tolist() == [
        ["99.34", "5.92"],
        ["97.5", "6.08"],
    ]


def test_symbols_for_two_things():
    shared = audit.shared_symbols()
    assert set(shared["symbol"]) == {"d", "N"} and set(
        shared.query("symbol == 'd'")["meaning"]
    ) == {
        "safety budget",
        "tokens in a block",
    }
    assert not shared["quote"].str.contains(r"[\\$]").any()


# --- resolution -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("safe", "others", "n"), [(5, 3, 6), (4, 4, 6), (6, 2, 6), (3, 1, 4), (0, 2, 5)]
)
def test_mcnemar_bounds_are_those_of_all_pairings(safe, others, n):
    """Against every number of prompts that are safe under both."""
    values = []
    for both in range(max(0, safe + others - n), min(safe, others) + 1):
        b, c = safe - both, others - both
        values.append(binomtest(b, b + c).pvalue if b + c else 1.0)
    assert audit.mcnemar_bounds(safe, others, n) == pytest.approx((min(values), max(values)))


def test_the_main_gap_stands_under_every_pairing():
    """717 and 669 of 759: between 2^-47 and 3.6e-5."""
    best, worst = audit.mcnemar_bounds(717, 669, 759)
    assert best == pytest.approx(2.0**-47) and worst == pytest.approx(3.57e-5, rel=0.01)


def test_verdicts_on_the_paper():
    """94.46 over 88.14 stands; 99.7, 96 and 98.96 cannot be told from the rates above them."""
    resolved = audit.resolve(audit.comparisons(), SIZES).set_index("lines")
    assert resolved.loc["810, 809", "verdict"] == "inferenceguard-critic is higher"
    assert set(resolved.loc[["823, 822", "848, 847", "862, 861"], "verdict"]) == {
        "cannot be resolved"
    }
    assert resolved.loc["889, 888", "verdict"] == "args-cost is higher under some pairings"
    assert (resolved["best"] <= resolved["worst"] + 1e-12).all()


def test_no_row_is_left_out_of_the_measured_tables():
    assert len(measured()) == 24 + 24 + 22 + 60 + 60 + 27 + 6 and set(IDENTITY) <= set(measured())
