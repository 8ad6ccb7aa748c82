"""Tests of where the cost of a text is checked, against word boundaries written a second time and
searches that look at every prefix.
"""

import math
import re

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mockpolicy import (
    WORDS,
    LastWordCost,
    LetterCritic,
    LetterReward,
    last_word_cost,
    letter_f1,
    letter_f2,
    outcome,
    slow_checks,
    slow_worst,
    word_policy,
)
from tiny import tiny, tiny_tokenizer

from igcore import METHODS, Guard, Prompt, decode
from igcore.errors import ParameterError
from igcore.methods import method_of
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.scoring import Cached, readings, tokens_in, word_ends
from igstudy.runs.critic_params import RolloutConfig
from igstudy.runs.decode_params import Settings
from igstudy.runs.rollout_run import load_rollouts, roll_out
from igstudy.training.rollouts import Rollout, targets

PROMPTS = [Prompt(f"id{i}", text, "mock") for i, text in enumerate("ab ce c dd eae cb".split())]
SETTINGS = dict(
    budget=1.0, n_samples=3, keep=2, block_size=4, max_new_tokens=12, rounds=2,
    lagrange_multiplier=0.7, token_top_k=4, refusal="", checks="word",
)  # fmt: skip
PATHWISE = ["inferenceguard", "inferenceguard-mix", "beam-augmented"]  # can look inside a block


def answers(method, seed=0, cost=None, on_block=None, critic=None, **changes):
    config = Settings(**(SETTINGS | changes))
    scorers = cost or LastWordCost(), LetterReward()
    guard = Guard(word_policy(), *scorers, config, critic or LetterCritic())
    return list(decode(method, guard, PROMPTS, seed=seed, on_block=on_block))


# --- where words end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("", []),
        ("   \n ", []),
        ("word", []),  # its end is that of the text, which is read anyway
        ("Hello, old world!", [5, 10, 16]),
        ("don't l’air o'clock.", [5, 11, 19]),  # an apostrophe inside a word is of the word
        ("'quoted' so", [7]),
        ("3.14, 1,000 and 2nd", [4, 11, 15]),
        ("no-one a_b c", [2, 6, 10]),
        ("你好。世界", [1, 2, 4]),  # every character
        ("สวัสดี", [1, 3, 4]),  # every character with its marks
        ("नमस्ते दुनिया", [6]),
        ("e\u0301te\u0301 so", [5]),
        ("🙂 👍🏽 ok 🙂 so", [7]),  # an emoji is no word of its own
    ],
)
def test_words_end_where_a_reader_would_say(text, ends):
    """Guards other scripts, in which a search for spaces would find no word."""
    assert word_ends(text) == ends
    for since in range(len(text) + 1):
        assert word_ends(text, since) == [end for end in ends if end > since]


# of every class that the rules of Unicode (UAX #29) tell apart
MARKS = "\u0301\u094d\u0e31"
CHARACTERS = "aZéд나न07'.:,_ -!你ก🙂" + MARKS

texts = st.text(st.sampled_from(CHARACTERS), max_size=14)
# next to such punctuation, and at the start, the library treats a mark as it likes
ODD = re.compile(f"^[{MARKS}]|[{MARKS}][.':,]|[.':,][{MARKS}]")
plain = texts.filter(lambda text: not ODD.search(text))


@settings(max_examples=300, deadline=None)
@given(plain)
def test_the_words_of_a_beginning_are_those_of_the_whole(text):
    """Guards a path that grows: nothing is checked otherwise because more text has come."""
    ends = word_ends(text)
    for end in ends:
        assert word_ends(text[:end]) == [e for e in ends if e < end]


@settings(max_examples=600, deadline=None)
@given(st.one_of(texts, st.text(max_size=20)), st.data())
def test_a_search_looks_wherever_the_final_check_does(text, data):
    """Guards the certificate: what the whole text is cut to, its beginnings were cut to as well, so
    that no check is new in the final one.
    """
    ends = word_ends(text)
    assert ends == sorted(set(ends)) and all(0 < end < len(text) for end in ends)
    block = data.draw(st.integers(0, len(text)))  # anywhere, inside a word too
    assert {e for e in ends if e < block} <= set(word_ends(text[:block]))


# --- readings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("checks", ["block", "word", "token"])
def test_readings_are_those_of_each_cut_text(checks):
    """Guards order and `finished`: only a whole text may be complete; a function has no tokens."""
    cost, texts = LastWordCost(), ["aa d", "aa d", "b c d", ""]
    found = readings(Cached(cost), checks, "ppqq", texts, [True, False, False, True], [0, 2, 1, 0])
    cuts = {"block": [[], [], [], []]}.get(checks, [[2], [], [3], []])
    assert [reading.ends for reading in found] == [
        [*inside, len(text)] for inside, text in zip(cuts, texts, strict=True)
    ]
    for reading, text in zip(found, texts, strict=True):
        assert reading.costs == [last_word_cost(text[:end]) for end in reading.ends]
        assert reading.scored_ends == reading.ends
    inside = checks != "block"
    asked = [*[("p", "aa", False)] * inside, ("p", "aa d", True), ("p", "aa d", False)]
    asked += [*[("q", "b c", False)] * inside, ("q", "b c d", False), ("q", "", True)]
    assert sum(cost.asked, []) == asked


def test_no_text_is_asked_for_nothing():
    assert readings(Cached(LastWordCost()), "word", [], [], [], []) == []


def test_tokens_are_shared_out_by_characters():
    """Guards the counts: a third of the characters are a third of the tokens; without characters
    every cut is the whole.
    """
    assert tokens_in(12, 6, [2, 4, 6]) == 4 + 8 + 12
    assert tokens_in(3, 0, [0, 0]) == 6 and tokens_in(5, 10, []) == 0


# --- a search under checks at words ---------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """The second implementation of the search, over words: every prefix is scored."""
    monkeypatch.setattr(reference, "LETTERS", WORDS)
    monkeypatch.setattr(reference, "letter_cost", slow_worst)
    return reference.search


@pytest.mark.parametrize("method", PATHWISE)
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0, 2.0])
def test_the_search_equals_one_that_scores_every_prefix(method, budget, slow):
    """Guards what a block is charged: the worst of its checks, in rank, retry, critic and z."""
    critic = {}
    if method == "inferenceguard-mix":
        # the critic of the search reads token ids as the letters a to f
        reads = [lambda text, z, f=f: f(text.replace(" ", "f"), z) for f in (letter_f1, letter_f2)]
        critic = dict(critic=reads, threshold=0.5, eta=0.7, gamma_task=0.9)
    changes = {name: critic[name] for name in critic if name != "critic"} | {"budget": budget}
    for seed in range(3):
        for prompt, got in zip(PROMPTS, answers(method, seed, **changes), strict=True):
            best, abstained = slow(
                method, prompt.text, prompt.id, seed, budget, 3, 2, 4, 12, 2, "half", 0.7, **critic
            )
            assert (got.status == "abstained") == abstained
            if abstained:
                assert got.reason == "exhausted" and got.text == ""
                continue
            assert got.text == best.text
            assert got.z_trace == [budget - peak for peak in best.peaks]
            assert got.word_peak_cost == max(slow_worst(got.text), got.peak_cost)
            if method == "beam-augmented":  # judged by its end alone
                assert (got.status == "verified_safe") == (last_word_cost(got.text) <= budget)
            else:
                assert got.status == "verified_safe" and slow_worst(got.text) <= budget


def test_what_breaks_inside_a_block_is_never_kept():
    """Guards the whole point: checks at the ends of blocks keep and emit what this drops."""
    kept = {}
    for checks in ("block", "word"):
        seen, out = [], []
        settings = dict(budget=0.5, checks=checks)
        settings["on_block"] = lambda _, beams, seen=seen: seen.extend(b.text for b in beams)
        for seed in range(4):
            out += answers("inferenceguard", seed, **settings)
        verified = [r.text for r in out if r.status == "verified_safe"]
        assert len(verified) > 3 and len(seen) > 30
        kept[checks] = [sum(slow_worst(text) > 0.5 for text in some) for some in (seen, verified)]
    assert kept["word"] == [0, 0] and min(kept["block"]) > 0


def test_a_word_that_cannot_be_scored_breaks_its_candidate():
    """Bug: the maximum of a number and a NaN is the number, where the NaN comes second."""

    def of_readable(text):
        return math.nan if text.rstrip().endswith("e") else last_word_cost(text)

    seen = []
    settings = dict(block_size=12, failure_rate=1.0)
    settings["on_block"] = lambda _, beams: seen.extend(beam.text for beam in beams)
    for seed in range(8):
        answers("inferenceguard", seed, LastWordCost(of_readable), budget=9.0, **settings)
    assert len(seen) > 20 and any(" " in text.strip() for text in seen)
    for text in seen:
        assert not any(text[:at].endswith("e") for at in slow_checks(text))


def test_every_text_that_is_scored_is_counted():
    """Guards the work of a search with one sample per block, counted by hand from its text."""
    seen = 0
    for seed in range(6):
        settings = dict(n_samples=1, keep=1, rounds=1, budget=9.0)
        for r in answers("inferenceguard", seed, **settings):
            assert r.status == "verified_safe"
            starts = [0, *r.block_ends[:-1]]
            in_search = 0
            for start, end in zip(starts, r.block_ends, strict=True):
                words = slow_checks(r.text[:end])
                in_search += sum(start < at < end for at in words) + 1
            cuts = {*slow_checks(r.text)[:-1], *r.block_ends[:-1]}
            rewards = len(r.block_ends)
            assert r.counts.scorer_calls == in_search + rewards + len(cuts) + 2
            seen += len(cuts) > len(r.block_ends)
    assert seen > 5  # words inside of blocks


def without_seconds(responses):
    return list(map(outcome, responses))


OTHERS = [m for m in METHODS if m not in PATHWISE and method_of(m).network != "value network"]
OTHERS = [m for m in OTHERS if not method_of(m).stepwise]  # which look inside a block, too


@pytest.mark.parametrize("method", OTHERS)
def test_methods_without_a_path_look_where_they_did(method):
    """Guards baselines and `terminal`: they neither pay for checks nor change by them."""
    plain = without_seconds(answers(method, checks="block"))
    for checks in ("word", "token"):
        assert without_seconds(answers(method, checks=checks)) == plain
        assert method_of(method).settings_under(Settings(budget=1, checks=checks)).checks == "block"


@pytest.mark.parametrize(
    "accounting", ["terminal", "sum", "clamped_sum", "increment", "positive_increment"]
)
def test_totals_that_depend_on_how_often_one_looks_look_at_blocks(accounting):
    plain = without_seconds(answers("inferenceguard", accounting=accounting, checks="block"))
    found = answers("inferenceguard", accounting=accounting, checks="word")
    assert without_seconds(found) == plain


def test_a_function_is_checked_at_words_where_tokens_are_wanted():
    found = [answers("inferenceguard", checks=checks) for checks in ("token", "word")]
    assert without_seconds(found[0]) == without_seconds(found[1])


@pytest.mark.parametrize(("gamma", "strict"), [(0.9, False), (0.9, True), (1.0, True)])
def test_a_block_is_charged_at_its_last_token(gamma, strict):
    """Guards discount and the other reading of safe: d - sum of gamma^t C over blocks, where C is
    what the worst check of a block adds.
    """
    verified = 0
    for seed in range(4):
        for r in answers("inferenceguard", seed, gamma_safety=gamma, strict=strict):
            if r.status != "verified_safe":
                continue
            omega, peak, start = 1.0, 0.0, 0
            for k, end in enumerate(r.block_ends):
                inside = [at for at in slow_checks(r.text) if start < at <= end]
                worst = max(last_word_cost(r.text[:at]) for at in [*inside, end])
                last = min(4 * (k + 1), r.n_tokens) - 1
                omega -= gamma**last * (max(peak, worst) - peak)
                peak, start = max(peak, worst), end
                assert r.z_trace[k + 1] == pytest.approx(omega / gamma ** (last + 1), abs=1e-12)
            assert omega > 0 if strict else omega >= -1e-12
            verified += peak > 0
    assert verified > 3


@pytest.mark.parametrize("on_failure", ["truncate", "paper"])
def test_after_a_failure_a_path_is_still_read_at_its_words(on_failure):
    """Guards truncated answers, and mode `paper`, where what broke on the way is never verified."""
    settings = dict(budget=0.5, n_samples=2, keep=1, rounds=1, on_failure=on_failure)
    out = [r for seed in range(8) for r in answers("inferenceguard", seed, **settings)]
    marked = [r for r in out if r.reason in ("truncated", "exhausted") and r.text]
    forgiven = [r for r in marked if last_word_cost(r.text) <= 0.5 < slow_worst(r.text)]
    for r in out:
        broken = slow_worst(r.text) > 0.5
        assert not (broken and r.status == "verified_safe")
    assert marked and bool(forgiven) == (on_failure == "paper")


# --- tokens of a language model -------------------------------------------------------------------


def token_scorer() -> LMScorer:
    model = tiny("llama", torch.float64, vocab_size=320, initializer_range=0.1)
    weights = torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
    backbone = Backbone(model, tiny_tokenizer())
    return LMScorer("lm", backbone, lambda h: h.double() @ weights, "higher is worse", digest="v1")


@torch.inference_mode()
def slow_token_score(scorer: LMScorer, prompt: str, response: str) -> float:
    """Return the score of a text by one pass over its ids alone: one character, one id."""
    ids = scorer.backbone.tokenizer(prompt + response)["input_ids"]
    assert len(ids) == len(prompt + response)
    out = scorer.backbone.model(input_ids=torch.tensor([ids]), use_cache=False)
    return scorer.head(out.last_hidden_state[:, -1]).item()


def test_a_search_over_tokens_equals_one_that_scores_every_prefix():
    """Guards `token`: in every block the worst of its tokens is charged, and no token is missed."""
    scorer = token_scorer()
    assert scorer.reads_tokens
    texts = [(p.text, r) for p in PROMPTS for r in ("a", "ab", "ba d", "ce ")]
    costs = [slow_token_score(scorer, *text) for text in texts]
    budget = max(0.0, sorted(costs)[3 * len(costs) // 4])
    settings = dict(checks="token", budget=budget, rounds=1, keep=1, max_new_tokens=8)
    verified = inside = 0
    for r in answers("inferenceguard", cost=scorer, **settings):
        if r.status != "verified_safe":
            continue
        slow = [slow_token_score(scorer, r.prompt, r.text[:at]) for at in range(1, len(r.text) + 1)]
        assert max(slow) <= budget + 1e-9
        peaks = [max(0.0, *slow[:end]) for end in r.block_ends]
        assert r.z_trace == pytest.approx([budget, *(budget - m for m in peaks)], abs=1e-9)
        verified += 1
        inside += any(m > max(0.0, *(slow[e - 1] for e in r.block_ends)) + 1e-6 for m in peaks)
    assert verified > 1 and inside  # a token inside of a block was the worst


# --- critics --------------------------------------------------------------------------------------


def test_a_critic_learns_from_the_worst_check_of_every_block():
    """Guards labels: under `peak` the words count; the other totals look at the ends of blocks."""
    rollout = Rollout(
        prompt_id="p", prompt="p", tokens=[1] * 6, ended=False, block_size=2, max_new_tokens=6,
        costs=[0.0, 0.5, 0.0], worst=[0.2, 3.0, 0.0], reward=1.0,
    )  # fmt: skip
    assert not targets(rollout, 2.0, "peak").safe and targets(rollout, 3.0, "peak").safe
    found = targets(rollout, 2.0, "peak").z
    assert found == pytest.approx([2.0, 1.8, 1.8, -1.0, -1.0, -1.0])
    for accounting in ("terminal", "clamped_sum", "increment"):
        assert targets(rollout, 0.5, accounting).safe
    halves = targets(rollout, 2.0, "peak", gamma_safety=0.5)
    # omega: 2 - .5 * .2, then less .125 * 2.8; divided by .5^t after t tokens
    omegas = [2.0, 1.9, 1.9, 1.55, 1.55, 1.55]
    assert halves.z == pytest.approx([w / 0.5 ** (t + 1) for t, w in enumerate(omegas)])


@pytest.mark.parametrize("worst", [[math.nan, 0.0], [0.0, math.nan]])
def test_a_check_that_failed_makes_a_rollout_unsafe(worst):
    rollout = Rollout("p", "p", [1] * 4, False, [0.0, 0.0], worst, 1.0, 2, 4)
    assert not targets(rollout, 9.0, "peak").safe


@pytest.mark.parametrize("checks", ["block", "word"])
def test_rollouts_remember_the_worst_of_each_block(tmp_path, checks):
    """Guards the labels of a critic for a search over words."""
    config = RolloutConfig(n_rollouts=12, max_new_tokens=10, block_size=4, seed=5, checks=checks)
    scorers = dict(cost=LastWordCost(), reward=LetterReward())
    found = roll_out(word_policy(), PROMPTS, config, folder=tmp_path / checks, **scorers)
    higher, first = 0, 0
    for r in found:
        ends = [*range(4, len(r.tokens), 4), len(r.tokens)]
        texts = ["".join(WORDS[t] for t in r.tokens[:end] if t) for end in ends]
        assert r.costs == [last_word_cost(text) for text in texts]
        begin = 0
        for text, worst, cost in zip(texts, r.worst, r.costs, strict=True):
            inside = [at for at in slow_checks(text) if begin < at] if checks == "word" else []
            assert worst == max([cost, *(last_word_cost(text[:at]) for at in inside)])
            higher += worst > cost
            first += worst > cost and begin == 0
            begin = len(text)
    assert (higher > first > 0) == (checks == "word")
    scorers["policy"] = word_policy()
    assert load_rollouts(tmp_path / checks, checks, **scorers) == found
    # Bug: a critic learnt from rollouts of another run, which were read at other checks
    other = {"block": "word", "word": "block"}[checks]
    with pytest.raises(ParameterError, match=f"read at checks '{checks}', not '{other}'"):
        load_rollouts(tmp_path / checks, other, **scorers)
