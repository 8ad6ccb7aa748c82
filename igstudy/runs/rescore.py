"""Score the lines of a run again, and compare the recorded values with the new ones.

The caller provides the scorers, see `igstudy.runs.verify`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from igcore import IgcoreError, Prompt, Scorer, SearchConfig
from igcore.contract import Contract
from igcore.methods import method_of
from igcore.prompt import as_prompt
from igcore.scorers import check_sign, uncached
from igcore.scoring import Cached, Tally
from igcore.verdict import Emission, judge, measure

from ..linefile import RECORD_FIELDS, SETTINGS, Fields, has_texts, line_digest
from ..settings import Settings

TOLERANCE = 1e-5  # two kernels of one processor give float32 networks scores 1.2e-6 apart
# raised by our code on values of a wrong type or form in a record
RECORD_ERRORS = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def rescored(lines: Sequence[Fields], cost: Scorer, reward: Scorer | None = None) -> Iterator[str]:
    """Score every emitted text again and yield one sentence for each thing that does not hold.

    Parameters
    ----------
    lines : sequence of dict
        Records; of those without their texts, see `igstudy.linefile.has_texts`, only digests and
        names of scorers are compared.
    reward : Scorer, optional
        Without one rewards are not compared: they are the policy's own likelihood.

    Raises
    ------
    ParameterError
        For a scorer with the wrong sign, and a cost that fails on all of some fixed texts.
    """
    if odd := odd_fields(lines):
        yield odd
        return
    check_sign(cost, "cost")  # a record may not name a reward model as its cost
    # a line says itself what failed, so nothing stops at a rate of failures
    contract = Contract.examined(cost, Tally(rate=1.0))
    # methods often come to the same text
    rewards = None if reward is None else Cached(check_sign(reward, "reward"), Tally(rate=1.0))
    # the final check of each line reads afresh, what is only measured is read once
    measuring = remembering(uncached(cost))
    for number, line in enumerate(lines, start=1):
        where = f"line {number}, prompt {line['prompt_id']}, {line['method']}"
        try:
            expected = recomputed(line, contract, rewards, measuring)
        except (IgcoreError, *RECORD_ERRORS) as error:
            yield f"{where}: cannot be checked ({type(error).__name__}: {error})"
            continue
        yield from differing_fields(where, line, expected, TOLERANCE)


def remembering(scorer: Scorer) -> Any:
    """Return a scorer that answers an equal call as before.

    A score by text would not do: beside other texts the last bits of one in half precision differ.
    """
    score = cache(scorer.score)
    return SimpleNamespace(name=scorer.name, score=lambda *texts: score(*map(tuple, texts)))


def odd_fields(lines: Sequence[Fields]) -> str:
    """Say which line has other fields than a line should; return "" if none has."""
    for number, line in enumerate(lines, start=1):
        if odd := sorted(line.keys() ^ {*RECORD_FIELDS}):
            return f"line {number}: its fields are not those of a line, see {', '.join(odd[:4])}"
    return ""


def recomputed(
    line: Fields, known: Contract, reward: Cached | None, measuring: Any = None
) -> Fields:
    """Return the fields of a line that follow from its text and settings, computed again.

    `measuring` gives the costs of prefixes that no check needs; by default the cost model.
    """
    cost = known.scorer
    expected: Fields = {
        "digest": line_digest(line),
        "cost_scorer": cost.name,
        "cost_digest": cost.digest,
        "reward_scorer": reward.scorer.name if reward else None,
        "reward_digest": reward.scorer.digest if reward else None,
    }
    if has_texts(line) == isinstance(line["tokens"], dict):
        raise TypeError("a part of its texts is withheld")
    if not has_texts(line):
        return expected
    prompt = as_prompt(line["prompt"], line["prompts"])
    repeat = line["prompt_id"].partition("-")[1:]  # a repeat of a prompt has its number appended
    expected |= {
        "prompt_id": "".join([prompt.id, *repeat]),
        "n_tokens": len(line["tokens"]),
        "z_final": (line["z_trace"] or [None])[-1],
    }
    config = settings_in(line)
    if line["response"] is None:
        return expected | _without_text(line, prompt, known, config)
    cost = measuring or uncached(cost)
    return expected | _scores_of_text(line, prompt, _contract(line, known), reward, cost)


def _without_text(line: Fields, prompt: Prompt, contract: Contract, config: SearchConfig) -> Fields:
    """Return the fields of a line without a text: an abstention that claims no scores."""
    response = None
    for refusal in ("", config.refusal):  # one that passes would have been emitted
        emission = Emission(refusal, ends=[len(refusal)])
        passed = judge(contract, prompt.text, emission, config).passed
        response = refusal if passed else response
    if not method_of(line["method"]).abstains or config.on_failure == "paper":
        response = "a text, which this method emits"
    return {
        "response": response,
        "status": "abstained",
        "reward": None,
        "cost": None,
        "peak_cost": None,
        "word_peak_cost": None,
        "spread": 0.0,
        "contract": "",
        "z_trace": [],
        "tokens": [],
        "n_tokens": 0,
    }


def _scores_of_text(
    line: Fields, prompt: Prompt, contract: Contract, reward: Cached | None, cost: Any
) -> Fields:
    """Return the scores and the status that a text deserves."""
    text, n_tokens, config = line["response"], line["n_tokens"], settings_in(line)
    emission = Emission(text, ends=line["block_ends"], grid=line["grid_ends"], n_tokens=n_tokens)
    emission.verdict = judge(contract, prompt.text, emission, config)
    (found,) = measure([emission], [prompt], reward=reward, cost=cost, config=config)
    abstains = method_of(line["method"]).abstains
    inside = emission.verdict.passed if abstains else emission.verdict.within
    status = "verified_safe" if inside else "unverified_unsafe"
    refused = abstains and config.on_failure != "paper" and n_tokens == 0
    if refused:  # not the policy's words
        status = "abstained"
    if line["status"] == "abstained" and text:
        text = config.refusal
    scores = found | {"status": status, "response": text if inside or not refused else None}
    if refused:
        end = [len(line["response"])]
        scores |= {"block_ends": end, "grid_ends": end, "finished": False}
    elif line["reason"] != "truncated":
        scores["fail_open_cost"] = scores["cost"]
    if reward or refused:
        return scores
    return {name: scores[name] for name in scores if name != "reward"}


def _contract(line: Fields, known: Contract) -> Contract:
    """Return the contract under which a line was judged: what it claims, or what is worse."""
    # the search had readings that cannot be repeated, so a larger spread is trusted
    claimed = line["contract"] not in ("kept", "")
    return replace(
        known,
        spread=max(known.spread, math.inf if line["spread"] is None else line["spread"]),
        problem=line["contract"] if claimed else known.problem,
    )


# --- comparing values -----------------------------------------------------------------------------


def settings_in(line: Fields) -> Settings:
    """Return the settings that a line names."""
    return Settings(**{name: line[name] for name in SETTINGS})


def differing_fields(
    where: str, found: Fields, expected: Fields, tolerance: float = 0.0
) -> Iterator[str]:
    """Yield a sentence for each expected value that a mapping does not have."""
    for name, value in expected.items():
        old = found.get(name)
        if not close(old, value, tolerance):
            yield f"{where}: {name} is {repr(old)[:60]}, not {repr(value)[:60]}"


def close(old: Any, new: Any, tolerance: float) -> bool:
    """True if JSON values are of one type and equal, floats up to a tolerance.

    A number that is not finite is None.
    """
    if isinstance(new, float):
        if not math.isfinite(new):
            return old is None
        return isinstance(old, float) and abs(old - new) <= tolerance
    if type(old) is not type(new):
        return False
    if isinstance(new, list):
        pairs = zip(old, new, strict=False)
        return len(old) == len(new) and all(close(x, y, tolerance) for x, y in pairs)
    if isinstance(new, dict):
        same_names = old.keys() == new.keys()
        return same_names and all(close(old[name], new[name], tolerance) for name in new)
    return bool(old == new)
