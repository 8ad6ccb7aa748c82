"""One line of responses.jsonl: which fields it has, and how a response becomes one.

A record is the step between decoding and the run folder: `igstudy.runs.decode_run.Experiment` makes
it, `igstudy.runs.folders.Run` appends it. Nothing is read or written here.
"""

from dataclasses import asdict

from igcore.guard import Guard
from igcore.methods import method_of
from igcore.response import Response

from ..linefile import RECORD_FIELDS, Fields, sealed
from ..settings import Settings, upcast_settings


def record(response: Response, method: str, guard: Guard, seed: int) -> Fields:
    """Return a response as the flat mapping that a run stores, with the fields `RECORD_FIELDS`.

    Parameters
    ----------
    guard : Guard
        With the user's settings, whose blocks measure every method. A line holds the settings that
        its own method ran under, which may differ.

    Returns
    -------
    dict
        JSON values only, see `igstudy.linefile.sealed`.
    """
    config = method_of(method).settings_under(upcast_settings(Settings, guard.config))
    values = asdict(config) | vars(response) | vars(response.counts)
    values |= {
        "response": response.judged,
        "prompts": response.set_name,
        "policy": guard.policy.name,
        "method": method,
        "seed": seed,
        "z_final": response.z_trace[-1] if response.z_trace else None,
        "grid_size": guard.config.block_size,
        "score_s": response.cost_s + response.reward_s + response.critic_s,
        "cost_scorer": guard.cost.name,
        "cost_digest": guard.cost.digest,
        "reward_scorer": getattr(guard.reward, "name", None),
        "reward_digest": getattr(guard.reward, "digest", None),
    }
    return sealed({name: values[name] for name in RECORD_FIELDS if name != "digest"})
