"""The main table against counts by hand, its files, and the block of the README."""

import csv
import json
import math
from functools import partial
from itertools import product

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

    def costs(end, peak, word):
        return {"cost": end, "peak_cost": peak, "word_peak_cost": word}

    ours = partial(synthetic.record, method="inferenceguard")
    base = partial(synthetic.record, method="base", policy_tokens=30)
    silent = costs(None, None, None) | {"reward": None}
    lines = [
        ours(prompt_id="a", reward=0.4, fail_open_cost=0.2, **costs(0.2, 0.2, 0.2)),
        ours(prompt_id="b", status="abstained", reward=0.1, cost=0, peak_cost=0, fail_open_cost=1),
        ours(prompt_id="c", status="abstained", fail_open_cost=0.9, **silent),
        ours(prompt_id="d", reward=0.7, generate_s=1.5, score_s=0.75, **costs(0.1, 0.15, 0.3)),
        *(base(prompt_id=x, reward=y) for x, y in (("a", 0.5), ("b", 0.6), ("c", 0.7))),
        base(prompt_id="d", reward=0.9, status="unverified_unsafe", **costs(0.1, 0.5, 0.5)),
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
    assert row.word_safety_rate == 0.25
    assert row.safety_rate_fail_open == 0.5
    base = by_hand.loc["base"]
    assert (base.safe, base.abstained, base.unsafe, base.peak_safety_rate) == (3, 0, 1, 0.75)
    assert base.word_safety_rate == 0.75


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
    work = {"samples_drawn": 8, "policy_tokens": 100, "forward_tokens": 130}
    work |= {"scorer_calls": 9, "scorer_tokens": 50, "generate_s": 0.5, "cost_s": 0.25}
    work |= {"reward_s": 0.125, "critic_s": 0.0625, "score_s": 0.4375}
    lines = [
        synthetic.record(prompt_id=prompt_id, **{name: k * work[name] for name in work})
        for prompt_id, k in (("a", 1), ("b", 3))
    ]
    row = tables.main_table(pd.DataFrame(lines)).iloc[0]
    names = ("samples", "policy_tokens", "forward_tokens", "scorer_calls", "scorer_tokens")
    assert [row[f"{name}_per_prompt"] for name in names] == [16, 200, 260, 18, 100]
    parts = [row[f"{part}_seconds_per_prompt"] for part in ("generate", "cost", "reward", "critic")]
    assert parts == [1, 0.5, 0.25, 0.125] and row.seconds_per_prompt == sum(parts)


def test_a_method_with_fewer_prompts_has_no_say_in_the_rewards_of_others():
    """Guards against "all answered" shrinking to the prompts of slow methods, whose own mean would
    look like the others.
    """
    methods = {"base": "abcd", "best-of-n": "abcd", "args": "bc", "re-control": "bd"}
    lines = []
    for n, (method, names) in enumerate(methods.items()):
        for name, policy in product(names, ("raw", "chat")):
            about = {"method": method, "prompt_id": name, "policy": policy}
            lines.append(synthetic.record(**about, reward=10.0 * n + "abcd".index(name)))
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
    shown = tables.pretty(main.reset_index()[tables.MAIN_COLUMNS])
    row = shown.set_index(["Policy", "Method"]).loc[("raw", "args")]
    assert (row["n"], row["Safe / abstained / unsafe"]) == ("2", "2 / 0 / 0")
    assert row["Reward, all answered"] == tables.MISSING


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
    order = list(zip(main["policy"], main["method"], strict=True))
    pd.testing.assert_frame_equal(again.loc[order].reset_index(), main)


def test_a_policy_that_answered_two_sets_has_a_name_for_each(records):
    """Bug: one row for two prompt sets, a mean over both that no table of the paper has."""
    other = records[records["policy"] == records["policy"].iloc[0]].assign(prompts="hex-phi")
    both = tables.by_prompt_set(pd.concat([records, other], ignore_index=True))
    name, *others = records["policy"].unique()
    first = records["prompts"].iloc[0]
    assert set(both["policy"]) == {f"{name} on {first}", f"{name} on hex-phi", *others}
    assert tables.by_prompt_set(records).equals(records)


@pytest.mark.parametrize("column", tables.CONSTANT)
def test_mixed_settings_are_refused(records, column):
    """Guards against a row that averages two configurations."""
    mixed = records.astype({column: object})
    mixed.loc[5, column] = "other"
    sentence = rf"{column} takes .*other.* in policy smollm2-raw, method base"
    with pytest.raises(ParameterError, match=sentence):
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
    runs = ["decode-raw-critic", "decode-raw-tokenwise", "decode-raw"]
    written(tmp_path, "ci", runs if finished else [])
    for manifest in (tmp_path / "runs/ci").glob("*/manifest.json"):
        if manifest.parent.name not in finished:
            manifest.unlink()
    executed(tmp_path, "ci", "40_tables")
    names = ["main", "compute", "comparison"]
    every = [*names, *(f"paper_{name}" for name in MEASURED)]
    folder = tmp_path / "figures/tables"
    files = {f"{name}.{end}" for name in every for end in ("csv", "md", "json")}
    assert {path.name for path in folder.iterdir()} == files
    for name in names:
        made_of = json.loads((folder / f"{name}.json").read_text())["runs"]
        assert set(made_of) == {f"ci/{run}" for run in finished}
    main, comparison = (pd.read_csv(folder / f"{name}.csv") for name in ("main", "comparison"))
    assert (len(main), len(comparison)) == (n_main, n_compared)
    assert (main["n_prompts"] == 4).all()
    said = {name: tables.NOT_RUN in (folder / f"{name}.md").read_text() for name in names}
    assert said == dict.fromkeys(said, not finished) | {"comparison": not n_compared}
    out = capsys.readouterr().out
    # by the tables of the profile, and by the paper's
    assert out.count("left out: the run ") == (2 * 2 if finished else 0)


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
    stem = tmp_path / "v1.5-main"
    paths = tables.write(main, stem, {"x/a": {}, "x/b": {}})
    first = [path.read_bytes() for path in paths]
    assert tables.write(main, stem, {"x/b": {}, "x/a": {}}) == paths
    assert [path.name for path in paths] == [f"v1.5-main.{end}" for end in ("csv", "md", "json")]
    assert [path.read_bytes() for path in paths] == first
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_settings_without_a_value_stay_integers(records, tmp_path):
    """Guards against "8.0 samples" in the table because another method has none."""
    records = records.astype({"keep": object})
    records.loc[records["method"] == "base", "keep"] = None
    path, *_ = tables.write(tables.main_table(records), tmp_path / "main", {})
    lines = path.read_text().splitlines()
    place = tables.MAIN_COLUMNS.index("keep")
    assert [line.split(",")[place] for line in lines[1:3]] == ["", "2"]


def test_people_read_at_most_seven_columns(main, tmp_path):
    """Bug: tables of 27 columns, in which nobody found the difference and its interval."""
    shown, sentence = tables.for_people(main)
    assert shown.shape[1] == tables.MOST_COLUMNS and sentence == "The CSV file has more columns."
    tests = pd.DataFrame(
        {
            "policy": ["raw"] * 2, "measure": ["safe", "reward"], "point": ["a", "b"],
            "test": ["McNemar", "flips"], "n_pairs": [12, 12], "train_s": [0.5, 0.6],
            "sd": [0.1, 0.2], "difference": [0.25, np.nan], "low": [0.1, np.nan],
            "high": [0.4, np.nan], "p": [0.01, 0.02], "p_holm": [0.02, 0.02001],
            "verdict": ["held", "failed"], "seconds": [np.nan, np.nan],
        }
    )  # fmt: skip
    shown, sentence = tables.for_people(tests)
    names = ["measure", "point", "test", "difference [95 %]", "p", "p_holm", "verdict"]
    assert list(shown) == names and sentence.startswith("In every row: policy raw, n pairs 12.")
    assert shown["difference [95 %]"].tolist() == ["0.250 [0.100, 0.400]", tables.MISSING]
    assert sentence.endswith("The CSV file has more columns.")  # train_s and sd
    text = tables.write(tests, tmp_path / "tests", {})[1].read_text()
    assert text.endswith(f"\n\n{sentence}\n") and "| measure   | point" in text
    # of one row nothing is the same in every row
    alone, sentence = tables.for_people(tests.iloc[:1])
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
