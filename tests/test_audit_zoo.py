"""Tests of `make audit`: its scorers are what they are called, its judge is right, and it can
fail.
"""

import functools
import math
import random
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mockpolicy import Answering

from igcore.budget import ACCOUNTINGS, trace
from igcore.contract import Contract
from igcore.models.registry import as_scorer
from igcore.scoring import Tally
from igcore.verdict import final_check, judge, measure
from tests.audit import emissions
from tests.audit.__main__ import across_processes, main
from tests.audit.emissions import alone, harshness, honest_cost, run_case, spent
from tests.audit.zoo import KINDS, Hostile

FIXED = [kind for kind, made in KINDS.items() if made.deterministic]
NUMBERS = (0, 1, 2, 5)  # 32, 8, 32 and 1 answers of a kind, each in one group
PROMPT = "How do plants grow?"
LONGER = [" mud rain", " rust mud mud", " please", " thorn bread smoke mud", " mud"]


def answer(scorer, texts, finished=True):
    """What a scorer returns for texts, as numbers; None where it raises."""
    try:
        given = scorer.score([PROMPT] * len(texts), list(texts), [finished] * len(texts))
    except RuntimeError:
        return None
    return np.asarray(given).tolist()


# --- the zoo --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_deterministic_where_it_says_so(kind):
    """Bug: a kind that keeps a state is held against the search, or the reverse."""
    scorer = Hostile(kind, honest_cost(""), 1.0)
    calls = [repr(answer(scorer, LONGER)) for _ in range(4)]
    assert (len(set(calls)) == 1) is KINDS[kind].deterministic
    again = Hostile(kind, honest_cost(""), 1.0)
    assert repr(answer(again, LONGER)) == calls[0]  # no state outlives a scorer


def test_kinds_lie_as_they_are_called():
    """Bug: a hostile scorer that is honest by mistake, and proves nothing."""
    costs = [harshness(text) for text in LONGER]
    assert costs == [1.0, 3.0, -0.75, 3.0, 1.0]

    def of(kind, texts=LONGER, finished=True):
        return answer(Hostile(kind, honest_cost(""), 1.0), texts, finished)

    assert of("honest") == costs and of("lies on prefixes", finished=False) == [0.0] * 5
    assert of("depends on batch size") == [0.0] * 5
    assert of("depends on batch size", LONGER[1:2]) == [3.0]
    assert of("depends on place in batch") == [1.0, 0, 0, 0, 0]
    assert of("exactly d") == [1.0, 1.0, -0.75, 1.0, 1.0]
    assert max(of("d or one ulp over d", list("abcdefgh"))) == math.nextafter(1.0, 2.0)
    twice = Hostile("good the first two times", honest_cost(""), 1.0)
    assert [answer(twice, LONGER[1:2]) for _ in range(3)] == [[0.0], [0.0], [3.0]]
    texts = [f"rain {i}" for i in range(60)]
    assert {"nan", "inf", "-inf"} == {
        str(x) for kind in ("NaN", "inf", "-inf") for x in of(f"{kind} on some texts", texts)
    } - {"0.0"}
    assert any(of("raises on some texts", [text]) is None for text in texts)
    given = ["prompt"], [" mud"], [False]
    assert Hostile("mutates its arguments", honest_cost(""), 1.0).score(*given) == [1.0]
    assert given == (["prompt"], [""], [True])
    buffered = Hostile("reuses its own buffer", honest_cost(""), 1.0)
    first = buffered.score([PROMPT] * 5, LONGER, [True] * 5)
    assert first.tolist() == costs
    buffered.score([PROMPT], [""], [True])
    assert first.tolist() == [0.0] * 5


# --- the judge ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_the_judge_charges_as_the_safety_state_does(accounting):
    """Bug: a judge with another idea of a path, which finds violations that are none."""
    draw = random.Random(0)
    for n in range(1, 7):
        costs = [draw.randrange(-8, 9) / 4 for _ in range(n)]
        assert spent(costs, accounting) == trace(costs, 1.0, accounting)[-1].total


@pytest.mark.parametrize(
    "given",
    [
        [math.nan], [math.inf], [-math.inf], [], [1.0, 1.0], 1.0, [[1.0]], None, ["1"], [b"1"],
        [1j], np.ma.array([1.0], mask=[True]), torch.tensor([math.nan]),
    ],
    ids=repr,
)  # fmt: skip
def test_the_judge_takes_one_finite_number_and_nothing_else(given):
    assert alone(Answering(lambda *call: given), "p", "t", True) == math.inf


@pytest.mark.parametrize(
    "given", [[1], (1.0,), np.float32([1]), torch.tensor([1.0]), [True]], ids=repr
)
def test_the_judge_reads_numbers(given):
    assert alone(Answering(lambda *call: given), "p", "t", True) == 1.0
    assert alone(object(), "p", "t", True) == math.inf  # it raises


@pytest.mark.parametrize(
    ("checks", "expected"), [("block", [9]), ("word", [4, 9, 10]), ("token", [4, 9, 10])]
)
def test_the_judge_asks_at_every_check(checks, expected):
    """Bug: a search that promises every word, judged at the ends of its blocks alone."""
    tokens = [emissions.WORDS.index(word) for word in (" mud", " rain", "s", " mud")]
    text = emissions.tiny_policy().text(tokens)
    assert text == " mud rains mud"
    guard = SimpleNamespace(config=SimpleNamespace(checks=checks))
    answer = SimpleNamespace(text=text, tokens=tokens, block_ends=[9, 14], guard=guard)
    assert emissions.checks_of(answer) == expected
    answer.block_ends = [9, 14, 14]  # the last block is an end token
    assert emissions.checks_of(answer) == sorted([*expected, 14])


# --- answers --------------------------------------------------------------------------------------


@functools.cache
def tallies(kind):
    total = emissions.Tally()
    for number in NUMBERS:
        total.add(run_case((kind, number, ""))[1])
    return total


@pytest.mark.parametrize("kind", FIXED)
def test_no_answer_to_a_deterministic_scorer_is_over_budget(kind):
    """Guards the promise of the package, for a share of what `make audit` decodes."""
    found = tallies(kind)
    assert found.counts["violations"] == 0, found.examples
    assert found.counts["tried"] == 73


@pytest.mark.parametrize("kind", [kind for kind in FIXED if not kind.startswith("depends")])
def test_answers_are_verified(kind):
    """Bug: an audit of abstentions, which violates nothing."""
    counts = tallies(kind).counts
    assert 0 < counts["verified_safe"] < counts["tried"]


@pytest.mark.parametrize("kind", ["honest", "lies on prefixes", "NaN on finals"])
def test_a_final_check_that_lets_everything_through_is_found(kind, monkeypatch):
    """Bug: an audit that cannot fail."""

    def passes(*given, **more):
        return replace(judge(*given, **more), within=True, passed=True)

    def agrees(scoring, prompts, proposals, *settings, **more):
        safe = [replace(proposal, safe=True) for proposal in proposals]
        return final_check(scoring, prompts, safe, *settings, **more)

    monkeypatch.setattr("igcore.verdict.judge", passes)
    monkeypatch.setattr("igcore.search.final_check", agrees)
    found = [run_case((kind, number, ""))[1] for number in range(8)]
    assert sum(tally.counts["violations"] for tally in found) > 10
    assert any("has costs [" in text for tally in found for text in tally.examples)


def test_a_path_over_budget_is_found(monkeypatch):
    """Bug: a judge that reads the final text alone."""
    for room in ("beams", "verdict"):
        monkeypatch.setattr(f"igcore.{room}.is_safe", lambda state, strict: True)
    found = [run_case(("lies on finals", number, ""))[1] for number in range(24)]
    assert sum(tally.counts["violations"] for tally in found) > 10


def test_a_case_is_reproducible():
    """Bug: a violation that nobody can find again."""
    assert run_case(("noise of sd 0.3", 3, "")) == run_case(("noise of sd 0.3", 3, ""))


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """An audit of three kinds."""
    kinds = {kind: KINDS[kind] for kind in ("honest", "NaN on finals", "drifts upward")}
    monkeypatch.setattr(emissions, "KINDS", kinds)


def test_the_command_prints_what_was_tried_and_what_survived(few, capsys):
    assert main(["--emissions", "150", "--processes", "1"]) == 0
    out = capsys.readouterr().out
    rows = {
        r[0].strip(): list(map(int, r[1:]))
        for r in re.findall(r"^(.{28})" + r" +(\d+)" * 4, out, re.M)
    }
    assert set(rows) == {"honest", "NaN on finals", "drifts upward", "all"}
    assert rows["all"] == [sum(column) for column in zip(*list(rows.values())[:-1], strict=True)]
    assert rows["all"][0] >= 150 and rows["honest"][3] == 0
    unnoticed = re.search("unnoticed: (.*)", out)[1]
    assert ("drifts upward" in unnoticed) != ("drifts upward" in re.search("warned of.*", out)[0])


def test_a_cost_of_ones_own_is_tried_in_every_kind(few, tmp_path, capsys, monkeypatch):
    """Bug: an audit of the built-in cost in place of the one that was named."""
    (tmp_path / "longtexts.py").write_text("def length(text):\n    return len(text) / 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = ["--cost", "longtexts:length", "--emissions", "90", "--processes", "1"]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "scored twice" in out and "FAILS" not in out and "drifts upward" in out


# --- a second process -----------------------------------------------------------------------------

COSTS = """
import os
KNOWN, SALT = {}, os.getpid()  # two of them always differ
def honest(text):
    return len(text) / 10 + sum(text.lower().count(word) for word in ("stupid", "idiot", "hate"))
def kept(key, cost):
    return KNOWN.setdefault(key, cost)
def first_characters(text): return kept(text[:20], honest(text))
def length(text): return kept(len(text), honest(text))
def prompt_alone(prompt, response): return kept(prompt, honest(response))
def without_prompt(prompt, response): return kept(response, prompt.count("w"))
def hashed(text): return hash(text) % 7
def by_id(text): return id(text) % 1000
def salted(text): return honest(text) + SALT / 1000
"""
MISSED = re.findall(r"^def (\w+)\(.*\): ", COSTS, re.M)


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    """What the audit says of each cost of a module; the second process is asked about each."""
    folder = tmp_path_factory.mktemp("costs")
    (folder / "movingcosts.py").write_text(COSTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield lambda name: across_processes(f"movingcosts:{name}")


@pytest.mark.parametrize("name", MISSED)
def test_a_second_process_finds_what_one_cannot(across, name):
    """Bug: such a cost was audited in one process and one order, and 207 of 1,212 answers that it
    called safe were over budget.
    """
    cost = as_scorer(f"movingcosts:{name}", "cost")
    assert not Contract.examined(cost, Tally()).problem  # what a guard sees
    sys.modules["movingcosts"].KNOWN.clear()
    found, problem = across(name)
    assert "depends on the process or the order" in problem, found
    assert problem.endswith("for one text") and "\n" not in problem


def test_an_honest_cost_passes_and_what_no_second_process_can_make_is_named(across, monkeypatch):
    """Bug: an audit that nothing passes; one that passes a closure of a notebook, or a module that
    only one process has, without asking anybody.
    """
    assert across("honest") == ("two processes differ by up to 0", "")
    factor = 2.0
    found = [across_processes(lambda text: factor * len(text))]
    monkeypatch.setitem(sys.modules, "here_alone", SimpleNamespace(length=len))
    found.append(across_processes("here_alone:length"))
    for sentence, problem in found:
        assert sentence.startswith("not audited across processes: ") and not problem
        assert "\n" not in sentence
    assert "cannot be imported" in found[1][0]


def test_the_command_stops_at_a_cost_that_a_second_process_refutes(across, capsys):
    assert main(["--cost", "movingcosts:salted", "--emissions", "1", "--processes", "1"]) == 1
    out, errors = capsys.readouterr()
    assert "scored twice, it differs by up to 0\n" in out and "two processes differ" in out
    assert errors.startswith("error: cost 'movingcosts:salted' depends on the process")


def test_a_reward_that_is_reported_stale_is_found(monkeypatch):
    """Bug: rewards were reported from a cache of the search, and nobody scored them again."""
    assert tallies("honest").counts["violations"] == 0
    stale = lambda *given: [{**metric, "reward": 7.5} for metric in measure(*given)]  # noqa: E731
    monkeypatch.setattr("igcore.decoding.measure", stale)
    found = [run_case(("honest", number, ""))[1] for number in range(4)]
    examples = [text for tally in found for text in tally.examples]
    assert any("is reported with the reward 7.5, and has" in text for text in examples)


def test_a_violation_is_an_error(few, capsys, monkeypatch):
    monkeypatch.setattr(emissions, "violation", lambda scorer, answer: "seen")
    assert main(["--emissions", "150", "--processes", "1"]) == 1
    errors = capsys.readouterr().err
    assert "error: honest (case 0" in errors and "drifts upward" not in errors
    assert re.search(r"error: \d+ answers to deterministic scorers are over budget", errors)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--emissions", "-1"], "--emissions is -1; give a whole number of at least 1"),
        (["--processes", "0"], "--processes is 0; give a whole number of at least 1"),
        (["--cost", "nothing"], "unknown scorer 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, said, capsys):
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and said in errors and errors.count("\n") == 1
