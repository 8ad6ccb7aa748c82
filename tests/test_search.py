"""Tests of the one loop, against a second implementation, closed forms, and scorers that fail."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mockpolicy import (
    EOS,
    LETTERS,
    Answering,
    LetterCost,
    LetterCritic,
    LetterReward,
    letter_cost,
    letter_f1,
    letter_f2,
    letter_reward,
    mock_policy,
    probabilities,
    some_number,
)
from reference import search as reference_search
from scipy.stats import binomtest
from tiny import tiny_policy, untrained
from transformers import DynamicCache

from igcore import METHODS, Guard, ParameterError, Prompt, budget, decode, decoding
from igcore.contract import TEXTS as EXAMINED
from igcore.engine.agreement import cache_for
from igcore.engine.kv_cache import History, cache_name
from igcore.methods import method_of
from igcore.prompt import PROBE
from igstudy.runs.decode_params import Settings
from igstudy.training.critic import CriticConfig
from igstudy.training.rollouts import Rollout, targets

ASKING = [method for method in METHODS if method_of(method).asks_critic]
STEPWISE = ["backtracking", "rejection"]  # which have tests of their own
ALONE = [m for m in METHODS if not method_of(m).network and m not in STEPWISE]
PROMPTS = ["ab", "fed", "c", "dd", "eae", "fcb"]
SETTINGS = dict(budget=1.0, n_samples=3, keep=2, block_size=3, max_new_tokens=8)
SETTINGS |= dict(rounds=2, lagrange_multiplier=0.7, token_top_k=4)


def answers(
    method, prompts=PROMPTS, cost=None, reward=None, seed=0, critic=None, on_block=None, **settings
):
    guard = guard_of(mock_policy(), cost, reward, critic, **settings)
    return list(decode(method, guard, prompts, seed=seed, on_block=on_block))


def guard_of(policy, cost=None, reward=None, critic=None, **settings):
    config = Settings(**(SETTINGS | settings))
    scorers = cost or LetterCost(), reward or LetterReward()
    return Guard(policy, *scorers, config, critic or LetterCritic())


def ids(prompts):
    return [Prompt(f"id{i}", text, "mock") for i, text in enumerate(prompts)]


class Tampered(LetterCost):
    """A cost whose scores are replaced by `bad` wherever `when(response, call number)` holds."""

    def __init__(self, bad, when):
        super().__init__()
        self.bad, self.when, self.calls = bad, when, 0

    def score(self, prompts, responses, finished):
        self.calls += 1
        return [self.bad if self.when(r, self.calls) else letter_cost(r) for r in responses]


@pytest.mark.parametrize("method", ALONE)
@pytest.mark.parametrize("diversity", ["half", "paper", "none"])
@pytest.mark.parametrize("d", [0.0, 0.5, 2.0])
def test_the_loop_equals_a_second_implementation(method, diversity, d):
    """Guards every choice of the loop: shares, retries, penalty, carried finished beams, dropping
    of unsafe ones, ranking.
    """
    compare_with_reference(method, dict(budget=d, diversity=diversity), {})


@pytest.mark.parametrize("method", ASKING)
@pytest.mark.parametrize("threshold", [-1, 0.0, 0.5, 1.0, "matched"])
@pytest.mark.parametrize("f2", [letter_f2, lambda text, z: 0.25], ids=["f2", "ties"])
@pytest.mark.parametrize("d", [0.0, 0.5, 2.0])
def test_the_loop_with_a_critic_equals_a_second_implementation(method, threshold, f2, d):
    """Guards E_critic and E_mix: what passes, when a block is tried again, what goes on when
    nothing passes, order and z.
    """
    number = 1 - 0.01 ** (2 / 3) if threshold == "matched" else threshold  # 3 samples for 2 beams
    critic = {"critic": (letter_f1, f2), "threshold": number, "eta": 0.7, "gamma_task": 0.9}
    settings = dict(budget=d, threshold=threshold, eta=0.7, gamma_task=0.9)
    compare_with_reference(method, settings, critic)


@pytest.mark.parametrize("score_threshold", [-1.0, 0.0, 0.4])
@pytest.mark.parametrize("diversity", ["half", "paper"])
def test_retries_by_score_equal_a_second_implementation(score_threshold, diversity):
    """Guards the other reason for a retry: every c_task + lambda C is above a threshold of one's
    own, 0 among them.
    """
    own = dict(score_threshold=score_threshold)
    compare_with_reference("beam-lagrangian-freq", own | dict(budget=0.5, diversity=diversity), own)


def compare_with_reference(method, settings, more):
    """Compare answers, abstentions and what follows a failure, over three seeds; `more` is for the
    reference alone.
    """
    d, diversity = settings["budget"], settings.get("diversity", "half")
    own = 3, 2, 3, 8, 2, diversity, SETTINGS["lagrange_multiplier"]
    for seed in range(3):
        mock = LetterCritic(*more["critic"]) if "critic" in more else None
        probing = settings | dict(probe_fail_open=True, critic=mock)
        out = answers(method, ids(PROMPTS), seed=seed, **probing)
        for prompt, got in zip(ids(PROMPTS), out, strict=True):
            given = method, prompt.text, prompt.id, seed, d
            best, abstained = reference_search(*given, *own, top_k=4, **more)
            assert (got.status == "abstained") == abstained
            assert got.fail_open_cost == letter_cost(best.text)
            if not abstained:
                assert got.text == best.text
                costs = [letter_cost(got.text[:end]) for end in got.block_ends]
                assert tuple(itertools.accumulate(costs, max)) == best.peaks[1:]


def test_the_comparison_above_meets_every_kind_of_ending():
    """Guards the test above against vacuity: abstentions, retries, end tokens and broken budgets
    all occur in its settings.
    """
    out = []
    for d, seed in itertools.product((0.0, 0.5, 2.0), range(3)):
        out += answers("inferenceguard", ids(PROMPTS), seed=seed, budget=d)
    assert {r.status for r in out} == {"verified_safe", "abstained"}
    assert any(len(blocks_of(r)) < len(r.trace) for r in out)  # some block took a second round
    safe = [r for r in out if r.status == "verified_safe"]
    assert any(0 < r.n_tokens < 8 or len(r.text) < r.n_tokens for r in safe)
    unsafe = answers("best-of-n", ids(PROMPTS), budget=0.0)
    assert any(r.status == "unverified_unsafe" for r in unsafe)
    for d in (0.0, 0.5):  # retries by score: of some blocks
        found = answers("beam-lagrangian-freq", ids(PROMPTS), budget=d)
        rounds = sum(len(r.trace) for r in found)
        assert rounds / 2 < sum(len(blocks_of(r)) for r in found) < rounds


def blocks_of(answer):
    return {t["block"] for t in answer.trace}


def block_probability(prompt, length, wanted):
    """Total probability of the blocks whose text satisfies `wanted`, by enumeration."""
    total, start = 0.0, tuple(LETTERS.index(c) for c in prompt)
    for tokens in itertools.product(range(len(LETTERS)), repeat=length):
        cut = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        if len(cut) < length and any(tokens[len(cut) :]):
            continue  # each block that ends early is counted once
        p = math.prod(probabilities(start + cut[:i])[t] for i, t in enumerate(cut))
        total += p * wanted("".join(LETTERS[t] for t in cut if t != EOS))
    return total


@pytest.mark.parametrize(("n", "rounds"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_probability_of_no_safe_block_is_a_power(n, rounds):
    """Guards independence of samples over beams and rounds: P(abstain) = (1-p)^(N M) for one block
    without penalty.
    """
    p = block_probability("ab", 2, lambda text: letter_cost(text) == 0)
    prompts = [Prompt(f"id{i}", "ab", "mock") for i in range(1500)]
    settings = dict(budget=0.0, n_samples=n, rounds=rounds, keep=1, group_size=500)
    settings |= dict(block_size=2, max_new_tokens=2, diversity="none")
    out = answers("inferenceguard", prompts, **settings)
    abstained = sum(r.status == "abstained" for r in out)
    assert 0.15 < p < 0.5
    assert binomtest(abstained, 1500, (1 - p) ** (n * rounds)).pvalue > 1e-3


def test_results_depend_neither_on_order_nor_on_company():
    """Guards the coordinates of the random numbers: a prompt alone, in a group or in reversed order
    gives the same answer.
    """

    def found(prompts, **settings):
        out = answers("inferenceguard", prompts, **settings)
        return {r.prompt_id: (r.text, r.z_trace) for r in out}

    together, alone = found(ids(PROMPTS)), {}
    for prompt in ids(PROMPTS):
        alone |= found([prompt])
    assert together == alone == found(ids(PROMPTS)[::-1], group_size=4)


def test_the_seed_and_the_prompt_set_change_the_answer():
    assert [r.text for r in answers("base")] != [r.text for r in answers("base", seed=1)]
    assert [r.text for r in answers("base")] != [r.text for r in answers("base", ids(PROMPTS))]


def unlike(some, others):
    """Return the fields in which answers differ, seconds excepted."""
    compared = [f.name for f in dataclasses.fields(some[0]) if f.compare]
    names = [name for name in compared if not name.endswith("_s")]
    pairs = list(zip(some, others, strict=True))
    return {n for n in names if any(getattr(a, n) != getattr(b, n) for a, b in pairs)}


EMITTING = [method for method in ALONE if not method_of(method).abstains]
SAMPLING = [method for method in EMITTING if not method.startswith("args")]
SCORED = {"counts", "trace", "finals"}  # what shows that a score was asked which changed nothing


@pytest.mark.parametrize("method", SAMPLING)
def test_base_is_the_first_sample_of_every_baseline(method):
    """Guards common random numbers: with one sample in one block there is nothing to choose."""
    one = answers(method, ids(PROMPTS), n_samples=1, keep=1, block_size=8, rounds=1)
    assert unlike(one, answers("base", ids(PROMPTS), block_size=8)) <= SCORED


@pytest.mark.parametrize("method", ["best-of-n", "best-of-n-lagrangian", "best-of-n-augmented"])
def test_the_first_finals_of_a_large_run_are_those_of_a_small_one(method):
    """Guards the smaller N that are read off one run at the largest: which candidates, in which
    order, with what scores.
    """
    large = answers(method, ids(PROMPTS), n_samples=9)
    for n in (2, 5):
        small = answers(method, ids(PROMPTS), n_samples=n)
        assert [r.finals for r in small] == [r.finals[:n] for r in large]
    for r in large:
        assert len(r.finals) == 9 == sum(t["finals"] for t in r.trace)
        rewards, costs = zip(*r.finals, strict=True)
        if method == "best-of-n":
            assert set(costs) == {None} and max(rewards) == r.reward
        elif method == "best-of-n-augmented":
            unasked = [reward is None for reward in rewards]
            assert unasked == [cost > 1.0 for cost in costs]
        else:
            assert min(-a + 0.7 * b for a, b in r.finals) == -r.reward + 0.7 * r.cost


def test_a_final_whose_score_has_failed_is_there_and_says_so():
    """Guards subsampling: a candidate left out would move all that come after it, and no infinity
    gets into a file.
    """
    bad, method = Tampered(math.nan, lambda text, call: "e" in text), "best-of-n-lagrangian"
    plain = [x for r in answers(method, ids(PROMPTS), n_samples=9) for x in r.finals]
    failing = [x for r in answers(method, ids(PROMPTS), bad, n_samples=9) for x in r.finals]
    finals = list(zip(plain, failing, strict=True))
    assert all(a[0] == b[0] and b[1] in (None, a[1]) for a, b in finals)
    assert 0 < sum(b[1] is None for _, b in finals) < len(finals)


@pytest.mark.parametrize(
    ("method", "vanilla"), [("best-of-n-lagrangian", "best-of-n"), ("args-lagrangian", "args")]
)
def test_lambda_zero_is_the_vanilla_method(method, vanilla):
    """Guards the weight: at 0 the cost is asked, and decides nothing."""
    found = answers(method, ids(PROMPTS), lagrange_multiplier=0.0)
    assert unlike(found, answers(vanilla, ids(PROMPTS))) == SCORED
    assert "text" in unlike(found, answers(method, ids(PROMPTS), lagrange_multiplier=5.0))


def test_a_threshold_that_every_score_meets_leaves_beam_search_as_it_is():
    """Guards `beam-lagrangian-freq`: it is `beam-lagrangian` with a reason to try a block again."""
    plain = answers("beam-lagrangian", ids(PROMPTS))
    assert not unlike(answers("beam-lagrangian-freq", ids(PROMPTS), score_threshold=99.0), plain)
    tried = answers("beam-lagrangian-freq", ids(PROMPTS), score_threshold=-99.0, rounds=3)
    assert all(r.counts.rounds_used == 3 * len(blocks_of(r)) for r in tried)


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_scores_are_compared_with_lambda_times_the_budget_unless_another_threshold_is_given():
    """Guards 0, which is a threshold like any other, and a text of reward 0 at the budget, which is
    not above the default.
    """
    config = Settings(budget=0.4, lagrange_multiplier=5.0)
    assert config.lagrangian_threshold == 2.0
    assert dataclasses.replace(config, score_threshold=0.0).lagrangian_threshold == 0.0
    ones = Tampered(1.0, lambda *_: True)
    for d, rounds in ((1.0, 1), (0.9, 2)):
        (r,) = answers(
            "beam-lagrangian-freq", ["ab"], ones, LetterReward(lambda text: 0.0), budget=d
        )
        assert r.counts.rounds_used == rounds * len(blocks_of(r))


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_what_could_not_be_scored_is_the_last_choice_whatever_lambda(lam):
    """Guards 0 times infinity, which is NaN: sorted, it leaves its neighbours where they stand, and
    wins when it comes first.
    """
    failed, method = 0, "best-of-n-lagrangian"
    for seed in range(4):
        cost = Tampered(math.nan, lambda text, call: text > "c")
        for r in answers(method, ids(PROMPTS), cost, seed=seed, lagrange_multiplier=lam):
            known = [b for _, b in r.finals if b is not None]
            assert (r.text > "c") == (not known)
            failed += 0 < len(known) < len(r.finals)
    assert failed > 10


def test_a_text_whose_reward_failed_is_the_last_choice():
    """Bug: NaN as a reward of +infinity, which wins."""
    reward = LetterReward(lambda text: math.nan if text > "c" else letter_reward(text))
    failed = 0
    for r in answers("best-of-n", ids(PROMPTS), reward=reward, failure_rate=1.0):
        known = [a for a, _ in r.finals if a is not None]
        assert (r.text > "c") == (not known)
        failed += 0 < len(known) < len(r.finals)
    assert failed > 1


def test_a_cost_that_cannot_be_read_is_infinite():
    """Bug: NaN stayed in the cost of a kept candidate, where no comparison sees it."""
    kept = []
    settings = dict(failure_rate=1.0, on_block=lambda prompt, beams: kept.extend(beams))
    answers("beam-lagrangian", ids(PROMPTS), Tampered(math.nan, lambda r, _: r != ""), **settings)
    assert {(beam.broken, beam.cost, beam.worst) for beam in kept} == {(True, math.inf, math.inf)}


@pytest.mark.parametrize("method", [*ALONE, *ASKING, *STEPWISE])
def test_forward_tokens_are_what_the_policy_reads(method, monkeypatch):
    """Guards equal compute: prompts once, and every token that something was asked about or drawn
    after; retries add theirs. Near ties, which are read again, are left out.
    """
    for module in ("igcore.engine.sampling", "igstudy.baselines.args"):
        monkeypatch.setattr(f"{module}.NEAR_TIE", 0.0)
    for d, length in itertools.product((0.0, 2.0), (8, 3, 1)):
        policy, settings = mock_policy(), dict(budget=d, max_new_tokens=length)
        guard = guard_of(policy, **settings, block_size=min(3, length))
        cache_for(policy.model)  # tried once, before anything is counted
        policy.model.forwarded.clear()
        out = list(decode(method, guard, ids(PROMPTS)))
        assert sum(r.counts.forward_tokens for r in out) == policy.model.tokens_forwarded
        assert all(r.counts.forward_tokens >= len(r.prompt) for r in out)


def test_tokens_that_the_policy_all_but_excludes_can_be_reported():
    """Guards the trace: the perplexity of tokens of log-probability -1000 is no number that a float
    can hold.
    """
    policy = mock_policy(lambda prefix: [0.0, 0.0] + [-5e3] * 5)
    (r,) = decode("args", guard_of(policy), ["ab"])
    assert r.trace[0]["perplexity"] == math.inf and r.trace[0]["kl"] == 0


def test_reward_is_asked_only_of_safe_candidates():
    """Guards lazy scoring: the reward model is the expensive one."""
    reward = LetterReward()
    # the refusal is measured too, so make it one that this cost calls safe
    answers("inferenceguard", ids(PROMPTS), reward=reward, refusal="", budget=0.0)
    seen = [text for text in reward.read if text not in EXAMINED]
    assert seen and all(letter_cost(text) == 0 for text in seen)


def test_only_prompts_without_a_safe_candidate_are_retried():
    """Guards the cost of retries: N samples per round that a prompt needed, and no more."""
    for r in answers("inferenceguard", ids(PROMPTS), budget=0.5):
        drawn = sum(t["drawn"] for t in r.trace)
        assert r.counts.samples_drawn == 3 * r.counts.rounds_used == drawn
        for block in blocks_of(r):
            rounds = [t for t in r.trace if t["block"] == block]
            assert all(t["safe"] == 0 for t in rounds[:-1])


def test_work_is_counted_before_the_cache():
    """Guards the equal-compute columns against the cache, and against being charged for the tables'
    own measurements.
    """
    methods = "base", "best-of-n", "best-of-n-augmented"
    base, best, augmented = (answers(method, ["ab"])[0].counts for method in methods)
    assert (base.samples_drawn, base.scorer_calls) == (1, 0)
    assert (best.samples_drawn, best.scorer_calls) == (3, 3)
    assert best.scorer_tokens == best.policy_tokens <= 3 * 8
    assert 3 <= augmented.scorer_calls <= 6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_makes_a_candidate_unsafe(bad):
    """Guards fail closed: -inf or NaN must not look like the safest text of all."""
    cost = Tampered(bad, lambda text, call: "e" in text)
    for method in ("inferenceguard", "beam-augmented", "beam-lagrangian"):
        for r in answers(method, ids(PROMPTS), cost=cost, budget=3.0):
            if r.status == "verified_safe":
                assert "e" not in r.text


def test_a_broken_scorer_and_a_policy_block_have_different_reasons():
    """Guards the reason: 'nothing safe was found' must never be said of a prompt whose candidates
    could not be scored.
    """
    broken = PROMPTS[:2]

    def score(prompts, texts, _):
        pairs = zip(prompts, texts, strict=True)
        return [math.nan if prompt in broken else letter_cost(text) for prompt, text in pairs]

    for r in answers("inferenceguard", ids(PROMPTS), cost=Answering(score), budget=0.0):
        if r.prompt in broken:  # nor could the refusal be scored
            assert (r.status, r.reason, r.text) == ("abstained", "scorer_error", None)
        else:
            assert r.reason in ("", "exhausted")


def test_truncation_emits_the_last_certified_prefix():
    out, settings = [], dict(on_failure="truncate", budget=0.0)
    for seed in range(10):
        out += answers("inferenceguard", ids(PROMPTS), seed=seed, **settings)
    cut = [r for r in out if r.reason == "truncated"]
    assert cut and {(r.status, r.finished) for r in cut} == {("verified_safe", False)}
    assert all(letter_cost(r.text) == 0 and r.n_tokens % 3 == 0 for r in cut)


def test_paper_mode_emits_the_least_unsafe_and_says_so():
    """Guards the fail-open number: the probe must find just what `on_failure="paper"` emits, and
    charge nothing for it.
    """
    settings = dict(budget=0.0, rounds=2)
    paper = answers("inferenceguard", ids(PROMPTS), on_failure="paper", **settings)
    probed = answers("inferenceguard", ids(PROMPTS), probe_fail_open=True, **settings)
    plain = answers("inferenceguard", ids(PROMPTS), **settings)
    failed = [i for i, r in enumerate(plain) if r.status == "abstained"]
    assert failed
    for i, (a, b, c) in enumerate(zip(paper, probed, plain, strict=True)):
        assert a.cost == b.fail_open_cost
        assert (b.text, b.counts, b.trace) == (c.text, c.counts, c.trace)
        assert (a.status == "unverified_unsafe") == (a.reason == "exhausted") == (i in failed)
        assert c.fail_open_cost == (None if i in failed else c.cost)


@pytest.mark.parametrize("accounting", sorted(budget.SIGNED))
@pytest.mark.parametrize("on_failure", ["truncate", "paper", "abstain"])
def test_credit_that_was_banked_never_makes_an_unsafe_path_safe(accounting, on_failure):
    """Guards the end of a signed search: a total above the budget is a failure, however low the
    final score is.
    """
    cost = LetterCost(lambda text: letter_cost(text) - 1.0)
    settings = dict(accounting=accounting, on_failure=on_failure, budget=0.0)
    out = []
    for seed in range(6):
        out += answers("inferenceguard", ids(PROMPTS), cost, seed=seed, **settings)
    assert {r.status for r in out} > {"verified_safe"}
    for r in out:
        safe = r.z_trace[-1] >= 0 and r.cost <= 0
        emitted = "verified_safe" if safe else "unverified_unsafe"
        assert r.status == ("abstained" if r.n_tokens == 0 and r.reason else emitted)


@pytest.mark.parametrize("mode", ["abstain", "paper"])
def test_a_failed_scorer_is_named_in_every_mode(mode):
    reward = LetterReward(lambda text: math.nan if len(text) > 3 else 0.0)
    out = answers("inferenceguard", ids(PROMPTS), reward=reward, on_failure=mode, budget=100.0)
    assert {r.reason for r in out if len(r.text) > 3 or r.status == "abstained"} == {"scorer_error"}


def test_a_scorer_is_never_asked_about_nothing():
    """Guards a group that fails as a whole: many scorers cannot score an empty list."""

    class Picky(LetterCost):
        def score(self, prompts, responses, finished):
            max(map(len, responses))  # raises for an empty list
            return [2.0 + len(r) if r else 0.0 for r in responses]

    settings = dict(refusal="", block_size=1, max_new_tokens=1, rounds=1)
    out = answers("inferenceguard", ids(PROMPTS), Picky(), **settings)
    assert all(r.text == "" for r in out)


def test_every_call_of_the_gate_is_counted():
    """Guards the equal-compute columns: one text by cost and reward, and twice more by the gate."""
    settings = dict(n_samples=1, keep=1, block_size=8, rounds=1, budget=100.0, checks="block")
    (r,) = answers("inferenceguard", ["ab"], **settings)
    assert (r.counts.scorer_calls, r.counts.scorer_tokens) == (4, 4 * r.n_tokens)
    dear = Tampered(9.0, lambda text, call: text != "")
    (r,) = answers("inferenceguard", ["ab"], dear, **(settings | {"budget": 1.0}))
    # the candidate, twice the refusal, twice the empty text
    assert (r.text, r.counts.scorer_calls) == ("", 5)


def test_the_trace_reports_divergence_and_perplexity_of_what_was_drawn():
    """Guards the sign and the scale: no penalty, no divergence; a ban diverges upwards; a
    perplexity is at least one.
    """
    out = answers("inferenceguard", ids(PROMPTS), budget=0.0, diversity="paper")
    steps = [t for r in out for t in r.trace]
    assert all(t["kl"] == 0 for t in steps if t["round"] == 0)
    retries = [t["kl"] for t in steps if t["round"] == 1]
    assert len(retries) >= 5 and sum(retries) > 0
    assert all(1 < t["perplexity"] < 100 for t in steps)


def test_near_ties_are_added_up(monkeypatch):
    monkeypatch.setattr("igcore.engine.sampling.NEAR_TIE", 1e9)
    for r in answers("best-of-n", ids(PROMPTS)):
        assert r.counts.near_ties == r.counts.policy_tokens


def test_seconds_are_shared_by_the_group(monkeypatch):
    """Guards seconds per prompt: a group of six is not charged six times."""
    times = itertools.count()
    monkeypatch.setattr("igcore.work.time.perf_counter", lambda: next(times))
    out = answers("base", ids(PROMPTS))
    # encoding the prompts, one round, and choosing its survivors
    assert sum(r.generate_s for r in out) == pytest.approx(3)


def test_a_retry_obeys_the_finite_penalty_and_spares_the_end_token():
    """Guards what the loop hands to the penalty: zero nats is no penalty, and EOS can be drawn
    after failing with it.
    """

    def texts(**settings):
        out = answers("inferenceguard", ids(PROMPTS), budget=0.0, **settings)
        return [r.text for r in out]

    free = texts(diversity="paper", diversity_penalty=0.0)
    assert free == texts(diversity="none") and free != texts(diversity="paper")


def test_one_yardstick_measures_methods_that_look_only_once():
    """Guards peak_cost: Best-of-N checks once, but is measured on the grid of every block_size
    tokens like all others.
    """
    cost = LetterCost(lambda text: float(text.count("a")) if len(text) < 8 else 0.0)
    out = answers("best-of-n", ids(PROMPTS), cost=cost, budget=0.0)
    full = [r for r in out if len(r.text) == 8]
    for r in full:
        assert (r.cost, r.status, len(r.block_ends)) == (0, "verified_safe", 1)
        assert r.peak_cost == max(r.text[:k].count("a") for k in (3, 6))
    assert any(r.peak_cost > 0 for r in full)


def test_strict_reading_with_a_zero_budget_is_a_dead_end():
    out = answers("inferenceguard", budget=0.0, strict=True)
    found = {(r.status, r.reason, r.counts.samples_drawn) for r in out}
    assert found == {("abstained", "dead_end", 0)}


@pytest.mark.parametrize("accounting", budget.ACCOUNTINGS)
@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_emitted_verified_text_is_inside_the_budget_under_every_accounting(accounting, gamma):
    """Guards the one promise, also where signed accounting banks credit: U_K <= d of the exact
    text.
    """
    settings = dict(accounting=accounting, gamma_safety=gamma, budget=0.5)
    for r in answers("inferenceguard", ids(PROMPTS), **settings):
        assert r.status == "abstained" or letter_cost(r.text) <= 0.5


def test_weights_and_random_state_are_untouched():
    state = torch.random.get_rng_state()
    answers("inferenceguard")
    assert torch.equal(state, torch.random.get_rng_state())


def test_no_prompts_have_no_answers():
    """Guards a batch job, of which a part may be empty."""
    guard = Guard(mock_policy(), LetterCost(), budget=1.0)
    assert guard.map([]) == [*decode("base", guard, iter(()))] == []


def test_a_guard_decodes_by_its_own_method_and_seed_or_by_others():
    """Guards the front of `decode`: what is left out is the guard's, and what is named is not."""
    guard = Guard(mock_policy(), LetterCost(), budget=1.0, method="rejection", seed=3)
    assert texts(guard.decode(PROMPTS)) == texts(decode("rejection", guard, PROMPTS, seed=3))
    found = texts(guard.decode(PROMPTS, method="base", seed=4))
    assert found == texts(decode("base", guard, PROMPTS, seed=4))


def texts(answers):
    """Return what each answer says."""
    return [answer.text for answer in answers]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        (["ab", "  "], {}, "is empty"),
        (["a" * 60], {}, "60 tokens, .* context of 64"),
        (["ab"], {"keep": 9}, "keep is 9, more than n_samples"),
        (["ab"], {"block_size": 9}, "block_size is 9, more than max_new_tokens"),
        (["ab"], {"budget": -1.0}, "budget is -1.0: it must be greater than or equal to 0"),
        (["ab"], {"budget": math.inf}, "budget is inf: it must be a finite number"),
        ("ab", {}, "prompts is 'ab'; give a list"),
        (["ab"], {"accounting": "peaks"}, "unknown accounting 'peaks'; did you mean 'peak'"),
    ],
)
def test_bad_input_is_named_before_anything_is_decoded(prompts, settings, message):
    with pytest.raises(ParameterError, match=message):
        answers("inferenceguard", prompts, **settings)


def kept_by_block(method, **more):
    """Return the answers and the beams kept after every block of every search, in order."""
    kept = []
    found = answers(method, ids(PROMPTS), on_block=lambda *block: kept.append(block), **more)
    return found, kept


@pytest.mark.parametrize("method", ASKING)
def test_the_comparison_with_a_critic_meets_every_kind_of_block(method):
    """Guards the second implementation against vacuity: doubt, retries for doubt alone, early ends,
    abstentions all occur.
    """
    out, kept = [], []
    for seed, d, threshold in itertools.product(range(3), (0.0, 0.5, 2.0), (0.5, 1.0)):
        found = kept_by_block(method, seed=seed, budget=d, threshold=threshold)
        out, kept = out + found[0], kept + found[1]
    assert {r.status for r in out} == {"verified_safe", "abstained"}
    config = Settings(**SETTINGS)
    kept = [beams for _, beams in kept]
    doubted = [beams for beams in kept if not beams[0].passes(config)]
    # the search goes on by f1
    assert any(beams[0].safe(config) and len(beams) == 2 for beams in doubted)
    # carried beside one that goes on
    assert any({b.finished for b in beams} == {True, False} for beams in kept)
    every = [b for beams in kept for b in beams]
    assert any(b.finished and b.let_through and len(b.tokens) < 8 for b in every)
    assert any(t["safe"] and t["round"] for r in out for t in r.trace)  # a retry that helped


def test_a_beam_that_has_overspent_is_dropped_for_one_that_is_only_doubted():
    """Guards the samples: past the budget nothing can be saved, while what the critic doubts may
    still end well.
    """
    _, kept = kept_by_block("inferenceguard-mix", budget=0.5, threshold=1.0, n_samples=6, keep=6)
    config = Settings(**(SETTINGS | dict(budget=0.5, threshold=1.0)))
    assert any(0 < len(beams) < 6 for _, beams in kept)
    assert all(beam.safe(config) for _, beams in kept for beam in beams)


@pytest.mark.parametrize(
    ("n_samples", "keep", "expected"),
    [(2, 2, 0.99), (8, 2, 0.684), (32, 1, 0.134), (128, 1, 0.035)],
)
def test_the_matched_threshold_leaves_a_beam_one_chance_in_a_hundred(n_samples, keep, expected):
    """Guards the formula 1 - miss^(1/m), m samples to a beam, on values worked out by hand."""
    config = Settings(budget=1.0, n_samples=n_samples, keep=keep)
    assert config.critic_threshold == pytest.approx(expected, abs=5e-4)
    assert (1 - config.critic_threshold) ** (n_samples / keep) == pytest.approx(0.01)


def knows(text, z):
    """A critic that is right: the fewer costly letters, the likelier a good end."""
    return math.exp(-letter_cost(text))


ADVERSARIES = {
    "opposite": lambda text, z: 1 - knows(text, z),
    "noise": lambda text, z: some_number("noise", text),
    "nan": lambda text, z: math.nan,
    "half nan": lambda text, z: math.nan if len(text) % 2 else 1.0,
    "infinite": lambda text, z: math.inf if "a" in text else -math.inf,
}


@pytest.mark.parametrize("method", ASKING)
@pytest.mark.parametrize("adversary", ADVERSARIES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    d=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    seed=st.integers(0, 999),
    threshold=st.sampled_from([-1.0, 0.0, 0.5, 1.0, "matched"]),
    as_f2=st.booleans(),
    on_failure=st.sampled_from(["abstain", "truncate"]),
    strict=st.booleans(),
)
def test_whatever_the_critic_says_verified_text_is_inside_the_budget(
    method, adversary, d, seed, threshold, as_f2, on_failure, strict
):
    """Guards the promise against the critic: it chooses where to look and never what is safe."""
    bad = ADVERSARIES[adversary]
    critic = LetterCritic(knows, bad) if as_f2 else LetterCritic(bad)
    settings = dict(budget=d, threshold=threshold, on_failure=on_failure, strict=strict)
    out = answers(method, ids(PROMPTS), critic=critic, seed=seed, **settings)
    assert critic.asked or (strict and d == 0)
    for r in out:
        assert r.status in ("verified_safe", "abstained")
        costs = [letter_cost(r.text[:end]) for end in r.block_ends] if r.text is not None else []
        assert all(cost < d or (cost == d and not strict) for cost in costs) or r.n_tokens == 0


@pytest.mark.parametrize("method", ASKING)
def test_an_unreadable_critic_lets_nothing_through(method):
    """Guards the comparisons with NaN: as an f1 it must rank like one doubt among equals, as an f2
    it must not pass for small.
    """
    unreadable = [
        LetterCritic(lambda text, z: math.nan), LetterCritic(knows, lambda text, z: math.nan),
        LetterCritic(lambda text, z: math.inf), LetterCritic(knows, lambda text, z: -math.inf),
    ]  # fmt: skip
    for i, critic in enumerate(unreadable):
        same = LetterCritic(knows if i % 2 else lambda text, z: 0.5)
        doubted = answers(method, ids(PROMPTS), critic=same, threshold=1.0, eta=0.0)
        found, kept = kept_by_block(method, critic=critic, threshold=-9.0, eta=0.0)
        assert [(r.text, r.trace) for r in found] == [(r.text, r.trace) for r in doubted]
        assert not any(beam.let_through for _, beams in kept for beam in beams if not beam.finished)


def test_a_candidate_whose_f1_cannot_be_read_comes_after_all_that_can():
    """Guards sorting: NaN compares as neither more nor less, and would scramble the order of its
    neighbours.
    """
    for seed in range(12):
        found = []
        for x in (math.nan, -1.0):
            f1 = lambda text, z, x=x: x if some_number(text) < 0.4 else knows(text, z)  # noqa: E731
            own = dict(critic=LetterCritic(f1), threshold=1.0, n_samples=6, seed=seed)
            found.append([r.text for r in answers("inferenceguard-critic", ids(PROMPTS), **own)])
        assert found[0] == found[1]


def test_where_nothing_passes_every_block_takes_all_its_rounds_and_goes_on_by_f1():
    """Guards threshold 1: with costs at the end only, doubt is no reason to stop; the best f1 of
    all rounds is kept.
    """
    checked, ended_early, settings = 0, 0, dict(threshold=1.0, rounds=3, n_samples=4)
    for seed in range(12):
        out, kept = kept_by_block("inferenceguard-critic", seed=seed, **settings)
        kept = [(p.id, beams) for p, beams in kept if not all(b.finished for b in beams)]
        for r in out:
            going = [beams for prompt_id, beams in kept if prompt_id == r.prompt_id]
            for number, beams in enumerate(going):
                if not beams[0].finished:
                    assert [t["safe"] for t in r.trace if t["block"] == number] == [0, 0, 0]
                doubted = [beam for beam in beams if not beam.finished]
                f1 = [beam.f1 for beam in doubted]
                assert beams[len(beams) - len(doubted) :] == doubted, "what is certain comes first"
                assert f1 == sorted(f1, reverse=True) and f1[0] == letter_f1(doubted[0].text, 1.0)
                checked += 1
                ended_early += beams[0].finished
    assert checked > 12 and ended_early > 2


def test_the_trace_counts_the_finals():
    """Guards the measure of the critic's worth: all that finished, whenever, and those of them
    inside the budget.
    """
    for seed in range(4):
        own = dict(seed=seed, threshold=1.0, rounds=1)
        for r in answers("inferenceguard-critic", ids(PROMPTS), **own):
            for t in r.trace:  # 1 lets nothing else through
                assert t["safe"] == t["safe_finals"] <= t["finals"] <= t["drawn"]
            assert r.trace[-1]["finals"] > 0
    (r,) = answers("best-of-n-augmented", ids(PROMPTS[:1]), n_samples=5, keep=1)
    assert [t["finals"] for t in r.trace] == [5]
    assert {t["safe_finals"] for r in answers("best-of-n", ids(PROMPTS)) for t in r.trace} == {None}


def test_a_critic_that_lets_everything_through_leaves_the_guard_as_it_is():
    """Guards E_mix at eta 0: the same ranking, retries, counts and failures as E_inter."""
    for seed, d in itertools.product(range(3), (0.0, 0.5, 2.0)):
        own = dict(seed=seed, budget=d, threshold=-1.0, eta=0.0)
        mix, plain = (
            answers(method, ids(PROMPTS), **own)
            for method in ("inferenceguard-mix", "inferenceguard")
        )
        assert not unlike(mix, plain)


def test_without_an_opinion_the_first_samples_go_on():
    """Guards ties: a constant f2 below every task cost keeps the first beam, which is `base` as
    long as it has not ended.
    """
    critic = LetterCritic(lambda text, z: 1.0, lambda text, z: -100.0)
    own = dict(critic=critic, threshold=-1.0, keep=1, budget=100.0)
    out = answers("inferenceguard-critic", ids(PROMPTS), **own)
    base = answers("base", ids(PROMPTS))
    pairs = [(a, b) for a, b in zip(out, base, strict=True) if len(b.text) >= 6]
    assert len(pairs) >= 2 and all(a.text[:6] == b.text[:6] for a, b in pairs)


def seen_by_scorers(monkeypatch, method, **more):
    """Return the answers, and the (text, finished) that each scorer was asked about after it was
    loaded and before the answers were measured.
    """
    seen, measuring = {"cost": [], "reward": []}, []

    def watched(role, kind):
        class Watched(kind):
            def score(self, prompts, responses, finished):
                if not measuring and prompts[0] != PROBE:
                    seen[role] += zip(responses, finished, strict=True)
                return super().score(prompts, responses, finished)

        return Watched()

    def measure(*given, own=decoding.measure):
        measuring.append(1)
        return own(*given)

    monkeypatch.setattr(decoding, "measure", measure)
    scorers = watched("cost", LetterCost), watched("reward", LetterReward)
    return answers(method, ids(PROMPTS), *scorers, **more), seen


def test_under_terminal_costs_scorers_are_asked_only_about_finished_text(monkeypatch):
    """Guards what E_critic is for: costs that exist only at the end, and a reward that nobody needs
    before.
    """
    out, seen = seen_by_scorers(monkeypatch, "inferenceguard-critic", budget=2.0, threshold=0.5)
    both = [*seen["cost"], *seen["reward"]]
    assert len(seen["cost"]) > 10 and all(finished for _, finished in both)
    assert seen["reward"] and all(letter_cost(text) <= 2.0 for text, _ in seen["reward"])
    assert sum(r.counts.scorer_calls for r in out) >= len(both)  # before the cache
    counts = [r.counts for r in out if r.counts.rounds_used > 3]
    assert all(each.scorer_calls < each.samples_drawn for each in counts)


def test_reward_is_not_asked_of_what_the_critic_rejects(monkeypatch):
    """Guards lazy scoring under E_mix: nothing unfinished passes a threshold of 1, while its cost
    is still needed.
    """
    _, seen = seen_by_scorers(monkeypatch, "inferenceguard-mix", budget=2.0, threshold=1.0)
    assert {finished for _, finished in seen["cost"]} == {True, False}
    assert {finished for _, finished in seen["reward"]} == {True}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("inferenceguard-critic", dict(gamma_safety=0.9, accounting="peak", budget=0.5)),
        ("inferenceguard-mix", dict(gamma_safety=1.0, accounting="peak", budget=1.0)),
        ("inferenceguard-mix", dict(gamma_safety=0.9, accounting="clamped_sum", budget=3.0)),
        ("inferenceguard-mix", dict(gamma_safety=0.9, accounting="increment", budget=1.0)),
    ],
)
def test_the_critic_is_told_the_z_that_it_was_trained_on(method, settings):
    """Guards the last input of the critic: time index, discount and accounting as in the rollouts;
    asked of what may go on.
    """
    critic = LetterCritic()
    answers(method, ids(PROMPTS), critic=critic, **settings)
    accounting = "terminal" if method == "inferenceguard-critic" else settings["accounting"]
    # never of a finished one
    assert len(critic.asked) > 20 and {len(text) for text, _ in critic.asked} == {3, 6}
    for text, z in critic.asked:
        tokens = [LETTERS.index(c) for c in text] + [EOS]
        costs = [letter_cost(text[:end]) for end in (*range(3, len(text) + 1, 3), len(text))]
        rollout = Rollout("", "", tokens, True, costs, costs, 0.0, 3, 8)
        known = targets(rollout, settings["budget"], accounting, settings["gamma_safety"])
        assert z == pytest.approx(known.z[-1]) and z >= 0


def test_a_reward_that_fails_is_not_let_through_by_the_critic():
    """Guards the way, E_mix too: such a candidate is not safe, and no minus infinity wins."""
    reward = LetterReward(lambda text: math.nan if text.startswith("d") else letter_reward(text))
    for method in ["inferenceguard", *ASKING]:
        for r in answers(method, ids(PROMPTS), reward=reward, budget=5.0, threshold=0.0):
            assert r.status == "abstained" or not r.text.startswith("d")


def test_a_finished_beam_is_judged_once_by_its_cost_and_never_by_the_critic():
    """Guards carried beams: the critic's doubt about how they began is forgotten, and their scores
    stay.
    """
    _, kept = kept_by_block("inferenceguard-critic", threshold=0.5, budget=5.0, keep=3, n_samples=6)
    finished = [beam for _, beams in kept for beam in beams if beam.finished]
    assert len(finished) > 5
    for b in finished:
        assert math.isnan(b.f1) and b.let_through and b.cost == letter_cost(b.text)


def tiny_critic(given, features="o", **changes):
    config = CriticConfig(budget=2.0, features=features, layer=0, width=8, dropout=0.0)
    return untrained(config=config, of=given, **{"max_new_tokens": 12} | changes)


REAL = dict(budget=2.0, n_samples=6, keep=2, block_size=4, max_new_tokens=12, threshold=0.5)
TEXTS = ["one", "a longer prompt", "22"]


def real_guard(policy, critic, cost=None):
    return Guard(policy, cost or LetterCost(), LetterReward(), Settings(**REAL), critic)


@torch.inference_mode()
def whole_text(policy, prompt, tokens, layer):
    """Return what one forward pass over a whole text gives a critic to read, without the engine."""
    past, n = DynamicCache(config=policy.model.config), len(tokens)
    ids, backbone = torch.tensor([policy.encode(prompt) + tokens]), policy.model.model
    out = backbone(ids, output_hidden_states=True, **{cache_name(backbone): past})
    middle = None if layer is None else out.hidden_states[layer + 1][:, -n:]
    keys, values = (
        [getattr(x, name)[:, :, -n:] for x in past.layers] for name in ("keys", "values")
    )
    hidden = out.last_hidden_state[:, -n:]
    mask = torch.ones(hidden.shape[:2], dtype=torch.bool)
    return History(mask, hidden, middle, keys, values)


@pytest.mark.parametrize("features", ["m", "o", "h", "ho"])
@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_the_critic_reads_in_the_search_what_it_reads_of_whole_text(features, cache):
    """Guards the way from the engine to the critic: rows, rounds and tokens of each candidate, for
    every kind of features.
    """
    policy, kept = tiny_policy(digest="tiny-1", cache=cache), []
    critic = tiny_critic(policy, features)
    guard = real_guard(policy, critic)

    def keep(prompt, beams):
        kept.extend((prompt, beam) for beam in beams)

    out = list(decode("inferenceguard-critic", guard, TEXTS, on_block=keep))
    asked = [(prompt, beam) for prompt, beam in kept if not beam.finished]
    assert len(asked) > 6 and {r.status for r in out} <= {"verified_safe", "abstained"}
    assert max(b.f1 for _, b in asked) - min(b.f1 for _, b in asked) > 0.01
    for prompt, beam in asked:
        read = whole_text(policy, prompt.text, beam.tokens, critic.watch)
        expected = [number.item() for number in critic.judge(read, [2.0])]
        assert [beam.f1, beam.f2] == pytest.approx(expected, abs=1e-4)
    assert all(r.critic_s > 0 for r in out)


@pytest.mark.parametrize("method", ASKING)
def test_a_method_without_its_critic_is_refused(method):
    guard = Guard(mock_policy(), LetterCost(), LetterReward(), Settings(**SETTINGS))
    message = f"^method '{method}' needs a critic; train one .* give it to Guard as critic="
    with pytest.raises(ParameterError, match=message):
        decode(method, guard, PROMPTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "other"}, "policy 'other' of hash 'tiny-1', not for 'tiny' of hash 'tiny-1'"),
        ({"cost": "harm"}, "cost 'harm' of hash 'v1', not for 'letters' of hash 'v1'"),
        ({"cost_digest": "v2"}, "cost 'letters' of hash 'v2', not for 'letters' of hash 'v1'"),
        ({"reward_digest": "v2"}, "trained for reward 'vowels' of hash 'v2'"),
        ({"accounting": "peak"}, "accounting 'peak', but .* runs with 'terminal'; set accounting"),
        ({"gamma_safety": 0.9}, "for gamma_safety 0.9, but .* runs with 1.0"),
        ({"max_new_tokens": 32}, "for max_new_tokens 32, but .* runs with 12"),
        ({"budget_high": 1.0, "budget": 0.5}, "budget is 2.0, but .* budgets from 0.5 to 1.0"),
    ],
)
def test_a_critic_that_was_trained_for_something_else_is_refused(changes, message):
    """Guards a probability against being read as that of another model, cost, budget or length."""
    policy = tiny_policy(digest="tiny-1")
    guard = real_guard(policy, tiny_critic(policy, **changes))
    with pytest.raises(ParameterError, match=message):
        decode("inferenceguard-critic", guard, TEXTS)
    assert decode("inferenceguard", guard, TEXTS)  # it is not asked


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_a_critic_that_reads_keys_may_read_few_candidates_at_a_time(rows, monkeypatch):
    """Bug: a chunk judged with the budgets left of others, or candidates after the first chunk
    never judged.
    """
    monkeypatch.setattr("igcore.search.CRITIC_ROWS", rows)
    kept, sizes = [], []

    def judge(seen, z):
        assert len(seen.hidden) == len(z) == len(seen.keys[0]) <= rows
        sizes.append(len(z))
        return torch.tensor(z, dtype=torch.float64).sigmoid(), torch.zeros(len(z))

    says = SimpleNamespace(spec=None, watch=None, reads_keys=True, judge=judge)
    varied = SimpleNamespace(
        name="varied", digest="v1", sign="higher is worse", unit="points",
        score=lambda _, responses, __: [sum(map(ord, text)) % 7 / 7 for text in responses],
    )  # fmt: skip
    guard = real_guard(tiny_policy(), says, varied)

    def keep(_, beams):
        kept.extend(beam for beam in beams if not beam.finished)

    list(decode("inferenceguard-mix", guard, TEXTS, on_block=keep))
    assert max(sizes) == min(rows, max(sizes)) and len({beam.state.z for beam in kept}) > 1
    for beam in kept:
        assert beam.f1 == pytest.approx(1 / (1 + math.exp(-beam.state.z)))
