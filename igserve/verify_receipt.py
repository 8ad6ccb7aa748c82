"""Check answers by their receipts, without trusting whoever gave them.

The verifier brings the recipe of a guard, with a cost and, if at hand, a policy of their own. It is
the request: nothing in a receipt decides what is loaded. By default the guard answers the prompt
again, and everything in the receipt must come out, abstentions included. That needs neither the
tokens of an answer nor its trace, so a receipt holds none. Without the policy the text is scored
again, which says that it is within budget, and not who wrote it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from igcore import Guard, RunError, SearchConfig
from igcore.contract import Contract
from igcore.errors import IgcoreError
from igcore.files import digest_of
from igcore.methods import method_of
from igcore.prompt import as_prompt, prompt_id
from igcore.scorers import uncached
from igcore.scoring import Tally
from igcore.settings import written
from igcore.tools.answers import line_in
from igcore.tools.receipt import text_digest
from igcore.verdict import Emission, judge, measure

from .recipe import Recipe, search_of
from .wire import BODIES, CHAT, TEXT, ChatBody, TextBody, changes, read_request

TOLERANCE = 1e-5  # two kernels of one processor give networks scores 1.2e-6 apart
Fields = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """An answer with its receipt, as somebody handed it on.

    Attributes
    ----------
    request : dict
        As OpenAI's interface has it.
    text : str or None
    receipt : dict
    """

    request: Fields
    text: str | None
    receipt: Fields

    @property
    def kind(self) -> str:
        """See `igserve.wire.Asked`."""
        return CHAT if "messages" in self.request else TEXT

    @property
    def body(self) -> ChatBody | TextBody:
        """The request, read by its form."""
        return BODIES[self.kind](**self.request)

    @property
    def digests(self) -> Fields:
        """What the receipt must say of prompt and text."""
        prompt = as_prompt(self.body.prompt)
        return {"prompt": text_digest(prompt.text), "text": text_digest(self.text)}


def claims_in(path: Path) -> Iterator[tuple[str, Claim]]:
    """Yield the answers of a file, each with its place.

    A line is one of `igcore.Guard.map` or of a batch, or has a ``request`` and its ``response``.

    Raises
    ------
    RunError
        When a line has no answer, receipt or request.
    """
    for number, content in enumerate(lines_of(path), start=1):
        where = f"line {number} of {path}"
        line = line_in(content, where)
        try:
            yield where, claim_of(line)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise RunError(
                f"{where} is no answer with its receipt and its request ({type(error).__name__}); "
                "give a file of guard.map or igserve batch, or lines with request and response"
            ) from None


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file, which is only read; raise ``RunError`` when it cannot be."""
    try:
        return [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); correct the path") from None


def claim_of(line: Any) -> Claim:
    """Return the claim of a line."""
    if "receipt" in line:
        text = None if line["text"] is None else line.get("reasoning", "") + line["text"]
        return Claim(
            {"model": "", "prompt": line["prompt"]}, text, dict(json.loads(line["receipt"]))
        )
    request, body = line["request"], line["response"]
    (choice,) = body["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    receipt = dict(json.loads(body["igcore"]["receipt"]))
    nothing = text == "" and receipt.get("text") is None  # the interface has no other word for it
    return Claim(dict(request), None if nothing else text, receipt)


# --- what must come out ---------------------------------------------------------------------------


def answered_again(claim: Claim, guard: Guard, set_name: str) -> Fields:
    """Return the receipt of the guard's own answer, without versions."""
    asked = read_request(claim.kind, claim.request, guard)
    number = prompt_id(asked.prompt.text, set_name)
    prompt = replace(asked.prompt, id=number, set_name=set_name)
    receipt: Fields = json.loads(asked.guard(prompt).receipt())
    del receipt["versions"]
    return receipt


def scored_again(claim: Claim, recipe: Recipe, cost: Any, reward: Any, set_name: str) -> Fields:
    """Return what a receipt must say by its text alone."""
    body, own = claim.body, search_of(recipe)
    config = method_of(recipe.method).settings_under(replace(own, **changes(body, own)))
    named = [scorer and {"name": scorer.name, "digest": scorer.digest} for scorer in (cost, reward)]
    expected = {
        "receipt": 1,
        "set": set_name,
        "method": recipe.method,
        "seed": recipe.seed if body.seed is None else body.seed,
        "budget": config.budget,
        "settings": digest_of(written(config)),
        "cost_model": named[0],
        "reward_model": named[1],
    }
    return expected if claim.text is None else expected | scores_of(claim, config, cost)


def scores_of(claim: Claim, config: SearchConfig, cost: Any) -> Fields:
    """Return cost, z and status that a text has by fresh scores.

    Raises
    ------
    ValueError
        When the receipt has no ends of blocks in the text.
    """
    text, ends, n = claim.text or "", claim.receipt["ends"], claim.receipt["tokens"]
    whole = [type(end) is int for end in [*ends, n]]
    if not all(whole) or any(a > b for a, b in pairwise([0, *ends])) or ends[-1] != len(text):
        raise ValueError("its ends are not those of blocks of the text")
    emission = Emission(text, ends=ends, n_tokens=n)
    prompt = as_prompt(claim.body.prompt)
    contract = Contract.examined(cost, Tally(rate=1.0))
    verdict = judge(contract, prompt.text, emission, config)
    judged = replace(emission, verdict=verdict)
    (measured,) = measure([judged], [prompt], None, uncached(cost), config)
    safe = "verified_safe" if claim.receipt["status"] == "verified_safe" else "abstained"
    status = safe if verdict.passed else "over budget"
    return {"cost": verdict.cost, "z": measured["z_trace"], "status": status}


def differences(claim: Claim, expected: Mapping[str, Any]) -> list[str]:
    """Return the fields of a receipt that are not as they must be."""
    wanted = dict(expected)
    odd = [name for name, value in wanted.items() if not alike(claim.receipt.get(name), value)]
    own = [name for name, value in claim.digests.items() if claim.receipt.get(name) != value]
    return sorted({*odd, *own})


def alike(found: Any, expected: Any) -> bool:
    """True for equal values, and for numbers that rounding explains."""
    if isinstance(expected, list):
        same = isinstance(found, list) and len(found) == len(expected)
        return same and all(map(alike, found, expected))
    if type(expected) is float:
        number = isinstance(found, int | float) and not isinstance(found, bool)
        return number and math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(found) is type(expected) and bool(found == expected)


def problem_of(claim: Claim, again: Any) -> str:
    """Return why an answer does not hold; empty if it does.

    Parameters
    ----------
    again : callable
        Returns what must come out of a claim.
    """
    try:
        odd = differences(claim, again(claim))
    except (IgcoreError, LookupError, TypeError, ValueError) as error:
        return f"it cannot be checked ({error})"
    return f"{', '.join(odd)} of its receipt: not what comes out" if odd else ""


def report(problems: Sequence[str], scores_only: bool) -> str:
    """Return a sentence about all answers."""
    held = sum(not problem for problem in problems)
    how = "scored again alone; who wrote them was not asked" if scores_only else "answered again"
    return f"{held} of {len(problems)} answers hold ({how})"
