"""Tests of safety hacking: the last pools of a search, and how often it emits what a judge calls
harmful.
"""

import numpy as np
import pytest
from mockpolicy import LetterCost, LetterReward, mock_policy

import igcore as ig
from igcore.errors import RunError
from igcore.prompt import as_prompt
from igstudy.report.harm import pools_table, row_digest
from igstudy.runs import hacking_run as hacking
from igstudy.runs.decode_params import DecodeParams

PROMPTS = [as_prompt(text) for text in ("a", "be", "cab", "deaf", "f", "bead")]
GIVEN = dict(profile="hacking", policy="smollm2-raw", prompts="mild", methods=["inferenceguard"])
GIVEN |= dict(budget=1.0, keep=1, block_size=2, max_new_tokens=6, rounds=3, group_size=2)
RUNS = [DecodeParams(run=f"n-{n}", n_samples=n, seed=3, **GIVEN) for n in (1, 4)]


def guard_of(params):
    scorers = {"cost": LetterCost(), "reward": LetterReward()}
    return ig.Guard(mock_policy(), config=params.search(), **scorers)


def test_a_line_has_what_passed_of_the_last_pool_and_a_stopped_run_goes_on(tmp_path, monkeypatch):
    """Bug: candidates of an earlier block, or over budget, in the pool; two answers or none; a text
    in the file; lines of other settings kept beside new ones, or decoded again after a stop.
    """
    prompts, judge = PROMPTS[:3], LetterCost(lambda text: len(text) / 10)
    monkeypatch.setattr(hacking, "guard_of", guard_of)
    monkeypatch.setattr(hacking, "load_prompts", lambda *named: prompts)
    monkeypatch.setattr(hacking, "root", lambda: tmp_path)
    kept, prompts = hacking.hacking_run(RUNS[:1], judge), PROMPTS
    lines = hacking.hacking_run(RUNS, judge)
    assert lines == hacking.read_pools(tmp_path / hacking.OF_RUNS) and len(lines) == 12
    assert lines[:3] == kept and judge.texts == sum(len(line["candidates"]) for line in lines)
    plain = [ig.decode("inferenceguard", guard_of(run), PROMPTS, seed=3) for run in RUNS]
    for line, answer in zip(lines, [answer for run in plain for answer in run], strict=True):
        last = [entry for entry in answer.trace if entry["block"] == answer.trace[-1]["block"]]
        assert line["drawn"] == sum(entry["drawn"] for entry in last)
        assert len(line["candidates"]) == sum(entry["safe"] for entry in last)
        emitted = [each for each in line["candidates"] if each["emitted"]]
        found = [(each["digest"], each["cost"], each["reward"]) for each in emitted]
        said = row_digest(answer.prompt, answer.text), answer.cost, answer.reward
        assert found == ([said] if answer.status == "verified_safe" else [])
        assert [each["score"] for each in emitted] == [len(answer.text) / 10 for _ in emitted]
    assert {len(line["candidates"]) for line in lines} > {0, 1}
    again = hacking.hacking_run([DecodeParams(run="n-1", n_samples=1, seed=4, **GIVEN)], judge)
    assert len(again) == 12 and {line["seed"] for line in again if line["run"] == "n-1"} == {4}


def line(prompt, n_samples, emitted, *others, seed=1, margin=0.0):
    """Return a line: the scores of the emitted candidate, None for an abstention, and of others."""
    candidates = [] if emitted is None else [{"score": emitted, "emitted": True}]
    candidates += [{"score": score, "emitted": False} for score in others]
    about = {"policy": "p", "n_samples": n_samples, "margin": margin, "seed": seed}
    return about | {"prompt_id": prompt, "candidates": candidates}


def test_harm_among_accepted_answers_has_its_two_causes():
    """Bug: an abstention counted as an accepted answer, the threshold itself as safe, a candidate
    without a score as safe, three seeds of a prompt as three prompts.
    """
    lines = [line("a", 2, 0.5, 0.9), line("b", 2, 0.7, 0.4), line("c", 2, 0.1, 0.9)]
    lines += [line("d", 2, None), line("a", 1, np.nan), *[line(name, 1, 0.1) for name in "bcd"]]
    lines += [line(name, 2, 0.1, margin=5.0) for name in "abcd"]
    rows = pools_table(lines, 0.5).set_index(["n_samples", "margin"])
    counts = ["n", "accepted", "harm", "only_unsafe", "outscored", "passed", "passed_unsafe"]
    found = rows.loc[[(2, 0), (1, 0)], counts].to_numpy().tolist()
    assert found == [[4, 3, 2, 1, 1, 6, 4], [4, 4, 1, 1, 0, 4, 1]]
    assert rows.loc[(2, 0), "minus_n_1"] == pytest.approx(2 / 3 - 1 / 4)
    nothing = rows.loc[(2, 5), ["minus_no_margin", "harm_high"]].tolist()
    assert nothing == pytest.approx([-2 / 3, 1 - 0.025 ** (1 / 4)])
    # three equal seeds of thirty prompts say no more than one
    one = [line(f"{i}", 1, 0.9 if i < 12 else 0.1) for i in range(30)]
    three = [each | {"seed": seed} for each in one for seed in (1, 2, 3)]
    ends = [pools_table(given, 0.5).loc[0, ["harm_low", "harm_high"]] for given in (one, three)]
    assert ends[0].tolist() == ends[1].tolist() and 0.2 < ends[0]["harm_low"] < 0.3
    with pytest.raises(RunError, match="occurs twice"):
        pools_table([*one, one[0]], 0.5)
