"""Tests of the ablations: effects and tests worked by hand, notebook 45 on
imaginary runs, and that no command makes a table that holds sweeps poorer; and of the experiment on
a critic: shares and differences worked by hand, intervals against plain loops.
"""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from imaginaryruns import executed, outputs, workplace, written
from mockruns import lines
from synthetic import record

from igcore import ParameterError
from igstudy.paper import MEASURED, compare, of_paper
from igstudy.report import paired, points, tables
from igstudy.report.experiments import EXPERIMENTS
from igstudy.runs.profiles import left_by

GUARD = "inferenceguard"


def line(prompt="p0", seed=0, method="base", trace=(), **fields) -> dict:
    """Return a line with all settings; those that `synthetic.record` lacks are the defaults."""
    more = {
        name: fields.pop(name)
        for name in list(fields)
        if name in ("diversity", "finals", "strict", "run")
    }
    known = record(
        prompt_id=prompt, seed=seed, method=method, **({"lagrange_multiplier": 5.0} | fields)
    )
    return known | {"diversity": "half", "trace": list(trace), "finals": []} | more


def frame(*found) -> pd.DataFrame:
    return pd.DataFrame(found)


# --- tests ----------------------------------------------------------------------------------------


def test_one_pair_is_tested_the_same_from_both_sides():
    """Guards against a sign, a count or an interval of the other arm."""
    import synthetic

    records = synthetic.records(24, policies={"raw": (1.0, 0.0)})
    records = records.assign(arm=records["method"])
    gains = pd.DataFrame(paired.paired(records, [(GUARD, "base")])).set_index("measure")
    losses = pd.DataFrame(paired.paired(records, [("base", GUARD)])).set_index("measure")
    assert gains.loc["safe", "test"] == "exact McNemar" and gains.loc["safe", "n_higher"] > 0
    for measure in ("safe", "reward"):
        one, other = gains.loc[measure], losses.loc[measure]
        assert one["difference"] == pytest.approx(-other["difference"])
        assert one["low"] == pytest.approx(-other["high"], abs=5e-3)
        assert (one["n_higher"], one["n_lower"]) == (other["n_lower"], other["n_higher"])
        assert one["p"] == pytest.approx(other["p"], abs=0.02)
    assert not paired.paired(records, [(GUARD, "unknown")])


def test_seeds_of_a_prompt_are_no_new_prompts():
    """Guards against pseudo-replication, and against a prompt with more seeds counting more."""
    index = pd.MultiIndex.from_tuples(
        [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)], names=["prompt_id", "seed"]
    )
    found = paired.clustered(
        pd.Series([1.0, 0.0, 0.5, 1.0, 0.25, np.nan], index=index), verdict=True
    )
    assert (found["n_prompts"], found["n_pairs"], found["test"]) == (3, 5, "sign flip")
    assert found["difference"] == pytest.approx((0.5 + 1 + 0.25) / 3)
    # all three above zero: two of the eight choices of signs are as far from it
    assert found["p"] == 2 / 8
    assert (found["low"], found["high"]) == (0.25, 1.0)
    once = paired.clustered(
        pd.Series([1.0, 1.0, -1.0, 0.0], index=pd.Index(list("abcd"), name="prompt_id")),
        verdict=True,
    )
    assert (once["test"], once["p"]) == ("exact McNemar", 1.0)
    none = paired.clustered(pd.Series([np.nan], index=pd.Index(["a"], name="prompt_id")))
    assert none["n_prompts"] == 0
    assert all(math.isnan(none[name]) for name in ("difference", "low", "high", "p"))


def test_holm_is_over_the_rows_of_a_measure():
    """Guards against claims by uncorrected p values."""
    about = {"policy": "raw", "reference": "b", "test": "sign flip", "n_prompts": 16, "n_pairs": 16}
    ps = [
        ("safe", "x", 0.01, 0.5),
        ("safe", "y", 0.03, 0.5),
        ("safe", "z", 0.5, 0.1),
        ("reward", "x", 0.04, -0.25),
    ]
    tests = [
        about | {"measure": m, "point": x, "p": p, "difference": d, "low": d, "high": d}
        for m, x, p, d in ps
    ]
    table = paired.corrected(tests)
    *known, last = paired.TEST_COLUMNS
    assert list(table.columns) == [*known, *paired.GAIN_COUNTS, last]
    assert table["p_holm"].tolist() == pytest.approx([0.03, 0.06, 0.5, 0.04])
    none = paired.corrected([])
    assert list(none.columns) == list(table.columns)


# --- tables ---------------------------------------------------------------------------------------


def test_a_table_has_a_row_for_every_point():
    """Guards against points pooled, the columns of the main table, and a setting that varies
    unseen.
    """
    statuses = ["abstained", "verified_safe", "verified_safe"]
    found = [
        line(f"p{k}", seed, GUARD, diversity=d, status=status, reward=0.1 * k)
        for d, seed in product(("half", "none"), (0, 1))
        for k, status in enumerate(statuses)
    ]
    table = points.point_table(frame(*found[::-1]), ["diversity", "seed"])
    assert list(table.columns) == [*tables.MAIN_COLUMNS, "diversity"]
    assert table[["diversity", "seed"]].to_numpy().tolist() == [
        ["half", 0], ["half", 1], ["none", 0], ["none", 1],
    ]  # fmt: skip
    assert table["safe"].tolist() == [2] * 4 and table["n_prompts"].tolist() == [3] * 4
    assert table["reward_mean"].tolist() == pytest.approx([0.1] * 4)
    with pytest.raises(
        ParameterError, match="diversity takes the values half, none in method inferenceguard"
    ):
        points.point_table(frame(*found), ["seed"])


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["ablations", "critic-search", "searches", "tune"])
def test_notebook_45_makes_what_the_snakefile_expects(profile, tmp_path, monkeypatch, capsys):
    """Guards the walk from params files to tables: names of runs, settings, and the files that the
    rule waits for.
    """
    workplace(tmp_path, monkeypatch)
    written(tmp_path, profile)
    executed(tmp_path, profile)
    made = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "figures").rglob("*.*")}
    of_others = ("ablation_critic.", "claims_", "harm_", "outcomes")  # notebooks 20, 80 and 65
    expected = outputs(tmp_path, profile)
    assert made == {name for name in expected if not any(part in name for part in of_others)}
    table = next(
        (tmp_path / "figures/tables").glob("*_tests.json" if profile == "ablations" else "*.json")
    )
    names = json.loads(table.read_text())["runs"]  # of the runs of one experiment, not of all
    assert names and names.keys() <= {
        f"{profile}/{path.name}" for path in (tmp_path / "runs" / profile).iterdir()
    }
    if profile == "ablations":  # what experiments take from the runs of others
        found = {
            name: pd.read_csv(tmp_path / f"figures/tables/ablation_{name}.csv")
            for name in ("lambda", "budget")
        }
        assert found["lambda"].query(f"method == '{GUARD}'")["budget"].tolist() == [0.2]
        values = found["budget"].groupby("method")["value"].agg(list)
        assert values[GUARD] == values["backtracking"] == [0.05, 0.1, 0.2, 0.33, 0.5]
        assert values["beam-lagrangian"] == [0.0, 0.5, 1.0, 2.5, 5.0, 10.0]
    said = [
        text.partition(":")[0]
        for text in capsys.readouterr().out.splitlines()
        if text.endswith("not run")
    ]
    apart = {
        "critic-search": {"critic_search"},
        "searches": {"searches"},
        "tune": {"tune"},
    }  # experiments with a profile of their own
    own = apart.get(profile) or set(EXPERIMENTS).difference(*apart.values())
    assert set(said) == set(EXPERIMENTS) - own | {"critic"}


def test_notebook_45_writes_what_has_finished(tmp_path, monkeypatch, capsys):
    """Bug: no run, or one unfinished run of one experiment, kept the tables of all others from
    being written.
    """
    workplace(tmp_path, monkeypatch)
    executed(tmp_path, "ablations")
    of_no_run = {f"paper_{table}" for table in SWEPT}
    assert {path.stem for path in (tmp_path / "figures").rglob("*.*")} == of_no_run
    assert "Traceback" not in capsys.readouterr().out
    written(tmp_path, "ablations", ["decode-ndk", "decode-budget"])
    (tmp_path / "runs/ablations/decode-budget-budget-0_5/manifest.json").unlink()
    executed(tmp_path, "ablations")
    made = {path.stem for path in (tmp_path / "figures").rglob("*.*")}
    assert made - of_no_run == {"ablation_ndk", "ablation_budget", "ablation_pareto"}
    out = capsys.readouterr().out
    assert out.startswith("left out: the run ") and "budget-0_5 has not finished" in out
    assert "\nlambda: not run\n" in out


# --- which profile writes what holds sweeps -------------------------------------------------------

ROOT = Path(__file__).parents[1]
TOGETHER = ("45-02b", "45-swept-tables")
SWEPT = of_paper(left_by("45_ablations", "ablations", ROOT).tables)


def test_no_order_of_commands_makes_a_table_poorer(tmp_path, monkeypatch):
    """Bug: `make reproduce` without the ablations' runs left 10 of 53 rows."""
    workplace(tmp_path, monkeypatch)
    for profile in ("small", "ablations"):
        written(tmp_path, profile)
    executed(tmp_path, "ablations", cells=TOGETHER)
    left = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in tmp_path.glob("figures/**/*.*")
    }
    assert left.keys() == {
        f"figures/tables/paper_{table}.{end}" for table in SWEPT for end in ("csv", "md", "json")
    }
    named = json.loads(left["figures/tables/paper_lambda_alpaca_beaver.json"])["runs"]
    assert {run.partition("/")[0] for run in named} == {"small", "ablations"}
    executed(tmp_path, "small", "40_tables", cells=("40-04", "40-15"))
    assert all((tmp_path / name).read_bytes() == content for name, content in left.items())
    every = {path.stem for path in tmp_path.glob("figures/tables/*.csv")}
    unswept = {f"paper_{table}" for table in MEASURED if table not in SWEPT}
    assert every - {Path(name).stem for name in left} == {"main", *unswept}


def test_what_waits_is_what_sweeps_change(tmp_path, monkeypatch):
    """Bug: a table that sweeps make richer among those that the main runs write alone."""
    workplace(tmp_path, monkeypatch)
    for profile in ("small", "ablations"):
        written(tmp_path, profile)
    alone, both = compare.load("small"), compare.load("small", "ablations")
    changed = {
        table
        for table in MEASURED
        if not compare.beside(table, alone).equals(compare.beside(table, both))
    }
    assert changed == set(SWEPT)


def test_one_profile_writes_each_of_them():
    """Bug: two profiles that write one file into figures, so that what the second knows replaces
    what the first knew.
    """
    asked = {
        path.parent.name: left_by("40_tables", path.parent.name, ROOT)
        for path in ROOT.glob("params/*/profile.yaml")
    }
    assert len(asked) == 8 and left_by("40_tables", "mine", ROOT) is None
    found = {profile: of_paper(made.tables) for profile, made in asked.items()}
    every = {name: list(MEASURED) for name in ("ci", "paper")}
    main = {"small": [name for name in MEASURED if name not in SWEPT]}
    assert {profile: names for profile, names in found.items() if names} == every | main


# --- the experiment on a critic -------------------------------------------------------------------

MEASURES = {
    "safe_finals": paired.safe_finals,
    "answered_safely": paired.answered_safely,
    "reward": paired.reward,
}
A, B = "critic", "best-of-n-augmented"
SAFE = "answered_safely"


def steps(*counts) -> list[dict]:
    """Return a trace from (finals, safe finals) of each round."""
    return [
        {"block": k, "round": 0, "drawn": 8, "finals": n, "safe_finals": safe}
        for k, (n, safe) in enumerate(counts)
    ]


def give(arm=A, prompt="p0", seed=0, finals=((8, 4),), **fields) -> dict:
    return record(prompt_id=prompt, seed=seed, method=f"method of {arm}", **fields) | {
        "arm": arm,
        "trace": steps(*finals),
    }


def row_of(records, arm, reference, what) -> dict:
    """Return the row of two arms and a measure."""
    (row,) = paired.paired(records, [(arm, reference)], {what: MEASURES[what]})
    return row


def reward(records) -> dict:
    return row_of(records, A, B, "reward")


# --- measures -------------------------------------------------------------------------------------


def test_share_of_safe_finals():
    """Guards against a mean of shares over rounds (1/6 here), and against a share of what was
    drawn.
    """
    lines = [give(finals=finals) for finals in ([(0, 0), (6, 2), (2, 0)], [(0, 0), (0, 0)], [])]
    shares = paired.safe_finals(frame(*lines)).tolist()
    assert shares[0] == 2 / 8 and all(map(math.isnan, shares[1:]))


def test_differences_worked_by_hand():
    """Guards the sign, the averages over seeds and prompts, and which column is which."""
    records = frame(
        give(A, "p0", 0, [(4, 4)], cost=0.1), give(B, "p0", 0, [(8, 4)], cost=0.1),  # 1 and 1/2
        give(A, "p0", 1, [(4, 2)], cost=0.3), give(B, "p0", 1, [(8, 2)], cost=0.2),  # 1/2 and 1/4
        give(A, "p1", 0, [(4, 3)], cost=0.2), give(B, "p1", 0, [(8, 4)], cost=0.21),  # 3/4 and 1/2
    )  # fmt: skip
    found = row_of(records.sample(frac=1, random_state=0), A, B, "safe_finals")
    about = ["point", "reference", "measure", "n_pairs", "n_prompts"]
    assert [found[name] for name in about] == [A, B, "safe_finals", 3, 2]
    assert found["difference"] == pytest.approx((0.375 + 0.25) / 2)
    # both prompts the worse, both the better one
    assert (found["low"], found["high"]) == pytest.approx((0.25, 0.375))
    assert row_of(records, A, B, "answered_safely")["difference"] == 0.25


def test_equal_verdicts_have_an_interval():
    """Guards against 0.000 [0.000, 0.000], which reads as certainty."""
    found = row_of(frame(*(give(x, f"p{k}") for x in (A, B) for k in range(40))), A, B, SAFE)
    z2 = 1.959964**2
    assert found["difference"] == 0
    assert (found["low"], found["high"]) == pytest.approx((-z2 / (40 + z2), z2 / (40 + z2)))


def test_an_abstention_is_no_safe_answer():
    """Guards against a refusal, which costs nothing, passing for a safe answer, and against a
    failed scorer doing so.
    """
    records = frame(
        give(A, "p0", status="abstained", cost=0.0),
        give(B, "p0"),
        give(A, "p1", status="abstained", cost=None, reward=None),
        give(B, "p1", status="unverified_unsafe", cost=None),
        give(A, "p2", status="unverified_unsafe", cost=0.3),
        give(B, "p2", cost=0.2),
    )
    found = row_of(records, A, B, "answered_safely")
    assert (found["difference"], found["n_pairs"]) == (pytest.approx(-2 / 3), 3)


def test_rewards_are_of_pairs_that_both_answered():
    """Guards against the reward of a refusal, and against means over other pairs than the
    difference.
    """
    records = frame(
        give(A, "p0", reward=0.9),
        give(B, "p0", reward=0.5),
        give(A, "p1", reward=0.0, status="abstained"),
        give(B, "p1", reward=0.8),
        give(A, "p2", reward=0.1),
        give(B, "p2", reward=None),
    )
    found = reward(records)
    assert (found["n_prompts"], found["n_pairs"]) == (1, 1)
    assert found["difference"] == pytest.approx(0.4)


def test_methods_that_do_not_look_at_the_cost():
    """Guards against uncounted candidates passing for unsafe ones, or for safe."""
    with pytest.raises(ParameterError, match="did not count its safe complete candidates"):
        paired.safe_finals(frame(give(B, finals=[(8, None)])))
    old = [{"block": 0, "round": 0, "drawn": 8, "safe": 4}]
    with pytest.raises(ParameterError, match="old run"):
        paired.safe_finals(frame(give() | {"trace": old}))


def test_lines_of_real_searches():
    """Guards the names of the fields that a search writes; the best of n is safe exactly where one
    of the n is.
    """
    best = pd.DataFrame(lines(methods=[B]))
    shares = paired.safe_finals(best).tolist()
    assert [share > 0 for share in shares] == (best["status"] == "verified_safe").tolist()
    assert 0 < sum(shares) < 4
    (plain, *_) = lines(methods=["best-of-n"])
    with pytest.raises(ParameterError, match="'best-of-n' did not count"):
        paired.safe_finals(pd.DataFrame([plain]))
