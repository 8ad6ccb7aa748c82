"""Tests of the rules that leave draws early, on rollouts whose prices are worked out by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from mockpolicy import MockTokenizer
from tiny import letters, read

from igcore import ParameterError
from igstudy.leaving import (
    NUMBERS,
    STRENGTHS,
    cheapest_threshold,
    draws_of,
    latents_at,
    learnt,
    prefixes_of,
)
from igstudy.report import leaving as report
from igstudy.report.auroc import resamples
from igstudy.report.leaving import BOTH, f1_at, leave, leaving_table, scores_of
from igstudy.training.rollouts import Rollout

NAN = math.nan


def rollout(prompt_id, n, costs, worst=None, tokens=None, ended=False):
    """A rollout of n tokens in blocks of 4, at most 12; `worst` is `costs` where left out."""
    tokens = tokens or [1] * n
    return Rollout(prompt_id, "ab", tokens, ended, costs, worst or costs, 0.0, 4, 12)


# budget 1: safe, safe, unsafe, safe but too short for a block end, unsafe
FIVE = [
    rollout("a", 12, [0.5, 2.0, 1.0]),
    rollout("a", 10, [0.0, 0.5, 0.25]),
    rollout("a", 12, [3.0, 3.0, 3.0]),
    rollout("b", 3, [0.0]),
    rollout("b", 8, [1.0, 1.5]),
]
NOTHING = np.ones(7), 0.5  # scores at the seven block ends, and a threshold


def drawn(seed, prompts=30, each=6, failed=0.0):
    """Rollouts of three blocks, with random costs: those on the way say something of the last, and
    some failed.
    """
    rng = np.random.default_rng(seed)
    costs = rng.gamma(1.0, size=(prompts * each, 1)) * rng.uniform(0.3, 1.7, (prompts * each, 3))
    costs = np.round(costs, 1)
    costs[rng.random(costs.shape) < failed] = NAN
    sizes = rng.integers(9, 13, size=len(costs))
    return [
        rollout(f"{i // each:02d}", int(n), row.tolist())
        for i, (n, row) in enumerate(zip(sizes, costs, strict=True))
    ]


# --- draws and their block ends -------------------------------------------------------------------


def test_the_four_numbers_are_those_worked_out_by_hand():
    """Bug: z with the wrong sign or without the checks between block ends, a slope per block, the
    cost of the finished answer among the inputs, or a last block end that is the end itself.
    """
    found = prefixes_of([rollout("a", 10, [0.5, 2.5, 0.0], [3.0, 2.5, 9.0]), FIVE[3], FIVE[4]], 2.0)
    assert found["draw"].tolist() == [0, 0, 2] and found["t"].tolist() == [4, 8, 4]
    assert found[NUMBERS].to_numpy().tolist() == [
        [-1.0, 0.5, 0.0, 4 / 12],
        [-1.0, 2.5, 0.5, 8 / 12],
        [1.0, 1.0, 0.0, 4 / 12],
    ]
    assert found["tokens"].tolist() == [10, 10, 8]
    assert found["prompt_id"].tolist() == ["a", "a", "b"]


def test_a_cost_that_failed_is_unsafe_and_its_draw_is_left():
    """Bug: NaN <= budget and NaN > tau are both False; one of them read the wrong way would call a
    text safe that nobody has scored, or go on with it.
    """
    failed = [rollout("a", 12, [0.0, NAN, 0.0]), rollout("a", 12, [0.0, 0.0, NAN]), FIVE[1]]
    draws, prefixes = draws_of(failed, 1.0), prefixes_of(failed, 1.0)
    assert draws["safe"].tolist() == [True, False, True]
    assert prefixes["z"].isna().tolist() == [False, True, False, False, False, False]
    x = prefixes[NUMBERS].to_numpy()
    many = drawn(0)
    table = prefixes_of(many, 1.0)
    rule = learnt(draws_of(many, 1.0), table, table[NUMBERS].to_numpy(), 4)
    score = rule.score(x)
    assert np.isnan(score).tolist() == [False, True, False, False, False, False]
    kept = leave(draws, prefixes, (score, -math.inf))
    assert kept["tokens"].tolist() == [8, 12, 10] and kept["safe"].tolist() == [False, False, True]
    assert np.isnan(rule.score(np.full((2, 4), NAN))).all()


def test_latents_are_those_of_the_text_so_far():
    """Bug: latents of the whole answer, of the token after the block, or in another order than the
    rows. They are compared with those of each prefix alone.
    """
    policy = letters(MockTokenizer())
    rng = np.random.default_rng(0)
    many = [
        rollout(f"{i}", n, [0.0] * -(-n // 4), tokens=rng.integers(1, 6, n).tolist(), ended=i % 2)
        for i, n in enumerate([*range(1, 13)] * 3)
    ]
    found, prefixes = latents_at(policy, many, 0), prefixes_of(many, 1.0)
    assert len(found) == len(prefixes) == 36
    for row, draw, t in zip(found, prefixes["draw"], prefixes["t"], strict=True):
        one = read(policy.model, [policy.encode("ab")], [many[draw].tokens[:t]], "m", 0).middle[0]
        expected = np.concatenate([one.mean(0).numpy(), one.max(0).values.numpy()])
        assert row == pytest.approx(expected, abs=1e-5)


def test_f1_is_read_at_block_ends():
    """Bug: f1 of another draw or token. A critic that has not judged every prefix is refused."""
    ended = [*FIVE, rollout("c", 9, [0.0] * 3, ended=True), rollout("c", 8, [0.0] * 2, ended=True)]
    places = [(i, t) for i, r in enumerate(ended) for t in range(1, len(r.words) + 1)]
    judged = pd.DataFrame(
        {"position": [t for _, t in places], "f1": [i + t / 100 for i, t in places]}
    )
    table = prefixes_of(ended, 1.0)
    assert f1_at(ended, judged).tolist() == (table["draw"] + table["t"] / 100).tolist()
    for wrong in (judged[1:], judged[judged["position"] != 5]):
        with pytest.raises(ParameterError, match="did not judge every prefix .*'terminal'"):
            f1_at(ended, wrong)


# --- thresholds -----------------------------------------------------------------------------------


def slow_price(rollouts, scores, tau, budget=1.0):
    """Return the tokens per safe answer, draw by draw."""
    paid, answers, scores = 0, 0, iter(scores)
    for r in rollouts:
        ends = [(t, next(scores)) for t in range(4, len(r.tokens), 4)]
        left = [t for t, score in ends if math.isnan(score) or score <= tau]
        paid += left[0] if left else len(r.tokens)
        answers += not left and r.costs[-1] <= budget
    return paid / answers if answers else math.inf


@pytest.mark.parametrize("seed", range(40))
def test_the_threshold_is_the_cheapest_of_all(seed):
    """Bug: a draw that counts as left at each of its low scores, ties taken apart, or an answer
    that stays after its draw was left. All thresholds are tried by a slow loop.
    """
    rng = np.random.default_rng(seed)
    rollouts = drawn(seed, prompts=4, failed=0.1)
    prefixes = prefixes_of(rollouts, 1.0)
    score = np.round(rng.random(len(prefixes)) + prefixes["safe"] * seed / 40, 1)
    score[rng.random(len(prefixes)) < 0.1] = NAN
    prices = {
        tau: slow_price(rollouts, score, tau)
        for tau in (-math.inf, *sorted({*score[~np.isnan(score)]}))
    }
    tau = cheapest_threshold(draws_of(rollouts, 1.0), prefixes, score)
    assert tau == min(prices, key=prices.get)
    kept = leave(draws_of(rollouts, 1.0), prefixes, (score, tau))
    assert kept["tokens"].sum() / kept["safe"].sum() == pytest.approx(prices[tau])


def test_a_score_that_knows_nothing_leaves_nothing():
    """Bug: a threshold that has to leave something, and so loses answers for no tokens."""
    draws, prefixes = draws_of(FIVE, 1.0), prefixes_of(FIVE, 1.0)
    assert cheapest_threshold(draws, prefixes, np.zeros(7)) == -math.inf
    unsafe = [FIVE[2], FIVE[4]]
    args = draws_of(unsafe, 1.0), prefixes_of(unsafe, 1.0), np.arange(3.0)
    assert cheapest_threshold(*args) == -math.inf


def test_penalty_and_threshold_are_chosen_for_prompts_that_were_not_seen():
    """Bug: folds that split the draws of a prompt. Latents that name the prompt would then explain
    every draw of it, and get the weakest penalty and a threshold that leaves.
    """
    rng = np.random.default_rng(0)
    rollouts = [
        rollout(f"{i:02d}", 12, [0.0, 0.0, cost])
        for i, cost in enumerate(rng.integers(0, 2, 30) * 2.0)
        for _ in range(6)
    ]
    prefixes = prefixes_of(rollouts, 1.0)
    names = np.eye(30)[prefixes["prompt_id"].astype(int)]
    rule = learnt(draws_of(rollouts, 1.0), prefixes, names, 0)
    widths = rule.model[1].func.args[0]
    assert (widths**2 <= STRENGTHS[2]).all()


# --- prices ---------------------------------------------------------------------------------------


def table_of(rules):
    return leaving_table(FIVE, 1.0, rules).set_index("rule")


def test_prices_are_those_worked_out_by_hand():
    """Bug: a draw too short for a block end that is not paid, a safe answer that is left and still
    counts, a draw that goes on after it was left, or a cost at the budget that counts as over it.
    """
    draws, prefixes = draws_of(FIVE, 1.0), prefixes_of(FIVE, 1.0)
    cost = -prefixes["cost"].to_numpy(), math.nextafter(-1.0, -math.inf)
    kept = leave(draws, prefixes, cost)
    # the first is left at its second block end, and would have been safe; the last is at the budget
    assert kept["tokens"].tolist() == [8, 10, 4, 3, 8]
    assert kept["safe"].tolist() == [False, True, False, True, False]
    found = table_of({"cost": cost, "nothing": NOTHING, "all": (np.zeros(7), 0.5)})
    assert found["tokens_per_safe"].tolist() == [45 / 3, 33 / 2, 45 / 3, 19 / 1]
    assert found["ratio"].tolist() == pytest.approx([1, 33 / 30, 1, 19 / 15])
    assert found["left_safe"].tolist() == pytest.approx([0, 1 / 3, 0, 2 / 3])
    assert found["lost_prompts"].tolist() == [0, 0, 0, 0.5]
    assert found["S"].tolist() == [0.6] * 4
    assert found.loc["nothing", ["ratio", "low", "high"]].tolist() == [1, 1, 1]


def test_a_rule_without_an_answer_costs_infinitely_much():
    """Bug: 0 answers as the best price of all."""
    long = [r for r in FIVE if len(r.tokens) > 4]
    found = leaving_table(long, 1.0, {"all": (np.zeros(7), 0.5)}).set_index("rule")
    assert found.loc["all", ["ratio", "low", "high"]].tolist() == [math.inf] * 3


def test_intervals_resample_prompts_and_keep_pairs():
    """Bug: draws resampled without their prompts, or other prompts for the two sides of a ratio.
    It is compared with a loop that prices each resample again.
    """
    rollouts = drawn(3, prompts=12)
    prefixes = prefixes_of(rollouts, 1.0)
    scores = -prefixes["cost"].to_numpy(), -1.0
    found = leaving_table(rollouts, 1.0, {"cost": scores}).set_index("rule").loc["cost"]
    plain, kept = draws_of(rollouts, 1.0), leave(draws_of(rollouts, 1.0), prefixes, scores)
    ratios = []
    for counts in resamples(12):
        weight = counts[plain["prompt_id"].astype(int)]
        prices = [(x["tokens"] * weight).sum() / (x["safe"] * weight).sum() for x in (kept, plain)]
        ratios.append(prices[0] / prices[1])
    assert [found["low"], found["high"]] == pytest.approx([sorted(ratios)[i] for i in (50, 1949)])
    assert found["low"] < found["ratio"] < found["high"]


@pytest.mark.parametrize("known", [True, False])
def test_latents_help_where_they_carry_the_outcome_and_noise_does_not(monkeypatch, known):
    """Bug: latents of other rows; or one penalty for hundreds of latents and four numbers, under
    which the numbers lost their weight and noise seemed to do harm.
    """

    def latents(policy, rollouts, layer):
        noise = np.random.default_rng(len(rollouts)).normal(size=(2 * len(rollouts), 300))
        noise[:, 7] += 6 * known * prefixes_of(rollouts, 1.0)["safe"]
        return noise

    monkeypatch.setattr(report, "latents_at", latents)
    train, test = drawn(1, 40), drawn(2, 50)
    f1 = np.ones(2 * len(test))
    rules = scores_of(None, train, test, budget=1.0, layer=0, f1=f1)
    found = leaving_table(test, 1.0, rules).set_index("rule")
    difference = found.loc[f"{BOTH}, minus numbers"]
    assert difference["ratio"] == pytest.approx(
        found.loc[BOTH, "ratio"] - found.loc["numbers", "ratio"]
    )
    assert found.loc["foresight", "auroc"] == 1 and found.loc["foresight", "left_safe"] == 0
    assert found.loc["foresight", "ratio"] < found.loc[BOTH, "ratio"]
    assert found.loc["critic", "ratio"] == 1
    score, tau = rules["cost seen"]
    assert ((score > tau) == (prefixes_of(test, 1.0)["cost"] <= 1)).all() and (score == -1).any()
    if known:
        assert difference["high"] < 0 and found.loc["latents", "auroc"] > 0.95
    else:
        assert abs(difference["ratio"]) < 0.02 and not difference["high"] < 0
        assert found.loc[BOTH, "auroc"] == pytest.approx(found.loc["numbers", "auroc"], abs=0.02)
        assert found.loc["numbers", "auroc"] > 0.75
        assert found.loc["latents", "auroc"] == pytest.approx(0.5, abs=0.1)
