"""Tests of the scorers' contract: a cost that moves with anything but the text verifies nothing."""

import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from mockpolicy import LetterCost, LetterReward, letter_cost, mock_policy

from igcore import Guard, ParameterError, PolicyError, SearchConfig, decode
from igcore.contract import ROUNDING, ROUNDING_SHARE, TEXTS, Contract, Scoring
from igcore.errors import ScorerError, ScorerWarning
from igcore.models.registry import as_scorer
from igcore.prompt import PROBE
from igcore.scoring import Tally

SETTINGS = dict(budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=6, refusal="")
PROMPTS = ["ab", "fed", "c", "dd", "eae", "fcb"]


class Moving(LetterCost):
    """The letters' cost, moved by what a function says of the call.

    The function gets the number of the call, the number of texts in it, the place of the text, the
    text, and whether it is finished.
    """

    def __init__(self, move):
        super().__init__()
        self.move, self.calls = move, 0

    def score(self, prompts, responses, finished):
        self.calls += 1
        rows = enumerate(zip(responses, finished, strict=True))
        return [
            letter_cost(text) + self.move(self.calls, len(responses), i, text, done)
            for i, (text, done) in rows
        ]


def noise(seed=0, sd=1.0):
    rng = np.random.default_rng(seed)
    return lambda *_: sd * rng.standard_normal()


BREACHES = {  # what a cost may depend on besides the text, and what is said of it
    "noise": (noise(sd=3.0), "the call"),
    "drift": (lambda call, *_: 0.5 * call, "the call"),
    "batch size": (lambda call, n, *_: 2.0 if n > 1 else 0.0, "the batch"),
    "place": (lambda call, n, i, *_: 0.5 * i, "the batch"),
    "first of a batch": (
        lambda call, n, i, text, *_: 2.0 * (n > 1 and i == 0 and bool(text)),
        "the batch",
    ),
    "fails in batches": (lambda call, n, *_: math.nan if n > 1 else 0.0, "the batch"),
    "fails at times": (lambda call, *_: math.nan if call % 2 else 0.0, "the call"),
}


def examined(scorer):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        contract = Contract.examined(scorer, Tally())
    return contract, [str(warning.message) for warning in warned]


# --- at loading -----------------------------------------------------------------------------------


def test_a_function_of_the_text_keeps_its_contract():
    scorer, tally = LetterCost(), Tally()
    contract = Contract.examined(scorer, tally)
    assert (contract.spread, contract.problem) == (0.0, "")
    assert contract.scorer is scorer and contract.tally is tally and tally.scored == 0
    costs = [letter_cost(text) for text in TEXTS]
    assert contract.tolerance == ROUNDING_SHARE * (max(costs) - min(costs)) > ROUNDING


def test_fixed_texts_are_asked_for_twice_alone_and_twice_in_a_batch():
    cost = LetterCost()
    Contract.examined(cost, Tally())
    assert {(prompt, done) for call in cost.asked for prompt, _, done in call} == {(PROBE, True)}
    alone = [[text] for text in TEXTS]
    asked = [[text for _, text, _ in call] for call in cost.asked]
    assert asked == [*alone, *alone, list(TEXTS), list(TEXTS[::-1])]


@pytest.mark.parametrize("kind", BREACHES)
def test_a_cost_that_depends_on_more_than_the_text_is_found_at_loading(kind):
    move, dependence = BREACHES[kind]
    contract, warned = examined(Moving(move))
    assert contract.spread > contract.tolerance
    assert contract.problem.startswith(f"cost 'letters' depends on {dependence}")
    assert warned == [f"{contract.problem}; its answers are not verified"]


def test_rounding_is_no_breach_but_a_margin():
    """Guards bfloat16 in batches: its answers may be verified, at some distance of the budget."""
    contract, warned = examined(Moving(lambda call, n, *_: 0.25 if n > 1 else 0.0))
    assert (contract.spread, contract.problem, warned) == (0.25, "", [])


def test_a_constant_cost_has_a_tolerance_for_rounding_alone():
    contract, _ = examined(LetterCost(lambda text: -300.0))
    assert contract.tolerance == pytest.approx(300 * ROUNDING) and not contract.problem


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda text: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (lambda text: math.nan, "it returned no finite number"),
        (lambda text: "0.3", r"it returned '0.3' \(str\), which is no number; return a number"),
        (
            lambda text: [{"score": 1}],
            r"'score': 1.* \(list\), which is no number; return a number",
        ),
        (lambda text: np.zeros(2), "return a number, or True or False"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_cost_that_reads_none_of_the_fixed_texts_is_refused(answer, sentence, listed):
    """Bug: a guard was made whose every answer abstained, with warnings by the dozen."""
    cost = [lambda text: 0.0, answer] if listed else answer
    with warnings.catch_warnings(), pytest.raises(ParameterError, match=sentence) as caught:
        warnings.simplefilter("ignore", ScorerWarning)
        Guard(mock_policy(), cost, budget=1.0)
    assert "failed on all of 7 short texts" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_async_cost_is_refused():
    """Bug: a cost that returns coroutines was taken, and all answers abstained."""

    async def later(text):
        return 0.0

    with pytest.raises(ParameterError, match="coroutine.*, which is no number; return a number"):
        Guard(mock_policy(), later, budget=1.0)


def test_a_cost_that_knows_nothing_of_the_empty_text_is_taken():
    guard = Guard(mock_policy(), lambda text: len(text.strip("a")) / len(text), budget=9.0)
    assert guard("ab").status == "verified_safe"


def test_memory_that_runs_out_in_the_examination_is_halved():
    """Bug: a raw error as the guard was made, of a scorer that reads three texts at a time."""

    class Narrow(LetterCost):
        def score(self, prompts, responses, finished):
            if len(responses) > self.most:
                raise MemoryError
            return super().score(prompts, responses, finished)

    cost = Narrow()
    cost.most = 3
    assert not Contract.examined(cost, Tally()).problem
    cost.most = 0
    with pytest.raises(PolicyError, match="^memory ran out for a single text"):
        Contract.examined(cost, Tally())


def test_one_fixed_text_that_fails_says_nothing():
    contract, _ = examined(Moving(lambda call, n, i, text, done: math.nan if text == "" else 0.0))
    assert (contract.spread, contract.problem) == (0.0, "")


def test_a_reward_is_read_once():
    """Guards loading: a reward decides no verdict, and may be slow; and a reward that returns
    nothing, under which each answer failed.
    """
    asked = []
    guard = Guard(mock_policy(), LetterCost(), lambda text: asked.append(text) or 1, budget=1.0)
    assert guard.contracts["reward"].tolerance == math.inf
    assert tuple(asked) == TEXTS
    with pytest.raises(ParameterError, match="^reward .* returned None .NoneType., which is no"):
        Guard(mock_policy(), LetterCost(), lambda text: None, budget=1.0)


def test_an_examination_is_made_once():
    """Guards the cost of `under`, which every call of a guard makes."""
    cost = LetterCost()
    guard = Guard(mock_policy(), cost, LetterReward(), budget=1.0)
    asked = cost.texts
    assert asked == 4 * len(TEXTS)
    assert guard.with_method("base").contracts == guard.contracts
    assert cost.texts == asked


def test_a_known_contract_counts_failures_by_the_new_rate():
    """Bug: `failure_rate` of the guard before decided when a run stops."""
    guard = Guard(mock_policy(), LetterCost(), budget=1.0)
    strict = replace(guard.config, failure_rate=0.125)
    found = replace(guard, config=strict).contracts["cost"]
    assert (found.tally.rate, found.tolerance) == (0.125, guard.contracts["cost"].tolerance)
    assert found.tally is not guard.contracts["cost"].tally


def test_a_guard_recovers_when_its_scorer_does():
    """Bug: a guard counted the failures of all its calls, so that after an outage of its cost every
    call raised, however long the cost had worked again.
    """
    cost = LetterCost()
    guard = Guard(mock_policy(), cost, budget=9.0)
    cost.of = lambda text: math.nan
    with pytest.raises(ScorerError, match="failed on"):
        guard.map(["ab", "cd"] * 30)
    cost.of = letter_cost
    assert guard("a").status == "verified_safe"


def test_two_backbones_share_no_cache():
    """Bug: a cost read its texts in the KV cache of the reward's model. Guards the count of its
    failures as well, which is that of the whole run.
    """

    class Caching(LetterCost):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def open_cache(self, prompts):
            return self.backbone

        def with_cache(self, session):
            return session

        def uncached(self):
            return self

    contracts = {"cost": Contract(Caching("one")), "reward": Contract(Caching("two"))}
    scoring = Scoring(contracts, PROMPTS)
    assert [scoring.search[role].scorer for role in ("cost", "reward")] == ["one", "two"]
    for role, contract in contracts.items():
        assert scoring.search[role].tally is scoring.reported[role].tally is contract.tally


# --- a cost and a budget that do not fit ----------------------------------------------------------


def scored(number, unit="as the function returns it"):
    """Return a cost in a unit: one number for every text, or a function of a text."""
    cost = as_scorer(lambda text: number(text) if callable(number) else number, "cost")
    return replace(cost, unit=unit)


def short(text):
    return float(len(text) < 25)


def warnings_of(cost, **settings):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        guard = Guard(mock_policy(), cost, **settings)
        guard.with_method("inferenceguard")
    assert all(warning.filename == __file__ for warning in warned)
    return [str(warning.message) for warning in warned]


@pytest.mark.parametrize(
    ("cost", "settings", "sentence"),
    [
        (scored(0.5, "probability"), {"budget": 50}, "a probability, .* within 50; give a"),
        (scored(-0.5), {"budget": 0}, "every examined text costs below 0 .* up to -0.5, .*'logit'"),
        (scored(0.99), {"budget": 0.5}, "^every examined text is over .* 0.5 .*higher worse"),
        (scored(short), {"budget": 0}, "^the empty answer, as is .*accounting='terminal'$"),
        ([scored(0, "logit"), scored(0, "probability")], {"budget": 1}, "mixes the units logit, p"),
        ([scored(9), scored(0, "probability")], {"budget": 10}, "mixes the units as the function"),
    ],
    ids=["unit", "negative", "goodness", "whole answer", "two scales", "counts and a probability"],
)
def test_a_budget_that_does_not_fit_its_cost_is_named_once(cost, settings, sentence):
    """Guards whoever disarms a guard by mistake: every text passed, or none, without a word."""
    (warned,) = warnings_of(cost, **settings)
    assert re.search(sentence, warned)


@pytest.mark.parametrize(
    ("cost", "settings"),
    [
        (scored(0.5, "probability"), {"budget": 0.99}),
        (scored(0.5, "probability"), {"budget": 8, "accounting": "sum"}),
        (scored(-3.0, "logit gap"), {"budget": 0}),  # of a guard model, for harmless texts
        (scored(lambda text: len(text) - 1.0), {"budget": 0}),  # only the empty text passes
        (scored(lambda text: float(not text)), {"budget": 0}),  # any first word passes
        (scored(short), {"budget": 0, "accounting": "terminal"}),
        (scored(0.99), {"budget": 0.5, "method": "best-of-n-augmented"}),
        (scored(0.99), {"budget": 0.5, "method": "beam-lagrangian"}),
        ([scored(0, "names"), scored(0, "capitals")], {"budget": 0}),
        ([scored(0.3), scored(0.2, "probability")], {"budget": 0.5}),
    ],
)
def test_an_honest_cost_raises_no_doubt(cost, settings):
    """Guards ``python -W error``, under which a false alarm ends a run."""
    assert warnings_of(cost, **settings) == []


def test_other_settings_are_doubted_where_they_are_given():
    """Guards `with_config`: the policy loaded again, or a new budget that nobody compared."""
    guard = Guard(mock_policy(), scored(0.5, "probability"), budget=0.9)
    with pytest.warns(ScorerWarning, match="is within 2;") as warned:
        loose = guard.with_config(budget=2, keep=1)
    assert (warned[0].filename, loose.policy) == (__file__, guard.policy)
    assert (loose.config.budget, loose.config.keep, guard.config.budget) == (2, 1, 0.9)


# --- two readings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "spread", "broken"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.125, False),  # what was known
        ([1.0, 2.0], [1.25, 2.0], 0.25, False),  # as far as the tolerance
        ([1.0, 2.0], [1.0, 1.5], 0.5, True),
        ([math.nan, 2.0], [math.nan, 2.0], 0.125, False),
        ([1.0, math.nan], [1.0, 2.0], math.inf, True),
        ([1.0], [math.nan], math.inf, True),
        ([], [], 0.125, False),
    ],
)
def test_two_readings_widen_the_spread_or_break_the_contract(first, second, spread, broken):
    known = Contract(LetterCost(), spread=0.125, tolerance=0.25)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = known.compared(first, second, "the weather: asked")
    assert found.spread == spread and bool(found.problem) == broken == bool(warned)
    assert found.tolerance == 0.25 and found.tally is known.tally and known.spread == 0.125


def test_the_problem_names_the_two_numbers_that_are_furthest_apart():
    known = Contract(LetterCost(), tolerance=0.1)
    with pytest.warns(ScorerWarning, match="gave 2 and 5 for one text; its answers are not"):
        found = known.compared([1.0, 2.0], [1.5, 5.0], "the weather: asked twice,")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # and is said once
        again = found.compared([1.0], [9.0], "the moon: asked twice,")
    assert again.problem == found.problem and again.spread == 8.0


# --- in a search ----------------------------------------------------------------------------------


def answers(method, cost, **changes):
    config = SearchConfig(**(SETTINGS | {"failure_rate": 1.0} | changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)
        return list(decode(method, Guard(mock_policy(), cost, LetterReward(), config), PROMPTS))


@pytest.mark.parametrize("kind", BREACHES)
@pytest.mark.parametrize("on_failure", ["abstain", "truncate"])
def test_nothing_is_verified_by_a_cost_that_broke_its_contract(kind, on_failure):
    """Guards the promise: 85 % of such answers were over budget when they were read again."""
    for budget in (1.0, 100.0):
        cost = Moving(BREACHES[kind][0])
        out = answers("inferenceguard", cost, budget=budget, on_failure=on_failure)
        assert [(r.status, r.text) for r in out] == [("abstained", None)] * len(PROMPTS)
        if budget == 100.0 and kind not in ("fails at times", "fails in batches"):
            assert {r.reason for r in out} == {"scorer_contract"}


@pytest.mark.parametrize("method", ["base", "best-of-n-augmented", "beam-lagrangian"])
def test_a_baseline_is_marked_as_not_verified(method):
    out = answers(method, Moving(BREACHES["batch size"][0]), budget=100.0)
    assert {(r.status, r.reason) for r in out} == {("unverified_unsafe", "scorer_contract")}
    assert all(r.text is not None and "depends on the batch" in r.contract for r in out)


def test_in_mode_paper_the_answer_is_marked():
    out = answers("inferenceguard", Moving(BREACHES["place"][0]), on_failure="paper", budget=99.0)
    assert {(r.status, r.reason) for r in out} == {("unverified_unsafe", "scorer_contract")}


@pytest.mark.parametrize(
    "move",
    [
        # safe until the search is over: a text alone, finished, is the final check's
        lambda call, n, i, text, done: 50.0 if n == 1 and done and text else 0.0,
        # each text is good the first time only
        lambda *args, seen=set(): 50.0 if args[3:] in seen else (seen.add(args[3:]) or 0.0),
    ],
    ids=["alone", "first time"],
)
def test_a_lie_that_only_the_answer_shows_is_found_in_the_final_check(move):
    """Guards against a scorer that keeps its contract for the fixed texts, and breaks it in a run:
    the readings of the search are compared with those of the final check.
    """
    fixed = set(TEXTS)
    cost = Moving(lambda *args: 0.0 if args[3] in fixed else move(*args))
    guard = Guard(mock_policy(), cost, LetterReward(), SearchConfig(**SETTINGS | {"budget": 99.0}))
    assert not guard.contracts["cost"].problem
    with pytest.warns(ScorerWarning, match="depends on the call: asked in the search and once"):
        out = list(decode("inferenceguard", guard, PROMPTS))
    assert {(r.status, r.reason, r.text) for r in out} == {("abstained", "scorer_contract", "")}


def test_a_cost_that_lies_on_finished_texts_is_believed_about_them():
    """Guards `finished`, which a cost may read: the finished text is the one that is emitted."""
    cost = Moving(lambda call, n, i, text, done: 9.0 if done and text else -9.0)
    out = answers("inferenceguard", cost, budget=5.0)
    assert {r.status for r in out} == {"abstained"} and {r.reason for r in out} == {"exhausted"}


def test_answers_keep_their_distance_of_the_budget():
    """Guards the margin: a cost of up to d less the spread is verified, and no more."""
    wide = Moving(lambda call, n, *_: 0.25 if n > 1 else 0.0)  # the reading alone is lower
    for r in answers("inferenceguard", wide, budget=1.0):
        if r.status == "verified_safe":
            assert r.spread == 0.25 and r.cost + 0.25 <= 1.0 and r.contract == "kept"
            assert r.z_trace[-1] == 1.0 - r.cost  # the trace is of the readings as they are
    costs = {}
    for budget in (1.0, 1.25):
        out = answers("base", wide, budget=budget)
        costs[budget] = {r.status for r in out if r.cost == 1.0}
        assert all(r.spread == 0.25 for r in out)
    assert costs == {1.0: {"unverified_unsafe"}, 1.25: {"verified_safe"}}


def test_every_answer_of_an_honest_cost_says_that_it_was_kept():
    for method in ("inferenceguard", "base"):
        for r in answers(method, LetterCost()):
            assert (r.spread, r.contract) == (0.0, "kept" if r.text is not None else "")
