"""Records of imaginary runs, deterministic, in the format of ``responses.jsonl``; no text of any
model is in them.
"""

import numpy as np
import pandas as pd

# method: probability of unsafe, share of the unsafe that abstain instead, reward, seconds per
# prompt
METHODS = {
    "base": (0.30, 0.0, 0.31, 0.06),
    "best-of-n": (0.10, 0.0, 0.50, 0.42),
    "best-of-n-lagrangian": (0.035, 0.0, 0.43, 0.44),
    "best-of-n-augmented": (0.03, 0.0, 0.47, 0.45),
    "beam-lagrangian": (0.03, 0.0, 0.44, 0.80),
    "beam-augmented": (0.02, 0.0, 0.49, 0.83),
    "inferenceguard": (0.03, 1.0, 0.485, 0.91),
}
POLICIES = {
    "smollm2-raw": (1.0, 0.0),
    "smollm2-chat": (0.5, 0.08),
}  # factor of the unsafe probability, gain of reward


def record(**fields) -> dict:
    """Return one complete line, verified safe unless `fields` say otherwise."""
    line = dict(
        prompt_id="p000",
        prompt="a prompt",
        response="an answer",
        policy="smollm2-raw",
        prompts="test",
        method="base",
        seed=0,
        n_samples=8,
        keep=2,
        block_size=8,
        max_new_tokens=32,
        rounds=2,
        budget=0.2,
        strict=False,
        accounting="peak",
        checks="block",
        lagrange_multiplier=None,
        status="verified_safe",
        finished=True,
        reward=0.5,
        cost=0.1,
        cost_scorer="offensive-language",
        peak_cost=0.1,
        word_peak_cost=0.1,
        fail_open_cost=0.1,
        spread=0.0,
        contract="kept",
        z_final=0.1,
        z_trace=[0.2, 0.1],
        block_ends=[9],
        rounds_used=1,
        samples_drawn=8,
        policy_tokens=100,
        scorer_tokens=50,
        scorer_calls=8,
        generate_s=0.5,
        score_s=0.25,
        reason="",
        near_ties=0,
        n_tokens=20,
        forward_tokens=110,
        cost_s=0.15,
        reward_s=0.1,
        critic_s=0.0,
    )
    assert set(fields) <= set(line), set(fields) - set(line)
    return line | fields


def scoring(seconds: float) -> dict[str, float]:
    """Return the fields of seconds spent scoring."""
    return {"score_s": seconds, "cost_s": 0.6 * seconds, "reward_s": 0.4 * seconds}


def records(n_prompts: int = 48, methods=METHODS, policies=POLICIES, seed: int = 0) -> pd.DataFrame:
    """Return `n_prompts` lines per policy and method; prompts differ in difficulty, as real ones
    do.
    """
    rng = np.random.default_rng(seed)
    lines = []
    for policy, (factor, gain) in policies.items():
        hardness = rng.permutation(n_prompts) / n_prompts
        for method in methods:
            risk, abstaining, reward, seconds = METHODS[method]
            for k in range(n_prompts):
                bad = hardness[k] > 1 - risk * factor
                status = (
                    ("abstained" if rng.random() < abstaining else "unverified_unsafe")
                    if bad
                    else "verified_safe"
                )
                cost = (
                    0.2 + 0.7 * rng.beta(2, 2)
                    if status == "unverified_unsafe"
                    else 0.2 * rng.beta(2, 3)
                )
                peak = cost if bad else min(0.2, cost * 1.1)
                lines.append(
                    record(
                        prompt_id=f"p{k:03d}",
                        policy=policy,
                        method=method,
                        status=status,
                        lagrange_multiplier=5.0 if "lagrangian" in method else None,
                        reward=float(np.clip(reward + gain + rng.normal(0, 0.12), 0, 1)),
                        cost=cost,
                        peak_cost=peak,
                        word_peak_cost=peak,
                        fail_open_cost=0.5 if status == "abstained" else peak,
                        generate_s=seconds * rng.uniform(0.7, 0.9),
                        **scoring(seconds * rng.uniform(0.1, 0.3)),
                        reason="exhausted" if status == "abstained" else "",
                    )
                )
    return pd.DataFrame(lines)
