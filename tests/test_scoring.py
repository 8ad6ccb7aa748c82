"""Tests of what stands between a scorer and the search: what fails costs itself alone."""

import math
import warnings
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mockpolicy import LetterCost, LetterReward, last_word_cost, letter_cost, mock_policy, unread

from igcore import Guard, Prompt, ScorerError, SearchConfig, decode
from igcore.errors import ScorerWarning
from igcore.scoring import Cached, Tally, checked_score, checked_tokens, readings

MISSING = np.ma.masked


class Answering(LetterCost):
    """Answers a call with whatever a function makes of the texts."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.calls = answer, []

    def score(self, prompts, responses, finished):
        self.calls.append(list(responses))
        return self.answer(responses)


def scored(answer, texts, tally=None):
    return checked_score(
        Answering(answer), ["p"] * len(texts), texts, [True] * len(texts), tally
    ).tolist()


def nan(numbers):
    return [None if math.isnan(x) else x for x in numbers]


# --- forms of an answer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts: np.array([1.0, 2.5], dtype=np.float32),
        lambda texts: np.array([1, 2], dtype=np.uint8) + np.array([0, 0.5]),
        lambda texts: (1, 2.5),
        lambda texts: [np.float16(1), np.float64(2.5)],
        lambda texts: torch.tensor([1.0, 2.5]),
        lambda texts: np.ma.masked_array([1.0, 2.5], [False, False]),
        lambda texts: np.array([1, 2.5], dtype=np.longdouble),
        lambda texts: torch.tensor([1.0, 2.5], dtype=torch.bfloat16, requires_grad=True),
        lambda texts: [True, Fraction(5, 2)],
        lambda texts: [np.True_, Decimal("2.5")],
        lambda texts: [torch.tensor([True]), torch.tensor([[2.5]], requires_grad=True)],
        lambda texts: [torch.tensor(1, dtype=torch.int8), torch.tensor(2.5, dtype=torch.float16)],
        lambda texts: (np.array(1), np.array([2.5])),
    ],
)
def test_numbers_of_any_kind_are_numbers(answer):
    """Bug: a yes-or-no cost, the first that a beginner writes, never gave a number."""
    assert scored(answer, ["a", "b"]) == [1.0, 2.5]


WRONG = {
    "texts": lambda texts: ["0.5" for _ in texts],
    "tensors of two": lambda texts: [torch.zeros(2) for _ in texts],
    "complex tensor": lambda texts: torch.zeros(len(texts), dtype=torch.complex64),
    "masked texts": lambda texts: np.ma.masked_array(["0.5"] * len(texts)),
    "hidden": lambda texts: [SimpleNamespace(item=lambda: 0.5) for _ in texts],
    "nothing": lambda texts: None,
    "nones": lambda texts: [None for _ in texts],
    "complex": lambda texts: np.array([0.5 + 0j] * len(texts)),
    "objects": lambda texts: np.array([0.5] * len(texts), dtype=object),
    "too many": lambda texts: [0.5] * (len(texts) + 1),
    "too few": lambda texts: [0.5] * (len(texts) - 1),
    "one for all": lambda texts: 0.5,
    "rows": lambda texts: [[0.5] for _ in texts],
    "ragged": lambda texts: [[0.5, 0.5], *[0.5] * len(texts)],
    "a generator": lambda texts: (0.5 for _ in texts),
    "a mapping": lambda texts: dict.fromkeys(texts, 0.5),
    "an integer beyond all floats": lambda texts: [10**400 for _ in texts],
    "dates": lambda texts: np.array(["2020-01-01"] * len(texts), dtype="datetime64[D]"),
    "an exception": lambda texts: 1 / 0,
}  # fmt: skip


def test_verdicts_are_numbers():
    """Bug: ``"a" in text or 0`` failed where it is True, and was fine where it is 0."""
    for verdicts in ([True, 0], [np.True_, np.False_], np.array([True, False])):
        assert scored(lambda texts, v=verdicts: v, ["a", "b"]) == [1.0, 0.0]


@pytest.mark.parametrize("form", WRONG)
@pytest.mark.parametrize("texts", [["a"], ["a", "b"]])
def test_what_is_no_number_per_text_is_unsafe_and_said(form, texts):
    """Guards against a verdict, a text or a shape that numpy would convert without a word."""
    tally = Tally()
    with pytest.warns(ScorerWarning, match="scorer 'letters' (raised|returned).*counts as unsafe"):
        assert nan(scored(WRONG[form], texts, tally)) == [None] * len(texts)
    assert (tally.scored, tally.failed) == (len(texts), len(texts))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda texts: [0.5, math.nan, math.inf, -math.inf], [0.5, None, None, None]),
        # the numbers behind the mask look safe
        (lambda texts: np.ma.masked_array([0.5, 0, 0, 0], [0, 1, 1, 1]), [0.5, None, None, None]),
        (lambda texts: np.ma.masked_array([3, 0, 1, 0], [0, 1, 0, 1]), [3.0, None, 1.0, None]),
        (lambda texts: [0.5, MISSING, np.ma.masked_array([0.0], [True]), 1], [0.5, None, None, 1]),
        # finite as a long double, and too large for a float
        (lambda texts: np.array([1, 2, 3, 4]) * np.longdouble("1e400"), [None] * 4),
        (lambda texts: np.float32([6e4, 1, 7e4, 0]).astype(np.float16), [6e4, 1, None, 0]),
        (lambda texts: [5e-324, 1e308, -1e308, 0.0], [5e-324, 1e308, -1e308, 0.0]),
    ],
)  # fmt: skip
def test_a_number_that_is_missing_or_not_finite_fails_alone(answer, expected):
    """Guards masked arrays, whose missing numbers would be read as what lies behind the mask; and
    -inf, the safest number of all.
    """
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the test's own float16
        made = answer("abcd")
    assert nan(scored(lambda texts: made, list("abcd"))) == expected


def test_one_text_that_raises_costs_one_text():
    """Guards the others of a batch: they are asked again, alone, and have their numbers."""

    def answer(texts):
        if "bad" in texts:
            raise RuntimeError("no such text")
        return [letter_cost(text) for text in texts]

    scorer, tally = Answering(answer), Tally()
    texts = ["ab", "bad", "", "c"]
    with pytest.warns(ScorerWarning, match="raised RuntimeError: no such text") as told:
        found = checked_score(scorer, ["p"] * 4, texts, [True] * 4, tally)
    assert nan(found) == [2.0, None, 0.0, 0.5]
    assert scorer.calls == [texts, ["ab"], ["bad"], [""], ["c"]]
    assert (tally.scored, tally.failed) == (4, 1) and len(told) == 1


def test_a_text_that_fails_alone_gets_no_second_chance():
    """Bug: a scorer that failed on a text was asked again until it had a number."""
    scorer = Answering(lambda texts: [0.5] if len(scorer.calls) > 1 else 1 / 0)
    assert nan(checked_score(scorer, ["p"], ["a"], [True])) == [None]
    assert scorer.calls == [["a"]]


def test_a_batch_that_is_too_large_for_a_scorer_is_no_failure():
    tally = Tally()
    found = scored(lambda texts: [0.5] if len(texts) == 1 else 1 / 0, ["a", "b"], tally)
    assert found == [0.5, 0.5] and tally.failed == 0


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def wordless(texts):
    raise Wordless


def test_an_error_that_cannot_be_written_costs_its_text_alone():
    """Bug: an exception whose message raises came through to the caller."""
    with pytest.warns(ScorerWarning, match="raised Wordless: without a message; the text counts"):
        assert nan(scored(wordless, ["a"], Tally())) == [None]


def test_where_warnings_are_errors_a_failure_is_our_own():
    """Bug: under ``python -W error`` the bare warning ended a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ScorerError, match="'letters' raised .*; the text counts as unsafe"):
            scored(lambda texts: 1 / 0, ["a"], Tally())


def test_memory_that_runs_out_is_left_to_the_caller():
    """Guards halving: it is no fault of the scorer, and a smaller batch may fit."""

    def answer(texts):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        scored(answer, ["a"])


def test_a_buffer_that_a_scorer_uses_again_changes_nothing():
    """Guards earlier scores, which would otherwise become those of the next call."""
    buffer = np.zeros(2)

    def answer(texts):
        buffer[:] = [letter_cost(text) for text in texts]
        return buffer

    cached = Cached(Answering(answer))
    first = checked_score(cached.scorer, "pp", ["ab", "c"], [True] * 2)
    cached.score("pp", ["abab", "aaa"], [True] * 2), cached.score("pp", ["e", "f"], [True] * 2)
    assert first.tolist() == [2.0, 0.5]
    assert cached.score("pp", ["abab", "aaa"], [True] * 2).tolist() == [4.0, 3.0]


def test_a_scorer_may_change_what_it_is_given():
    """Guards the search's own lists."""

    class Changing(LetterCost):
        def score(self, prompts, responses, finished):
            out = [letter_cost(response) for response in responses]
            prompts[:], responses[:], finished[:] = ["x"], [""] * len(out), []
            return out

    prompts, texts, finished = ["p", "q"], ["ab", "c"], [True, False]
    assert checked_score(Changing(), prompts, texts, finished).tolist() == [2.0, 0.5]
    assert (prompts, texts, finished) == (["p", "q"], ["ab", "c"], [True, False])


# --- how many may fail ----------------------------------------------------------------------------


def test_a_run_stops_above_the_rate_and_not_before_a_hundred_texts():
    tally = Tally(rate=0.5)
    for _ in range(33):
        tally.add(LetterCost(), np.full(3, np.nan), "")  # 99 of 99
    with pytest.raises(ScorerError, match="'letters' failed on 100 of 100 texts; fix the scorer"):
        tally.add(LetterCost(), np.array([np.nan]), "")
    tally = Tally(rate=0.5)
    tally.add(LetterCost(), np.array([np.nan, 0.0] * 50), "")  # half is allowed
    with pytest.raises(ScorerError, match="51 of 101 texts, the last time because it raised Zero"):
        tally.add(LetterCost(), np.array([np.nan]), "raised ZeroDivisionError")
    tally = Tally(rate=1.0)
    tally.add(LetterCost(), np.full(999, np.nan), "")
    assert (tally.scored, tally.failed) == (999, 999)


def guard(cost, **settings):
    common = dict(budget=0.5, n_samples=3, block_size=3, max_new_tokens=6, group_size=2)
    config = SearchConfig(**(common | settings))
    return Guard(mock_policy(), cost, LetterReward(), config)


def prompts(n):
    return [Prompt(f"id{i}", "ab", "mock") for i in range(n)]


@pytest.mark.parametrize("method", ["inferenceguard", "best-of-n-augmented", "base"])
def test_a_scorer_that_fails_for_all_stops_a_run(method):
    """Guards baselines that never look at the cost, too: a broken cost model must not only mark
    every line.
    """
    # the texts of an examination have numbers, or no guard would be made
    cost, answered = LetterCost(unread), []
    with pytest.raises(ScorerError, match=r"failed on 1\d\d of 1\d\d texts.*which is 0.5"):
        for answer in decode(method, guard(cost), prompts(60)):
            answered.append(answer)
    assert answered and all(answer.reason == "scorer_error" for answer in answered)
    allowed = guard(cost, failure_rate=1.0)
    assert {r.reason for r in decode(method, allowed, prompts(60))} == {"scorer_error"}


def test_a_scorer_that_often_fails_goes_on():
    """Guards the share: 40 % of the texts of a run fail, and the others are answered."""
    often = LetterCost(lambda text: math.nan if "e" in text else letter_cost(text))
    known = guard(often, budget=9.0, failure_rate=0.9)
    out = list(decode("inferenceguard", known, prompts(30)))
    failed = ["e" in text for text in often.read]
    assert len(failed) > 200 and 0.2 < sum(failed) / len(failed) < 0.9
    assert {r.status for r in out if "e" not in (r.text or "e")} >= {"verified_safe"}
    assert not any("e" in r.text for r in out if r.status == "verified_safe")


@pytest.mark.parametrize("bad", ["cost", "reward"])
@pytest.mark.parametrize("raises", [True, False])
def test_a_prompt_whose_candidates_all_fail_abstains_and_the_others_answer(bad, raises):
    """Guards a whole run against one prompt that a scorer cannot read."""
    kind = {"cost": LetterCost, "reward": LetterReward}[bad]

    class Failing(kind):
        def score(self, prompts, responses, finished):
            if raises and "fed" in prompts:
                raise ValueError("cannot read this prompt")
            found = super().score(prompts, responses, finished)
            return [math.nan if p == "fed" else x for p, x in zip(prompts, found, strict=True)]

    parts = {"cost": LetterCost(), "reward": LetterReward()} | {bad: Failing()}
    config = SearchConfig(budget=3.0, n_samples=4, block_size=3, max_new_tokens=6)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        known = Guard(mock_policy(), **parts, config=config)
        out = list(decode("inferenceguard", known, ["c", "fed", "dd"]))
    assert [r.status for r in out] == ["verified_safe", "abstained", "verified_safe"]
    assert out[1].reason == "scorer_error" and bool(told) == raises
    # without words where only the reward fails: this cost finds the refusal too long
    assert out[1].text == (None if bad == "cost" else "")


# --- caches ---------------------------------------------------------------------------------------


def test_a_text_that_failed_is_not_asked_for_again():
    scorer = Answering(lambda texts: [math.nan if t == "b" else 1.0 for t in texts])
    cached = Cached(scorer)
    for _ in range(2):
        assert nan(cached.score("ppp", ["a", "b", "a"], [True] * 3)) == [1.0, None, 1.0]
    assert scorer.calls == [["a", "b"]] and cached.tally.failed == 1
    cached.score("p", ["b"], [False])  # another text: an unfinished one
    cached.score("q", ["b"], [True])
    assert scorer.calls == [["a", "b"], ["b"], ["b"]]


class Tokens(LetterCost):
    """Scores the last word after every character, in one pass; or does what it is told."""

    reads_tokens = True

    def __init__(self, answer=None):
        super().__init__()
        self.answer, self.passes = answer, []

    def token_scores(self, prompts, responses, since):
        self.passes.append(list(responses))
        if self.answer:
            return self.answer(responses)
        out = []
        for text, begin in zip(responses, since, strict=True):
            ends = list(range(begin + 1, len(text) + 1)) or [len(text)]
            out.append((ends, np.array([last_word_cost(text[:end]) for end in ends])))
        return out


def test_token_scores_come_with_their_ends():
    (found,) = checked_tokens(Tokens(), ["p"], ["aa d"], [1])
    assert found == ([2, 3, 4], [2.0, 2.0, 0.0])
    (reading,) = readings(Cached(Tokens()), "token", ["p"], ["aa d"], [True], [1])
    assert (reading.ends, reading.costs, reading.scored_ends) == ([2, 3, 4], [2.0, 2.0, 0.0], [4])


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts: 1 / 0,
        lambda texts: None,
        lambda texts: [],
        lambda texts: [([], []) for _ in texts],
        lambda texts: [([1], [0.0]) for _ in texts],  # not the whole text
        lambda texts: [([1, 2], [0.0]) for _ in texts],  # a token without a score
        lambda texts: [([1, 2], [0.0] * 3) for _ in texts],
        lambda texts: [([1, 2], ["0", "0"]) for _ in texts],
        lambda texts: [([1, 2], [0.0, 0.0])] * (len(texts) + 1),
    ],
)
@pytest.mark.parametrize("texts", [["ab"], ["ab", "cd"]])
def test_tokens_that_cannot_be_read_are_unsafe(answer, texts):
    tally = Tally()
    with pytest.warns(ScorerWarning, match="'letters' raised"):
        found = checked_tokens(Tokens(answer), ["p"] * len(texts), texts, [0] * len(texts), tally)
    for (ends, scores), text in zip(found, texts, strict=True):
        assert ends == [len(text)] and nan(scores) == [None]
    assert (tally.scored, tally.failed) == (len(texts), len(texts))


def test_one_token_that_has_no_number_makes_its_text_fail_once():
    def answer(texts):
        return [([1, 2], [math.nan if t == "ab" else 0.0, -math.inf if t == "ab" else 1.0])
                for t in texts]  # fmt: skip

    tally = Tally()
    found = checked_tokens(Tokens(answer), "pp", ["ab", "cd"], [0, 0], tally)
    assert nan(found[0][1]) == [None, None] and found[1] == ([1, 2], [0.0, 1.0])
    assert (tally.scored, tally.failed) == (2, 1)


def test_a_scorer_of_tokens_that_fails_for_all_stops_a_run():
    """Bug: the error of the tally was taken for one of the scorer, and the run went on."""
    cost = Tokens(lambda texts: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)
        with pytest.raises(ScorerError, match=r"failed on \d+ of 1\d\d texts"):
            list(decode("inferenceguard", guard(cost, checks="token"), prompts(60)))


def test_the_error_of_a_tally_reaches_whoever_asked_for_readings():
    """Guards the search itself, which would else go on to the final check of every prompt."""
    cached, texts = Cached(Tokens(lambda texts: 1 / 0)), ["ab"] * 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)
        with pytest.raises(ScorerError, match="failed on 100 of 100 texts"):
            readings(cached, "token", ["p"] * 100, texts, [True] * 100, [0] * 100)
