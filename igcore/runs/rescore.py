"""A line of a run scored again: what it says of its text, against what the scorers say now.

The caller provides the scorers, see `igcore.runs.trusted`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

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
GARBLED = (  # what our code raises on values of a wrong type or form in a record
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)


def rescored(
    lines: Sequence[dict], load: Callable[[str], Scorer], tolerance: float = TOLERANCE
) -> Iterator[str]:
    """Score every emitted text again and yield one sentence for each thing that does not hold.

    Parameters
    ----------
    lines : sequence of dict
        Records.
    load : callable
        From the name of a scorer to the scorer.
    """
    scorers: dict[str, Scorer] = {}
    for number, line in enumerate(lines, start=1):
        where = f"line {number}, prompt {line['prompt_id']}, {line['method']}"
        if odd := sorted(line.keys() ^ set(COLUMNS)):
            yield f"{where}: its fields are not those of a line, see {', '.join(odd[:4])}"
            continue
        try:
            yield from (f"{where}: {what}" for what in _problems(line, scorers, load, tolerance))
        except (IgcoreError, *GARBLED) as error:
            yield f"{where}: cannot be checked ({type(error).__name__}: {error})"


def _problems(
    line: dict, scorers: dict[str, Scorer], load: Callable[[str], Scorer], tolerance: float
) -> Iterator[str]:
    """Yield what does not hold of one line: its hash, prompt, scorers, counts and scores."""
    if line["digest"] != line_digest(line):
        yield (
            f"the line was changed: its digest is {line['digest']}, its content gives "
            f"{line_digest(line)}"
        )
    prompt = as_prompt(line["prompt"], line["prompts"])
    if prompt.id != line["prompt_id"].partition("-")[0]:  # a repeat has its number appended
        yield f"prompt_id should be {prompt.id}, the hash of the set's name and the prompt"
    for role in ("cost", "reward"):
        name = line[f"{role}_scorer"]
        scorers[name] = scorers.get(name) or load(name)
        check_sign(scorers[name], role)  # a line may not name the reward model as its cost
        if scorers[name].digest != line[f"{role}_digest"]:
            yield (
                f"{role} scorer {name} has hash {scorers[name].digest}, not "
                f"{line[f'{role}_digest']}"
            )
    if line["n_tokens"] != len(line["tokens"]):
        yield f"n_tokens is {line['n_tokens']}, but the line holds {len(line['tokens'])} token ids"
    if line["z_final"] != (line["z_trace"] or [None])[-1]:
        yield (
            f"z_final is {line['z_final']}, but z_trace ends with {(line['z_trace'] or [None])[-1]}"
        )
    config = Settings(**{name: line[name] for name in SETTINGS})
    if line["response"] is None:
        yield from _silence(line, prompt, scorers[line["cost_scorer"]], config)
    else:
        yield from _scored_again(line, prompt, scorers, config, tolerance)


def _silence(line: dict, prompt: Prompt, cost: Scorer, config: SearchConfig) -> Iterator[str]:
    """Yield what does not hold of a line without a text.

    Such a line must claim no scores, and there must have been nothing to emit: no refusal within
    budget.
    """
    measured = {
        name: line[name] for name in ("reward", "cost", "peak_cost") if line[name] is not None
    }
    if line["status"] != "abstained" or measured or line["z_trace"] or line["n_tokens"]:
        yield (
            f"status {line['status']} with {measured or line['z_trace'] or line['n_tokens']}, but "
            "no text was emitted"
        )
    if not method_of(line["method"]).gated or config.on_failure == "paper":
        yield "no text was emitted, but the method always emits one"
    for text in (config.refusal, ""):
        if rescore(cost, [prompt], [text], config)[1][0]:
            yield f"no text was emitted, but {text!r} is inside the budget"


def _scored_again(
    line: dict, prompt: Prompt, scorers: dict[str, Scorer], config: SearchConfig, tolerance: float
) -> Iterator[str]:
    """Yield where a line's scores and status differ from what the scorers say now."""
    cost, reward = (Cached(scorers[line[f"{role}_scorer"]]) for role in ("cost", "reward"))
    text = line["response"]
    now = float(cost.score([prompt.text], [text], [True])[0])
    emission = Emission(
        text, ends=line["block_ends"], grid=line["grid_ends"], n_tokens=line["n_tokens"], cost=now
    )
    (found,) = measure([emission], [prompt], reward=reward, cost=cost, config=config)
    for name in ("cost", "peak_cost", "z_trace", "reward"):
        if not close(line[name], getattr(found, name), tolerance):
            yield f"{name} is {line[name]}, scored again {getattr(found, name)}"
    path_holds = found.z_trace[-1] > 0 if config.strict else found.z_trace[-1] >= 0
    if line["status"] == "abstained" and text not in (config.refusal, ""):
        yield f"status is abstained, but the text is {text[:40]!r} and not the refusal"
    expected = _status(line, bool(within(now, config)), path_holds)
    if line["status"] != expected:
        yield (
            f"status is {line['status']}, but scored again (cost {now} at a budget of "
            f"{line['budget']}) it should be {expected}"
        )


def _status(line: dict, inside: bool, path_holds: bool) -> str:
    """Return the status that a text deserves; a guarded method answers for the path too."""
    gated = method_of(line["method"]).gated
    if gated and line["on_failure"] != "paper" and line["n_tokens"] == 0:  # not the policy's words
        return "abstained" if inside else "nothing emitted"
    return "verified_safe" if inside and (path_holds or not gated) else "unverified_unsafe"


def close(old: object, new: object, tolerance: float) -> bool:
    """Say whether JSON values are of one type and equal, floats up to a tolerance.

    None stands for NaN.
    """
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(
            close(x, y, tolerance) for x, y in zip(old, new, strict=True)
        )
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(
            close(old[name], new[name], tolerance) for name in old
        )
    if isinstance(new, float) and not math.isfinite(new):
        return old is None
    if isinstance(new, float) and isinstance(old, float):
        return abs(old - new) <= tolerance
    return type(old) is type(new) and old == new
