"""The main table against counts by hand, its files, and the block of the README."""

import csv
import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from imaginaryruns import executed, workplace, written

from igcore.errors import ParameterError, RunError
from igstudy.paper import MEASURED
from igstudy.report import statistics as metrics
from igstudy.report import tables


@pytest.fixture(scope="module")
def records():
    return synthetic.records(30)


@pytest.fixture(scope="module")
def main(records):
    return tables.main_table(records)


@pytest.fixture(scope="module")
def by_hand():
    """Four prompts; inferenceguard is safe, abstains with a text, abstains without one, is safe
    again.
    """
    silent = dict(reward=None, cost=None, peak_cost=None, word_peak_cost=None)
    ours, base = {"method": "inferenceguard"}, {"method": "base", "policy_tokens": 30}
    lines = [
        synthetic.record(
            **ours,
            prompt_id="a",
            reward=0.4,
            cost=0.2,
            peak_cost=0.2,
            word_peak_cost=0.2,
            fail_open_cost=0.2,
        ),
        synthetic.record(
            **ours,
            prompt_id="b",
            status="abstained",
            reward=0.1,
            cost=0,
            peak_cost=0,
            fail_open_cost=1,
        ),
        synthetic.record(**ours, prompt_id="c", status="abstained", fail_open_cost=0.9, **silent),
        synthetic.record(
            **ours,
            prompt_id="d",
            reward=0.7,
            cost=0.1,
            peak_cost=0.15,
            word_peak_cost=0.3,
            generate_s=1.5,
            score_s=0.75,
        ),
        synthetic.record(**base, prompt_id="a", reward=0.5),
        synthetic.record(**base, prompt_id="b", reward=0.6),
        synthetic.record(**base, prompt_id="c", reward=0.7),
        synthetic.record(
            **base,
            prompt_id="d",
            reward=0.9,
            status="unverified_unsafe",
            cost=0.1,
            peak_cost=0.5,
            word_peak_cost=0.5,
        ),
    ]
    return tables.main_table(pd.DataFrame(lines)).set_index("method")


def test_rates_by_hand(by_hand):
    """Guards against abstentions counted as safe, or dropped from the denominator."""
    row = by_hand.loc["inferenceguard"]
    counts = row.n_prompts, row.safe, row.abstained, row.unsafe
    assert counts == (4, 2, 2, 0) and row.safety_rate == 0.5
    assert row.safety_lower95 == metrics.safety_lower(2, 4)
    assert (row.safety_wilson_low, row.safety_wilson_high) == metrics.wilson(2, 4)
    assert row.peak_safety_rate == 0.5  # the abstentions are not answers
    # of the two answers one breaks the budget at a word though at no block end
    assert (row.word_safety_rate, row.broken_between_blocks) == (0.25, 0.5)
    assert row.safety_rate_fail_open == 0.5
    base = by_hand.loc["base"]
    assert (base.safe, base.abstained, base.unsafe, base.peak_safety_rate) == (3, 0, 1, 0.75)
    assert (base.word_safety_rate, base.broken_between_blocks) == (0.75, 0)


def test_means_by_hand(by_hand):
    """Guards against rewards of silence counted as 0, and against means over different prompts
    being compared.
    """
    row = by_hand.loc["inferenceguard"]
    assert row.reward_mean == pytest.approx((0.4 + 0.1 + 0.7) / 3)
    assert row.reward_std == pytest.approx(0.3)  # ddof 1
    assert (row.reward_low, row.reward_high) == metrics.bootstrap_mean([0.4, 0.1, 0.7])
    assert row.cost_mean == pytest.approx(0.1) and row.peak_cost_mean == pytest.approx(0.35 / 3)
    assert row.seconds_per_prompt == pytest.approx((3 * 0.75 + 2.25) / 4)
    assert row.reward_answered == pytest.approx((0.4 + 0.7) / 2)
    assert by_hand.loc["base"].reward_answered == pytest.approx((0.5 + 0.9) / 2)
    assert by_hand["n_answered_by_all"].tolist() == [2, 2]
    assert by_hand.loc["base"].policy_tokens_per_prompt == 30


def test_work_by_hand():
    """Guards against a column that holds another field's mean, and parts of the seconds that do not
    add up to the whole.
    """
    lines = [
        synthetic.record(
            prompt_id=prompt_id,
            samples_drawn=8 * k,
            policy_tokens=100 * k,
            forward_tokens=130 * k,
            scorer_calls=9 * k,
            scorer_tokens=50 * k,
            generate_s=0.5 * k,
            cost_s=0.25 * k,
            reward_s=0.125 * k,
            critic_s=0.0625 * k,
            score_s=0.4375 * k,
        )
        for prompt_id, k in (("a", 1), ("b", 3))
    ]
    row = tables.main_table(pd.DataFrame(lines)).iloc[0]
    assert (
        row.samples_per_prompt,
        row.policy_tokens_per_prompt,
        row.forward_tokens_per_prompt,
    ) == (16, 200, 260)
    assert (row.scorer_calls_per_prompt, row.scorer_tokens_per_prompt) == (18, 100)
    parts = [row[f"{part}_seconds_per_prompt"] for part in ("generate", "cost", "reward", "critic")]
    assert parts == [1, 0.5, 0.25, 0.125] and row.seconds_per_prompt == sum(parts)


def test_a_method_with_fewer_prompts_has_no_say_in_the_rewards_of_others():
    """Guards against "all answered" shrinking to the prompts of slow methods, whose own mean would
    look like the others.
    """
    methods = {"base": "abcd", "best-of-n": "abcd", "args": "bc", "re-control": "bd"}
    lines = [
        synthetic.record(
            method=method, prompt_id=name, reward=10.0 * n + "abcd".index(name), policy=policy
        )
        for n, (method, names) in enumerate(methods.items())
        for name in names
        for policy in ("raw", "chat")
    ]
    lines[2] |= {"status": "abstained"}  # base in raw, prompt b
    for given in (lines, lines[::-1]):
        main = tables.main_table(pd.DataFrame(given)).set_index(["policy", "method"])
        assert main["n_prompts"].to_dict() == {
            (p, m): len(names) for p in ("raw", "chat") for m, names in methods.items()
        }
        found = main[["reward_answered", "n_answered_by_all"]]
        assert found.loc[("raw", "base")].tolist() == [(0 + 2 + 3) / 3, 3]
        assert found.loc[("raw", "best-of-n")].tolist() == [10 + (0 + 2 + 3) / 3, 3]
        assert found.loc[("chat", "best-of-n")].tolist() == [11.5, 4]
        for method in ("args", "re-control"):
            mean, n = found.loc[("raw", method)]
            assert math.isnan(mean) and n == 0
    row = (
        tables.pretty(main.reset_index()[tables.MAIN_COLUMNS])
        .set_index(["Policy", "Method"])
        .loc[("raw", "args")]
    )
    assert (row["n"], row["Safe / abstained / unsafe"], row["Reward, all answered"]) == (
        "2",
        "2 / 0 / 0",
        tables.MISSING,
    )


def test_methods_with_as_many_but_other_prompts_share_none():
    """Guards against means over different prompts being set side by side: a method of other prompts
    leaves nothing in common.
    """
    lines = [
        synthetic.record(method=method, prompt_id=name)
        for method, names in {"base": "ab", "args": "cd"}.items()
        for name in names
    ]
    main = tables.main_table(pd.DataFrame(lines))
    assert main["reward_answered"].isna().all() and main["n_answered_by_all"].tolist() == [0, 0]


def test_missing_costs_keep_no_budget():
    """Guards against failing open: a broken scorer leaves no cost, and no cost is no safety."""
    costs = dict.fromkeys(["cost", "peak_cost", "word_peak_cost", "fail_open_cost"])
    broken = synthetic.record(status="unverified_unsafe", reward=None, **costs)
    row = tables.main_table(pd.DataFrame([broken])).iloc[0]
    assert (row.peak_safety_rate, row.safety_rate_fail_open, row.unsafe) == (0, 0, 1)
    assert row.word_safety_rate == 0
    assert math.isnan(row.reward_mean) and math.isnan(row.reward_answered)
    people, _ = tables.for_people(tables.main_table(pd.DataFrame([broken])))
    assert tables.MISSING in tables.markdown(people)


def test_order_of_lines_changes_nothing(records, main):
    """Guards against tables that differ after a resume: sums and bootstraps follow prompt_id, not
    the file.
    """
    shuffled = records.sample(frac=1, random_state=1)
    again = tables.main_table(shuffled).set_index(["policy", "method"])
    pd.testing.assert_frame_equal(
        again.loc[list(zip(main["policy"], main["method"], strict=True))].reset_index(), main
    )


def test_a_policy_that_answered_two_sets_has_a_name_for_each(records):
    """Bug: one row for two prompt sets, a mean over both that no table of the paper has."""
    other = records[records["policy"] == records["policy"].iloc[0]].assign(prompts="hex-phi")
    both = tables.by_prompt_set(pd.concat([records, other], ignore_index=True))
    name, *others = records["policy"].unique()
    assert set(both["policy"]) == {
        f"{name} on {records['prompts'].iloc[0]}",
        f"{name} on hex-phi",
        *others,
    }
    assert tables.by_prompt_set(records).equals(records)


@pytest.mark.parametrize("column", tables.CONSTANT)
def test_mixed_settings_are_refused(records, column):
    """Guards against a row that averages two configurations."""
    mixed = records.astype({column: object})
    mixed.loc[5, column] = "other"
    with pytest.raises(
        ParameterError, match=rf"{column} takes .*other.* in policy smollm2-raw, method base"
    ):
        tables.main_table(mixed)


def test_a_setting_present_in_half_the_cell_is_refused(records):
    """Guards against nulls that are skipped when settings are counted."""
    mixed = records.astype({"keep": object})
    mixed.loc[5, "keep"] = None
    with pytest.raises(ParameterError, match="keep takes the values"):
        tables.main_table(mixed)


def test_duplicates_are_refused(records):
    """Guards against a prompt counted twice."""
    with pytest.raises(RunError, match="method 'base', prompt_id 'p003' occurs twice"):
        tables.main_table(pd.concat([records, records.iloc[[3]]]))


# --- nothing was run ------------------------------------------------------------------------------


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def test_a_table_without_rows_says_so():
    """Guards against a header alone, which readers take for a table that was cut off."""
    empty = pd.DataFrame(columns=["a_name", "p_value"])
    header, _, row = tables.markdown(empty).splitlines()
    assert cells_of(header) == ["a name", "p value"] and cells_of(row) == ["not run", ""]
    assert tables.pretty(empty).to_numpy().tolist() == [["not run", ""]]
    # bug: a table without columns stopped notebook 80 where nothing had run
    assert tables.pretty(pd.DataFrame()).to_numpy().tolist() == [["not run"]]
    nothing = tables.main_table(synthetic.records(1).iloc[:0])
    assert tables.pretty(nothing)["policy"].tolist() == ["not run"]


@pytest.mark.parametrize(
    ("finished", "n_main", "n_compared"),
    [
        ([], 0, 0),
        (["decode-raw"], 8, 7),  # inferenceguard and its baselines
        (["decode-raw-tokenwise"], 5, 0),
        (["decode-raw-critic"], 1, 0),
    ],
)
def test_notebook_40_writes_every_table_of_whatever_has_finished(
    finished, n_main, n_compared, tmp_path, monkeypatch, capsys
):
    """Bug: no run, or one unfinished run beside a finished one, ended the notebook before it wrote
    a table.
    """
    workplace(tmp_path, monkeypatch)
    written(
        tmp_path,
        "ci",
        ["decode-raw-critic", "decode-raw-tokenwise", "decode-raw"] if finished else [],
    )
    for manifest in (tmp_path / "runs/ci").glob("*/manifest.json"):
        if manifest.parent.name not in finished:
            manifest.unlink()
    executed(tmp_path, "ci", "40_tables")
    names = [
        "main",
        "compute",
        "comparison",
        "heldout",
        *(f"paper_{name}" for name in (*MEASURED, "orderings")),
    ]
    folder = tmp_path / "figures/tables"
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{end}" for name in names for end in ("csv", "md", "json")
    }
    made_of = {
        name: set(json.loads((folder / f"{name}.json").read_text())["runs"]) for name in names[:4]
    }
    assert made_of == dict.fromkeys(names[:4], {f"ci/{run}" for run in finished})
    main, comparison = (pd.read_csv(folder / f"{name}.csv") for name in ("main", "comparison"))
    assert (len(main), len(comparison)) == (n_main, n_compared)
    assert (main["n_prompts"] == 4).all()
    said = {
        name: tables.NOT_RUN in (folder / f"{name}.md").read_text()
        for name in ("main", "compute", "comparison", "heldout")
    }
    assert said == dict.fromkeys(said, not finished) | {"comparison": not n_compared}
    out = capsys.readouterr().out
    assert out.count("left out: the run ") == (
        2 * 2 if finished else 0
    )  # by the tables of the profile, and by the paper's


# --- files ----------------------------------------------------------------------------------------


def test_csv_keeps_every_digit(main, tmp_path):
    """Guards against rounding in the file that others compute with."""
    path, *_ = tables.write(main, tmp_path / "deep" / "main", {})
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == tables.MAIN_COLUMNS and len(rows) == len(main)
    for name in ("reward_mean", "safety_lower95", "seconds_per_prompt", "budget"):
        assert [float(row[name]) for row in rows] == main[name].tolist()


def test_files_are_the_same_each_time(main, tmp_path):
    """Guards against bytes that change without a change of numbers, and temporary files left
    behind.
    """
    first = [
        path.read_bytes()
        for path in tables.write(main, tmp_path / "v1.5-main", {"x/a": {}, "x/b": {}})
    ]
    paths = tables.write(main, tmp_path / "v1.5-main", {"x/b": {}, "x/a": {}})
    assert [path.name for path in paths] == [
        "v1.5-main.csv",
        "v1.5-main.md",
        "v1.5-main.json",
    ]
    assert [path.read_bytes() for path in paths] == first
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_settings_without_a_value_stay_integers(records, tmp_path):
    """Guards against "8.0 samples" in the table because another method has none."""
    records = records.astype({"keep": object})
    records.loc[records["method"] == "base", "keep"] = None
    lines = (
        tables.write(tables.main_table(records), tmp_path / "main", {})[0].read_text().splitlines()
    )
    place = tables.MAIN_COLUMNS.index("keep")
    assert [line.split(",")[place] for line in lines[1:3]] == ["", "2"]


def test_people_read_at_most_seven_columns(main, tmp_path):
    """Bug: tables of 27 columns, in which nobody found the difference and its interval."""
    shown, sentence = tables.for_people(main)
    assert shown.shape[1] == tables.MOST_COLUMNS and sentence == "The CSV file has more columns."
    tests = pd.DataFrame(
        {
            "policy": ["raw"] * 2,
            "measure": ["safe", "reward"],
            "point": ["a", "b"],
            "test": ["McNemar", "flips"],
            "n_pairs": [12, 12],
            "train_s": [0.5, 0.6],
            "sd": [0.1, 0.2],
            "difference": [0.25, np.nan],
            "low": [0.1, np.nan],
            "high": [0.4, np.nan],
            "p": [0.01, 0.02],
            "p_holm": [0.02, 0.02001],
            "verdict": ["held", "failed"],
            "seconds": [np.nan, np.nan],
        }
    )
    shown, sentence = tables.for_people(tests)
    names = ["measure", "point", "test", "difference [95 %]", "p", "p_holm", "verdict"]
    assert list(shown) == names and sentence.startswith("In every row: policy raw, n pairs 12.")
    assert shown["difference [95 %]"].tolist() == ["0.250 [0.100, 0.400]", tables.MISSING]
    assert sentence.endswith("The CSV file has more columns.")  # train_s and sd
    text = tables.write(tests, tmp_path / "tests", {})[1].read_text()
    assert text.endswith(f"\n\n{sentence}\n") and "| measure   | point" in text
    alone, sentence = tables.for_people(
        tests.iloc[:1]
    )  # of one row nothing is the same in every row
    assert list(alone)[:2] == ["policy", "measure"] and "In every row" not in sentence


def test_the_centre_of_an_interval_is_the_last_number_of_its_name():
    """Guards an interval beside another number: a count, a spread, the difference of another."""
    row = dict(n=5, reward_mean=0.5, reward_difference=0.1, reward_low=0.0, reward_high=0.2)
    row |= dict(safety_mean=0.9, safety_sd=0.01, safety_low=0.8, safety_high=1.0)
    shown, _ = tables.for_people(pd.DataFrame([row]))
    assert list(shown) == [
        *["n", "reward_mean", "reward_difference [95 %]", "safety_mean [95 %]", "safety_sd"]
    ]


def test_other_tables_are_rounded_and_escaped():
    """Guards against markup in names breaking a table, and tiny p values printed as 0.000."""
    odd = pd.DataFrame(
        {"a_name": ["x|y", "50% & \nmore_"], "p_value": [0.00012345, 0.25], "n": [1, 2]}
    )
    _, rule, *rows = tables.markdown(odd).splitlines()
    assert [side[-1] for side in cells_of(rule)] == ["-", ":", ":"]
    assert "x\\|y " in rows[0] and cells_of(rows[0])[-2:] == ["1e-04", "1"]
    assert cells_of(rows[1]) == ["50% &  more_", "0.250", "2"]


def test_a_fail_open_rate_that_nobody_measured_is_missing():
    """Guards against counting an abstention that was not searched on as unsafe, or as safe."""
    lines = [
        synthetic.record(prompt_id="a"),
        synthetic.record(prompt_id="b", status="abstained", fail_open_cost=None),
    ]
    assert math.isnan(tables.main_table(pd.DataFrame(lines)).iloc[0].safety_rate_fail_open)
