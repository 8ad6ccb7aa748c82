"""Tests of ARGS: against a literal slow reference on tiny random models, by hand-computed chances,
and at its edges.
"""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from mockpolicy import (
    EOS,
    LETTERS,
    LetterCost,
    LetterReward,
    MockModel,
    letter_cost,
    letter_reward,
    logits_of,
    mock_policy,
    probabilities,
)
from tiny import PROMPTS as IDS
from tiny import Counter, reencode, tiny, tiny_tokenizer

from igcore import METHODS, Guard, ParameterError, PolicyError, Prompt, decode
from igcore.engine.agreement import supports_shared_prefix
from igcore.engine.local import LocalEngine
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.policy import Policy
from igstudy.baselines.args import propose
from igstudy.runs.decode_params import Settings

ARGS = [name for name in METHODS if name.startswith("args")]
# bytes: many candidates end inside a character, and leave the text as it is
TOKENIZER = tiny_tokenizer()
PROMPTS = ["one", "a longer prompt", "22", "naïve"]
SETTINGS = dict(
    budget=1.0, token_top_k=5, max_new_tokens=8, lagrange_multiplier=0.7, policy_weight=0.4,
    block_size=4, keep=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    made = tiny("llama", vocab_size=len(TOKENIZER))
    assert supports_shared_prefix(made)  # tried once, before anything is counted
    return made


@pytest.fixture
def policy(model):
    # so many that some answers end early
    return Policy("tiny", model, TOKENIZER, eos_ids=frozenset(range(3, len(TOKENIZER), 24)))


class Hashed:
    """A score between 0 and 1 that a text fixes and nothing else does; finished text has another
    one.
    """

    digest, unit = "v1", "points"

    def __init__(self, name, sign):
        self.name, self.sign = name, sign

    def score(self, prompts, responses, finished):
        raw = [
            hashlib.sha256(repr((self.name, *text)).encode()).digest()
            for text in zip(prompts, responses, finished, strict=True)
        ]
        return [int.from_bytes(digest[:6]) / 2**48 for digest in raw]


COST, REWARD = Hashed("cost", "higher is worse"), Hashed("reward", "higher is better")


@pytest.fixture(scope="module")
def lm_reward():
    backbone = Backbone(tiny("qwen2", vocab_size=len(TOKENIZER)), TOKENIZER)
    backbone.batch = 1
    weights = torch.randn(32, generator=torch.Generator().manual_seed(3)) / 6
    return LMScorer(
        "lm-reward", backbone, lambda hidden: hidden @ weights, "higher is better", digest="v1"
    )


def slow_args(method, policy, prompt, reward, config):
    """ARGS with nothing carried: the model reads the whole prefix for every token, and the scorers
    each whole text alone.
    """
    tokens = []
    lam = {"args": 0.0, "args-lagrangian": config.lagrange_multiplier}.get(method, math.nan)
    while len(tokens) < config.max_new_tokens and not set(tokens) & policy.eos_ids:
        ids = torch.tensor([policy.encode(prompt.text) + tokens])
        with torch.inference_mode():
            logits = policy.model(ids, use_cache=False).logits[0, -1].double()
        p, found = logits.softmax(-1), {}
        for token in logits.argsort(descending=True)[: config.token_top_k].tolist():
            ends = token in policy.eos_ids or len(tokens) + 1 == config.max_new_tokens
            text = [prompt.text], [policy.text([*tokens, token])], [ends]
            r, c = (float(scorer.score(*text)[0]) for scorer in (reward, COST))
            penalty = c if method == "args-cost" else -r + lam * c
            found[token] = -config.policy_weight * p[token].item() + penalty
        tokens.append(min(found, key=found.get))
    return tokens


def answers(method, policy, prompts=PROMPTS, reward=REWARD, cost=COST, seed=0, **settings):
    guard = Guard(policy, cost, reward, Settings(**(SETTINGS | settings)))
    return list(decode(method, guard, prompts, seed=seed))


def named(texts):
    return [Prompt(f"id{i}", text, "tiny") for i, text in enumerate(texts)]


@pytest.mark.parametrize("method", ARGS)
@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_args_equals_a_literal_slow_reference(policy, method, cache):
    """Guards every part of it: which tokens are considered, all signs and weights, carried state,
    and ends.
    """
    compare(method, replace(policy, cache=cache), REWARD)


@pytest.mark.parametrize("method", ["args", "args-lagrangian"])
@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_scores_of_a_language_model_are_carried_along(policy, lm_reward, method, cache):
    """Guards the session of the scorer, which reads one token per candidate, against whole texts
    read afresh.
    """
    compare(method, replace(policy, cache=cache), lm_reward)


def compare(method, policy, reward):
    """Compare the tokens of every answer with those of the slow reference."""
    found = answers(method, policy, named(PROMPTS), reward, seed=2)
    for prompt, r in zip(named(PROMPTS), found, strict=True):
        assert r.tokens == slow_args(method, policy, prompt, reward, Settings(**SETTINGS))


def test_one_candidate_is_greedy_decoding(policy):
    """Guards token_top_k 1 against transformers' own greedy decoding."""
    for prompt, r in zip(PROMPTS, answers("args", policy, token_top_k=1), strict=True):
        ids = torch.tensor([policy.encode(prompt)])
        greedy = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
            eos_token_id=list(policy.eos_ids),
            pad_token_id=0,
        )  # fmt: skip
        assert r.tokens == greedy[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_a_prompt_is_answered_alike_alone_and_in_company(policy, lm_reward, cache):
    """Guards rows and sessions against each other's prompts, and against the order of prompts."""
    policy = replace(policy, cache=cache)
    settings = dict(reward=lm_reward, seed=1)

    def tokens_of(prompts, **more):
        found = answers("args-lagrangian", policy, prompts, **settings, **more)
        return {r.prompt_id: r.tokens for r in found}

    prompts = named(PROMPTS)
    together = tokens_of(prompts)
    assert together == tokens_of(prompts[::-1], group_size=3)
    assert together == {p.id: tokens_of([p])[p.id] for p in prompts}


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
@pytest.mark.parametrize("method", ARGS)
def test_every_chosen_token_is_read_once_and_no_other(policy, method, cache):
    """Guards the cost of ARGS: k candidates cost the policy nothing, and the last token of an
    answer is read by nobody.
    """
    prompts = ["one", "two", "six"]  # of one length: no padding to be counted
    with Counter(policy.model) as counter:
        out = answers(method, replace(policy, cache=cache), prompts)
    assert counter.tokens == sum(r.counts.forward_tokens for r in out)
    for r in out:
        counts = r.counts
        assert counts.forward_tokens == 3 + r.n_tokens - 1
        assert counts.rounds_used == r.n_tokens
        assert counts.samples_drawn == counts.policy_tokens == 5 * r.n_tokens
        assert counts.scorer_calls == 5 * r.n_tokens * (2 if method == "args-lagrangian" else 1)
        assert len(r.z_trace) == len(r.block_ends) + 1 == r.n_tokens + 1
        assert [t["finals"] for t in r.trace[:-1]].count(5) == 0
        assert len(r.finals) == sum(t["finals"] for t in r.trace)
        assert all(
            (reward is None, cost is None) == (method == "args-cost", method == "args")
            for reward, cost in r.finals
        )


def mock_answers(method, prompts, logits=logits_of, reward=None, cost=None, seed=0, **settings):
    common = dict(budget=1.0, token_top_k=4, max_new_tokens=6, block_size=3)
    config = Settings(**(common | {"lagrange_multiplier": 0.7} | settings))
    guard = Guard(mock_policy(logits), cost or LetterCost(), reward or LetterReward(), config)
    return list(decode(method, guard, prompts, seed=seed))


def test_an_end_token_can_be_chosen_and_ends():
    """Guards EOS: it is a candidate like any other, is scored as finished text, and nothing is read
    or asked after it.
    """

    class Ended(LetterReward):
        def score(self, prompts, responses, finished):
            return [float(f) for f in finished]

    for method in ("args", "args-lagrangian"):
        (r,) = mock_answers(method, ["fed"], reward=Ended(), token_top_k=7)
        work = r.counts.forward_tokens, r.counts.samples_drawn
        assert (r.text, r.tokens, r.finished, work) == ("", [EOS], True, (3, 7))
        assert r.reward == 1.0 and len(r.finals) == 1


@pytest.mark.parametrize("method", ["args-lagrangian", "args-cost"])
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_a_token_that_could_not_be_scored_is_the_last_choice(method, lam):
    """Guards 0 times infinity and infinity minus infinity, with the failing token often the most
    probable: first in the list.
    """
    cost = LetterCost(lambda text: math.nan if {"e", "f"} & {*text} else letter_cost(text))
    texts = ["ab", "fed", "c", "dd", "eae", "fcb"]
    out = mock_answers(method, texts, cost=cost, lagrange_multiplier=lam)
    assert not any({"e", "f"} & set(r.text) for r in out)
    first = []  # the most probable token at every position
    for prompt, r in zip(texts, out, strict=True):
        read = [tuple(LETTERS.index(c) for c in prompt + r.text[:n]) for n in range(len(r.tokens))]
        first += [max(range(7), key=probabilities(ids).__getitem__) for ids in read]
    assert first.count(5) + first.count(6) > 4


def test_where_nothing_could_be_scored_the_policy_decides():
    """Guards the order of what is equally bad: the most probable token comes first."""
    reward = LetterReward(lambda text: letter_reward(text) if len(text) < 3 else math.nan)
    for r in mock_answers("args", ["ab", "fed", "dd"], reward=reward, token_top_k=3):
        prefix = tuple(LETTERS.index(c) for c in r.prompt)
        for n in range(3, len(r.tokens)):
            p = probabilities(prefix + tuple(r.tokens[:n]))
            assert r.tokens[n] == p.index(max(p))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "ARGS does not sample with temperature, .* set token_top_k"),
        ({"policy_weight": "2.5"}, "policy_weight is '2.5': it must be a valid number"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ParameterError, match=message):
        mock_answers("args", ["ab"], **settings)


# --- proposals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_proposed_tokens_are_the_most_probable_and_nothing_is_read_for_them(cache):
    """Guards `propose` against sequences read alone: rows left out, in another order, doubled."""
    llama = tiny("llama")
    engine = LocalEngine(llama, {-1}, cache)
    engine.open(IDS)
    before = engine.rows.logits.clone()
    for rows in ([0, 1, 2], [2, 0], [1, 1]):
        with Counter(llama) as counter:
            block = propose(engine, rows, 3)
        assert counter.tokens == 0 and torch.equal(before, engine.rows.logits)
        assert block.encoded == [0] * len(block.tokens) and block.log_q == block.log_p
        for i, row in enumerate(rows):
            best, tokens = reencode(llama, IDS[row])[1][-1].log_softmax(-1).topk(3)
            own = slice(3 * i, 3 * i + 3)
            assert block.tokens[own] == [[token] for token in tokens.tolist()]
            assert [x for (x,) in block.log_p[own]] == pytest.approx(best.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("k", "gap", "near"), [(2, 1.9, 1), (2, 2.1, 0), (2, 0.0, 1), (1, 1.9, 0), (3, 1.9, 0)]
)
def test_a_proposal_is_a_near_tie_when_the_next_token_could_take_its_place(k, gap, near):
    """Guards what is read again: two logits that each move by 1e-4 change places over a gap of
    2e-4, and only the last place is at stake.
    """
    logits = [-9.0, 2.0 - gap * 1e-4, 5.0, 2.0, -1.0, -2.0, -3.0]
    engine = LocalEngine(MockModel(lambda prefix: logits), {EOS})
    engine.open([[1], [2, 3]])
    block = propose(engine, [0, 1], k)
    assert block.near == [*[[False]] * (k - 1), [bool(near)]] * 2
    assert [t for (t,) in block.tokens] == ([2, 3, 1][:k] if gap else [2, *block.tokens[1]]) * 2


def test_a_proposed_end_token_ends():
    """Guards EOS among proposals: it is offered, and marked."""
    engine = LocalEngine(MockModel(lambda prefix: [2.0, 0.0, 1.0, 3.0, -1.0, -2.0, -3.0]), {EOS})
    engine.open([[1]])
    block = propose(engine, [0], 3)
    assert block.tokens == [[3], [EOS], [2]] and block.ended == [False, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_propose_nothing(bad):
    """Guards against a broken model, whose NaN would be the most probable token."""
    logits = lambda prefix: [0.0, bad if prefix == (1,) else 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # noqa: E731
    engine = LocalEngine(MockModel(logits), {EOS})
    engine.open([[1]])
    with pytest.raises(PolicyError, match="logits that are not finite"):
        propose(engine, [0], 2)


def test_more_proposals_than_tokens_are_refused():
    engine = LocalEngine(MockModel(), {EOS})
    engine.open([[1], [2]])
    assert sorted(t for (t,) in propose(engine, [0], 7).tokens) == list(range(7))
    message = "8 candidates per token were asked of a vocabulary of 7; lower token_top_k"
    with pytest.raises(ParameterError, match=message):
        propose(engine, [0], 8)
