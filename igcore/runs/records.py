"""One line of responses.jsonl: which fields it has, and how a response becomes one.

A record is the step between decoding and the run folder: `igcore.runs.decode_run.lines_of` makes
it, `igcore.folders.Run` appends it. Nothing is read or written here.
"""

import math
from dataclasses import fields

from ..beams import settings_of
from ..config import widened
from ..folders import line_digest
from ..guard import Guard
from ..verdict import Counts, Response
from .decode_params import Settings

SETTINGS = (
    "n_samples", "keep", "block_size", "max_new_tokens", "rounds", "budget", "accounting",
    "gamma_safety", "strict",
    "lagrange_multiplier", "threshold", "miss", "eta", "gamma_task", "diversity",
    "diversity_penalty", "on_failure", "refusal",
    "probe_fail_open", "group_size", "score_threshold", "top_k", "token_score", "policy_weight",
    "reward_weight",
    "token_temperature", "value_steps", "value_step_size",
)  # fmt: skip
COLUMNS = (
    *[
        "prompt_id",
        "prompt",
        "response",
        "tokens",
        "policy",
        "prompts",
        "method",
        "seed",
        *SETTINGS,
    ],
    *["status", "finished", "n_tokens"],
    *[
        "reward",
        "cost",
        "peak_cost",
        "fail_open_cost",
        "z_final",
        "z_trace",
        "block_ends",
        "grid_ends",
        "grid_size",
    ],
    *[field.name for field in fields(Counts)],
    *["trace", "finals", "generate_s", "cost_s", "reward_s", "critic_s", "score_s", "reason"],
    *["cost_scorer", "cost_digest", "reward_scorer", "reward_digest", "digest"],
)


def record(response: Response, method: str, guard: Guard, seed: int) -> dict:
    """Return a response as the flat mapping that a run stores.

    Parameters
    ----------
    guard : Guard
        With the user's settings, whose blocks measure every method. A line holds the settings that
        its own method ran under, which may differ.

    Returns
    -------
    dict
        JSON values only: a number that is not finite becomes None. ``digest`` covers every field
        whose name does not end in ``_s``, so that an accidental change of a line shows without
        scoring.
    """
    r, cost, reward = response, guard.cost, guard.reward
    config = settings_of(method, widened(Settings, guard.config))
    line = {
        "prompt_id": r.prompt_id, "prompt": r.prompt, "response": r.text, "tokens": r.tokens,
        "policy": guard.policy.name, "prompts": r.set_name, "method": method, "seed": seed,
        **{name: getattr(config, name) for name in SETTINGS},
        "status": r.status, "finished": r.finished, "n_tokens": r.n_tokens, "reward": r.reward,
        "cost": r.cost,
        "peak_cost": r.peak_cost, "fail_open_cost": r.fail_open_cost,
        "z_final": r.z_trace[-1] if r.z_trace else None, "z_trace": r.z_trace,
        "block_ends": r.block_ends, "grid_ends": r.grid_ends, "grid_size": guard.config.block_size,
        **vars(r.counts), "trace": r.trace, "finals": r.finals,
        "generate_s": r.generate_s, "cost_s": r.cost_s, "reward_s": r.reward_s,
        "critic_s": r.critic_s,
        "score_s": r.cost_s + r.reward_s + r.critic_s,
        "reason": r.reason,
        "cost_scorer": cost.name, "cost_digest": cost.digest, "reward_scorer": reward.name,
        "reward_digest": reward.digest,
    }  # fmt: skip
    line = _finite(line)
    return line | {"digest": line_digest(line)}


def _finite(value):
    """Return a JSON value with every number that is not finite replaced by None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
