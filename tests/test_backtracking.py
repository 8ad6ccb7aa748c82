"""Tests of the search with steps back and of rejection sampling, its member, against a second
implementation, `slowsteps`.
"""

import math

import pytest
from mockpolicy import LastWordCost, LetterCritic, LetterReward, last_word_cost, word_policy
from slowsteps import PROMPTS, WHOLE, SlowSteps, compare

from igcore import Guard, ParameterError, SearchConfig, decode
from igcore import search as search_module
from igcore.engine.agreement import cache_for
from igcore.methods import method_of
from igstudy.runs.decode_params import Settings
from igstudy.runs.records import record
from igstudy.runs.rescore import rescored

METHODS = ["backtracking", "rejection"]
SETTINGS = dict(budget=0.5, block_size=4, max_new_tokens=12, refusal="", spend=60)
SLOW = dict(
    checks="word", gamma_safety=1.0, accounting="peak", step=4, back="tries", tries=3, at_least=0,
    answers=1, choices=1, margin=0, keep_shown=False, draws=None,
)  # fmt: skip


def guard_of(policy=None, cost=None, **changes):
    config = SearchConfig(**(SETTINGS | changes))
    return Guard(policy or word_policy(), cost or LastWordCost(), LetterReward(), config)


def answers(method="backtracking", prompts=PROMPTS, seed=0, record=False, **changes):
    guard = guard_of(**changes)
    return list(decode(method, guard, prompts, seed=seed, record=record))


def slow_of(prompt, seed=0, cost=last_word_cost, **changes):
    slow = SlowSteps(prompt, seed, cost, **(SETTINGS | SLOW | changes))
    slow.search()
    return slow


@pytest.mark.filterwarnings("ignore:.*")
def test_random_searches_equal_a_second_implementation():
    """Guards keys, checks, where a draw is left, both rules of stepping back, choices, the margin,
    limits, costs that fail and the choice of the answer, token by token, and all tokens sampled.
    """
    seen = compare(400, seed=7)
    assert len(seen) >= 7 and sum(seen.values()) == 400


@pytest.mark.parametrize("method", METHODS)
def test_the_first_draw_is_the_sample_of_base(method):
    """Guards common random numbers, and the count of a draw that nothing stops."""
    base, one = answers("base", budget=99.0), answers(method, budget=99.0)
    assert [r.tokens for r in one] == [r.tokens for r in base]
    assert [r.counts.policy_tokens for r in one] == [r.counts.policy_tokens for r in base]


# --- steps back -----------------------------------------------------------------------------------


class DeadEnd(LastWordCost):
    """A first block without an e is within budget, and every answer that begins with it is not."""

    def score(self, prompts, responses, finished):
        later = [whole or len(r) > 4 for r, whole in zip(responses, finished, strict=True)]
        return [float(x and "e" not in r[:4]) for x, r in zip(later, responses, strict=True)]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize("back", ["tries", "doubling"])
def test_a_dead_end_is_left_behind(back):
    """Bug: M rounds in a prefix that makes the breach certain, then an abstention."""
    found = answers(cost=DeadEnd(), spend=400, back=back)
    assert {r.status for r in found} == {"verified_safe"}
    stuck = answers(cost=DeadEnd(), spend=400, keep_shown=True)
    more = answers("inferenceguard", cost=DeadEnd(), spend=None, n_samples=1, keep=1, rounds=99)
    assert "abstained" in {r.status for r in stuck} & {r.status for r in more}


def test_the_safety_state_of_a_dropped_block_is_restored():
    """Bug: z after a step back is that of the dropped block, and the budget is charged twice."""
    for r in answers(budget=1.0, record=True, spend=200):
        states = {-1: 1.0} | {node.number: node.beam.state.omega for node in r.candidates}
        for node in r.candidates:
            text = node.beam.text
            start = states[node.parent]
            assert states[node.number] <= start
            if node.within and not node.beam.finished:
                ends = [text[:end] for end in range(len(text) + 1)]
                assert states[node.number] >= 1.0 - max(map(last_word_cost, ends))


def test_a_dropped_block_is_shown_as_dropped():
    """Bug: the tree called a block kept that the answer does not hold."""
    fates = set()
    for r in answers(budget=0.5, spend=200, record=True, tries=1):
        kept = [node for node in r.candidates if node.fate in ("kept", "emitted")]
        assert "".join(node.text for node in kept) == (
            r.text if r.status == "verified_safe" else ""
        )
        fates |= {node.fate for node in r.candidates}
    assert {"kept", "emitted", "dropped", "over budget"} <= fates


def test_what_is_shown_is_never_left():
    """Guards ``keep_shown``: each block that was announced begins the answer, or it abstains."""
    shown = {}
    guard = guard_of(budget=1.0, keep_shown=True, choices=2)

    def note(prompt, beams):
        assert beams[0].text.startswith(shown.get(prompt.id, ""))
        shown[prompt.id] = beams[0].text

    for r in decode("backtracking", guard, PROMPTS, on_block=note):
        assert r.status == "abstained" or r.text.startswith(shown.get(r.prompt_id, ""))
    assert shown
    seen = []
    list(decode("backtracking", guard_of(), PROMPTS, on_block=lambda *_: seen.append(1)))
    assert not seen  # it may go back behind any of them


def test_truncation_emits_the_longest_prefix_that_passed():
    """Bug: the top of the stack, which the search had dropped to."""
    found = answers(cost=LastWordCost(lambda text: float(len(text) > 9)), on_failure="truncate")
    for prompt, r in zip(PROMPTS, found, strict=True):
        slow = slow_of(prompt, cost=lambda text: float(len(text) > 9))
        if r.reason == "truncated":
            assert r.tokens == slow.longest and len(r.tokens) == 8
    assert "truncated" in {r.reason for r in found}


def test_the_better_of_two_blocks_goes_on_while_tokens_last():
    """Guards ``choices``: the reward rises, and without spare tokens nothing is sampled twice."""
    one, two = answers(budget=99.0, spend=200), answers(budget=99.0, spend=200, choices=2)
    assert sum(r.reward for r in two) > sum(r.reward for r in one)
    assert all(
        a.counts.policy_tokens < b.counts.policy_tokens for a, b in zip(one, two, strict=True)
    )
    scarce = answers(budget=99.0, spend=12, choices=2)
    assert [r.tokens for r in scarce] == [r.tokens for r in answers(budget=99.0, spend=12)]


def test_a_margin_keeps_away_from_the_budget():
    """Guards the sign of ``margin``, in the two searches that rank by E_inter."""
    for method, more in (
        ("backtracking", {"answers": "all"}),
        ("inferenceguard", {"n_samples": 6}),
    ):
        near = answers(method, budget=2.0, **more)
        far = answers(method, budget=2.0, margin=9, **more)
        assert sum(r.cost for r in far) < sum(r.cost for r in near)
        assert sum(r.reward for r in far) < sum(r.reward for r in near)


# --- work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_is_left_is_read_no_further(method, monkeypatch):
    """Guards what leaving early and cutting save: tokens of the model itself, each counted."""
    monkeypatch.setattr("igcore.engine.sampling.NEAR_TIE", 0.0)
    policy = word_policy()
    cache_for(policy.model)  # tried once, before anything is counted
    policy.model.forwarded.clear()
    (r,) = answers(method, policy=policy, prompts=PROMPTS[:1], budget=0.0)
    slow = slow_of(
        PROMPTS[0], budget=0.0, **(WHOLE | {"step": 12} if method == "rejection" else {})
    )
    assert policy.model.tokens_forwarded == r.counts.forward_tokens
    assert r.counts.policy_tokens == slow.spent
    if method == "rejection":  # each draw is read up to its last token
        read = sum(len(tokens) - 1 for tokens in slow.draws)
        assert r.counts.forward_tokens == len(PROMPTS[0].text) + read


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group_size", [1, 2, 6])
def test_a_prompt_is_answered_alike_in_any_company(method, group_size):
    """Guards rows at depths of their own against each other's state."""
    alone = [r for prompt in PROMPTS for r in answers(method, prompts=[prompt])]
    together = answers(method, group_size=group_size)
    assert [(r.tokens, r.counts) for r in alone] == [(r.tokens, r.counts) for r in together]


class FailingEarly(LastWordCost):
    def score(self, prompts, responses, finished):
        scores = super().score(prompts, responses, finished)
        return [s if len(r) > 3 else math.nan for s, r in zip(scores, responses, strict=True)]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_a_cost_that_fails_at_an_early_check_is_the_reason():
    """Bug: the later checks of an answer that is drawn to its end said that the cost worked."""
    settings = dict(method="rejection", cost=FailingEarly(), failure_rate=1.0, spend=400)
    found = [r.reason for r in answers(on_failure="paper", **settings)]
    assert found == [r.reason for r in answers(**settings)] and "scorer_error" in found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes", [{"accounting": "sum"}, {"accounting": "terminal"}, {"on_failure": "paper"}], ids=str
)
def test_an_answer_is_drawn_to_its_end_where_its_beginning_decides_nothing(method, changes):
    """Guards totals that may fall again, costs that exist at the end alone, and the mode that emits
    the least unsafe answer, whole.
    """
    for r in answers(method, budget=0.0, record=True, **changes):
        # the last one may be cut where tokens end
        drawn = [node.beam for node in r.candidates[:-1] if not node.within]
        cut = [beam for beam in drawn if not beam.finished]
        assert not cut and (r.finished or r.status == "abstained")
        if "accounting" in changes:
            assert all(len(node.beam.tokens) - len(node.text) <= 1 for node in r.candidates)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [{"gamma_safety": 0.99}, {"strict": True}, {"checks": "token"}, {"accounting": "clamped_sum"}],
    ids=str,
)
def test_the_final_check_agrees_with_the_draws(method, changes):
    """Bug: an answer that was accepted is refused in the end, because its words were charged at
    other places than the blocks of the final check.
    """
    out = answers(method, budget=1.0, spend=36, **changes)
    assert {r.reason for r in out} <= {"", "exhausted"}
    assert "verified_safe" in {r.status for r in out}


def test_an_answer_that_the_final_check_refuses_is_not_the_last_word(monkeypatch):
    """Bug: an abstention with tokens left, because a cached cost was lower than the fresh one."""
    refused = answers(budget=1.0)[0].text

    def final_check(*given):
        texts = [proposal.text for proposal in given[2]]
        if refused in texts:
            given[2][texts.index(refused)].safe = False
        return checked(*given)

    checked = search_module.final_check
    monkeypatch.setattr(search_module, "final_check", final_check)
    again = answers(budget=1.0)[0]
    assert again.status == "verified_safe" and again.text != refused


# --- settings and records -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"tries": 0}, "tries is 0"),
        ({"step": 16}, "step is 16, more than max_new_tokens, which is 12"),
        ({"step": 6}, "step is 6, but .* a multiple of block_size, which is 4"),
        ({"spend": 3}, "block_size is 4, more than spend, which is 3"),
        ({"step": 12, "spend": 8}, "step is 12, more than spend, which is 8"),
        ({"at_least": 99}, "at_least is 99, more than spend"),
        ({"keep_shown": True, "answers": 2}, "keep_shown is True, but answers is 2"),
        ({"answers": 0}, "answers"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_sentence(changes, why):
    """Bug: a search that never steps back, or has no token to sample, found out while decoding."""
    with pytest.raises(ParameterError, match=why):
        guard_of(**changes)


@pytest.mark.parametrize(
    "method, accounting",
    [("rejection", "peak"), ("best-of-n", "peak"), ("base", "peak"), ("backtracking", "terminal")],
)
def test_a_method_that_cannot_stream_says_so(method, accounting):
    """Bug: ``keep_shown`` without effect: a whole answer at the end, and no word about it."""
    with pytest.raises(ParameterError, match=f"'{method}' cannot stream"):
        answers(method, keep_shown=True, accounting=accounting)


@pytest.mark.parametrize(
    "method, changes, reader",
    [
        ("backtracking", {"n_samples": 4}, "inferenceguard"),
        ("inferenceguard", {"tries": 2, "spend": 50}, "backtracking"),
        ("inferenceguard", {"critic": True}, "inferenceguard-critic"),
        ("rejection", {"choices": 2}, "backtracking"),
    ],
    ids=str,
)
def test_what_a_method_does_not_read_is_one_warning(method, changes, reader):
    """Bug: a setting or a critic that was ignored without a word."""
    changes = {"spend": None} | changes
    critic = LetterCritic() if changes.pop("critic", None) else None
    config = SearchConfig(**(SETTINGS | changes))
    guard = Guard(word_policy(), LastWordCost(), LetterReward(), config, critic, method=method)
    with pytest.warns(UserWarning, match=f"{method!r} does not read .*{reader!r}") as said:
        guard("ab")
    assert len(said) == 1


def test_rejection_is_the_search_whose_step_is_the_whole_answer():
    """Guards the family: one loop, and one setting between its two members."""
    whole = answers(step=12, tries=1)
    assert [(r.tokens, r.counts) for r in whole] == [
        (r.tokens, r.counts) for r in answers("rejection")
    ]
    config = method_of("rejection").settings_under(SearchConfig(budget=1.0))
    assert (config.step, config.tries, config.spend, config.block_size) == (32, 1, 128, 8)


@pytest.mark.parametrize("method", METHODS)
def test_a_line_holds_the_settings_and_is_scored_again(method):
    """Guards records: another limit is another search."""
    config = Settings(**(SETTINGS | dict(at_least=20)))
    guard = Guard(word_policy(), LastWordCost(), LetterReward(), config)
    texts = [prompt.text for prompt in PROMPTS]
    lines = [record(r, method, guard, seed=0) for r in decode(method, guard, texts)]
    found = {(line["spend"], line["at_least"], line["n_samples"]) for line in lines}
    assert found == {(60, 20, 1)}
    assert list(rescored(lines, guard.cost, guard.reward)) == []
