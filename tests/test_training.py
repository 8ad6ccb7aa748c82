"""Tests of the training of a critic, on a tiny random Llama that speaks seven letters."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from mockpolicy import LetterCost, LetterReward
from tiny import TRAINING, policy, same, trained

from igcore import ParameterError
from igstudy.report import critic_metrics
from igstudy.training import latents, loop
from igstudy.training.critic import SharedSources, bce_loss, mse_loss, train
from igstudy.training.latents import encode
from igstudy.training.rollouts import split_by_prompt, targets


def test_the_losses_worked_by_hand():
    """Guards J_1 and J_2: sign, sum and units; a reward that failed is left out."""
    logit, safe = torch.tensor([0.0, math.log(3)]), torch.tensor([1.0, 0.0])
    assert bce_loss(logit, safe).item() == pytest.approx(math.log(2) + math.log(4))
    f2, task = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, math.nan, 2.5])
    assert mse_loss(f2, task, torch.tensor(2.0)).item() == pytest.approx(1 + 0.25**2)


def test_critics_that_read_the_same_share_one_reading(rollouts, tmp_path, monkeypatch):
    """Bug: seven critics for which the policy read the same rollouts seven times; or shared latents
    that change what a critic learns, or are of other features or another layer.
    """
    read = Counter()  # (features, layer) -> responses

    def counted(model, prompts, responses, features="ho", layer=None):
        # smaller ones find sizes
        read[features, layer] += len(responses) if len(responses) > 2 else 0
        return encode(model, prompts, responses, features, layer)

    monkeypatch.setattr(latents, "encode", counted)
    kinds = {
        "m": {"features": "m", "layer": 1},
        "peak": {"features": "m", "layer": 1, "accounting": "peak"},
        "lower": {"features": "m", "layer": 0},
        "o": {"features": "o"},
    }
    shared = SharedSources()
    together = {
        name: trained(rollouts, tmp_path / name, shared=shared, epochs=1, **kind)
        for name, kind in kinds.items()
    }
    n_rows = sum(bool(r.words) for r in rollouts)
    assert +read == {("m", 1): n_rows, ("m", 0): n_rows, ("o", None): n_rows}
    alone = trained(rollouts, tmp_path / "alone", epochs=1, **kinds["peak"])
    assert same(alone, together["peak"])


def test_a_critic_learns_what_the_responses_say(rollouts, tmp_path, monkeypatch):
    """Guards the whole way: at the last letter the critic must know a good deal of the letters'
    cost and reward.
    """
    critic = trained(
        rollouts, tmp_path / "c", epochs=20, patience=20, lr=3e-3, f2_weight=0.2, width=32
    )
    monkeypatch.setattr(critic_metrics, "POSITIONS", (10,))
    judged = critic_metrics.judged_prefixes(critic, policy(), rollouts)
    (row,) = critic_metrics.rows_of_critic(critic, judged).to_dict("records")
    assert row["auroc"] > 0.75 and row["auroc_within_prompt"] > 0.7 and row["spearman"] > 0.75
    first, last = (critic.about["history"][i] for i in (0, -1))
    assert last["learn_loss"] < 0.7 * first["learn_loss"] and first["epoch"] == 1
    assert critic.about["n_prompts"] == 30
    assert critic.about["train_s"] > 0
    assert 0 < critic.about["unsafe"] < 1


@pytest.mark.parametrize("features", ["o", "h", "ho", "m"])
def test_all_features_train_to_the_same_weights_again(features, rollouts, tmp_path):
    """Guards determinism by seed; and the global random state, which is the user's."""
    a = trained(rollouts, tmp_path / "a", features=features, epochs=1)
    config, letters = replace(TRAINING, features=features, epochs=1), policy()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    b = train(letters, rollouts, config, tmp_path / "b", cost=LetterCost(), reward=LetterReward())
    assert torch.equal(torch.get_rng_state(), before)
    assert same(a, b)
    assert not same(a, trained(rollouts, tmp_path / "c", features=features, epochs=1, seed=1))


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2])
def test_interrupted_training_goes_on_to_the_same_weights(after, rollouts, tmp_path, monkeypatch):
    """Guards the checkpoint: weights, best weights, moments of the optimiser, order and dropout of
    the epochs to come.
    """
    whole = trained(rollouts, tmp_path / "whole", epochs=4, dropout=0.3)
    learn = loop._Trainer._learn

    def stopping(self, epoch):
        if epoch > after:
            raise Stop
        return learn(self, epoch)

    monkeypatch.setattr(loop._Trainer, "_learn", stopping)
    with pytest.raises(Stop):
        trained(rollouts, tmp_path / "parts", epochs=4, dropout=0.3)
    assert not (tmp_path / "parts" / "critic.json").exists()
    began = []
    monkeypatch.setattr(
        loop._Trainer, "_learn", lambda self, epoch: began.append(epoch) or learn(self, epoch)
    )
    parts = trained(rollouts, tmp_path / "parts", epochs=4, dropout=0.3)
    assert began == list(range(after + 1, 5)) and same(whole, parts)
    drop = {"check_loss", "check_bce", "check_mse", "learn_loss"}
    assert [[e[k] for k in drop] for e in whole.about["history"]] == [
        [e[k] for k in drop] for e in parts.about["history"]
    ]
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == [
        "critic.json",
        "critic.safetensors",
    ]


def test_a_checkpoint_of_another_training_is_not_resumed(rollouts, tmp_path, monkeypatch):
    """Guards a folder in which a training with other settings or rollouts was stopped."""
    check = loop._Trainer._stale
    monkeypatch.setattr(loop._Trainer, "_stale", lambda self: self.history and 1 / 0)
    # the same costs at block ends, and another one between them
    between = [replace(r, worst=[cost + 1 for cost in r.worst]) for r in rollouts]
    for part, lr in ((rollouts, 1e-3), (between, 1e-2)):
        with pytest.raises(ZeroDivisionError):
            trained(part, tmp_path / "c", epochs=2, lr=lr)
    monkeypatch.setattr(loop._Trainer, "_stale", check)
    first = trained(rollouts, tmp_path / "alone", epochs=2, lr=1e-2)
    assert len(list((tmp_path / "c").glob("checkpoint-*"))) == 2
    assert same(first, trained(rollouts, tmp_path / "c", epochs=2, lr=1e-2))


def test_training_stops_when_validation_no_longer_falls(rollouts, tmp_path):
    """Guards early stopping: the best epoch is kept, not the last."""
    critic = trained(rollouts, tmp_path / "c", epochs=60, patience=2, lr=0.1)
    losses = [epoch["check_loss"] for epoch in critic.about["history"]]
    assert len(losses) < 60 and losses.index(min(losses)) == len(losses) - 3
    short = trained(rollouts, tmp_path / "short", epochs=len(losses) - 2, patience=2, lr=0.1)
    assert same(critic, short)


def test_latents_held_or_made_again_train_alike(rollouts, tmp_path):
    """Guards the second way to the features; batches differ in padding, so weights agree up to
    rounding.
    """
    a, b = (
        trained(rollouts, tmp_path / str(gb), memory_gb=gb, epochs=1, dropout=0.0)
        for gb in (1.0, 0.0)
    )
    assert same(a, b, atol=1e-3)


def test_bf16_trains(rollouts, tmp_path):
    """Guards mixed precision: a policy in bfloat16, a critic saved and judged in float32."""
    AcceleratorState._reset_state(True)
    critic = trained(rollouts, tmp_path / "c", torch.bfloat16, epochs=1, mixed_precision="bf16")
    AcceleratorState._reset_state(True)
    assert {x.dtype for x in critic.state_dict().values()} == {torch.float32}
    assert math.isfinite(critic.about["history"][0]["check_loss"])


@pytest.mark.parametrize(
    "budget, counts", [(99.0, r"(\d+) end within the budget of 99.0"), (0.0, "0 end within")]
)
def test_rollouts_of_one_class_are_refused(budget, counts, rollouts, tmp_path):
    """Guards against a critic that says the same of everything; the sentence counts the safe
    rollouts and says where costs lie.
    """
    unsafe = [r for r in rollouts if r.costs[-1] > 0]
    chosen = rollouts if budget else unsafe
    with pytest.raises(ParameterError, match=rf"of \d+ rollouts to learn from {counts}"):
        trained(chosen, tmp_path, budget=budget)


def test_the_network_works_in_units_of_its_data(rollouts, tmp_path):
    """Guards f2 and z of any size: both heads see z, and f2 learns with mean 0 and deviation 1."""
    critic = trained(rollouts, tmp_path / "c", accounting="peak", epochs=1)
    learn = split_by_prompt([r for r in rollouts if r.words], 0.2)[0]
    z = torch.tensor([z for r in learn for z in targets(r, 3.0, "peak").z])
    task = torch.tensor([-(0.999**10) * r.reward for r in learn])
    for i, numbers in enumerate((z, task)):
        assert critic.centre[i] == pytest.approx(numbers.mean().item())
        assert critic.scale[i] == pytest.approx(numbers.std().item())
    z, seen = [0.5, 2.5], encode(policy().model, [[1], [1]], [[2], [2]], "m", 0)
    want = critic.judge(seen, z)
    critic.centre[0], critic.scale[0] = 0.0, 1.0
    units = [(x - 3.0) / 2.0 for x in z]
    ours = critic.judge(seen, units)
    critic.centre[0], critic.scale[0] = 3.0, 2.0
    assert torch.allclose(torch.stack(ours), torch.stack(critic.judge(seen, z)))
    assert not torch.equal(want[0], ours[0])


def test_rewards_that_failed_are_left_out(rollouts, tmp_path):
    """Guards f2 against one NaN, which would end all training."""
    some = [replace(r, reward=math.nan) if i % 5 == 0 else r for i, r in enumerate(rollouts)]
    assert math.isfinite(trained(some, tmp_path / "c", epochs=1).about["history"][0]["learn_mse"])


def test_a_loss_that_is_lost_is_one_sentence(rollouts, tmp_path):
    with pytest.raises(ParameterError, match="no longer a finite number at lr 1e.30; lower lr"):
        trained(rollouts, tmp_path / "c", lr=1e30)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(features="k"), "unknown features 'k'"),
        (dict(layer=2), "layer is 2; features 'm' need one of the 2 layers"),
        (dict(layer=None), "layer is None; features 'm' need one"),
    ],
)
def test_bad_settings_are_one_sentence(changes, sentence, rollouts, tmp_path):
    with pytest.raises(ParameterError, match=sentence):
        trained(rollouts, tmp_path, **changes)
