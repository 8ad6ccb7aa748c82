"""Tests of rollouts, on the mock policy (exact), and of what they say a critic should have said."""

import gzip
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mockpolicy import LetterCost, LetterReward, letter_cost, letter_reward, mock_policy

from igcore import Guard, ParameterError, Prompt, RunError, ScorerError, SearchConfig, decode
from igstudy.runs.critic_params import RolloutConfig
from igstudy.runs.rollout_run import load_rollouts, roll_out
from igstudy.training.rollouts import Rollout, labels_of, split_by_prompt, targets

PROMPTS = [
    Prompt(f"{i:02d}", text, "mock") for i, text in enumerate("ab fed c dd eae fcb a".split())
]
CONFIG = RolloutConfig(n_rollouts=3, max_new_tokens=10, block_size=4, group_size=2, seed=5)


KNOWN = {"policy": mock_policy(), "cost": LetterCost(), "reward": LetterReward()}


def roll(folder, config=CONFIG, cost=None, reward=None, prompts=PROMPTS):
    return roll_out(
        mock_policy(),
        prompts,
        config,
        cost=cost or LetterCost(),
        reward=reward or LetterReward(),
        folder=folder,
    )


def said(rollouts):
    return {(r.prompt_id, tuple(r.tokens), r.ended, tuple(r.costs), r.reward) for r in rollouts}


def test_rollouts_are_plain_samples_with_their_scores(tmp_path):
    """Guards the reference policy: the first rollout of a prompt is what `base` answers with the
    same seed.
    """
    policy, found = mock_policy(), roll(tmp_path / "a")
    assert [r.prompt_id for r in found] == [p.id for p in PROMPTS for _ in range(3)]
    config = SearchConfig(budget=9, max_new_tokens=10, block_size=4, keep=1, group_size=2)
    base = decode(
        "base",
        Guard(policy, reward=LetterReward(), cost=LetterCost(), config=config),
        PROMPTS,
        seed=5,
    )
    assert [r.tokens for r in found[::3]] == [answer.tokens for answer in base]
    assert any(r.ended for r in found) and not all(r.ended for r in found)
    for r in found:
        texts = [policy.text(r.tokens[:end]) for end in (4, 8, 10) if end < len(r.tokens)] + [
            policy.text(r.tokens)
        ]
        assert r.costs == [letter_cost(text) for text in texts]
        assert r.reward == letter_reward(texts[-1])
        assert r.words == (r.tokens[:-1] if r.ended else r.tokens)
        assert r.ended or len(r.tokens) == 10
    assert len(said(found)) > len(PROMPTS)  # they differ


MUTE = LetterReward(lambda text: math.nan, digest="v0")


def test_neither_groups_nor_a_file_change_a_rollout(tmp_path):
    """Guards keys by coordinates, and the way to the file and back."""
    whole = roll(tmp_path / "whole")
    assert said(roll(tmp_path / "alone", replace(CONFIG, group_size=1))) == said(whole)
    assert load_rollouts(tmp_path / "whole", CONFIG.checks, **KNOWN) == whole
    for role, other in (
        ("policy", replace(mock_policy(), digest="x")),
        ("cost", MUTE),
        ("reward", MUTE),
    ):
        with pytest.raises(
            ParameterError, match=f"are of {role} .* of hash .*, not of '{other.name}' of hash"
        ):
            load_rollouts(tmp_path / "whole", CONFIG.checks, **KNOWN | {role: other})


class Failing(LetterCost):
    """Is stopped at its third call."""

    # a scorer is known by its module: this one stands for the other
    __module__ = LetterCost.__module__
    calls = 0

    def score(self, prompts, responses, finished):
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt("power cut")
        return super().score(prompts, responses, finished)


def test_a_stop_loses_nothing(tmp_path):
    """Guards resume: finished groups are kept, a half-written line is dropped, and the end is the
    same.
    """
    with pytest.raises(KeyboardInterrupt, match="power cut"):
        roll(tmp_path / "a", cost=Failing())
    path = tmp_path / "a" / "responses.jsonl"
    assert path.read_bytes().count(b"\n") == 4
    with pytest.raises(RunError, match="manifest.json cannot be read .*finishes the run"):
        load_rollouts(tmp_path / "a", CONFIG.checks, **KNOWN)
    with path.open("ab") as file:
        file.write(b'{"half": ')
    before = path.read_bytes()[:-9]
    assert said(roll(tmp_path / "a")) == said(roll(tmp_path / "b"))
    assert path.read_bytes().startswith(before)
    lines = path.read_bytes().splitlines(keepends=True)
    roll(tmp_path / "a")
    assert path.read_bytes() == b"".join(lines)
    # in the middle of a group, all of which is then drawn again
    path.write_bytes(b"".join(lines[:3]))
    assert said(roll(tmp_path / "a")) == said(roll(tmp_path / "b"))
    assert path.read_bytes().count(b"\n") == 7


@pytest.mark.parametrize("role", ["cost", "reward"])
def test_a_scorer_that_always_fails_stops_the_rollouts(tmp_path, role):
    """Bug: every group counted for itself, and rewards not at all, so that hours of rollouts
    without a score were called finished.
    """
    scorer = type(KNOWN[role])()
    scorer.score = lambda prompts, *_: [math.nan] * len(prompts)
    prompts = [Prompt(f"{k:03d}", "ab", "mock") for k in range(110)]
    with pytest.raises(ScorerError, match=f"'{scorer.name}' failed on"):
        roll(tmp_path / "a", prompts=prompts, **{role: scorer})
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_packed_rollouts_are_the_same_and_changed_ones_are_refused(tmp_path):
    """Guards rollouts that are shipped: one changed byte is found, packed or not."""
    whole = roll(tmp_path / "a")
    path, packed = tmp_path / "a/responses.jsonl", tmp_path / "a/responses.jsonl.gz"
    content = path.read_bytes()
    changed = content.replace(b'"seed": 5', b'"seed": 6', 1)
    assert changed != content
    load = lambda: load_rollouts(tmp_path / "a", CONFIG.checks, **KNOWN)  # noqa: E731
    path.write_bytes(changed)
    with pytest.raises(RunError, match="a have changed since they were sampled; sample them"):
        load()
    packed.write_bytes(gzip.compress(content))
    assert load() == whole, "the packed lines are read"
    for damaged, said in (
        (gzip.compress(changed), "a have changed since they were sampled; sample them"),
        (gzip.compress(content)[:-20], "cannot read .*jsonl.gz"),
        (b"no archive", "cannot read .*jsonl.gz"),
    ):
        packed.write_bytes(damaged)
        with pytest.raises(RunError, match=said):
            load()


def test_a_score_that_failed_is_stored_as_none(tmp_path):
    """Guards the file: NaN is no JSON. It must come back as NaN, so that the targets can fail
    closed.
    """
    found = roll(tmp_path / "a", reward=MUTE)
    assert all(math.isnan(r.reward) for r in found)
    line = json.loads((tmp_path / "a" / "responses.jsonl").read_text().splitlines()[0])
    assert line["rewards"] == [None] * 3


def rollout(costs, n=10, ended=False, reward=2.0, size=4):
    return Rollout("p", "text", list(range(n)), ended, costs, costs, reward, size, 10)


@pytest.mark.parametrize(
    "costs, accounting, budget, safe",
    [
        # closed: the whole budget may be used; what came before does not count
        ([3.0, 0.0, 1.0], "terminal", 1.0, True),
        ([0.0, 0.0, 1.0], "terminal", 0.999, False),
        ([3.0, 0.0, 1.0], "peak", 1.0, False),
        ([-1.0, -2.0, -3.0], "terminal", 0.0, True),
        ([0.0, 0.0, math.nan], "terminal", 5.0, False),  # a score that cannot be read is never safe
        ([1.0, 1.0, 1.0], "sum", 3.0, True),
        ([1.0, 1.0, 1.5], "sum", 3.0, False),
    ],
)
def test_safe_is_the_one_predicate(costs, accounting, budget, safe):
    """Guards the label: with z_T > 0 instead, every answer would be unsafe at budget 0."""
    assert targets(rollout(costs), budget, accounting).safe == safe


def test_z_is_what_a_search_knows():
    """Guards against a z that tells the answer: `terminal` charges at the end alone, and between
    block ends nobody looks.
    """
    assert targets(rollout([0.0, 0.0, 7.0]), 2.0, "terminal").z == [2.0] * 10
    # even where a block ends at the end
    assert targets(rollout([0.0, 7.0], n=8), 2.0, "terminal").z == [2.0] * 8
    peak = targets(rollout([0.5, 0.0, 7.0]), 2.0, "peak").z
    # the block that ends at 10 is not full: its end is the end
    assert peak == [2.0] * 3 + [1.5] * 7
    assert targets(rollout([0.5, 1.0], n=8), 2.0, "peak").z == [2.0] * 3 + [1.5] * 4 + [1.0]
    # the end token is no prefix
    assert targets(rollout([0.5, 1.0], n=5, ended=True), 2.0, "peak").z == [2.0] * 3 + [1.5]


def test_z_grows_by_the_safety_discount():
    """Guards the paper's z_t = omega_{t-1} / gamma^t, here as the safety state of `igcore.budget`
    has it at a block's end.
    """
    from igcore.budget import charge, start

    z = targets(rollout([0.5, 0.7, 1.0]), 2.0, "peak", gamma_safety=0.9).z
    one = charge(start(2.0), 0.5, "peak", 0.9, position=3)
    two = charge(one, 0.7, "peak", 0.9, position=7)
    assert z[3] == pytest.approx(one.z) and z[7] == pytest.approx(two.z)
    assert z[5] == pytest.approx(one.z / 0.9**2) and z[0] == pytest.approx(2.0 / 0.9)


def test_task_cost_is_paid_at_the_maximum_length():
    """Guards the sign, and T: a short answer is discounted like a long one."""
    for n in (3, 10):
        assert targets(rollout([0.0], n=n, size=99), 1.0, gamma_task=0.9).task == pytest.approx(
            -2.0 * 0.9**10
        )


def test_labels_are_padded():
    """Guards z of rollouts of several lengths, and the discount of the task."""
    found = [rollout([1.0] * 3), rollout([0.5, 0.5], n=6, ended=True)]
    spec = SimpleNamespace(budget=0.75, accounting="terminal", gamma_safety=1.0, gamma_task=0.5)
    labels = labels_of(found, spec)
    assert labels.safe.tolist() == [0, 1]
    assert labels.z.tolist() == [[0.75] * 10, [0.75] * 5 + [0.0] * 5]
    assert labels.task.tolist() == pytest.approx([-2.0 * 0.5**10] * 2)


def test_a_prompt_is_on_one_side():
    """Guards validation: a critic recognises a prompt that it was trained on. And the side must not
    depend on the others' order.
    """
    rollouts = [replace(rollout([1.0]), prompt_id=str(i % 20)) for i in range(60)]
    learn, check = split_by_prompt(rollouts, 0.25)
    assert {r.prompt_id for r in learn}.isdisjoint(r.prompt_id for r in check) and (
        len(learn),
        len(check),
    ) == (45, 15)
    assert {r.prompt_id for r in split_by_prompt(rollouts[::-1], 0.25)[1]} == {
        r.prompt_id for r in check
    }
    assert [len(part) for part in split_by_prompt(rollouts[:2], 0.9)] == [1, 1]
    with pytest.raises(ParameterError, match="rollouts of 1 prompts; training needs at least 2"):
        split_by_prompt(rollouts[:1], 0.5)
