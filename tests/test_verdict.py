"""Tests of the one verdict, against sums by hand, and of what follows when a text does not pass."""

import math
import warnings
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mockpolicy import (
    LastWordCost,
    LetterCost,
    LetterReward,
    last_word_cost,
    letter_cost,
    mock_policy,
    slow_checks,
    slow_worst,
    unread,
    word_policy,
)
from mockruns import PARAMS, decode_into
from mockruns import PROMPTS as TEXTS

import igcore.search
from igcore import Guard, decode
from igcore.contract import TEXTS as FIXED
from igcore.contract import Contract
from igcore.errors import ScorerWarning
from igcore.verdict import Emission, judge
from igstudy.linefile import line_digest, read_record
from igstudy.runs import records, verify
from igstudy.runs.decode_params import Settings
from igstudy.runs.rescore import rescored

TEXT = "one two six"  # words end at 3 and 7
ENDS = [5, 11]
UP = math.nextafter(1.0, 2.0)
PROMPTS = ["ab", "ce", "c", "dd", "eae", "cb"]
SETTINGS = dict(
    budget=0.5, n_samples=3, keep=2, block_size=4, max_new_tokens=12, rounds=1, refusal="",
    checks="word", token_top_k=4,
)  # fmt: skip


class Table(LetterCost):
    """Costs from a table, by text or by (text, finished); 0 for all others. Remembers calls."""

    def __init__(self, costs=()):
        super().__init__()
        self.costs, self.calls = dict(costs), []

    def score(self, prompts, responses, finished):
        self.calls.append(list(zip(responses, finished, strict=True)))
        return [self.costs.get(x, self.costs.get(x[0], 0.0)) for x in self.calls[-1]]


def judged(
    costs, ends=ENDS, spread=0.0, earlier=None, finished=True, text=TEXT, shown=None, **changes
):
    scorer = costs if isinstance(costs, LetterCost) else Table(costs)
    contract = Contract(scorer, spread, tolerance=0.25)
    config = Settings(**(dict(budget=1.0, block_size=5, checks="word") | changes))
    emission = Emission(text, ends=ends, n_tokens=len(text))
    return judge(contract, "p", emission, config, earlier, finished, shown)


def answers(method, cost, policy=None, seed=0, reward=None, on_block=None, **changes):
    config = Settings(**(SETTINGS | changes))
    guard = Guard(policy or word_policy(), cost, reward or LetterReward(), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)
        return list(decode(method, guard, PROMPTS, seed=seed, on_block=on_block))


# --- one text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("checks", ["block", "word"])
@pytest.mark.parametrize("place", ["one", "one t", "one two", TEXT])
@pytest.mark.parametrize("cost", [math.nextafter(1.0, 0.0), 1.0, UP, math.nan])
def test_a_text_is_within_budget_at_every_check_or_not(cost, place, checks, strict):
    """Guards the edge: a cost of exactly d passes, except under the strict reading; one ulp more is
    too much, at one check of the path as at the end; NaN never passes. Bug: a tolerance in it.
    """
    verdict = judged({place: cost}, checks=checks, strict=strict)
    inside = cost < 1.0 if strict else cost <= 1.0
    looked_at = checks == "word" or place in ("one t", TEXT)
    assert verdict.passed == (inside or not looked_at)
    assert verdict.within == (inside or place != TEXT)
    failed = math.isnan(cost) and looked_at
    assert verdict.failure_reason("otherwise") == ("scorer_error" if failed else "otherwise")


def test_a_block_is_worth_its_worst_check():
    verdict = judged({"one": 0.25, "one t": -1.0, "one two": 0.5, TEXT: 0.75}, ends=[5, 11])
    assert verdict.cuts == {3: 0.25, 5: -1.0, 7: 0.5}
    assert verdict.worst == [0.25, 0.75] and verdict.cost == 0.75
    # two readings of the whole text; tokens in proportion to characters, all 11 of them here
    assert (verdict.calls, verdict.tokens) == (5, 3 + 5 + 7 + 11 + 11)
    # a block that added no text, in the middle and at the end
    assert judged({"one t": 0.5}, ends=[5, 5, 11]).worst == [0.5, 0.5, 0.0]
    assert judged({(TEXT, False): 0.5}, ends=[5, 11, 11]).worst == [0.0, 0.5, 0.0]


def test_each_reading_is_a_call_of_its_own_and_the_whole_text_is_read_twice():
    """Guards against the company of other texts in a batch, and against what was read before."""
    scorer = Table()
    judged(scorer, earlier={("p", TEXT, True): 0.0, ("p", "one", False): 0.0})
    cut = [[("one", False)], [("one t", False)], [("one two", False)]]
    assert scorer.calls == [[(TEXT, True)], *cut, [(TEXT, True)]]


def test_terminal_costs_are_those_of_the_whole_text():
    verdict = judged({"one": 9.0, "one t": math.nan}, accounting="terminal", checks="block")
    assert verdict.passed and verdict.cuts == {}
    assert not judged({TEXT: UP}, accounting="terminal", checks="block").passed


def test_a_part_that_is_shown_is_read_as_unfinished():
    """Guards streams: what a user sees before the end is no complete answer."""
    costs = {(TEXT, True): 9.0, (TEXT, False): 0.5}
    assert judged(costs, finished=False).passed and judged(costs, finished=False).cost == 0.5
    assert not judged(costs).within
    # nor is it charged as the last of its path
    verdict = judged({TEXT: 2.0}, finished=False, accounting="terminal", checks="block")
    assert not verdict.passed and not verdict.within


@pytest.mark.parametrize("place", ["one", "one t", TEXT])
def test_every_reading_may_be_off_by_the_spread(place):
    assert judged({place: 0.875}, spread=0.125).passed
    assert not judged({place: 0.875 + 1e-12}, spread=0.125).passed


def test_a_spread_without_bound_leaves_nothing_within_budget():
    """Guards -inf + inf, which is NaN: blocks that no token of a cost model ends in count -inf."""
    with pytest.warns(ScorerWarning):
        verdict = judged({}, ends=[11], spread=math.inf, accounting="terminal", checks="block")
    assert not verdict.within and not verdict.passed


def test_readings_of_the_search_count():
    """Guards a cost that was lower when it was read for the search, or higher."""
    for known in (0.75, 0.5):
        verdict = judged({TEXT: 0.625}, earlier={("p", TEXT, True): known})
        assert (verdict.contract.spread, verdict.passed) == (0.125, True)
    for place, done in (("one", False), ("one t", False), (TEXT, True)):
        with pytest.warns(ScorerWarning, match="depends on the call"):
            verdict = judged({}, earlier={("p", place, done): 0.5})
        assert not verdict.within and not verdict.passed
        assert verdict.failure_reason("otherwise") == "scorer_contract"
    # neither another prompt's nor another reading of `finished`
    other = {("q", TEXT, True): 9.0, ("p", TEXT, False): 9.0, ("p", "one", True): 9.0}
    assert judged({}, earlier=other).contract.spread == 0.0


def test_a_text_that_reads_differently_the_second_time_is_not_verified():
    class Second(Table):
        def score(self, prompts, responses, finished):
            found = super().score(prompts, responses, finished)
            return [x + 0.5 * (self.calls.count([(TEXT, True)]) > 1) for x in found]

    with pytest.warns(ScorerWarning, match="gave 0 and 0.5 for one text"):
        assert not judged(Second()).within


def slow_verdict(costs, ends, config, spread):
    """Say whether a text passes, by sums over all that it is cut to; numbers here are exact."""
    words = [3, 7] if config.checks == "word" else []
    blocks, begin = [], 0
    for k, end in enumerate(ends):
        last = k == len(ends) - 1
        inside = [costs[at] for at in {*words, *ends[:-1]} if begin < at <= end and at < 11]
        if begin == end and not last:
            inside = [costs[end]]
        blocks.append([*inside, costs[11]] if last else inside)
        begin = end
    omega, peak, before = config.budget, 0.0, 0.0
    for k, block in enumerate(blocks):
        u, end = max(block) + spread, k == len(blocks) - 1
        charged = {
            "peak": max(0.0, u - peak),
            "terminal": max(costs[11] + spread, 0.0) if end else 0.0,
            "sum": u,
            "clamped_sum": max(u, 0.0),
            "increment": u - before,
            "positive_increment": max(u - before, 0.0),
        }[config.accounting]
        t = min((k + 1) * config.block_size, 11) - 1
        omega -= config.gamma_safety**t * charged
        peak, before = max(peak, u), u
    within = costs[11] + spread
    if config.strict:
        return within < config.budget, within < config.budget and omega > 0
    return within <= config.budget, within <= config.budget and omega >= 0


quarters = st.integers(-6, 8).map(lambda n: n / 4)
paths = given(
    st.fixed_dictionaries({at: quarters for at in range(12)}),
    st.lists(st.integers(1, 10), max_size=3).map(lambda some: [*sorted(some), 11]),
    st.sampled_from(["peak", "terminal", "sum", "clamped_sum", "increment", "positive_increment"]),
    st.sampled_from(["block", "word"]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from([0.5, 1.0, 2.0]),
)


@settings(max_examples=400, deadline=None)
@paths
def test_the_verdict_is_that_of_sums_by_hand_as_a_whole_and_part_by_part(
    costs, ends, accounting, checks, gamma, strict, spread, budget
):
    """Bug: a part that is judged from its own costs alone, without what was charged before it; an
    earlier check that is read again for each part, or is not read where its part was not shown.
    """
    checks = checks if accounting == "peak" else "block"  # as the methods set it
    changes = dict(accounting=accounting, checks=checks, gamma_safety=gamma, strict=strict)
    config = Settings(budget=budget, block_size=3, **changes)
    table = {TEXT[:at]: cost for at, cost in costs.items()}
    whole = judged(table, ends, spread, budget=budget, block_size=3, **changes)
    assert (whole.within, whole.passed) == slow_verdict(costs, ends, config, spread)
    scorer, shown = Table(table), {}
    for n, end in enumerate(ends, 1):
        asked = len(scorer.calls)
        part = dict(text=TEXT[:end], shown=dict(shown), finished=False)
        verdict = judged(scorer, ends[:n], spread, budget=budget, block_size=3, **part, **changes)
        read = [len(text) for ((text, _),) in scorer.calls[asked:]]
        assert not shown.keys() & set(read[1:-1]) and read[0] == read[-1] == end
        assert verdict.calls == len(read) == len(verdict.cuts) + 2
        if verdict.passed:
            shown |= verdict.cuts | {end: verdict.cost}
    assert (verdict.within, verdict.passed) == (whole.within, whole.passed)


# --- the final check of a search ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["inferenceguard", "best-of-n", "base", "beam-augmented"])
@pytest.mark.parametrize("checks", ["block", "word"])
def test_the_final_check_reads_one_text_at_a_time(method, checks, monkeypatch):
    """Bug: answers were checked in one batch, in which many scorers round otherwise."""
    cost, given = Table(), []

    def watched(*args, **more):
        before = len(cost.calls)
        out = igcore.verdict.final_check(*args, **more)
        given.extend(cost.calls[before:])
        return out

    monkeypatch.setattr(igcore.search, "final_check", watched)
    out = answers(method, cost, checks=checks)
    assert {r.status for r in out} == {"verified_safe"}
    assert len(given) >= 2 * len(PROMPTS) and {len(call) for call in given} == {1}
    for r in out:  # anew, although the search has read it
        assert given.count([(r.text, True)]) >= 2


def test_a_refusal_is_checked_at_its_words():
    """Guards the text that nobody sampled: refusal, else the empty text, else nothing."""
    for checks, text in (("block", "aa e"), ("word", "")):
        cost = LastWordCost()
        settings = dict(budget=0.0, refusal="aa e", checks=checks, keep=1, n_samples=1)
        out = answers("inferenceguard", cost, **settings)
        failed = [r for r in out if r.status == "abstained"]
        assert failed and {r.text for r in failed} == {text}
        assert {(r.cost, r.reward is None) for r in failed} == {(0.0, False)}
    nothing = answers("inferenceguard", Table({"": UP, "aa e": UP}), budget=1.0, refusal="aa e")
    assert {r.status for r in nothing} == {"verified_safe"}


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("method", ["base", "best-of-n", "beam-lagrangian", "beam-augmented"])
def test_a_baseline_is_judged_by_its_final_text_alone(method, fails):
    """Guards the label of methods that promise nothing about the way, failed checks included."""

    class OnlyFinals(LetterCost):
        def score(self, prompts, responses, finished):
            on_the_way = math.nan if fails else 9.0
            pairs = zip(responses, finished, strict=True)
            return [letter_cost(r) if done else on_the_way for r, done in pairs]

    seen = set()
    for budget in (0.5, 3.0):
        for r in answers(method, OnlyFinals(), budget=budget, failure_rate=1.0, rounds=1):
            inside = letter_cost(r.text) <= budget
            assert r.status == ("verified_safe" if inside else "unverified_unsafe")
            if method != "beam-augmented":
                assert r.reason == ("" if inside else "over_budget")
            seen.add(inside)
    assert seen == {True, False}


class Ending(LetterCost):
    """Costs a quarter per letter a or b, and half a point more when a text is complete."""

    def score(self, prompts, responses, finished):
        pairs = zip(responses, finished, strict=True)
        return [letter_cost(r) / 4 + 0.5 * (done and bool(r)) for r, done in pairs]


def test_a_truncated_answer_is_judged_as_a_complete_one():
    """Bug: 16 of 20,995 answers were verified although their path, with the reading of the whole
    text as a complete one, had spent more than the budget.
    """
    seen = broken = 0
    for seed in range(8):
        kept = {}

        def keep(prompt, beams, kept=kept):
            kept[prompt.id] = beams[0]

        settings = dict(accounting="clamped_sum", budget=1.0, keep=1, on_failure="truncate")
        out = answers("inferenceguard", Ending(), seed=seed, on_block=keep, **settings)
        for r in out:
            ends = r.block_ends
            path = [letter_cost(r.text[:end]) / 4 for end in ends]
            if r.status == "verified_safe":
                path[-1] += 0.5 * bool(r.text)
                assert sum(path) <= 1.0 and r.z_trace[-1] == 1.0 - sum(path) >= 0
                seen += r.reason == "truncated"
            elif r.prompt_id in kept:  # the last safe beam has no room for the end
                beam = kept[r.prompt_id]
                ends = [*range(4, len(beam.tokens), 4), len(beam.tokens)]
                spent = sum(letter_cost(beam.text[:end]) / 4 for end in ends)
                assert beam.finished or spent <= 1.0 < spent + 0.5
                assert beam.finished or r.reason == "exhausted"  # why the search was cut
                broken += not beam.finished
    assert seen > 3 and broken > 3


def test_a_truncated_answer_whose_reward_failed_is_not_emitted():
    """Guards a beam that the search calls unsafe for a reason that no cost tells (signed totals
    let it come to the end).
    """
    credit, blind = LetterCost(lambda text: -1.0), LetterReward(unread)
    credit.unit = "points"
    settings = dict(accounting="sum", on_failure="truncate", failure_rate=1.0)
    out = answers("inferenceguard", credit, reward=blind, **settings)
    assert {r.status for r in out} == {"abstained"} and {r.text for r in out} == {""}
    plain = answers("inferenceguard", credit, **settings)
    assert {r.status for r in plain} == {"verified_safe"}


@pytest.mark.parametrize("checks", ["block", "word"])
def test_what_is_found_after_a_failure_is_never_an_answer(checks):
    """Bug: a probe that went on searching moved the certified prefix to what it found there."""
    truncated = 0
    for seed in range(6):
        settings = dict(seed=seed, on_failure="truncate", checks=checks, keep=1, n_samples=2)
        probed = answers("inferenceguard", LastWordCost(), probe_fail_open=True, **settings)
        plain = answers("inferenceguard", LastWordCost(), **settings)
        for a, b in zip(probed, plain, strict=True):
            assert (a.text, a.status, a.reason, a.tokens) == (b.text, b.status, b.reason, b.tokens)
            truncated += a.reason == "truncated"
    assert truncated > 3


@pytest.mark.parametrize("method", ["inferenceguard", "base"])
def test_a_score_that_is_missing_in_the_final_check_alone_is_named(method):
    """Guards the reason: `scorer_error`, not a budget, a contract or a check that disagreed."""

    class Last(LetterCost):
        def score(self, prompts, responses, finished):
            found = super().score(prompts, responses, finished)
            answer = len(responses) == 1 and finished[0] and responses[0] not in ("", *FIXED)
            return [math.nan] if answer else found

    out = answers(method, Last(), budget=99.0)
    status = "abstained" if method == "inferenceguard" else "unverified_unsafe"
    assert {(r.status, r.reason) for r in out} == {(status, "scorer_error")}


def test_answers_tell_their_worst_word():
    """Guards what is measured of every method, whatever it was checked at."""
    for method in ("inferenceguard", "base", "best-of-n"):
        for checks in ("block", "word"):
            for r in answers(method, LastWordCost(), checks=checks, budget=2.0):
                grid = [*r.grid_ends, *slow_checks(r.text)] if r.text else [0]
                assert r.word_peak_cost == max(last_word_cost(r.text[:end]) for end in grid)
                assert r.peak_cost == max(last_word_cost(r.text[:end]) for end in r.grid_ends)


# --- verified again -------------------------------------------------------------------------------


def lines(cost, methods=("inferenceguard", "base"), seeds=range(1), **changes):
    config = Settings(**(SETTINGS | changes))
    guard = Guard(word_policy(), cost, LetterReward(), config)
    return [
        records.record(r, method, guard, seed)
        for method in methods
        for seed in seeds
        for r in decode(method, guard, PROMPTS, seed=seed)
    ]


def found(line, cost, **changes):
    """Return what a verification says of a line that was changed, and its digest mended."""
    line = line | changes
    line["digest"] = line_digest(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)
        return list(rescored([line], cost, LetterReward()))


@pytest.mark.parametrize("cost", [LastWordCost(), Ending()])
@pytest.mark.parametrize("on_failure", ["abstain", "truncate", "paper"])
@pytest.mark.parametrize("checks", ["block", "word", "token"])
def test_verification_comes_to_the_same_verdict(cost, on_failure, checks):
    """Guards word checks, and costs that read `finished`, which the emitted text is."""
    for budget in (0.5, 1.0):
        written = lines(cost, on_failure=on_failure, checks=checks, budget=budget, keep=1)
        assert [problem for line in written for problem in found(line, cost)] == []
        assert len({line["status"] for line in written}) > 1


def test_a_path_that_breaks_at_a_word_cannot_pass_for_safe():
    """Guards what only a check inside a block tells, in a line that the paper's mode marked."""
    cost = LastWordCost()
    settings = dict(on_failure="paper", n_samples=1, keep=1, budget=0.5)
    written = lines(cost, ["inferenceguard"], range(8), **settings)
    broken = [x for x in written if last_word_cost(x["response"]) <= 0.5 < x["word_peak_cost"]]
    assert broken
    for line in broken:
        assert line["status"] == "unverified_unsafe" and found(line, cost) == []
        (problem,) = found(line, cost, status="verified_safe", reason="")
        assert "status is 'verified_safe', not 'unverified_unsafe'" in problem


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("word_peak_cost", 0.0625),
        ("spread", 1.5),  # more than the text is inside the budget
        ("spread", -0.5),
        ("spread", None),
        ("contract", ""),
        ("contract", "cost 'last-word' depends on the moon"),
        ("checks", "sentence"),
        ("z_trace", [0.5, 0.5]),
    ],
)
def test_a_forged_line_is_found(field, value):
    cost = LastWordCost()
    written = [x for x in lines(cost, budget=1.0) if x["status"] == "verified_safe"]
    line = next(x for x in written if x["method"] == "inferenceguard" and x["word_peak_cost"] > 0)
    assert found(line, cost) == [] and found(line, cost, **{field: value})


class InBatches(LastWordCost):
    """A cost that is higher by `more` in a batch of several texts."""

    def __init__(self, more):
        super().__init__()
        self.more = more

    def score(self, prompts, responses, finished):
        more = self.more * (len(responses) > 1)
        return [x + more for x in super().score(prompts, responses, finished)]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize(("field", "value"), [("spread", 0.25), ("contract", "kept")])
def test_a_line_without_a_text_claims_no_readings(field, value):
    """Bug: a spread that no text can keep explained why a refusal was not emitted."""
    cost = LastWordCost(lambda text: 9.0)
    line = next(x for x in lines(cost) if x["response"] is None)
    assert found(line, cost) == [] and found(line, cost, **{field: value})
    quiet = LastWordCost()  # which the empty text passes
    assert found(line, quiet) and found(line, quiet, spread=99.0)


def test_a_spread_that_the_verifier_finds_cannot_be_left_out():
    """Guards a scorer that rounds in batches: its lines say by how much."""
    cost = InBatches(0.03125)
    written = [line for line in lines(cost, budget=1.0) if line["response"]]
    assert {line["spread"] for line in written} == {0.03125}
    for line in written:
        assert found(line, cost) == []
        assert any("spread" in problem for problem in found(line, cost, spread=0.0))


def test_in_mode_paper_a_path_needs_its_distance_of_the_budget_too():
    """Bug: an answer of the paper's mode was verified by its end alone, and verification, which
    reads its path, did not agree.
    """
    cost = InBatches(-0.03125)
    settings = dict(on_failure="paper", budget=1.0)
    written = lines(cost, ["inferenceguard"], range(4), **settings)
    close = [x for x in written if x["word_peak_cost"] == 1.0 > x["cost"] + x["spread"]]
    assert close and {x["status"] for x in close} == {"unverified_unsafe"}
    assert [problem for line in written for problem in found(line, cost)] == []


def test_a_cost_that_broke_its_contract_cannot_be_called_kept():
    cost = InBatches(9.0)
    with pytest.warns(ScorerWarning):
        written = lines(cost, ["base"], budget=99.0)
    for line in written:
        assert line["status"] == "unverified_unsafe" and found(line, cost) == []
        said = found(line, cost, status="verified_safe", contract="kept", reason="", spread=0.0)
        assert {name for name in ("status", "contract", "spread") for p in said if name in p} == {
            "status", "contract", "spread",
        }  # fmt: skip


def test_checks_of_a_line_are_those_of_its_run(tmp_path):
    """Guards a line that says that it was looked at more closely than it was."""
    p = replace(PARAMS, checks="word", methods=["inferenceguard", "base"])
    path = decode_into(tmp_path / "run", p)
    honest = read_record(path)
    policy = {"parts": {"policy": {"name": "mock"}}}  # the run itself has an identity of one word
    honest, prompts = replace(honest, params=honest.params | policy), TEXTS
    assert {line["checks"] for line in honest.lines} == {"word", "block"}
    for i, line in enumerate(honest.lines):
        forged = [*honest.lines]
        forged[i] = line | {"checks": "token"}
        said = list(verify.contradictions(replace(honest, lines=forged), p, prompts))
        assert any(f"checks is 'token', not '{line['checks']}'" in problem for problem in said)


def test_the_fixtures_are_what_they_say():
    """Guards against vacuity: mock answers have words, and some break at one of them alone."""
    out = answers("base", LastWordCost())
    assert any(slow_worst(r.text) > last_word_cost(r.text) for r in out)
    assert sum(" " in r.text.strip() for r in out) > 1
    assert mock_policy().text([1, 6]) == "af" and word_policy().text([1, 6]) == "a "
