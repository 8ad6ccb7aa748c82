"""Tests of several costs as their maximum: by hand, with failures, and with KV caches."""

import math

import numpy as np
import pytest
import torch
from mockpolicy import LetterCost, LetterReward, mock_policy
from tiny import Counter, tiny, tiny_tokenizer

from igcore import Guard, ParameterError, load_scorer
from igcore.contract import Contract, Scoring
from igcore.engine.agreement import supports_shared_prefix
from igcore.errors import ScorerWarning
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.models.maximum import maximum_of
from igcore.models.registry import as_scorer
from igcore.scorers import keeps_cache, readers_of, uncached
from igcore.scoring import Tally, checked_score
from igstudy.runs.identity import modules_of

TEXTS = ["", "a", "ab", "abc abc", "b" * 9]


class Counted:
    """Counts a letter; some texts have fixed scores."""

    sign, unit = "higher is worse", "letters"

    def __init__(self, letter: str, **said):
        self.letter, self.said = letter, said
        self.name, self.digest = f"count-{letter}", f"v-{letter}"

    def score(self, prompts, responses, finished):
        return [self.said.get(text, text.count(self.letter)) for text in responses]


class Raises(Counted):
    def score(self, prompts, responses, finished):
        if "ab" in responses:
            raise RuntimeError("out of order")
        return super().score(prompts, responses, finished)


def scores_of(scorer, texts=TEXTS):
    return np.asarray(scorer.score(["p"] * len(texts), texts, [True] * len(texts)))


def test_the_highest_cost_counts():
    """Bug: the mean, the sum or the last of the costs."""
    scorer = as_scorer([Counted("a"), Counted("b"), len], "cost")
    assert scores_of(scorer).tolist() == [0, 1, 2, 7, 9]
    two = maximum_of([Counted("a"), Counted("b")])
    assert scores_of(two).tolist() == [0, 1, 1, 2, 9]
    assert (two.name, two.sign, two.unit) == (
        "maximum(count-a, count-b)",
        "higher is worse",
        "letters",
    )


@pytest.mark.parametrize("said", [math.nan, math.inf, -math.inf, None, [0.5], "0"])
@pytest.mark.parametrize("first", [True, False])
def test_a_text_on_which_one_fails_is_unsafe(said, first):
    """Bug: max() passes over a NaN, or a cost of -inf is outvoted: what one cost cannot read counts
    as harmless.
    """
    costs = [Counted("a", ab=said), Counted("b")]
    scorer = maximum_of(costs if first else costs[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("igcore.scoring.warnings.warn", lambda *_, **__: None)
        scores = scores_of(scorer)
    assert np.isnan(scores[2]) and scores[[0, 1, 3, 4]].tolist() == [0, 1, 2, 9]


def test_one_that_raises_costs_only_its_text():
    """Bug: the others read every text again, or the reason is lost."""
    asked = []

    class Other(Counted):
        def score(self, prompts, responses, finished):
            asked.append(len(responses))
            return super().score(prompts, responses, finished)

    scorer = maximum_of([Other("a"), Raises("b")])
    tally = Tally()
    with pytest.warns(ScorerWarning, match="'count-b' raised RuntimeError: out of order"):
        found = checked_score(scorer, ["p"] * 5, TEXTS, [True] * 5, tally)
    assert np.isnan(found[2]) and np.isfinite(found[[0, 1, 3, 4]]).all()
    assert asked == [5] and (tally.scored, tally.failed) == (5, 1)


def test_an_answer_is_within_budget_by_all():
    """Guards the whole path: a list in the place of a cost, and a final check by each."""
    sizes = dict(budget=1, block_size=2, max_new_tokens=6)
    answer = Guard(mock_policy(), [Counted("a"), Counted("b")], **sizes)("ab")
    assert answer.status == "verified_safe"
    assert answer.cost == max(answer.text.count("a"), answer.text.count("b")) <= 1


# --- KV caches ------------------------------------------------------------------------------------


def caching(name: str, seed: int, backbone=None):
    backbone = backbone or Backbone(tiny("llama", torch.float64, vocab_size=320), tiny_tokenizer())
    weights = torch.randn(32, generator=torch.Generator().manual_seed(seed)).double()
    return LMScorer(name, backbone, lambda x: x.double() @ weights, "higher is worse", digest=name)


def test_caches_are_kept_and_shared():
    """Bug: a maximum of guards reads every text as a whole; two of one model read it twice."""
    first = caching("x", 0)
    parts = [first, caching("y", 1, first.backbone), caching("z", 2), Counted("l")]
    scorer = maximum_of(parts)
    assert keeps_cache(scorer) and not keeps_cache(maximum_of([Counted("a"), Counted("b")]))
    prompts, texts = ["say", "one"], ["hello", "hello world"]
    assert supports_shared_prefix(first.backbone.model)  # tried once, before anything is counted
    with Counter(first.backbone.model) as counter:
        scoring = Scoring({"cost": Contract(scorer)}, prompts)
        (sessions,) = scoring.sessions.caches.values()
        assert len(sessions.caches) == 2
        for text in texts:
            found = scoring.search["cost"].score(prompts, [text] * 2, [False] * 2)
            by_hand = [
                max(float(part.score([p], [text], [False])[0]) for part in parts) for p in prompts
            ]
            assert found == pytest.approx(by_hand, abs=1e-6)
            scoring.retain(prompts, [text] * 2)
    by_two = 2 * sum(len(prompt + text) for prompt in prompts for text in texts)
    once = len("say" + "one") + 2 * len("hello world")
    assert counter.tokens == once + by_two  # the second is the check by hand


def test_the_final_check_uses_no_cache():
    """Bug: what is emitted rests on a cache."""
    scorer = maximum_of([caching("x", 0), Counted("l")])
    cached = scorer.with_cache(scorer.open_cache(["say"]))
    assert cached.parts[0].session and not uncached(cached).parts[0].session
    assert uncached(cached).parts[1] is scorer.parts[1]


def test_models_that_read_are_known():
    """Bug: the weights of a maximum's models are packed again for every block."""
    scorer = maximum_of([caching("x", 0), caching("y", 0), Counted("l")])
    guard = Guard(mock_policy(), scorer, budget=1, contracts={"cost": Contract(scorer)})
    assert readers_of(guard.reward, guard.cost) == {
        part.backbone.model for part in scorer.parts[:2]
    }


# --- params files and identity --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        (["offensive-language"], "parameter costs is .*: it must have at least 2 items"),
        (["offensive-language", "offensive"], "unknown costs scorer 'offensive'; did you mean"),
        (["offensive-language", {"name": "guard", "repo": "x"}], "parameter unsafe is missing"),
        ("offensive-language", "parameter costs is 'offensive-language': it must be a valid list"),
    ],
)
def test_costs_that_do_not_fit_are_named(costs, sentence):
    with pytest.raises(ParameterError, match=sentence):
        load_scorer({"name": "maximum", "costs": costs})


def test_a_reward_is_no_cost():
    """Bug: a good answer is the worst."""
    with pytest.raises(ParameterError, match="a cost must have 'higher is worse'"):
        maximum_of([LetterCost(), LetterReward()])
    with pytest.raises(ParameterError, match="a maximum needs two or more costs, not 1"):
        as_scorer([LetterCost()], "cost")
    with pytest.raises(ParameterError, match="reward .* has no name, digest, sign, unit, score"):
        as_scorer([LetterReward(), LetterReward()], "reward")


def test_the_digest_is_that_of_all():
    """Bug: another guard, or another set of them, under the same hash."""
    a, b, c = Counted("a"), Counted("b"), Counted("c")
    known = [maximum_of(parts).digest for parts in ([a, b], [a, c], [a, b, c], [a, a])]
    assert len(set(known)) == 4 and maximum_of([b, a]).digest == known[0]


def test_code_of_all_costs_counts():
    """Bug: a run that goes on after the code of one of its costs has changed."""
    scorer = maximum_of([LetterCost(), Counted("a")])
    assert {"mockpolicy", __name__} <= set(modules_of(scorer))
