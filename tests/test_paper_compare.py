"""The paper's tables beside ours: verdicts by hand, which run stands in which row, and tables that
compile.
"""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from igcore import paper
from igcore.judge import JudgeParams
from igcore.paper import report
from igcore.paper.compare import (
    AGREES,
    DIFFERS,
    MEASURES,
    NOT_RUN,
    RATE,
    UNRESOLVED,
    Cell,
    cells,
    compared,
    estimate,
    means_apart,
    priority,
    rates_apart,
    verdict,
)
from igcore.paper.hyperparameters import hyperparameters
from igcore.paper.standing import has_policies_of_the_paper, nearest, standing_in
from igcore.report import statistics as metrics
from igcore.report.verdicts import pairs_of, questions_of
from igcore.runs import folders

N = 759
RESULTS = [table for table in paper.TABLES if table not in paper.HYPERPARAMETERS]
NONE = pd.DataFrame()
ALPACA = {"policy": "alpaca-7b", "prompts": "pku-saferlhf"}
OURS = ALPACA | {"method": "inferenceguard", "n_samples": 128, "keep": 32, "block_size": 32}


@pytest.fixture(scope="module", autouse=True)
def quick():
    """statsmodels collects garbage in every Holm correction, which takes most of the time of a test
    here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", lambda *_: 0)
        yield


def cell(safe, n, reward=7.08, spread=2.49, run="decode-main-alpaca-pku", **fields):
    """Lines of one run, `safe` of them safe, whose rewards lie one printed deviation below and
    above a mean.
    """
    lines = [
        synthetic.record(
            **{
                "prompt_id": f"p{k:04d}",
                "prompt": f"What is {k}?",
                "reward": reward + spread * (-1) ** k,
                "max_new_tokens": 128,
            }
            | {
                "status": "verified_safe" if k < safe else "unverified_unsafe",
                "lagrange_multiplier": 5.0,
            }
            | fields
        )
        for k in range(n)
    ]
    more = {
        "run": run,
        "critic_control": "none",
        "group_size": 8,
        "value_steps": 30,
        "value_step_size": 0.5,
    }
    return pd.DataFrame(lines).assign(**more)


def row_of(table, **about):
    """The one row with these values."""
    for name, value in about.items():
        table = table[table[name] == value]
    (found,) = table.to_dict("records")
    return found


def of_ours(lines, table="main_alpaca_beaver"):
    return row_of(
        compared(table, lines), policy="alpaca-7b", method="inferenceguard", n_samples=128
    )


# --- verdicts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def main():
    """Three rows were run: as printed, otherwise, and on so few prompts that nothing follows."""
    base, beam = {"method": "base", "n_samples": 1}, OURS | {"method": "beam-augmented"}
    parts = [
        cell(669, N, **OURS),
        cell(300, N, reward=7.0, spread=1.5, **ALPACA | base),
        cell(5, 8, 8.29, 2.02, **beam),
    ]
    return compared("main_alpaca_beaver", pd.concat(parts))


def test_a_row_that_was_repeated_agrees(main):
    """88.14 % of 759 are 669 and the mean is the printed one. Bug: a verdict that nothing can
    reach.
    """
    row = row_of(main, policy="alpaca-7b", method="inferenceguard")
    assert (row["run"], row["safety_n"], row["safety_paper"]) == (
        "decode-main-alpaca-pku",
        N,
        0.8814,
    )
    assert (row["safety_ours"], row["safety_low"], row["safety_high"]) == pytest.approx(
        (669 / N, *metrics.wilson(669, N))
    )
    assert row["reward_ours"] == pytest.approx(7.08, abs=0.004)
    assert row["safety_verdict"] == row["reward_verdict"] == AGREES
    assert -RATE < row["safety_gap_low"] < 0 < row["safety_gap_high"] < RATE


def test_a_row_that_came_out_otherwise_differs(main):
    """300 of 759 against 224, and a reward .85 higher at a deviation of 1.5."""
    row = row_of(main, policy="alpaca-7b", method="base")
    assert row["safety_verdict"] == row["reward_verdict"] == DIFFERS
    assert row["safety_gap_low"] > 0.05 and row["safety_p"] < 0.001


def test_eight_prompts_settle_nothing(main):
    """5 of 8 against 58.89 %: no difference is resolved. Bug: "agrees" because a wide interval
    holds 0.
    """
    row = row_of(main, policy="alpaca-7b", method="beam-augmented")
    assert row["safety_gap_low"] < -0.2 < 0.2 < row["safety_gap_high"]
    assert row["safety_verdict"] == row["reward_verdict"] == UNRESOLVED


def test_all_other_rows_are_not_run(main):
    """Bug: a row left out, or an empty one that agrees."""
    rest = main[main["run"] == NOT_RUN]
    assert len(main) == 24 and len(rest) == 21
    assert set(
        rest[["safety_verdict", "reward_verdict", "seconds_verdict"]].to_numpy().ravel()
    ) == {NOT_RUN}
    assert rest[["safety_ours", "reward_ours", "safety_p"]].isna().all(axis=None)
    assert rest["safety_paper"].notna().all() and not rest["safety_n"].any()


@pytest.mark.parametrize(
    "p, low, high, expected",
    [
        (0.2, -0.01, 0.04, AGREES),
        (0.2, -0.06, 0.01, UNRESOLVED),
        (0.2, -0.01, 0.06, UNRESOLVED),
        (0.06, 0.01, 0.04, AGREES),  # not claimed after Holm, and too small to matter
        (0.05, 0.01, 0.02, DIFFERS),  # resolved, though small
        (math.nan, math.nan, math.nan, UNRESOLVED),
    ],
)
def test_the_rules_of_verdicts(p, low, high, expected):
    numbers = {"p": p, "gap_low": low, "gap_high": high, "matters": 0.05}
    part = pd.DataFrame([numbers | {"run": run} for run in ("a run", NOT_RUN)])
    assert verdict(part).tolist() == [expected, NOT_RUN]


def test_p_values_are_adjusted_over_all_numbers_of_a_table():
    """Three of seven p values by hand. Bug: Holm within a column, or none, which calls chance a
    difference.
    """
    safer = cell(
        648, N, **OURS | {"generate_s": 13.0, "score_s": 3.25}
    )  # 85.4 % against 88.1 %: p .13
    base = cell(
        190, N, 6.15, 1.51, **ALPACA | {"method": "base", "generate_s": 0.5, "score_s": 0.2}
    )  # 25 against 29.5 %
    for lines in (safer, base):
        lines["generate_s"] += np.arange(N) / 1000  # seconds that vary
    table = compared("main_alpaca_beaver", pd.concat([safer, base]))
    raw = [rates_apart(k / N, N, theirs, N)["p"] for k, theirs in ((648, 0.8814), (190, 0.2947))]
    for lines, theirs, spread in ((safer, 7.08, 2.49), (base, 6.15, 1.51)):
        raw.append(means_apart(lines["reward"], theirs, spread, N)["p"])
    for lines, theirs in ((safer, 16.25), (base, 0.7)):
        spent = [
            lines["generate_s"][k : k + 8].mean() + lines["score_s"][0] for k in range(0, N, 8)
        ]
        raw.append(means_apart(pd.Series(spent), theirs, math.nan, N)["p"])
    adjusted = {rank: p for rank, p in zip(np.argsort(raw), _holm(sorted(raw)), strict=True)}
    rows = [
        row_of(table, policy="alpaca-7b", method=method) for method in ("inferenceguard", "base")
    ]
    found = [row[f"{name}_p"] for name in ("safety", "reward", "seconds") for row in rows]
    assert found == pytest.approx([adjusted[k] for k in range(6)])
    assert raw[1] < 0.06 < found[1] and rows[1]["safety_verdict"] == UNRESOLVED


def _holm(p):
    """Holm's step-down by its definition, of sorted p values."""
    return [min(1, max((len(p) - j) * p[j] for j in range(i + 1))) for i in range(len(p))]


def test_rates_are_compared_by_newcombe_and_fisher():
    """Against the formulas: two Wilson intervals at 90 %, and the sum of all tables that are no
    likelier.
    """
    k, n, other, size = 46, 48, 757, 759
    found = rates_apart(k / n, n, 0.997, size)
    (low, high), (their_low, their_high) = (
        proportion_confint(k, n, 0.1, method="wilson"),
        proportion_confint(other, size, 0.1, method="wilson"),
    )
    gap = k / n - other / size
    assert found["gap_low"] == pytest.approx(
        gap - math.hypot(k / n - low, their_high - other / size)
    )
    assert found["gap_high"] == pytest.approx(
        gap + math.hypot(high - k / n, other / size - their_low)
    )
    safe = stats.hypergeom(n + size, k + other, n)
    chances = safe.pmf(range(n + 1))
    assert found["p"] == pytest.approx(chances[chances <= safe.pmf(k) * (1 + 1e-7)].sum())
    assert 0.01 < found["p"] < 0.05  # a z test would say .0002


def test_rates_of_100_percent_agree_and_are_no_error():
    """Bug: 0/0 in the pooled variance of two methods that never failed."""
    assert rates_apart(1.0, N, 1.0, N) == {
        "gap_low": pytest.approx(-0.0036, abs=1e-4),
        "gap_high": pytest.approx(0.0036, abs=1e-4),
        "p": 1,
    }


def test_means_are_compared_by_welch_less_what_rounding_may_do():
    values = pd.Series([1.0, 2.0, 4.0, 7.0, 9.0])
    theirs, spread, size = 3.0, 2.0, 759
    found = means_apart(values, theirs, spread, size)
    test = stats.ttest_ind_from_stats(
        values.mean(), values.std(), 5, theirs + 0.005, spread, size, equal_var=False
    )
    assert found["p"] == pytest.approx(test.pvalue)
    parts = values.var() / 5, spread**2 / size
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 758)
    half = stats.t.ppf(0.95, freedom) * math.sqrt(sum(parts)) + 0.005
    assert (found["gap_low"], found["gap_high"]) == pytest.approx((1.6 - half, 1.6 + half))
    assert means_apart(values, 4.596, spread, size)["p"] == 1  # prints as 4.60


@pytest.mark.parametrize("values", [[2.0], [3.0, 3.0, 3.0]])
def test_a_mean_without_spread_settles_nothing(values):
    assert math.isnan(means_apart(pd.Series(values), 3.0, math.nan, N)["p"])


def test_prompts_decoded_together_are_one_draw_of_seconds():
    """Bug: 759 equal shares of 95 batches taken for 759 timings, which makes every difference in
    seconds significant.
    """
    lines = cell(20, 20, **OURS).assign(generate_s=[1.0] * 8 + [2.0] * 8 + [6.0] * 4, score_s=0.5)
    row = of_ours(lines.sample(frac=1, random_state=0))
    assert (row["seconds_n"], row["safety_n"]) == (3, 20)


def test_a_short_last_group_weighs_as_many_prompts_as_it_has():
    """Bug: the unweighted mean of 8 and 4 prompts, 1.3 s where the other tables print 1.1; equal
    groups are left as they are.
    """
    spent = [1.0] * 8 + [2.0] * 8 + [6.0] * 4
    lines = cell(20, 20, **OURS).assign(generate_s=spent, score_s=0.5)
    row = of_ours(lines)
    assert row["seconds_ours"] == pytest.approx(np.mean(spent) + 0.5)
    assert row["seconds_low"] < row["seconds_ours"] < row["seconds_high"]
    values = MEASURES["seconds"].values(Cell({}, "", lines))
    sizes, means = np.array([8, 8, 4]), np.array([1.5, 2.5, 6.5])
    error = (sizes * (means - values.mean()) / sizes.mean()).var(
        ddof=1
    )  # of the ratio of sums, as in Cochran (6.13)
    assert values.var(ddof=1) == pytest.approx(error)
    assert MEASURES["seconds"].values(Cell({}, "", lines[:16])).tolist() == [1.5, 2.5]
    assert MEASURES["seconds"].values(Cell({}, "", lines.assign(score_s=np.nan))).empty


def test_half_a_win_is_half_a_count():
    assert estimate(pd.Series([1.0, 0.5, 0.5, 0.0]), kind="rate") == {
        "ours": 0.5,
        "n": 4,
        "low": pytest.approx(metrics.wilson(2, 4)[0]),
        "high": pytest.approx(metrics.wilson(2, 4)[1]),
    }


def test_the_papers_side_has_the_prompts_that_its_percentages_imply():
    assert paper.sample_sizes()["n"].to_dict() == {
        "pku-saferlhf": 759,
        "hex-phi": 300,
        "hh-rlhf": 12500,
        "win_rates": 500,
    }


# --- which run stands in which row ----------------------------------------------------------------


OTHERWISE = [
    {"policy": "beaver-7b-v3"},
    {"prompts": "hh-rlhf"},
    {"method": "inferenceguard-mix"},
    {"n_samples": 64},
    {"keep": 16},
    {"block_size": 16},
    {"critic_control": "shuffled"},
    {"run": "decode-sweep-ndk-alpaca-pku-128"},
    {"run": "decode-budget-0_1"},
]


def test_other_settings_never_stand_beside_a_row():
    """Bug: numbers of another experiment beside the print, where nobody would see that they are."""
    lines = cell(6, 8, **OURS)
    others = [
        lines.assign(**{"run": f"decode-other-{k}"} | change) for k, change in enumerate(OTHERWISE)
    ]
    assert of_ours(pd.concat(others))["run"] == NOT_RUN
    assert of_ours(pd.concat([*others, lines]))["run"] == "decode-main-alpaca-pku"


def test_a_multiplier_counts_where_it_is_used():
    """Bug: InferenceGuard not found because its records name a multiplier, or the Lagrangian
    methods found under any.
    """
    lines = cell(6, 8, **OURS | {"method": "beam-lagrangian", "lagrange_multiplier": 1.0})
    about = {"policy": "alpaca-7b", "method": "beam-lagrangian"}
    assert row_of(compared("main_alpaca_beaver", lines), **about)["run"] == NOT_RUN
    swept = compared("lambda_alpaca_beaver", lines)
    ran = swept[swept["run"] != NOT_RUN]
    assert ran[["method", "n_samples", "lagrange_multiplier"]].to_numpy().tolist() == [
        ["beam-lagrangian", 128, 1.0]
    ]


def test_a_table_reads_its_own_sweep_first_and_main_runs_next():
    both = [
        cell(6, 8, run=f"decode-{name}", **OURS)
        for name in ("main-alpaca-pku", "sweep-lambda-x", "sweep-ndk-x")
    ]
    ran = {
        table: of_ours(pd.concat(both[:2]), table)["run"]
        for table in ("main_alpaca_beaver", "lambda_alpaca_beaver")
    }
    assert ran == {
        "main_alpaca_beaver": "decode-main-alpaca-pku",
        "lambda_alpaca_beaver": "decode-sweep-lambda-x",
    }
    ndk = compared("ndk", pd.concat(both))
    assert set(ndk["run"]) == {NOT_RUN, "decode-sweep-ndk-x"} and (ndk["run"] != NOT_RUN).sum() == 1
    assert {
        priority("latency", run)
        for run in ("decode-sweep-lambda-x", "decode-seeds-seed-1", "decode-tune-4")
    } == {None}
    assert (
        priority("latency", "decode-compute-n_samples-4"),
        priority("latency", "decode-raw"),
    ) == (
        0,
        1,
    )


# --- policies that the paper does not have --------------------------------------------------------

RAW = {"policy": "smollm2-raw", "prompts": "rtp"}


def test_embedded_policies_stand_beside_the_print_without_a_verdict():
    """Guards a run of another policy, method or sweep beside a row, and a verdict on it."""
    lines = pd.concat(
        [
            cell(8, 8, run="decode-raw", **RAW | {"method": "inferenceguard"}),
            cell(4, 8, run="decode-raw", **RAW | {"method": "base", "n_samples": 1}),
            cell(
                8,
                8,
                run="decode-ndk-8-16-2",
                **RAW | {"method": "inferenceguard", "block_size": 16},
            ),
        ]
    )
    assert not has_policies_of_the_paper(lines)
    assert has_policies_of_the_paper(cell(1, 2, **OURS)) and has_policies_of_the_paper(NONE)
    found = standing_in("main_alpaca_beaver", lines, ["smollm2-raw"])
    assert len(found) == 24 and not any("verdict" in name for name in found)
    row = row_of(found, policy="alpaca-7b", method="base")
    assert (row["standing"], row["safety_ours"]) == ("smollm2-raw", 0.5)
    assert row["safety_paper"] == 0.2947
    row = row_of(found, policy="alpaca-7b", method="inferenceguard")
    assert row["ours_block_size"] == 8 and row["n_samples"] == 128  # not the sweep's
    assert math.isnan(row["ours_lagrange_multiplier"])  # in the record, but not used
    assert (found["run"] == NOT_RUN).sum() == 22
    aligned = standing_in("main_llama", lines, ["smollm2-raw"])
    assert set(aligned["standing"]) == {"smollm2-chat"} and set(aligned["run"]) == {NOT_RUN}
    ndk = standing_in("ndk", lines, ["smollm2-raw"]).query("run != 'not run'")
    smallest = ndk[["n_samples", "block_size", "ours_block_size"]].drop_duplicates()
    assert smallest.to_numpy().tolist() == [[64, 16, 8], [64, 32, 16]]
    assert set(standing_in("ndk", lines, ["mine"])["standing"]) == {"mine"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"n_samples": 64, "keep": 16, "lagrange_multiplier": 5.0}, "small"),
        ({"n_samples": 128, "keep": 32, "lagrange_multiplier": 5.0}, "large"),
        ({"n_samples": 256, "keep": 64, "lagrange_multiplier": 5.0}, None),
        ({"n_samples": 64, "keep": 16, "lagrange_multiplier": 1.0}, None),
        ({"n_samples": None, "keep": None, "lagrange_multiplier": None}, "large"),
    ],
)
def test_the_smallest_stands_for_the_smallest(row, expected):
    """Guards sizes matched across kept beams of another N, and a weight that is not the row's."""
    printed = pd.DataFrame({"n_samples": [64, 128, 256], "keep": [16, 32, 64]})
    same = {"block_size": 8, "lagrange_multiplier": 5.0}
    large, small = (
        Cell(same | {"n_samples": n, "keep": keep}, run)
        for n, keep, run in ((8, 2, "large"), (4, 1, "small"))
    )
    found = nearest(row | {"block_size": None}, printed, [large, small])
    assert (found and found.run) == expected


def test_the_sweep_of_best_of_n_has_a_row_for_every_point_that_its_samples_hold():
    """Bug: one row, of the largest N, where the experiment's other tables read twenty off it."""
    fields = RAW | {"method": "best-of-n-lagrangian", "n_samples": 32}
    lines = cell(2, 2, run="decode-lambda-best-of-n", **fields)
    lines["finals"] = [[[float(k % 7), 0.01 * k] for k in range(32)]] * 2
    found = report.replayed(lines)
    assert len(cells("lambda_vicuna", found)) == 20
    table = standing_in("lambda_vicuna", found, ["smollm2-raw"])
    points = table.query("method == 'best-of-n-lagrangian' and prompts == 'hex-phi'")
    assert points[["n_samples", "ours_n_samples"]].drop_duplicates().to_numpy().tolist() == [
        [64, 4],
        [128, 8],
    ]
    assert (points["lagrange_multiplier"] == points["ours_lagrange_multiplier"]).all()
    assert (
        points["reward_ours"].notna().all() and points["seconds_ours"].isna().all()
    )  # what only decoding would tell
    assert report.replayed(cell(1, 2, **OURS))["run"].tolist() == ["decode-main-alpaca-pku"] * 2


# --- settings -------------------------------------------------------------------------------------


def test_hyperparameters_beside_those_that_were_run():
    lines = pd.concat(
        [
            cell(1, 2, **OURS | {"rounds": 2}),
            cell(
                1,
                2,
                run="decode-sweep-ndk-1",
                **OURS | {"keep": 16, "n_samples": 64, "block_size": 64},
            ),
            cell(1, 2, **OURS | {"method": "best-of-n", "keep": 1, "block_size": 128}),
            cell(
                1,
                2,
                **OURS | {"method": "re-control", "n_samples": 1, "keep": 1, "block_size": 128},
            ),
            cell(1, 2, run="decode-tune-1", **OURS | {"rounds": 9}),
        ]
    )
    found = hyperparameters("hyperparameters", lines).set_index(["printed_as", "setting"])
    told = {key: tuple(row) for key, row in found[["paper", "ours", "verdict"]].iterrows()}
    assert told["InferenceGuard", "n_samples"] == ("64 128 512", "64 128", DIFFERS)
    assert told["InferenceGuard", "keep"] == ("N/4", "N/4", AGREES)
    assert told["InferenceGuard", "block_size"] == ("32", "32 64", AGREES)
    assert told["InferenceGuard", "rounds"] == ("2", "2", AGREES)
    assert told["BoN", "block_size"] == ("32", "128", DIFFERS)
    assert told["RE-Control", "block_size"] == ("1", "1", AGREES)
    assert told["RE-Control", "value_step_size"] == ("0.5", "0.5", AGREES)
    assert told["ARGS", "n_samples"] == ("128", NOT_RUN, NOT_RUN)
    assert len(found) == 16  # all that is printed


def test_hyperparameters_of_critics_beside_those_that_were_trained():
    given = {
        "width": 4096,
        "lr": 1e-5,
        "epochs": 50,
        "gamma_task": 0.999,
        "batch_size": 8,
        "budget": 0.0,
    }
    found = hyperparameters("critic_hyperparameters", pd.DataFrame([given, given | {"width": 64}]))
    assert found.set_index("setting")["ours"].to_dict() == {
        "width": "64 4096",
        "lr": "1e-05",
        "epochs": "50",
        "gamma_task": "0.999",
        "batch_size": "8",
        "budget": "0",
    }
    assert found["verdict"].tolist() == [AGREES] * 5 + [DIFFERS]
    assert set(hyperparameters("critic_hyperparameters", NONE)["verdict"]) == {NOT_RUN}


# --- folders and files ----------------------------------------------------------------------------


def stored(folder, lines, finished=True, shard=None):
    """Write a run, or one shard of two, below a folder that looks like the repository."""
    name = lines["run"].iloc[0]
    run = folder / "runs/mine" / (name if shard is None else f"{name}.{shard}-of-2")
    run.mkdir(parents=True)
    (run / "params.json").write_text(
        json.dumps({"run": name} | ({} if shard is None else {"shard": shard, "n_shards": 2}))
    )
    for line in lines.drop(columns=["run", "critic_control"]).to_dict("records"):
        folders.append(run / "responses.jsonl", line)
    if finished:
        (run / "manifest.json").write_text("{}")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in ("notebooks", "params"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_without_runs_gives_ten_tables(repository):
    found = report.load("mine")
    assert not found.left_out and list(report.paper_tables(found)) == list(paper.TABLES)
    told = report.counts(report.paper_tables(found))
    assert (
        told["rows"].iloc[:8] == [len(paper.reported(table)) for table in RESULTS]
    ).all() and not told[AGREES].any()


def test_a_run_that_has_not_finished_is_left_out_and_named(repository):
    """Bug: one unfinished sweep that keeps all tables from being made, or its half of the prompts
    in a table.
    """
    stored(repository, cell(6, 8, **OURS))
    stored(
        repository,
        cell(6, 8, run="decode-main-half", **OURS | {"method": "beam-augmented"}),
        finished=False,
    )
    found = report.load("mine")
    assert len(found.left_out) == 1 and "decode-main-half" in found.left_out[0]
    table = report.paper_tables(found)["main_alpaca_beaver"]
    assert table.loc[table["run"] != NOT_RUN, "method"].tolist() == ["inferenceguard"]


def test_shards_are_one_run_and_best_of_n_is_none(repository):
    """Bug: "best-of-n" in a name read as a shard's number, or half of the prompts in a row."""
    lines = cell(8, 8, **OURS)
    for shard in (0, 1):
        stored(repository, lines[shard::2], shard=shard)
    stored(
        repository,
        cell(
            4,
            8,
            run="decode-sweep-lambda-best-of-n",
            **OURS | {"method": "best-of-n-lagrangian", "keep": 1},
        ),
    )
    found = report.load("mine")
    assert not found.left_out and [
        len(cell.lines) for cell in cells("lambda_vicuna", found.decoded)
    ] == [8, 8]
    made = report.paper_tables(found)
    shards = {f"mine/decode-main-alpaca-pku.{shard}-of-2" for shard in (0, 1)}
    assert report.sources("main_alpaca_beaver", made["main_alpaca_beaver"], found).keys() == shards
    assert report.sources("hyperparameters", made["hyperparameters"], found).keys() - shards == {
        "mine/decode-sweep-lambda-best-of-n"
    }
    assert not report.sources("ndk", made["ndk"].assign(run=NOT_RUN), found)


def test_judged_answers_become_win_rates(repository):
    """Of four answers the judge prefers two, finds one equal and cannot be read on one; N must be
    the printed one.
    """
    base = cell(4, 4, **ALPACA | {"method": "base", "response": "One."})
    other = cell(
        4,
        4,
        run="decode-main-beam",
        **OURS | {"method": "beam-augmented", "n_samples": 256, "keep": 64},
    )
    for lines in (base, other):
        stored(repository, lines)
    folder = repository / "runs/mine/judge/scorers"
    folder.mkdir(parents=True)
    params = {"profile": "mine", "run": "scorers", "figures": "figures", "pattern": "decode-main-*"}
    (folder / "manifest.json").write_text(json.dumps({"params": params}))
    lines = pd.concat([base, other])
    better = {"p0000": 1, "p0001": 1, "p0002": 0}
    for digest, asked in questions_of(pairs_of(lines, JudgeParams(**params))).items():
        first = (
            better.get(asked.prompt_id)
            if asked.first != "One."
            else -better.get(asked.prompt_id, 0)
        )
        scores = [first, 0] if asked.prompt_id in better else None
        folders.append(folder / "verdicts.jsonl", {"question": digest, "scores": scores})
    found = report.load("mine")
    row = row_of(compared("win_rates", found.judged), method="beam-augmented")
    assert (row["run"], row["helpfulness_n"], row["helpfulness_ours"]) == (
        "judge scorers",
        3,
        pytest.approx(2.5 / 3),
    )
    made_of = {"mine/decode-main-alpaca-pku", "mine/decode-main-beam", "mine/judge/scorers"}
    assert report.sources("win_rates", compared("win_rates", found.judged), found).keys() == made_of
    assert row["harmlessness_verdict"] == UNRESOLVED
    fewer = found.judged.assign(n_samples=128)
    assert row_of(compared("win_rates", fewer), method="beam-augmented")["run"] == NOT_RUN
    stored(
        repository, cell(4, 4, run="decode-main-more", **OURS | {"response": "Three."})
    )  # answers that nobody has judged
    found = report.load("mine")
    assert (
        not len(found.judged) and "run notebook 60 with its parameters again" in found.left_out[0]
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """All tables of both kinds of profile: with the print, and of embedded policies alone."""
    folder = tmp_path_factory.mktemp("tables")
    with_print = pd.concat(
        [cell(6, 8, **OURS), cell(6, 8, **ALPACA | {"method": "base", "n_samples": 1})]
    )
    alone = cell(6, 8, run="decode-raw", **RAW | {"method": "inferenceguard"})
    found = {
        name: report.Results(lines, NONE, NONE, [])
        for name, lines in (("print", with_print), ("alone", alone))
    }
    return {
        name: report.write(report.paper_tables(of), folder / name, of) for name, of in found.items()
    }


def test_every_table_is_written_three_times_with_its_sources(written):
    names = [
        f"paper_{table}.{end}" for table in paper.TABLES for end in ("csv", "md", "tex", "json")
    ]
    assert (
        [path.name for path in written["print"]]
        == [path.name for path in written["alone"]]
        == names
    )
    assert all(path.parent.name == "tables" and path.stat().st_size for path in written["print"])
    text = (written["print"][0].parent / "paper_main_alpaca_beaver.md").read_text()
    wanted = [
        "alpaca-7b on pku-saferlhf",
        "inferenceguard (N 128)",
        "n 8",
        "88.14 / 75.0 [40.9, 92.9], unresolved",
        "7.08 / 7.080 [5.213, 8.947], unresolved",
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert wanted in [cells[: len(wanted)] for cells in rows]
    text = (written["alone"][0].parent / "paper_main_alpaca_beaver.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    wanted[1:3] = ["inferenceguard (N 128 / 8)", "smollm2-raw, n 8"]
    assert [*wanted[:3], "88.14 / 75.0 [40.9, 92.9]"] in [cells[:4] for cells in rows]
    assert "unresolved" not in text and "verdict" not in text


def test_latex_is_sound_without_a_compiler(written):
    """Guards against what stops LaTeX: bare special characters, rows of unequal length, a row that
    reads as an option.
    """
    for path in (path for paths in written.values() for path in paths if path.suffix == ".tex"):
        text = path.read_text()
        assert re.findall(r"\\(begin|end)\{(\w+)\}", text) == [
            ("begin", "tabular"),
            ("end", "tabular"),
        ]
        assert all(text.count(rule) == 1 for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
        columns = len(re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)[1])
        rows = [line for line in text.splitlines() if line.endswith(r" \\")]
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {columns - 1} and len(
            rows
        ) == len(text.splitlines()) - 5
        assert not any(
            re.search(r"(?<!\\)[%#_$^~]", row.replace("$<$", "").replace("$>$", "")) for row in rows
        )
        assert not any(row.startswith(("[", "*")) for row in rows) and text.isascii()


@pytest.mark.parametrize("table", RESULTS)
def test_without_any_run_every_row_is_not_run(table):
    """Bug: a crash on a fresh clone."""
    found = compared(table, NONE)
    assert len(found) == len(paper.reported(table)) and set(found["run"]) == {NOT_RUN}
    alone = standing_in(table, NONE, [])
    assert set(alone["run"]) == {NOT_RUN} and len(alone) == len(found)
    assert set(alone["standing"]) <= {"smollm2-raw", "smollm2-chat"}
