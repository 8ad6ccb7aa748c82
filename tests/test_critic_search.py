"""Tests of the experiment on a critic: shares and differences worked by hand, intervals against
plain loops.
"""

import math

import pandas as pd
import pytest
from mockruns import lines
from synthetic import record

from igcore import ParameterError
from igstudy.report import paired

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


def line(arm=A, prompt="p0", seed=0, finals=((8, 4),), **fields) -> dict:
    return record(prompt_id=prompt, seed=seed, method=f"method of {arm}", **fields) | {
        "arm": arm,
        "trace": steps(*finals),
    }


def frame(*lines) -> pd.DataFrame:
    return pd.DataFrame(lines)


def compare(records, arm, reference, what) -> dict:
    """Return the row of two arms and a measure."""
    (row,) = paired.paired(records, [(arm, reference)], {what: MEASURES[what]})
    return row


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
    about = ["point", "reference", "measure", "n_pairs", "n_prompts"]
    assert [found[name] for name in about] == [A, B, "safe_finals", 3, 2]
    assert found["difference"] == pytest.approx((0.375 + 0.25) / 2)
    # both prompts the worse, both the better one
    assert (found["low"], found["high"]) == pytest.approx((0.25, 0.375))
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
    assert [share > 0 for share in shares] == (best["status"] == "verified_safe").tolist()
    assert 0 < sum(shares) < 4
    (plain, *_) = lines(methods=["best-of-n"])
    with pytest.raises(ParameterError, match="'best-of-n' did not count"):
        paired.safe_finals(pd.DataFrame([plain]))
