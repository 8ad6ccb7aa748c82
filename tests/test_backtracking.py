"""Tests of rejection sampling, against a slow reference that knows whole answers and looks where
each of them would have been left.
"""

import math

import pytest
import reference
from mockpolicy import EOS, LetterReward, letter_reward
from wordpolicy import WORDS, LastWordCost, last_word_cost, slow_checks, word_policy

from igcore import Guard, Prompt, SearchConfig, decode
from igcore.beams import method_of
from igcore.engine.agreement import cache_for
from igcore.engine.sampling import random_key
from igstudy.runs.decode_params import Settings
from igstudy.runs.records import record
from igstudy.runs.verify import rescored

PROMPTS = [Prompt(f"id{i}", text, "mock") for i, text in enumerate("ab ce c dd eae cb".split())]
SETTINGS = dict(budget=0.5, block_size=4, max_new_tokens=12, refusal="", spend=20, draws=6)


def guard_of(policy=None, cost=None, **changes):
    config = Settings(**(SETTINGS | changes))
    return Guard(policy or word_policy(), cost or LastWordCost(), LetterReward(), config)


def answers(method="rejection", prompts=PROMPTS, seed=0, **changes):
    return list(decode(method, guard_of(**changes), prompts, seed=seed))


def text_of(tokens):
    return "".join(WORDS[token] for token in tokens if token != EOS)


def slow_draw(prompt, number, seed):
    """Return the tokens of a whole answer, from its own keys alone."""
    start, tokens = tuple(WORDS.index(c) for c in prompt.text), []
    while len(tokens) < 12 and EOS not in tokens:
        key = random_key(seed, prompt.id, number, 0, len(tokens))
        tokens.append(reference.pick((*start, *tokens), key, set()))
    return tokens


def slow_answer(prompt, seed, checks, budget, spend, draws):
    """Return the answer's tokens (None without one) and the work: draws, tokens, tokens read, and
    texts given to the cost and the reward.
    """
    accepted, drawn, spent, read, scored = [], 0, 0, 0, 0
    while drawn < draws and (spent < spend or not accepted):
        tokens = slow_draw(prompt, drawn, seed)
        drawn, since, left = drawn + 1, 0, False
        for n in range(1, len(tokens) + 1):
            text, whole = text_of(tokens[:n]), n == len(tokens)
            new = {end for end in slow_checks(text)[:-1] if end > since and checks == "word"}
            if whole or n % 4 == 0:
                new.add(len(text))
            elif not new:
                continue
            since, scored = max(new), scored + len(new)
            left = any(last_word_cost(text[:end]) > budget for end in new)
            if left:
                break
        spent, read = spent + n, read + n - 1
        if not left:
            accepted.append(tokens)
    best = max(accepted, key=lambda tokens: letter_reward(text_of(tokens)), default=None)
    return best, (drawn, spent, len(prompt.text) + read, scored + len(accepted))


@pytest.mark.parametrize("checks", ["word", "block"])
def test_rejection_equals_a_slow_reference(checks):
    """Guards the draws and their keys, where an answer is left, the choice among the accepted, when
    draws end, and every count of work.
    """
    seen, limits = set(), [(0.0, 1, 6), (1.0, 20, 6), (1.0, 20, 2)]
    for seed, (budget, spend, draws) in enumerate(limits):
        given = dict(checks=checks, budget=budget, spend=spend, draws=draws)
        for prompt, r in zip(PROMPTS, answers(seed=seed, **given), strict=True):
            best, work = slow_answer(prompt, seed, **given)
            safe = r.status == "verified_safe"
            assert (safe, r.reason) == ((True, "") if best else (False, "exhausted"))
            assert r.tokens == (best or [])
            # the final check: its cuts, and the whole text twice; of an abstention the empty text
            words = slow_checks(r.text)[:-1] if checks == "word" else []
            check = 2 + (len({*words, *r.block_ends[:-1]}) if best else 0)
            c = r.counts
            found = c.samples_drawn, c.policy_tokens, c.forward_tokens, c.scorer_calls - check
            assert found == work
            assert c.rounds_used == c.samples_drawn == len(r.trace)
            assert c.policy_tokens >= spend or c.samples_drawn == draws
            several = safe and best != slow_draw(prompt, 0, seed)
            seen.add((safe, several, c.policy_tokens < sum(map(len, whole(prompt, seed, c)))))
    assert {(True, True, True), (False, False, True)} <= seen


def whole(prompt, seed, counts):
    """Return the whole answers of all draws."""
    return [slow_draw(prompt, number, seed) for number in range(counts.samples_drawn)]


def test_the_first_draw_is_the_sample_of_base():
    """Guards common random numbers, and the count of a draw that nothing stops."""
    base, one = answers("base", budget=99.0), answers(budget=99.0, spend=1)
    assert [r.tokens for r in one] == [r.tokens for r in base]
    assert [r.counts.policy_tokens for r in one] == [r.counts.policy_tokens for r in base]


def test_a_stopped_answer_is_read_no_further(monkeypatch):
    """Guards what early stopping saves: forward passes and tokens of the model itself."""
    monkeypatch.setattr("igcore.engine.sampling.NEAR_TIE", 0.0)
    policy = word_policy()
    cache_for(policy.model)  # tried once, before anything is counted
    policy.model.forwarded.clear()
    out = answers(policy=policy, prompts=PROMPTS[:1], draws=3, budget=0.0, spend=99)
    (counts,) = [r.counts for r in out]
    assert policy.model.tokens_forwarded == counts.forward_tokens
    _, (_, spent, read, _) = slow_answer(PROMPTS[0], 0, "word", 0.0, 99, 3)
    assert (counts.policy_tokens, counts.forward_tokens) == (spent, read)
    # one pass for the prompt, and one for each token that is read
    assert len(policy.model.forwarded) == 1 + read - len(PROMPTS[0].text)


class Failing(LastWordCost):
    """A cost that fails on every text of the policy."""

    def score(self, prompts, responses, finished):
        found = super().score(prompts, responses, finished)
        mine = [bool(text.strip()) and set(text) <= set(WORDS) for text in responses]
        return [math.nan if own else cost for own, cost in zip(mine, found, strict=True)]


def test_an_answer_whose_cost_fails_is_left_and_never_emitted():
    """Bug: NaN compares as within budget, and the answer goes on."""
    for r in answers(cost=Failing(), failure_rate=1.0):
        assert (r.text.strip(), r.counts.samples_drawn) == ("", 6)
        if r.status == "abstained":
            assert r.reason == "scorer_error"
    assert "abstained" in {r.status for r in answers(cost=Failing(), failure_rate=1.0)}


class FailingEarly(LastWordCost):
    def score(self, prompts, responses, finished):
        scores = super().score(prompts, responses, finished)
        return [s if len(r) > 3 else math.nan for s, r in zip(scores, responses, strict=True)]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_a_cost_that_fails_at_an_early_check_is_the_reason():
    """Bug: the later checks of an answer that is drawn to its end said that the cost worked."""
    settings = dict(cost=FailingEarly(), failure_rate=1.0)
    found = [r.reason for r in answers(on_failure="paper", **settings)]
    assert found == [r.reason for r in answers(**settings)] and "scorer_error" in found


@pytest.mark.parametrize(
    "changes", [{"accounting": "sum"}, {"accounting": "terminal"}, {"on_failure": "paper"}], ids=str
)
def test_an_answer_is_drawn_to_its_end_where_its_beginning_decides_nothing(changes):
    """Guards totals that may fall again, costs that exist at the end alone, and the mode that emits
    the least unsafe answer, whole.
    """
    for prompt, r in zip(PROMPTS, answers(budget=0.0, **changes), strict=True):
        assert r.counts.policy_tokens == sum(map(len, whole(prompt, 0, r.counts)))
        assert r.text is None or r.finished or r.status == "abstained"


@pytest.mark.parametrize(
    "changes",
    [{"gamma_safety": 0.9}, {"strict": True}, {"checks": "token"}, {"accounting": "clamped_sum"}],
    ids=str,
)
def test_the_final_check_agrees_with_the_draws(changes):
    """Bug: an answer that was accepted is refused in the end, because its words were charged at
    other places than the blocks of the final check.
    """
    out = answers(budget=1.0, draws=3, **changes)
    assert {r.reason for r in out} <= {"", "exhausted"}
    assert "verified_safe" in {r.status for r in out}


def test_a_prompt_is_answered_alike_alone_and_in_company():
    """Guards rows that leave at different draws and tokens against each other's state."""
    alone = [r for prompt in PROMPTS for r in answers(prompts=[prompt], draws=3)]
    together = answers(draws=3)
    assert [(r.tokens, r.counts) for r in alone] == [(r.tokens, r.counts) for r in together]


def test_a_plain_config_gets_the_defaults():
    """Guards a guard of igcore alone, which knows nothing of these settings."""
    config = method_of("rejection").settings_under(SearchConfig(budget=1.0))
    assert (config.spend, config.draws, config.checks, config.block_size) == (64, 24, "word", 8)


def test_a_line_holds_the_settings_and_is_scored_again():
    """Guards records: another limit of draws is another method."""
    guard = guard_of(draws=3)
    texts = [prompt.text for prompt in PROMPTS]
    lines = [record(r, "rejection", guard, seed=0) for r in decode("rejection", guard, texts)]
    assert {(line["spend"], line["draws"], line["n_samples"]) for line in lines} == {(20, 3, 1)}
    assert list(rescored(lines, guard.cost, guard.reward)) == []
