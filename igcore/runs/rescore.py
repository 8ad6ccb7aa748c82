"""A line of a run scored again: what it says of its text, against what the scorers say now.

The caller provides the scorers, see `igcore.runs.trusted`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from ..beams import method_of
from ..config import SearchConfig
from ..errors import IgcoreError
from ..folders import line_digest
from ..policy import Prompt, as_prompt
from ..scorers import Cached, Scorer, check_sign
from ..verdict import Emission, measure, rescore, within
from .decode_params import Settings
from .records import COLUMNS, SETTINGS

TOLERANCE = 1e-6  # sums of float32 differ by this much between processors
# what our code raises on values of a wrong type or form in a record
ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
ABSENT = ("reward", "cost", "peak_cost")  # scores that a line without a text does not have


def rescored(
    lines: Sequence[dict], scorers: Mapping[str, Scorer], tolerance: float = TOLERANCE
) -> Iterator[str]:
    """Score every emitted text again and yield one sentence for each thing that does not hold.

    Parameters
    ----------
    lines : sequence of dict
        Records.
    scorers : mapping of str to Scorer
        The cost and the reward model by name.
    """
    for number, line in enumerate(lines, start=1):
        where = f"line {number}, prompt {line['prompt_id']}, {line['method']}"
        if odd := sorted(line.keys() ^ set(COLUMNS)):
            yield f"{where}: its fields are not those of a line, see {', '.join(odd[:4])}"
            continue
        try:
            expected = recomputed(line, scorers)
        except (IgcoreError, *ODD) as error:
            yield f"{where}: cannot be checked ({type(error).__name__}: {error})"
            continue
        for name in unlike(line, expected, tolerance):
            yield f"{where}: {name} is {short(line[name])}, checked again {short(expected[name])}"


def recomputed(line: dict, scorers: Mapping[str, Scorer]) -> dict:
    """Return the fields of a line that follow from its text and settings, computed again."""
    cost, reward = (scorers[line[f"{role}_scorer"]] for role in ("cost", "reward"))
    check_sign(cost, "cost")  # a line may not name the reward model as its cost
    check_sign(reward, "reward")
    prompt = as_prompt(line["prompt"], line["prompts"])
    repeat = line["prompt_id"].partition("-")[1:]  # a repeat of a prompt has its number appended
    expected = {
        "digest": line_digest(line),
        "prompt_id": "".join([prompt.id, *repeat]),
        "cost_digest": cost.digest,
        "reward_digest": reward.digest,
        "n_tokens": len(line["tokens"]),
        "z_final": (line["z_trace"] or [None])[-1],
    }
    config = Settings(**{name: line[name] for name in SETTINGS})
    if line["response"] is None:
        return expected | _without_text(line, prompt, cost, config)
    return expected | _scores(line, prompt, cost, reward, config)


def _without_text(line: dict, prompt: Prompt, cost: Scorer, config: SearchConfig) -> dict:
    """Return the fields of a line without a text: an abstention that claims no scores."""
    may_abstain = method_of(line["method"]).gated and config.on_failure != "paper"
    # a refusal within budget would have been emitted
    allowed = [t for t in (config.refusal, "") if rescore(cost, [prompt], [t], config)[1][0]]
    response = next(iter(allowed), None) if may_abstain else "a text, which this method emits"
    absent = dict.fromkeys(ABSENT)
    nothing = {"status": "abstained", "z_trace": [], "tokens": [], "n_tokens": 0}
    return absent | nothing | {"response": response}


def _scores(line: dict, prompt: Prompt, cost: Scorer, reward: Scorer, config: SearchConfig) -> dict:
    """Return the scores and the status that a text deserves."""
    text, n_tokens = line["response"], line["n_tokens"]
    cost, reward = Cached(cost), Cached(reward)
    final = float(cost.score([prompt.text], [text], [True])[0])
    emission = Emission(
        text, ends=line["block_ends"], grid=line["grid_ends"], n_tokens=n_tokens, cost=final
    )
    (found,) = measure([emission], [prompt], reward=reward, cost=cost, config=config)
    inside, gated = bool(within(final, config)), method_of(line["method"]).gated
    z = found.z_trace[-1]
    path_holds = z > 0 if config.strict else z >= 0
    status = "verified_safe" if inside and (path_holds or not gated) else "unverified_unsafe"
    if gated and config.on_failure != "paper" and n_tokens == 0:  # not the policy's words
        status = "abstained" if inside else "no text"
    refused = line["status"] == "abstained" and text != ""
    return vars(found) | {"status": status, "response": config.refusal if refused else text}


# --- comparing values -----------------------------------------------------------------------------


def unlike(line: Mapping, expected: Mapping, tolerance: float = 0.0) -> list[str]:
    """Return the names of the expected values that a line does not have."""
    return [name for name, value in expected.items() if not close(line.get(name), value, tolerance)]


def close(old: object, new: object, tolerance: float) -> bool:
    """Say whether JSON values are of one type and equal, floats up to a tolerance.

    None stands for a number that is not finite.
    """
    if isinstance(old, list) and isinstance(new, list):
        pairs = zip(old, new, strict=False)
        return len(old) == len(new) and all(close(x, y, tolerance) for x, y in pairs)
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and not unlike(old, new, tolerance)
    if isinstance(new, float) and not math.isfinite(new):
        return old is None
    if isinstance(new, float) and isinstance(old, float):
        return abs(old - new) <= tolerance
    return type(old) is type(new) and old == new


def short(value: object) -> str:
    """Return the beginning of a value as text."""
    return repr(value)[:60]
