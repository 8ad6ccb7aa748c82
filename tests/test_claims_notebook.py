"""What notebook 80 computes beside the verdicts: by hand, and likelihoods one text at a time."""

import math

import pandas as pd
import pytest
import torch
from notebook_code import notebook_code
from synthetic import record
from tiny import letters

from igstudy.report import claims, paired
from igstudy.report import statistics as metrics

NOTEBOOK = notebook_code("80_claims")


def lines(method, peaks, rewards=None, **fields):
    """Return lines with these highest costs; None is an abstention."""
    rows = []
    for k, peak in enumerate(peaks):
        line = record(method=method, prompt_id=f"p{k}", seed=7, **fields)
        line |= {"word_peak_cost": peak, "cost": peak, "toxicity": 0.1 * k, "run": method}
        line["status"] = "abstained" if peak is None else "verified_safe"
        line["reward"] = 0.5 if rewards is None else rewards[k]
        rows.append(line)
    return pd.DataFrame(rows)


def test_prompts_are_chosen_by_how_many_rollouts_go_over():
    """Guards the rule behind the lists: three of five, above the budget at any block end."""
    over, inside, at = [0.01, 0.06], [0.05, 0.01], [0.05]
    rollouts = pd.DataFrame(
        {
            "prompt_id": ["b", "a", "c"],
            "costs": [[over] * 3 + [at] * 2, [over] * 2 + [inside] * 3, [[0.06]] * 5],
        }
    )
    assert NOTEBOOK.often_over(rollouts) == ["b", "c"]


def test_outcomes_of_an_arm_by_hand():
    """Guards abstentions counted as answers, and a text over budget on the way counted as safe."""
    part = lines("inferenceguard", [0.1, 0.3, None, 0.2, 0.9])
    part.loc[1, "cost"] = 0.1  # over budget on the way, and not at the end
    row = NOTEBOOK.arm_row(part)
    assert (row["n_prompts"], row["answered_path_safe"], row["abstained"]) == (5, 2, 1)
    assert (row["over_budget_on_the_path"], row["safe_at_the_end"]) == (2, 3)
    assert (row["path_safe_low"], row["path_safe_high"]) == metrics.clopper_pearson(2, 5)


def test_means_are_paired_with_the_first_guarded_arm():
    """Guards the sign: an arm minus the guard, over the prompts that both answered."""
    regime = claims.Regime(
        about="",
        policy="smollm2-raw",
        split=claims.split_of("a prompt"),
        n_prompts=4,
        seed=7,
        budget=0.2,
        pilot={},
        arms={"plain": {"method": "base"}, "guard": {"method": "inferenceguard"}},
        behind_check=["plain"],
    )
    both = pd.concat(
        [
            lines("base", [0.1, 0.1, 0.9, 0.1], [0.3, 0.2, 0.1, 0.9]),
            lines("inferenceguard", [0.1, 0.1, 0.1, None], [0.5, 0.5, 0.2, 0.0]),
        ],
        ignore_index=True,
    )
    table = NOTEBOOK.arms_of("reward", regime, both, {"reward": paired.reward}).set_index("arm")
    assert list(table.index) == ["plain", "plain, behind the check", "guard"]
    assert table["reward_difference"]["plain"] == pytest.approx((-0.2 - 0.3 - 0.1) / 3)
    assert table["reward_difference"]["plain, behind the check"] == pytest.approx(-0.25)
    assert table["reward_difference"]["guard"] == 0
    assert table["reward_mean"]["guard"] == pytest.approx(0.4)
    assert table["answered_path_safe"].tolist() == [3, 3, 3]
    assert table["abstained"].tolist() == [0, 1, 1]


@pytest.fixture
def policy():
    return letters()


def test_likelihoods_are_those_of_one_text_at_a_time(policy):
    """Guards padding that is read, and a shift by one token."""
    openings, answers = [[3], [4, 5, 6], [2, 1]], [[6, 3, 4], [5], [6, 2, 1, 5, 3]]
    expected = []
    for opening, answer in zip(openings, answers, strict=True):
        total = 0.0
        for k, token in enumerate(answer):
            ids = torch.tensor([[*opening, *answer[:k]]])
            with torch.inference_mode():
                log_p = policy.model(ids).logits[0, -1].float().log_softmax(-1)
            total += log_p[token].item()
        expected.append(total / len(answer))
    assert NOTEBOOK.log_likelihoods(policy, openings, answers) == pytest.approx(expected, abs=1e-5)


def test_relevance_is_what_the_prompt_adds(policy, monkeypatch):
    """Guards an answer that another prompt's answer with the same text stands for, and silence."""
    told = pd.DataFrame(
        {
            "prompt_id": ["a", "b", "a", "c"],
            "prompt": ["ab", "cd", "ab", "ef"],
            "response": ["x", "x", "x", None],
            "tokens": [[6, 3], [6, 3], [6, 3], []],
        }
    )
    found = NOTEBOOK.relevance(policy, told)
    after = NOTEBOOK.log_likelihoods(policy, [policy.encode(x) for x in ("ab", "cd")], [[6, 3]] * 2)
    alone = NOTEBOOK.log_likelihoods(policy, [NOTEBOOK.unprompted(policy)], [[6, 3]])
    assert found[:3].tolist() == pytest.approx(
        [after[0] - alone[0], after[1] - alone[0], after[0] - alone[0]]
    )
    assert math.isnan(found[3]) and after[0] != after[1]
