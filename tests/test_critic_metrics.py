"""Tests of the measures of a critic, against scikit-learn and against plain loops."""

import math

import numpy as np
import pandas as pd
import pytest
from mockpolicy import Answering, LetterCost, letter_cost, mock_policy
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from tiny import policy, trained

from igstudy.report import critic_metrics
from igstudy.report.auroc import auroc, calibration_error, wins
from igstudy.report.critic_metrics import judged_prefixes, reference_table, rows_of_critic
from igstudy.report.critics import COLUMNS


def sample(seed=0, n=120, prompts=15):
    """Scores that know the prompt well and the response a little; some are tied."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(prompts, size=n)
    safe = rng.random(n) < rng.random(prompts)[prompt]
    score = 2 * safe.mean() + rng.normal(size=prompts)[prompt] + safe + rng.normal(size=n)
    return safe, np.round(score, 1), prompt


def test_auroc_overall_is_scikit_learns():
    """Guards the pairs behind every interval, ties included."""
    safe, score, prompt = sample()
    won, pairs = wins(safe, score, prompt)
    assert won.sum() / pairs.sum() == pytest.approx(roc_auc_score(safe, score))
    assert auroc(safe, score, prompt)["auroc"] == pytest.approx(roc_auc_score(safe, score))


def test_auroc_within_prompts_counts_pairs_of_one_prompt():
    """Guards the number that search lives on, against a plain loop; a score of the prompt alone
    must get exactly one half.
    """
    safe, score, prompt = sample()
    n = range(len(safe))
    pairs = [
        (score[i] > score[j]) + (score[i] == score[j]) / 2
        for i in n
        for j in n
        if prompt[i] == prompt[j] and safe[i] and not safe[j]
    ]
    found = auroc(safe, score, prompt)
    assert found["auroc_within_prompt"] == pytest.approx(np.mean(pairs))
    assert found["n_pairs"] == len(pairs)
    assert auroc(safe, prompt, prompt)["auroc_within_prompt"] == 0.5


def test_intervals_resample_prompts():
    """Guards the bootstrap: the same as drawing whole prompts and starting again, and wider than
    drawing responses.
    """
    safe, score, prompt = sample(1, n=400, prompts=20)
    rng = np.random.default_rng(5)
    again = []
    for _ in range(400):
        rows = np.concatenate([np.flatnonzero(prompt == p) for p in rng.integers(20, size=20)])
        again.append(roc_auc_score(safe[rows], score[rows]))
    found = auroc(safe, score, prompt)
    assert [found["auroc_low"], found["auroc_high"]] == pytest.approx(
        np.quantile(again, [0.025, 0.975]), abs=0.02
    )
    alone = auroc(safe, score, np.arange(400))
    assert found["auroc_high"] - found["auroc_low"] > 1.3 * (
        alone["auroc_high"] - alone["auroc_low"]
    )
    assert found["within_low"] < found["auroc_within_prompt"] < found["within_high"]


def test_one_class_has_no_auroc():
    found = auroc([True, True], [0.1, 0.2], ["a", "a"])
    assert all(
        math.isnan(found[name])
        for name in ("auroc", "auroc_low", "auroc_within_prompt", "within_high")
    )


def test_calibration_error_worked_by_hand():
    """Guards bins and weights: two bins, of 1 and 3 responses."""
    safe, probability = pd.Series([True, True, False, False]), pd.Series([1.0, 0.72, 0.75, 0.78])
    assert calibration_error(safe, probability) == pytest.approx((3 * (0.75 - 1 / 3) + 1 * 0) / 4)


def test_the_table_of_a_critic(rollouts, tmp_path, monkeypatch):
    """Guards columns, and that a response is counted only while it goes on; numbers against those
    made here.
    """
    critic = trained(rollouts, tmp_path / "c", epochs=1)
    judged = judged_prefixes(critic, policy(), rollouts)
    assert len(judged) == sum(len(r.words) for r in rollouts)
    monkeypatch.setattr(critic_metrics, "POSITIONS", (1, 10, 11))
    table = rows_of_critic(critic, judged)
    assert list(table.columns) == COLUMNS and table["position"].tolist() == [1, 10]
    assert table["n"].tolist() == [sum(len(r.words) >= t for r in rollouts) for t in (1, 10)]
    here = judged[judged["position"] == 10]
    want = [r for r in rollouts if len(r.words) >= 10]
    assert here["safe"].tolist() == [r.costs[-1] <= 3.0 for r in want]
    assert here["task"].tolist() == pytest.approx([-r.reward * 0.999**10 for r in want])
    row = table.iloc[1]
    assert row["spearman"] == pytest.approx(spearmanr(here["f2"], here["task"]).statistic)
    assert row["parameters"] == critic.parameter_count and row["train_s"] == critic.about["train_s"]


def test_reference_rows(rollouts, monkeypatch):
    """Guards the two judges that a critic must be compared with: at the last token the cost of the
    text is the label itself.
    """
    monkeypatch.setattr(critic_metrics, "POSITIONS", (1, 10))
    table = reference_table(mock_policy(), rollouts, LetterCost(), 3.0)
    table = table.set_index(["features", "position"])
    assert table.loc[("partial-cost", 10), "auroc"] == 1.0
    assert table.loc[("prompt-cost", 1), "auroc_within_prompt"] == 0.5
    longer = [r for r in rollouts if len(r.words) >= 1]
    want = roc_auc_score(
        [r.costs[-1] <= 3.0 for r in longer], [-letter_cost(r.prompt) for r in longer]
    )
    assert table.loc[("prompt-cost", 1), "auroc"] == pytest.approx(want)


def test_a_score_that_failed_is_the_worst(rollouts, monkeypatch):
    """Guards the reference rows against NaN, which scikit-learn refuses."""
    broken = Answering(
        lambda _, texts, __: [letter_cost(r) if i % 7 else math.nan for i, r in enumerate(texts)]
    )
    monkeypatch.setattr(critic_metrics, "POSITIONS", (1,))
    table = reference_table(mock_policy(), rollouts, broken, 3.0)
    assert table["auroc"].between(0, 1).all()
    assert auroc([True, False], [math.nan, -math.inf], [1, 1])["auroc"] == 0.5
    assert auroc([True, False], [math.nan, -1e9], [1, 1])["auroc_within_prompt"] == 0


def test_prefixes_that_have_overspent_are_not_judged(rollouts, tmp_path):
    """Guards the AUROC of a critic that is told z: below zero it gives the answer away, and a
    search does not ask there.
    """
    critic = trained(rollouts, tmp_path, epochs=1, accounting="peak")
    judged = judged_prefixes(critic, policy(), rollouts)
    budget = critic.spec.budget
    left = [  # the costs that a search knows after t tokens: those of the blocks that have ended
        (r.prompt_id, t)
        for r in rollouts
        for t in range(1, len(r.words) + 1)
        if all(u <= budget for u in r.costs[: t // r.block_size])
    ]
    assert sorted(zip(judged["prompt_id"], judged["position"], strict=True)) == sorted(left)
    assert 0 < len(left) < sum(len(r.words) for r in rollouts)
