"""Rates, intervals and paired tests against independent computations, and what answers cost under a
budget, on lines made by hand.
"""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from igcore.errors import ParameterError, RunError
from igstudy.report import paired
from igstudy.report import statistics as metrics
from igstudy.report.paired import comparison
from igstudy.report.points import point_table


def table(*cells: tuple[str, list, list]) -> pd.DataFrame:
    """Return records from (method, statuses, rewards); statuses by initial: s, a, u."""
    names = {"s": "verified_safe", "a": "abstained", "u": "unverified_unsafe"}
    return pd.DataFrame(
        synthetic.record(method=method, prompt_id=f"p{k}", status=names[status], reward=reward)
        for method, statuses, rewards in cells
        for k, (status, reward) in enumerate(zip(statuses, rewards, strict=True))
    )


# --- rates ----------------------------------------------------------------------------------------


def test_safety_lower_certifies_less_than_one():
    """Guards against a two-sided bound, or a bound of 1, for a run without violations (the paper
    prints 100 %).
    """
    assert metrics.safety_lower(759, 759) == pytest.approx(0.05 ** (1 / 759), abs=1e-12)
    assert round(metrics.safety_lower(759, 759), 4) == 0.9961
    assert round(metrics.safety_lower(300, 300), 3) == 0.990
    assert metrics.safety_lower(0, 5) == 0
    assert metrics.safety_lower(717, 759) == pytest.approx(stats.beta.ppf(0.05, 717, 43), abs=1e-9)


def test_intervals_of_the_reference_count():
    """Guards against Wilson and Clopper-Pearson being swapped; both are compared with their closed
    forms.
    """
    low, high = metrics.clopper_pearson(717, 759)
    assert (round(low, 3), round(high, 3)) == (0.926, 0.960)
    assert low == pytest.approx(stats.beta.ppf(0.025, 717, 43), abs=1e-9)
    assert high == pytest.approx(stats.beta.ppf(0.975, 718, 42), abs=1e-9)
    low, high = metrics.wilson(717, 759)
    assert (round(low, 3), round(high, 3)) == (0.926, 0.959)
    z, p, n = stats.norm.ppf(0.975), 717 / 759, 759
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert np.multiply((low, high), 1 + z**2 / n) == pytest.approx(
        (centre - half, centre + half), abs=1e-12
    )


@pytest.mark.parametrize(("safe", "n"), [(0, 0), (3, 2), (-1, 2), (math.nan, 3)])
def test_impossible_counts_are_refused(safe, n):
    """Guards against a rate of no prompts, which would print as a number."""
    with pytest.raises((ValueError, TypeError)):
        metrics.safety_lower(safe, n)


def score_statistic(higher, lower, n, difference):
    """The score statistic of a difference of paired rates, by a search over the nuisance share.

    The counts are of three kinds, with shares q + difference, q, and 1 - 2 q - difference.
    """
    rest = n - higher - lower
    q = np.linspace(max(0, -difference), (1 - difference) / 2, 400_001)
    shares = np.stack([q + difference, q, 1 - 2 * q - difference]).clip(0)
    counts = np.array([[higher], [lower], [rest]])
    with np.errstate(divide="ignore", invalid="ignore"):
        log_likelihood = np.where(counts > 0, counts * np.log(shares), 0).sum(0)
    q = q[np.argmax(log_likelihood)]
    variance = n * (2 * q + difference * (1 - difference))
    return (higher - lower - n * difference) / np.sqrt(variance)


@pytest.mark.parametrize(
    ("higher", "lower", "n"), [(12, 2, 50), (19, 0, 48), (0, 0, 48), (3, 5, 12), (0, 7, 30)]
)
def test_interval_of_a_paired_difference_is_where_the_score_is_1_96(higher, lower, n):
    """Guards the interval of a safety difference, and its swap of the two methods."""
    low, high = metrics.difference_of_rates(higher, lower, n)
    assert low < (higher - lower) / n < high
    assert score_statistic(higher, lower, n, low) == pytest.approx(1.96, abs=2e-3)
    assert score_statistic(higher, lower, n, high) == pytest.approx(-1.96, abs=2e-3)
    assert metrics.difference_of_rates(lower, higher, n) == pytest.approx((-high, -low))


def test_interval_of_equal_verdicts_is_no_point():
    """Guards against the false certainty of 0.000 [0.000, 0.000], which a bootstrap gives."""
    z2 = 1.959964**2
    for n in (1, 12, 48):
        assert metrics.difference_of_rates(0, 0, n) == pytest.approx(
            (-z2 / (n + z2), z2 / (n + z2)), abs=1e-6
        )
    assert all(math.isnan(bound) for bound in metrics.difference_of_rates(0, 0, 0))
    low, high = metrics.difference_of_rates(5, 0, 5)
    assert high == 1 and 0 < low < 1
    two_seeds = pd.Series(0.0, index=pd.MultiIndex.from_product([range(12), [0, 1]]))
    two_seeds.index.names = ["prompt_id", "seed"]
    row = paired.clustered(two_seeds, verdict=True)
    assert (row["low"], row["high"]) == metrics.difference_of_rates(0, 0, 12)


# --- means ----------------------------------------------------------------------------------------


def test_bootstrap_agrees_with_the_exact_distribution():
    """Guards against a bootstrap of something else than the mean: for five values all 5^5 resamples
    can be listed.
    """
    values = [0.0, 0.1, 0.4, 0.5, 0.9]
    means = np.mean(list(itertools.product(values, repeat=5)), axis=1)
    exact = np.percentile(means, [2.5, 97.5])
    assert metrics.bootstrap_mean(values, seed=0) == pytest.approx(exact, abs=0.02)


def test_bootstrap_depends_on_nothing_but_values_and_seed():
    """Guards against numbers in a table that change from run to run."""
    values = np.random.default_rng(3).normal(size=30)
    np.random.seed(1)
    first = metrics.bootstrap_mean(values, seed=5)
    np.random.seed(2)
    assert metrics.bootstrap_mean(values, seed=5) == first
    assert metrics.bootstrap_mean(values, seed=6) != first


def test_bootstrap_of_degenerate_samples():
    """Guards against NaN or a warning where every prompt has the same reward, or none has one."""
    assert metrics.bootstrap_mean([0.1] * 3) == (0.1, 0.1)
    assert metrics.bootstrap_mean([2]) == (2, 2)
    assert all(math.isnan(bound) for bound in metrics.bootstrap_mean([]))
    assert metrics.bootstrap_mean([1, math.nan, 2, 3]) == metrics.bootstrap_mean([1, 2, 3])


def test_sign_flip_enumerates_small_samples():
    """Guards against shuffling pairs (which leaves a mean unchanged) where signs must flip."""
    gains = np.array([0.5, 0.25, 1.0, -0.125, 0.75, 2.0])
    flips = np.array(list(itertools.product([1, -1], repeat=6)))
    exact = np.mean(abs((flips * gains).mean(axis=1)) >= gains.mean())
    assert metrics.sign_flip(gains) == pytest.approx(exact)
    assert exact < 0.1
    assert metrics.sign_flip(gains) == metrics.sign_flip(-gains)


def test_sign_flip_counts_sums_that_only_rounding_parts():
    """Bug: .1 + .2 - .3 and its opposite are not 0, so one of two equal sums counted as less."""
    assert metrics.sign_flip([0.1, 0.2, -0.3, 0.05]) == 1


def test_sign_flip_of_degenerate_samples():
    """Guards against an exception for one pair and a warning for no variance."""
    assert metrics.sign_flip([0.3]) == 1
    assert metrics.sign_flip([0.0] * 20) == 1
    assert math.isnan(metrics.sign_flip([]))
    assert metrics.sign_flip([0.25] * 5) == pytest.approx(2 / 2**5)


# --- comparisons ----------------------------------------------------------------------------------


def compare(records: pd.DataFrame) -> pd.DataFrame:
    return paired.comparison(records)


def test_compare_counts_pairs_by_hand():
    """Guards against swapped discordant counts, unpaired differences, and rewards of abstentions
    being compared.
    """
    ours = ("inferenceguard", "sssssa", [0.5, 0.5, 0.75, 0.5, 0.5, 9.0])
    base = ("base", "ssuuus", [0.25, 0.25, 0.25, 0.25, 0.25, 0.25])
    row = compare(table(base, ours)).iloc[0]
    assert (row.policy, row.method, row.baseline) == ("smollm2-raw", "inferenceguard", "base")
    assert (row.n_pairs, row.mcnemar_b, row.mcnemar_c, row.n_answered) == (6, 3, 1, 5)
    assert row.safety_difference == pytest.approx(2 / 6)
    assert (row.safety_low, row.safety_high) == metrics.difference_of_rates(3, 1, 6)
    assert row.mcnemar_p == pytest.approx(stats.binomtest(3, 4).pvalue)
    assert row.reward_difference == pytest.approx(0.3)
    assert row.reward_p == pytest.approx(2 / 2**5)
    assert row.reward_low >= 0.25 and row.reward_high <= 0.5
    assert list(row.index) == paired.COMPARISON_COLUMNS


def test_compare_uses_only_shared_prompts():
    """Guards against test sets of different size being compared as if they were one (ARGS has fewer
    prompts).
    """
    records = table(("inferenceguard", "sss", [1.0, 1.0, 1.0]), ("args", "u", [0.5]))
    row = compare(records).iloc[0]
    assert (row.n_pairs, row.mcnemar_b, row.n_answered) == (1, 1, 1)
    assert (row.safety_low, row.safety_high) == metrics.difference_of_rates(1, 0, 1)
    assert (row.reward_low, row.reward_high, row.reward_p) == (0.5, 0.5, 1)


def test_a_method_on_a_subset_of_prompts_is_paired_on_these_alone():
    """Guards against the 12 prompts of a slow method being compared with the rates of all 48, and
    the sentence hiding how many.
    """
    ours = ("inferenceguard", "sauss", [9.0, 9.0, 9.0, 0.75, 0.5])
    whole = table(ours, ("base", "sssss", [0.0, 0.0, 0.0, 0.5, 0.5]))
    few = table(("args", "ssusu", [0.0, 0.0, 0.0, 0.5, 0.25])).iloc[3:]
    records = pd.concat([whole, few])
    base, args = compare(records).itertuples(index=False)
    assert (base.n_pairs, base.n_answered, base.mcnemar_b, base.mcnemar_c) == (5, 4, 0, 2)
    assert (args.n_pairs, args.n_answered, args.mcnemar_b, args.mcnemar_c) == (2, 2, 1, 0)
    assert (args.safety_difference, args.reward_difference) == (0.5, 0.25)


def test_compare_does_not_depend_on_the_order_of_lines():
    """Guards against intervals that change when a run is resumed or sharded."""
    records = synthetic.records(20)
    first, second = (
        compare(lines).sort_values(["policy", "baseline"]).reset_index(drop=True)
        for lines in (records, records.sample(frac=1, random_state=1))
    )
    pd.testing.assert_frame_equal(first, second, check_exact=True)


def test_holm_by_hand():
    """Guards against unadjusted p values, and against p values of missing pairs entering the
    family.
    """
    p = pd.Series([0.01, np.nan, 0.04, 0.03])
    assert metrics.holm(p)[[0, 2, 3]].tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert math.isnan(metrics.holm(p)[1])
    assert metrics.holm(pd.Series([np.nan])).isna().all()


def test_holm_spans_policies():
    """Guards against a family per policy: the table is read as a whole."""
    records = synthetic.records(30, methods=["base", "inferenceguard"])
    rows = compare(records)
    smaller, larger = rows["mcnemar_p"].sort_values()
    assert rows["mcnemar_p_holm"].sort_values().tolist() == pytest.approx(
        [2 * smaller, max(2 * smaller, larger)]
    )


def test_compare_without_pairs_or_answers():
    """Guards against a crash, a warning or an invented p value where nothing can be compared."""
    nothing = table(("inferenceguard", "aaa", [None] * 3), ("base", "sus", [0.5] * 3))
    row = compare(nothing).iloc[0]
    assert row.n_answered == 0 and math.isnan(row.reward_p) and math.isnan(row.reward_p_holm)
    apart = table(("inferenceguard", "s", [0.5])).assign(prompt_id="q9")
    rows = compare(pd.concat([apart, table(("base", "s", [0.5]))]))
    assert rows["n_pairs"].item() == 0
    assert (
        rows[["mcnemar_p", "safety_difference", "safety_low", "safety_high"]].isna().all(axis=None)
    )
    assert compare(apart).columns.tolist() == paired.COMPARISON_COLUMNS


def test_compare_without_discordant_pairs():
    """Guards against p = 2 or NaN where both methods are safe on the same prompts."""
    same = table(("inferenceguard", "ssu", [0.5] * 3), ("base", "ssu", [0.5] * 3))
    row = compare(same).iloc[0]
    assert (row.mcnemar_p, row.reward_p, row.reward_low, row.reward_high) == (1, 1, 0, 0)
    assert row.safety_difference == 0
    assert (row.safety_low, row.safety_high) == metrics.difference_of_rates(0, 0, 3)


def test_compare_refuses_what_cannot_be_compared():
    """Guards against comparing rates under different budgets, and seeds pooled as prompts."""
    records = table(("inferenceguard", "ss", [0.5, 0.5]), ("base", "su", [0.5, 0.5]))
    with pytest.raises(
        ParameterError, match=r"budget takes the values 0.2, 0.5 in policy smollm2-raw"
    ):
        compare(records.assign(budget=[0.2, 0.2, 0.5, 0.5]))
    with pytest.raises(RunError, match="arm 'inferenceguard', prompt_id 'p0', seed 0 occurs twice"):
        compare(pd.concat([records, records]))


@pytest.mark.parametrize("run", [[], ["inferenceguard"], ["base", "best-of-n"]])
def test_a_pair_that_was_not_run_is_said_to_be_none(run):
    """Bug: a profile without the method, or with it alone, was a misspelt name and ended the
    notebook of tables.
    """
    records = synthetic.records(3)
    found = compare(records[records["method"].isin(run)])
    assert list(found.columns) == paired.COMPARISON_COLUMNS and not len(found)


# --- abstentions on benign prompts, counted by hand -----------------------------------------------


BENIGN = table(("base", "ssussuss", [0.25] * 8), ("inferenceguard", "saaassss", [0.5] * 8)).assign(
    prompts="benign"
)


def test_abstentions_by_hand():
    """Guards against the reward of a refusal entering the difference, and base being compared with
    itself.
    """
    made = point_table(BENIGN, ["budget"])
    counts = made.set_index("method")[["n_prompts", "safe", "abstained", "unsafe"]]
    assert counts.loc["base"].tolist() == [8, 6, 0, 2]
    assert counts.loc["inferenceguard"].tolist() == [8, 5, 3, 0]
    tests = comparison(BENIGN)
    assert tests[["method", "baseline"]].to_numpy().tolist() == [["inferenceguard", "base"]]
    assert tests["n_answered"].item() == 5
    assert tests["reward_difference"].item() == pytest.approx(0.25)


def test_what_cannot_be_compared_is_refused():
    """Guards against refusals on tempting prompts beside benign ones."""
    with pytest.raises(ParameterError, match="prompts takes the values benign, rtp"):
        point_table(BENIGN.assign(prompts=["benign"] * 15 + ["rtp"]), ["budget"])
