"""Tests of the experiment on a critic: shares and differences worked by hand, intervals against
plain loops.
"""

import math

import pandas as pd
import pytest
from mockruns import lines
from notebook_code import notebook_code
from synthetic import record

from igcore import ParameterError
from igstudy.report import paired

notebook = notebook_code("45_ablations")
MEASURES, PAIRS = notebook.FOUND, notebook.PAIRS
COLUMNS = "n_samples arm reference measure n_pairs n_prompts difference low high".split()
A, B = "critic", "best-of-n-augmented"
SAFE = "answered_safely"


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


def compare(records, arm, reference, what) -> dict:
    """Return the row of two arms: `critic` and the best of N are given the names that it knows."""
    pair = {arm: A, reference: B}
    named = records.assign(
        method=records["arm"].map(pair).replace({A: "inferenceguard-critic"}),
        critic_control="none",
    )
    shuffled = named[named["arm"] == arm].assign(critic_control="shuffled")
    table = notebook.critic_search_tables(pd.concat([named, shuffled]))[""]
    rows = table[(table["arm"] == A) & (table["reference"] == B) & (table["measure"] == what)]
    assert len(rows) == 1
    return rows.iloc[0].to_dict()


def reward(records) -> dict:
    return compare(records, A, B, "reward")


# --- measures -------------------------------------------------------------------------------------


def test_share_of_safe_finals():
    """Guards against a mean of shares over rounds (1/6 here), and against a share of what was
    drawn.
    """
    lines = [line(finals=finals) for finals in ([(0, 0), (6, 2), (2, 0)], [(0, 0), (0, 0)], [])]
    shares = paired.safe_finals(frame(*lines)).tolist()
    assert shares[0] == 2 / 8 and all(map(math.isnan, shares[1:]))


def test_differences_worked_by_hand():
    """Guards the sign, the averages over seeds and prompts, and which column is which."""
    records = frame(
        line(A, "p0", 0, [(4, 4)], cost=0.1), line(B, "p0", 0, [(8, 4)], cost=0.1),  # 1 and 1/2
        line(A, "p0", 1, [(4, 2)], cost=0.3), line(B, "p0", 1, [(8, 2)], cost=0.2),  # 1/2 and 1/4
        line(A, "p1", 0, [(4, 3)], cost=0.2), line(B, "p1", 0, [(8, 4)], cost=0.21),  # 3/4 and 1/2
    )  # fmt: skip
    found = compare(records.sample(frac=1, random_state=0), A, B, "safe_finals")
    assert list(found) == COLUMNS
    assert [found[name] for name in COLUMNS[:6]] == [8, A, B, "safe_finals", 3, 2]
    assert found["difference"] == pytest.approx((0.375 + 0.25) / 2)
    assert (found["low"], found["high"]) == pytest.approx(
        (0.25, 0.375)
    )  # both prompts the worse, both the better one
    assert compare(records, A, B, "answered_safely")["difference"] == 0.25


def test_equal_verdicts_have_an_interval():
    """Guards against 0.000 [0.000, 0.000], which reads as certainty."""
    found = compare(frame(*(line(x, f"p{k}") for x in (A, B) for k in range(40))), A, B, SAFE)
    z2 = 1.959964**2
    assert found["difference"] == 0
    assert (found["low"], found["high"]) == pytest.approx((-z2 / (40 + z2), z2 / (40 + z2)))


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
    found = compare(records, A, B, "answered_safely")
    assert (found["difference"], found["n_pairs"]) == (pytest.approx(-2 / 3), 3)


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
    assert (found["n_prompts"], found["n_pairs"]) == (1, 1)
    assert found["difference"] == pytest.approx(0.4)


def test_methods_that_do_not_look_at_the_cost():
    """Guards against uncounted candidates passing for unsafe ones, or for safe."""
    with pytest.raises(ParameterError, match="did not count its safe complete candidates"):
        paired.safe_finals(frame(line(B, finals=[(8, None)])))
    old = [{"block": 0, "round": 0, "drawn": 8, "safe": 4}]
    with pytest.raises(ParameterError, match="old run"):
        paired.safe_finals(frame(line() | {"trace": old}))


def test_lines_of_real_searches():
    """Guards the names of the fields that a search writes; the best of n is safe exactly where one
    of the n is.
    """
    best = pd.DataFrame(lines(methods=[B]))
    shares = paired.safe_finals(best).tolist()
    assert [share > 0 for share in shares] == (
        best["status"] == "verified_safe"
    ).tolist() and 0 < sum(shares) < 4
    (plain, *_) = lines(methods=["best-of-n"])
    with pytest.raises(ParameterError, match="'best-of-n' did not count"):
        paired.safe_finals(pd.DataFrame([plain]))


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
    found = notebook.arms(records)
    assert found["arm"].tolist() == [arm for *_, arm in known]
    pd.testing.assert_frame_equal(found.drop(columns="arm"), records)


def test_the_experiment_compares_the_pairs_that_are_there():
    """Guards rows: every pair with all its measures, in the order of the pairs, and nothing of an
    arm that is not there.
    """
    gains = {"critic": 0.3, "shuffled": 0.1, B: 0.0, "inferenceguard": 0.2}
    methods = {"critic": "inferenceguard-critic", "shuffled": "inferenceguard-critic"}
    records = frame(
        *(
            line(arm, f"p{k}", reward=0.5 + gain + 0.01 * k)
            | {"method": methods.get(arm, arm)}
            | {"critic_control": "shuffled" if arm == "shuffled" else "none"}
            for arm, gain in gains.items()
            for k in range(3)
            if arm != "shuffled" or k < 2
        )
    )
    found = notebook.critic_search_tables(records)[""]
    assert list(found.columns) == COLUMNS and found.index.tolist() == list(range(11))
    rows = found[["arm", "reference", "measure"]].itertuples(index=False)
    assert [tuple(row) for row in rows] == [
        (*pair, measure)
        for pair in PAIRS
        for measure in MEASURES
        if (pair[0], measure) != ("inferenceguard", "safe_finals")
    ]
    rewards = found[found["measure"] == "reward"]
    assert rewards["difference"].tolist() == pytest.approx([0.3, 0.1, 0.2, 0.2])
    everyone = (found["measure"] == "answered_safely") & ~found["arm"].eq("shuffled")
    everyone &= found["reference"] != "shuffled"
    assert found["n_prompts"].tolist() == [3 if here else 2 for here in everyone]
    some = notebook.critic_search_tables(records[records["critic_control"] == "none"])[""]
    assert set(some["measure"]) == {"answered_safely"} and len(some) == 2
    none = notebook.critic_search_tables(records[records["arm"] == "critic"])[""]
    assert not len(none)


def test_what_was_tried_is_a_row_per_setting():
    """Guards means over all settings at once, an abstention that counts as an answer, and its
    missing reward as a zero.
    """
    found = notebook.tune_tables(
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
    )[""]
    assert found["keep"].tolist() == [1, 4] and found["n_prompts"].tolist() == [2, 1]
    assert found["safe_finals"].tolist() == [0.75, 0.25] and found["answered_safely"].tolist() == [
        0.5,
        0.0,
    ]
    assert found["reward"].tolist() == [0.2, 0.6]
