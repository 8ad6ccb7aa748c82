"""A critic's training in small: rollouts of a tiny random Llama that speaks seven letters."""

from dataclasses import replace

import torch
from mockpolicy import EOS, LetterCost, LetterReward, MockTokenizer
from tinymodels import tiny

from igcore import Prompt
from igcore.policy import Policy
from igstudy.runs.critic_params import RolloutConfig
from igstudy.runs.rollout_run import roll_out
from igstudy.training.critic import CriticConfig, train

PROMPTS = [Prompt(f"{i:02d}", "abcdef"[i % 6] + "abcdef"[i // 6], "mock") for i in range(30)]
CONFIG = CriticConfig(
    budget=3.0, features="m", layer=0, width=16, epochs=3, batch_size=16, lr=1e-2, validation=0.2,
    f2_weight=1.0,
)  # fmt: skip


def policy(dtype=torch.float32, end=EOS):
    model = tiny("llama", dtype, vocab_size=7, initializer_range=0.1)
    return Policy("letters", model, MockTokenizer(), digest="l1", eos_ids=frozenset({end}))


def sampled(folder):
    """Of many lengths: a third of them never end by themselves."""
    scorers = {"cost": LetterCost(), "reward": LetterReward()}
    found = []
    for n, end in ((4, -1), (8, EOS)):
        config = RolloutConfig(n_rollouts=n, max_new_tokens=10, block_size=4)
        found += roll_out(policy(end=end), PROMPTS, config, **scorers, folder=folder / str(n))
    return found


def trained(rollouts, folder, dtype=torch.float32, shared=None, **changes):
    config, scorers = replace(CONFIG, **changes), {"cost": LetterCost(), "reward": LetterReward()}
    return train(policy(dtype), rollouts, config, folder, **scorers, shared=shared)


def same(a, b, **close):
    """Whether two networks have the same weights, bit for bit unless told how close."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x, y, **close) if close else torch.equal(x, y) for x, y in pairs)
