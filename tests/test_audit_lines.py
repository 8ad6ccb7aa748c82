"""Tests of single lines that no other test guards, found by breaking them."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mockpolicy import LETTERS, Answering, LetterCost, LetterReward, mock_policy, unread

from igcore import Guard, SearchConfig, decode
from igcore.beams import Beam
from igcore.budget import start, trace
from igcore.candidates import new_search, why_unsafe
from igcore.contract import Contract
from igcore.errors import ScorerWarning
from igcore.methods import method_of
from igcore.prompt import Prompt
from igcore.scoring import Tally
from igcore.streaming import Shown, certified_prefix
from igcore.verdict import Emission, emission_of, judge
from igserve.generate import _Streamed

PROMPTS = [Prompt(f"id{i}", text, "mock") for i, text in enumerate(["ab", "fed"])]
SPELLED = SimpleNamespace(text="".join)  # one letter, one token


def beam(text, ends, cost=0.0, finished=False, accounting="peak", then=0.0):
    """Return a beam over letters, charged a cost and after that another."""
    state = trace([cost, then], 1.0, accounting)[-1]
    return Beam(list(text), text, finished, state, ends, 0)


# --- the safety state -----------------------------------------------------------------------------


def test_a_peak_is_the_worst_score_itself():
    """Bug: the increments of a peak were summed up, and rounding made its total larger or smaller
    than the worst score.
    """
    draw = random.Random(0)
    for _ in range(1000):
        scores = [0.0, *(draw.gauss(0, 1) for _ in range(8))]
        assert trace(scores, 1.0)[-1].total == max(scores)


# --- contracts and verdicts -----------------------------------------------------------------------


def test_a_cost_that_depends_on_the_order_of_its_batch_is_found():
    """Bug: a batch was read in one order, in which this cost is right."""

    def ordered(prompts, responses, finished):
        backwards = len(responses) > 1 and len(responses[0]) > len(responses[-1])
        return [len(response) + 100.0 * backwards for response in responses]

    with pytest.warns(ScorerWarning, match="depends on the batch"):
        assert Contract.examined(Answering(ordered), Tally()).problem


def test_a_contract_is_of_one_scorer():
    """Bug: a guard with another cost kept the contract of the one before."""
    guard = Guard(mock_policy(), LetterCost(), budget=1.0)
    other = replace(guard, cost=LetterCost())
    assert other.contracts["cost"].scorer is other.cost is not guard.cost


def test_the_cost_of_a_text_is_that_of_its_last_token():
    """Bug: the final cost was that of a token on the way."""

    class Tokens(LetterCost):
        reads_tokens = True

        def token_scores(self, prompts, responses, since):
            return [([1, 2, 3], [0.0, 0.5, 0.25])]

        def score(self, prompts, responses, finished):
            return [0.25]

    emission = Emission("abc", ends=[3], n_tokens=3)
    verdict = judge(Contract(Tokens()), "p", emission, SearchConfig(budget=1.0, checks="token"))
    assert (verdict.cost, verdict.worst, verdict.contract.spread) == (0.25, [0.5], 0.0)


def test_the_final_check_is_told_the_ends_of_blocks():
    """Bug: a path was judged as a single block."""
    emission = emission_of(beam("abcdef", [2, 4, 6]), SPELLED, grid=5)
    assert (emission.ends, emission.grid, emission.n_tokens) == ([2, 4, 6], [5, 6], 6)
    assert emission_of(beam("abcdef", [6]), SPELLED, grid=2).grid == [2, 4, 6]


# --- the search -----------------------------------------------------------------------------------


def search_of(prompt=PROMPTS[0], **settings):
    config = SearchConfig(**dict(budget=1.0, n_samples=4, keep=2) | settings)
    return new_search(prompt, [1, 2], 0, method_of("inferenceguard"), config)


@pytest.mark.parametrize("probe", [False, True])
def test_only_the_first_failure_counts(probe):
    """Bug: after a failure the probe replaced the prefix that was certified before it; and a search
    without the probe went on.
    """
    search = search_of(probe_fail_open=probe, on_failure="truncate")
    first = search.best
    search.fail("exhausted")
    search.beams = [search_of(PROMPTS[1]).best]
    search.fail("dead_end")
    assert (search.failure, search.certified is first) == ("exhausted", True)
    assert search.stopped is not probe


def test_a_safe_candidate_drives_out_the_unsafe():
    """Bug: a place that was left free went to a candidate over budget, which went on."""
    search = search_of()
    unsafe, safe = beam("a", [1], cost=5.0), beam("b", [1], cost=1.0)
    unsafe.reward = 9.0
    search.pool = [unsafe, safe]
    assert search.chosen() == [safe]


@pytest.mark.parametrize(
    ("f1", "f2", "through"),
    [(0.6, 0.0, True), (0.5, 0.0, False), (math.inf, 0.0, False), (0.6, math.nan, False)],
)
def test_a_critic_lets_through_what_is_above_its_threshold(f1, f2, through):
    """Bug: every answer of a critic let candidates through, unreadable ones too."""
    judged = beam("a", [1])
    judged.judge(f1, f2, SimpleNamespace(critic_threshold=0.5))
    assert judged.let_through is through


def test_what_a_critic_lets_through_needs_budget():
    """Bug: a critic's word stood for the budget."""
    config = SearchConfig(budget=1.0)
    assert beam("a", [1]).passes(config) and not beam("a", [1], cost=2.0).passes(config)


def test_one_failed_candidate_may_have_been_safe():
    """Bug: a search whose scorer failed on some candidates was said to be exhausted."""
    unsafe, failed = beam("a", [1], cost=2.0), replace(beam("b", [1]), broken=True)
    assert why_unsafe([unsafe, unsafe]) == "exhausted"
    assert why_unsafe([unsafe, failed]) == why_unsafe([failed]) == "scorer_error"


def test_mode_paper_believes_a_search_that_calls_its_answer_unsafe():
    """Bug: an answer whose reward could not be read was verified in mode paper, and there alone."""
    config = SearchConfig(
        budget=99.0, n_samples=2, block_size=2, max_new_tokens=4, on_failure="paper"
    )
    guard = Guard(mock_policy(), LetterCost(), LetterReward(unread), config)
    found = list(decode("inferenceguard", guard, PROMPTS))
    assert {answer.status for answer in found} == {"unverified_unsafe"}


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beams", "expected"),
    [
        ([beam("ab cd", [2, 5])], "ab cd"),
        ([beam("ab cd", [2, 5]), beam("ab ce", [2, 5])], "ab"),
        ([beam("ab cd", [1, 5]), beam("ac cd", [1, 5])], "a"),
        ([beam("abcde", [1, 5]), beam("abcdf", [2, 5])], ""),  # no check of both
        ([beam("ab cd", [2, 5], finished=True)], "ab"),  # its end is not checked yet
        ([beam("ab cd", [2, 5]), beam("ab cd", [2, 5], cost=2.0)], ""),
        # charged at the end alone, or repaid
        ([beam("ab cd", [2, 5], cost=2.0, accounting="terminal")], ""),
        ([beam("ab cd", [2, 5], cost=2.0, accounting="sum", then=-2.0)], ""),
    ],
)
def test_only_what_all_beams_share_up_to_a_check_is_certified(beams, expected):
    """Bug: a stream showed tokens that only one beam had, that no check had seen, or that had been
    over budget.
    """
    config = SearchConfig(budget=1.0)
    assert "".join(certified_prefix(beams, config)) == expected


class Stream:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.shown = []

    def put(self, tokens):
        self.shown.append(tokens.tolist())


def shown(costs, ends=(2, 4)):
    """Return what a stream shows of abcd, given costs by (text, finished); 0 for all others."""
    table = Answering(lambda _, *texts: [costs.get(x, 0.0) for x in zip(*texts, strict=True)])
    text = lambda tokens: "".join(LETTERS[token] for token in tokens)  # noqa: E731
    guard = SimpleNamespace(
        policy=SimpleNamespace(text=text, decoded=text, stable_ids=list),
        config=SearchConfig(budget=1.0, block_size=2, checks="block"),
        contracts={"cost": Contract(table)},
        method="backtracking",
    )
    stream, tokens = Stream(), [LETTERS.index(letter) for letter in "abcd"]
    beam = Beam(tokens, "abcd", False, start(1.0), list(ends), 0)  # the search calls it safe
    _Streamed(stream, Shown(guard)).block(PROMPTS[0], [beam])
    return stream.shown == [tokens]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({}, True),
        ({("abcd", False): 2.0}, False),
        ({("abcd", True): 2.0}, True),  # it is not finished
        ({("ab", False): 2.0}, False),  # on its way
        ({("abc", False): 2.0}, True),  # no check
    ],
)
def test_a_stream_shows_what_passes_a_verdict_of_its_own(costs, expected):
    """Bug: a prefix was shown because the search called it safe, was judged as if it were a whole
    answer, or by its end alone.
    """
    assert shown(costs) is expected


def test_a_stream_is_never_taken_back():
    """Bug: after an abstention the stream went on with the refusal, from the middle."""
    stream = Stream()
    part = _Streamed(stream, Shown(None))
    for tokens in ([1, 2], [3, 4, 5], [1], [1, 2, 6]):
        part.show(tokens)
    assert stream.shown == [[1, 2], [6]]
