"""Tests of the experiment on a critic: shares and differences worked by hand, intervals against
plain loops.
"""

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from mockruns import lines
from synthetic import record

from igcore import METHODS, ParameterError
from igcore.report.critic_search import (
    ARMS,
    COLUMNS,
    MEASURES,
    PAIRS,
    arms,
    compare,
    comparison_table,
    experiment,
    safe_final_share,
    tried,
)

A, B = "critic", "best-of-n-augmented"


def steps(*counts) -> list[dict]:
    """Return a trace from (finals, safe finals) of each round."""
    return [
        {"block": k, "round": 0, "drawn": 8, "finals": n, "safe_finals": safe}
        for k, (n, safe) in enumerate(counts)
    ]


def line(arm=A, prompt="p0", seed=0, finals=((8, 4),), **fields) -> dict:
    return record(prompt_id=prompt, seed=seed, method=f"method of {arm}", **fields) | {
        "arm": arm,
        "trace": steps(*finals),
    }


def frame(*lines) -> pd.DataFrame:
    return pd.DataFrame(lines)


def noisy(prompts=40, seeds=2, scale=0.1) -> pd.DataFrame:
    """Records whose rewards vary from prompt to prompt and a little from seed to seed."""
    rng = np.random.default_rng(7)
    ease = rng.normal(0.1, scale, prompts)
    return frame(
        *(
            line(
                arm, f"p{p:02d}", s, reward=float(rng.normal(0.5, scale / 4) + (arm == A) * ease[p])
            )
            for p in range(prompts)
            for s in range(seeds)
            for arm in (A, B)
        )
    )


def reward(records, **more) -> dict:
    return compare(records, A, B, what="reward", n_samples=8, **more)


# --- measures -------------------------------------------------------------------------------------


def test_share_of_safe_finals():
    """Guards against a mean of shares over rounds (1/6 here), and against a share of what was
    drawn.
    """
    assert safe_final_share(line(finals=[(0, 0), (6, 2), (2, 0)])) == 2 / 8
    assert math.isnan(safe_final_share(line(finals=[(0, 0), (0, 0)]))) and math.isnan(
        safe_final_share(line(finals=[]))
    )


def test_differences_worked_by_hand():
    """Guards the sign, the averages over seeds and prompts, and which column is which."""
    records = frame(
        line(A, "p0", 0, [(4, 4)], cost=0.1), line(B, "p0", 0, [(8, 4)], cost=0.1),  # 1 and 1/2
        line(A, "p0", 1, [(4, 2)], cost=0.3), line(B, "p0", 1, [(8, 2)], cost=0.2),  # 1/2 and 1/4
        line(A, "p1", 0, [(4, 3)], cost=0.2), line(B, "p1", 0, [(8, 4)], cost=0.21),  # 3/4 and 1/2
    )  # fmt: skip
    found = compare(records.sample(frac=1, random_state=0), A, B, what="safe_finals", n_samples=8)
    assert list(found) == COLUMNS
    assert [found[name] for name in COLUMNS[:6]] == [8, A, B, "safe_finals", 3, 2]
    assert (found["mean_arm"], found["mean_reference"]) == pytest.approx((0.75, (0.375 + 0.5) / 2))
    assert found["difference"] == pytest.approx((0.375 + 0.25) / 2)
    assert (found["low"], found["high"]) == pytest.approx(
        (0.25, 0.375)
    )  # both prompts the worse, both the better one
    found = compare(records, A, B, what="answered_safely", n_samples=8)
    assert (found["mean_arm"], found["mean_reference"], found["difference"]) == (0.75, 0.5, 0.25)


def test_an_abstention_is_no_safe_answer():
    """Guards against a refusal, which costs nothing, passing for a safe answer, and against a
    failed scorer doing so.
    """
    records = frame(
        line(A, "p0", status="abstained", cost=0.0),
        line(B, "p0"),
        line(A, "p1", status="abstained", cost=None, reward=None),
        line(B, "p1", status="unverified_unsafe", cost=None),
        line(A, "p2", status="unverified_unsafe", cost=0.3),
        line(B, "p2", cost=0.2),
    )
    found = compare(records, A, B, what="answered_safely", n_samples=8)
    assert (found["mean_arm"], found["mean_reference"], found["n_pairs"]) == (
        0,
        pytest.approx(2 / 3),
        3,
    )


def test_rewards_are_of_pairs_that_both_answered():
    """Guards against the reward of a refusal, and against means over other pairs than the
    difference.
    """
    records = frame(
        line(A, "p0", reward=0.9),
        line(B, "p0", reward=0.5),
        line(A, "p1", reward=0.0, status="abstained"),
        line(B, "p1", reward=0.8),
        line(A, "p2", reward=0.1),
        line(B, "p2", reward=None),
    )
    found = reward(records)
    assert (found["mean_arm"], found["mean_reference"], found["n_pairs"]) == (0.9, 0.5, 1)
    assert found["difference"] == pytest.approx(0.4)
    assert all(
        math.isnan(found[name]) for name in ("low", "high", "low_one_sided")
    )  # one prompt says nothing about others


def test_nothing_to_compare_is_nan():
    """Guards against a zero, or a warning, where no pair has a number."""
    found = compare(frame(line(A, finals=[]), line(B)), A, B, what="safe_finals", n_samples=8)
    assert (found["n_pairs"], found["n_prompts"]) == (0, 0)
    assert all(math.isnan(found[name]) for name in COLUMNS[6:])


def test_methods_that_do_not_look_at_the_cost():
    """Guards against uncounted candidates passing for unsafe ones, or for safe; other measures are
    compared all the same.
    """
    records = frame(line(A), line(B, finals=[(8, None)]))
    with pytest.raises(
        ParameterError,
        match=f"'method of {B}' did not count its safe finished .* leave out the measure",
    ):
        compare(records, A, B, what="safe_finals", n_samples=8)
    old = [{"block": 0, "round": 0, "drawn": 8, "safe": 4}]
    with pytest.raises(ParameterError, match="its run is too old"):
        safe_final_share(line() | {"trace": old})
    assert len(comparison_table(records, [(A, B)], measures=["answered_safely", "reward"])) == 2


# --- intervals ------------------------------------------------------------------------------------


def test_intervals_are_those_of_a_plain_loop():
    """Guards the bootstrap: prompts drawn with replacement, one mean each, their quantiles."""
    records = noisy()
    wide = records.pivot(index="prompt_id", columns=["arm", "seed"], values="reward")
    gains = ((wide[A][0] - wide[B][0]) + (wide[A][1] - wide[B][1])).to_numpy() / 2
    rng = np.random.default_rng(3)
    means = [np.mean([gains[i] for i in rng.integers(40, size=40)]) for _ in range(800)]
    found = reward(records, resamples=800, seed=3, confidence=0.9)
    assert found["difference"] == pytest.approx(gains.mean())
    assert [found["low"], found["high"]] == pytest.approx(np.quantile(means, [0.05, 0.95]))
    assert found["low_one_sided"] == pytest.approx(np.quantile(means, 0.1))


def test_intervals_are_near_the_normal_ones():
    """Guards against an interval of the wrong level; the two agree to a tenth of the standard error
    of a mean of 40 prompts.
    """
    records = noisy()
    wide = records.groupby(["arm", "prompt_id"])["reward"].mean()
    gains = wide[A] - wide[B]
    error = gains.std() / math.sqrt(40)
    found = reward(records)
    errors = (
        np.subtract([found["low"], found["high"], found["low_one_sided"]], gains.mean()) / error
    )
    assert errors == pytest.approx([-1.960, 1.960, -1.645], abs=0.1)


def test_repeated_seeds_do_not_narrow_the_interval():
    """Guards against pseudo-replication: the same answers under more seeds are no new prompts."""
    once = noisy(seeds=1)
    again = pd.concat([once.assign(seed=s) for s in range(5)])
    few, many = reward(once), reward(again)
    assert (few["n_pairs"], many["n_pairs"], many["n_prompts"]) == (40, 200, 40)
    for name in ("difference", "low", "high", "low_one_sided"):
        assert many[name] == pytest.approx(few[name])
    for_granted = reward(again.assign(prompt_id=again["prompt_id"] + again["seed"].astype(str)))
    assert few["high"] - few["low"] > 2 * (
        for_granted["high"] - for_granted["low"]
    )  # sqrt(5) = 2.2


def test_same_seed_same_interval():
    """Guards against randomness from elsewhere, and against the order of the lines."""
    records = noisy(seeds=5)
    assert reward(records) == reward(records[::-1]) != reward(records, seed=1)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks, has", [(A, B), (B, A)])
def test_missing_pairs_are_refused(lacks, has):
    """Guards against comparing other prompts, or other seeds, on the two sides; also where a prompt
    has the other seed.
    """
    records = noisy(prompts=3)
    without = records[
        ~((records["arm"] == lacks) & (records["prompt_id"] == "p01") & (records["seed"] == 1))
    ]
    with pytest.raises(
        ParameterError,
        match=f"'{lacks}' lacks 1 of the pairs of '{has}', such as prompt 'p01' with seed 1",
    ):
        reward(without)


def test_repeated_lines_are_refused():
    """Guards against a line counted twice."""
    records = noisy(prompts=3)
    with pytest.raises(
        ParameterError, match=f"prompt 'p00' with seed 0 occurs twice in arm {A}, n_samples = 8"
    ):
        reward(pd.concat([records, records.iloc[:1]]))


def test_unknown_names_are_refused():
    """Guards against an empty comparison instead of a sentence; an unknown status must not pass for
    an answer.
    """
    records = noisy(prompts=3)
    with pytest.raises(ParameterError, match="unknown arm 'critics'; did you mean 'critic'"):
        compare(records, "critics", B, what="reward", n_samples=8)
    with pytest.raises(ParameterError, match="unknown measure 'rewards'"):
        compare(records, A, B, what="rewards", n_samples=8)
    with pytest.raises(ParameterError, match="no record of arm critic, n_samples = 4"):
        compare(records, A, B, what="reward", n_samples=4)
    with pytest.raises(ParameterError, match="unknown status 'abstain'"):
        reward(records.assign(status="abstain"))
    for how in ({"confidence": 95}, {"confidence": 1}, {"resamples": 0}):
        with pytest.raises(ParameterError, match="give 0 < confidence < 1 and resamples >= 1"):
            reward(records, **how)


@pytest.mark.parametrize(
    "column, other", [("policy", "another"), ("budget", 0.3), ("method", "another")]
)
def test_arms_that_differ_in_more_than_the_arm_are_refused(column, other):
    """Guards against a difference that another policy, budget or mixture of methods made."""
    records = noisy(prompts=3)
    records.loc[(records["arm"] == A) & (records["seed"] == 1), column] = other
    with pytest.raises(ParameterError, match=f"{column} takes the values"):
        reward(records)


# --- the table ------------------------------------------------------------------------------------


def test_the_table_has_what_both_arms_have():
    """Guards columns, order, and settings passed on; an n_samples of one arm alone gives no row."""
    eight = noisy(prompts=5)
    records = pd.concat(
        [eight, eight.assign(n_samples=4), eight[eight["arm"] == A].assign(n_samples=2)],
        ignore_index=True,
    )
    table = comparison_table(records, [(A, B), (B, A)], resamples=50, seed=2)
    assert list(table.columns) == COLUMNS
    assert table["n_samples"].tolist() == 2 * [4, 4, 4, 8, 8, 8] and table[
        "measure"
    ].tolist() == 4 * list(MEASURES)
    assert table.iloc[5].to_dict() == reward(eight, resamples=50, seed=2)
    assert table["difference"][:6].to_numpy() == pytest.approx(-table["difference"][6:].to_numpy())
    assert list(comparison_table(records, []).columns) == COLUMNS
    with pytest.raises(ParameterError, match="unknown arm 'shuffled'"):
        comparison_table(records, [(A, "shuffled")])
    with pytest.raises(ParameterError, match="share no n_samples"):
        comparison_table(records[(records["arm"] == A) != (records["n_samples"] == 8)], [(A, B)])


def test_lines_of_real_searches():
    """Guards the names of the fields that a search writes; the best of n is safe exactly where one
    of the n is.
    """
    arms = {"inferenceguard-critic": A, "best-of-n-augmented": B, "best-of-n": "plain"}
    records = pd.DataFrame(lines(methods=list(arms))).assign(
        arm=lambda found: found["method"].map(arms)
    )
    table = comparison_table(records, [(A, B)], resamples=20).set_index("measure")
    assert table["n_pairs"][["safe_finals", "answered_safely"]].tolist() == [4, 4]
    best = records[records["arm"] == B]
    shares = [safe_final_share(found) for found in best.to_dict("records")]
    assert [share > 0 for share in shares] == (
        best["status"] == "verified_safe"
    ).tolist() and 0 < sum(shares) < 4
    with pytest.raises(ParameterError, match="'best-of-n' did not count"):
        comparison_table(records, [(A, "plain")])


# --- the experiment -------------------------------------------------------------------------------


def test_arms_are_named_by_method_and_control():
    """Guards the control: the shuffled critic is decoded by the same method, and must never be
    counted with the real one.
    """
    known = [
        ("none", "inferenceguard-critic", "critic"),
        ("shuffled", "inferenceguard-critic", "shuffled"),
        ("none", "best-of-n-augmented", "best-of-n-augmented"),
        ("none", "inferenceguard", "inferenceguard"),
    ]
    records = pd.DataFrame(
        [record(method=method) | {"critic_control": control} for control, method, _ in known],
        index=[3, 3, 5, 1],
    )
    found = arms(records)
    assert found["arm"].tolist() == [arm for *_, arm in known]
    pd.testing.assert_frame_equal(found.drop(columns="arm"), records)


def test_the_experiment_names_what_there_is():
    """Guards a misspelt arm or measure, whose comparison would silently be left out."""
    assert set(ARMS) <= set(METHODS)
    assert {arm for pair in PAIRS for arm in pair} <= {
        ARMS.get(method, method) for method in METHODS
    } | {"shuffled"}
    assert all(set(measures) <= set(MEASURES) for measures in PAIRS.values())
    assert (
        "safe_finals" not in PAIRS["inferenceguard", "best-of-n-augmented"]
    )  # counted under another accounting


def test_the_experiment_compares_the_pairs_that_are_there():
    """Guards rows: every pair with all its measures, in the order of the pairs, and nothing of an
    arm that is not there.
    """
    gains = {"critic": 0.3, "shuffled": 0.1, B: 0.0, "inferenceguard": 0.2}
    records = frame(
        *(
            line(arm, f"p{k}", reward=0.5 + gain + 0.01 * k)
            for arm, gain in gains.items()
            for k in range(3)
        )
    )
    found = experiment(records, ["p0", "p1"])
    assert list(found.columns) == COLUMNS and found.index.tolist() == list(range(11))
    rows = found[["arm", "reference", "measure"]].itertuples(index=False)
    assert [tuple(row) for row in rows] == [
        (*pair, measure) for pair, measures in PAIRS.items() for measure in measures
    ]
    rewards = found[found["measure"] == "reward"]
    assert rewards["difference"].tolist() == pytest.approx([0.3, 0.1, 0.2, 0.2])
    hard = records[records["prompt_id"] != "p2"]
    assert found.iloc[0].to_dict() == compare(hard, "critic", B, what="safe_finals", n_samples=8)
    assert found["n_prompts"].tolist() == [
        3 if what == "answered_safely" else 2 for what in found["measure"]
    ]
    some = experiment(records[records["arm"] != "shuffled"], ["p0"])
    assert (
        set(zip(some["arm"], some["reference"], strict=True))
        == {("critic", B), ("inferenceguard", B)}
        and len(some) == 5
    )
    none = experiment(records[records["arm"] == "critic"], ["p0"])
    assert list(none.columns) == COLUMNS and not len(none)


def test_what_was_tried_is_a_row_per_setting():
    """Guards means over all settings at once, an abstention that counts as an answer, and its
    missing reward as a zero.
    """
    found = tried(
        frame(
            line(prompt="a", finals=((8, 4),), keep=1, reward=0.2, cost=0.1, budget=0.2),
            line(
                prompt="b",
                finals=((8, 8),),
                keep=1,
                status="abstained",
                reward=0.9,
                cost=0.0,
                budget=0.2,
            ),
            line(prompt="a", finals=((8, 2),), keep=4, reward=0.6, cost=0.3, budget=0.2),
        )
    )
    assert found["keep"].tolist() == [1, 4] and found["n_prompts"].tolist() == [2, 1]
    assert found["safe_finals"].tolist() == [0.75, 0.25] and found["answered_safely"].tolist() == [
        0.5,
        0.0,
    ]
    assert found["reward"].tolist() == [0.2, 0.6]


def test_needs_no_torch():
    """Guards against loading a model library to analyse a table."""
    code = "import sys, igcore.report.critic_search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
