"""Records of imaginary runs, deterministic, in the format of ``responses.jsonl``; no text of any
model is in them.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd

LINE = (Path(__file__).parent / "data/record.json").read_text(encoding="utf-8")
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
    line = json.loads(LINE)
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
