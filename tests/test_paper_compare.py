"""The paper's tables beside ours: which run stands in which row, and what is written."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic

from igcore.files import append_line
from igstudy import paper
from igstudy.paper import compare
from igstudy.paper.compare import (
    MEASURES,
    NOT_RUN,
    Cell,
    beside,
    cells,
    estimate,
    nearest,
    priority,
)
from igstudy.report import statistics as metrics

ALPACA = {"policy": "alpaca-7b", "prompts": "pku-saferlhf"}
OURS = ALPACA | {"method": "inferenceguard", "n_samples": 128, "keep": 32, "block_size": 32}


def cell(safe, n, reward=7.08, spread=2.49, run="decode-main-alpaca-pku", **fields):
    """Lines of one run, `safe` of them safe, whose rewards lie one printed deviation below and
    above a mean.
    """
    lines = []
    for k in range(n):
        line = {"prompt_id": f"p{k:04d}", "prompt": f"What is {k}?", "max_new_tokens": 128}
        line |= {"reward": reward + spread * (-1) ** k, "lagrange_multiplier": 5.0}
        line["status"] = "verified_safe" if k < safe else "unverified_unsafe"
        lines.append(synthetic.record(**line | fields))
    return pd.DataFrame(lines).assign(run=run, critic_control="none", group_size=8)


def row_of(table, **about):
    """The one row with these values."""
    for name, value in about.items():
        table = table[table[name] == value]
    (found,) = table.to_dict("records")
    return found


def of_ours(lines, table="main_alpaca_beaver"):
    return row_of(beside(table, lines), policy="alpaca-7b", method="inferenceguard", n_samples=128)


# --- the numbers of a row -------------------------------------------------------------------------


def test_a_table_is_compared_by_what_it_prints():
    """Bug: seconds of generating, which one table prints, as empty columns of all others."""
    found = {table: list(compare.measures_of(table)) for table in ("main_llama", "ndk", "latency")}
    assert found == {
        "main_llama": ["safety", "reward", "seconds"],
        "ndk": ["safety", "reward", "cost", "seconds"],
        "latency": ["safety", "generation", "scoring", "seconds"],
    }


def test_every_row_has_the_print_and_a_run_that_has_all_of_its_settings():
    """Bug: a row left out, or numbers in one that was not run."""
    found = beside("main_alpaca_beaver", cell(669, 759, **OURS))
    row = row_of(found, policy="alpaca-7b", method="inferenceguard")
    assert (row["run"], row["standing"]) == ("decode-main-alpaca-pku", "alpaca-7b")
    assert (row["safety_n"], row["safety_paper"]) == (759, 0.8814)
    interval = row["safety_ours"], row["safety_low"], row["safety_high"]
    assert interval == pytest.approx((669 / 759, *metrics.wilson(669, 759)))
    assert row["reward_ours"] == pytest.approx(7.08, abs=0.004)
    rest = found[found["run"] == NOT_RUN]
    assert len(found) == 24 and len(rest) == 23
    assert rest[["safety_ours", "reward_ours"]].isna().all(axis=None)
    assert rest["safety_paper"].notna().all() and not rest["safety_n"].any()


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
    # of the ratio of sums, as in Cochran (6.13)
    error = (sizes * (means - values.mean()) / sizes.mean()).var(ddof=1)
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
    {"run": "decode-strict-rounds-4"},
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
    assert row_of(beside("main_alpaca_beaver", lines), **about)["run"] == NOT_RUN
    swept = beside("lambda_alpaca_beaver", lines)
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
    ndk = beside("ndk", pd.concat(both))
    assert set(ndk["run"]) == {NOT_RUN, "decode-sweep-ndk-x"} and (ndk["run"] != NOT_RUN).sum() == 1
    assert {
        priority("latency", run)
        for run in ("decode-sweep-lambda-x", "decode-budget-budget-0_5", "decode-tune-4")
    } == {None}
    assert (
        priority("latency", "decode-sweep-latency-x"),
        priority("latency", "decode-raw"),
    ) == (0, 1)


# --- policies that the paper does not have --------------------------------------------------------

RAW = {"policy": "smollm2-raw", "prompts": "rtp"}


def test_embedded_policies_stand_beside_the_print():
    """Guards a run of another policy, method or sweep beside a row."""
    wide = RAW | {"method": "inferenceguard", "block_size": 16}
    cells = [
        cell(8, 8, run="decode-raw", **RAW | {"method": "inferenceguard"}),
        cell(4, 8, run="decode-raw", **RAW | {"method": "base", "n_samples": 1}),
        cell(8, 8, run="decode-ndk-8-16-2", **wide),
    ]
    lines = pd.concat(cells)
    found = beside("main_alpaca_beaver", lines)
    assert len(found) == 24
    row = row_of(found, policy="alpaca-7b", method="base")
    assert (row["standing"], row["safety_ours"]) == ("smollm2-raw", 0.5)
    assert row["safety_paper"] == 0.2947
    row = row_of(found, policy="alpaca-7b", method="inferenceguard")
    assert row["ours_block_size"] == 8 and row["n_samples"] == 128  # not the sweep's
    assert math.isnan(row["ours_lagrange_multiplier"])  # in the record, but not used
    assert (found["run"] == NOT_RUN).sum() == 22
    aligned = beside("main_llama", lines)
    assert set(aligned["standing"]) == {"smollm2-chat"} and set(aligned["run"]) == {NOT_RUN}
    ndk = beside("ndk", lines).query("run != 'not run'")
    smallest = ndk[["n_samples", "block_size", "ours_block_size"]].drop_duplicates()
    assert smallest.to_numpy().tolist() == [[64, 16, 8], [64, 32, 16]]


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
    assert (found[0].run if found else None) == expected


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
        append_line(run / "responses.jsonl", line)
    if finished:
        (run / "manifest.json").write_text("{}")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in ("notebooks", "params"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_without_runs_gives_every_table(repository, capsys):
    """Bug: a crash on a fresh clone."""
    found = compare.load("mine")
    assert not capsys.readouterr().out
    for name in paper.MEASURED:
        table = beside(name, found)
        assert len(table) == len(paper.reported(name)) and set(table["run"]) == {NOT_RUN}


def test_a_run_that_has_not_finished_is_left_out_and_named(repository, capsys):
    """Bug: one unfinished sweep that keeps all tables from being made, or its half of the prompts
    in a table.
    """
    stored(repository, cell(6, 8, **OURS))
    half = cell(6, 8, run="decode-main-half", **OURS | {"method": "beam-augmented"})
    stored(repository, half, finished=False)
    found = compare.load("mine")
    assert capsys.readouterr().out.count("decode-main-half") == 1
    table = beside("main_alpaca_beaver", found)
    assert table.loc[table["run"] != NOT_RUN, "method"].tolist() == ["inferenceguard"]


def test_shards_are_one_run_and_best_of_n_is_none(repository):
    """Bug: "best-of-n" in a name read as a shard's number, or half of the prompts in a row."""
    lines = cell(8, 8, **OURS)
    for shard in (0, 1):
        stored(repository, lines[shard::2], shard=shard)
    best = OURS | {"method": "best-of-n-lagrangian", "keep": 1}
    stored(repository, cell(4, 8, run="decode-sweep-lambda-best-of-n", **best))
    found = compare.load("mine")
    assert [len(cell.lines) for cell in cells("lambda_vicuna", found)] == [8, 8]
    made = {name: beside(name, found) for name in ("main_alpaca_beaver", "ndk")}
    shards = {f"mine/decode-main-alpaca-pku.{shard}-of-2" for shard in (0, 1)}
    assert compare.sources(made["main_alpaca_beaver"], found).keys() == shards
    assert not compare.sources(made["ndk"].assign(run=NOT_RUN), found)


@pytest.mark.parametrize(
    ("parts", "row"),
    [
        ([OURS, ALPACA | {"method": "base", "n_samples": 1}], ["inferenceguard", "alpaca-7b"]),
        ([RAW | {"method": "inferenceguard"}], ["inferenceguard", "smollm2-raw"]),
    ],
)  # fmt: skip
def test_every_table_is_written_with_its_sources(tmp_path, parts, row):
    lines = pd.concat([cell(6, 8, run="decode-raw", **part) for part in parts])
    made = {name: beside(name, lines) for name in paper.MEASURED}
    compare.write(made, tmp_path, lines)
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        f"paper_{table}.{end}" for table in paper.MEASURED for end in ("csv", "md", "json")
    }
    text = (tmp_path / "tables/paper_main_alpaca_beaver.md").read_text()
    wanted = ["alpaca-7b", *row, "n/a", "0.881", "0.750 [0.409, 0.929]"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert wanted in [cells[:6] for cells in rows]
