"""Check answers by their receipts, without trusting whoever gave them.

The verifier brings the recipe of a guard, with a policy and a cost of their own. It is the request:
nothing in a receipt decides what is loaded. The guard answers the prompt again, and everything in
the receipt must come out, abstentions included. That needs neither the tokens of an answer nor its
trace, so a receipt holds none.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from igcore import Guard, RunError
from igcore.errors import IgcoreError
from igcore.prompt import prompt_id
from igcore.tools.answers import line_in
from igcore.tools.receipt import text_digest

from .wire import CHAT, TEXT, read_request

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


def differences(claim: Claim, expected: Mapping[str, Any]) -> list[str]:
    """Return the fields of a receipt that are not as they must be."""
    odd = {name for name, value in expected.items() if not alike(claim.receipt.get(name), value)}
    if claim.receipt.get("text") != text_digest(claim.text):
        odd.add("text")
    return sorted(odd)


def alike(found: Any, expected: Any) -> bool:
    """True for equal values, and for numbers that rounding explains."""
    if isinstance(expected, list):
        same = isinstance(found, list) and len(found) == len(expected)
        return same and all(map(alike, found, expected))
    if type(expected) is float:
        number = isinstance(found, int | float) and not isinstance(found, bool)
        return number and math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(found) is type(expected) and bool(found == expected)


def problem_of(claim: Claim, guard: Guard, set_name: str = "user") -> str:
    """Return why an answer does not hold; empty if it does.

    Parameters
    ----------
    guard : Guard
        The verifier's own.
    set_name : str
        Of the prompt's set, which decides the samples; by default that of a bare text.
    """
    try:
        odd = differences(claim, answered_again(claim, guard, set_name))
    except (IgcoreError, LookupError, TypeError, ValueError, AttributeError) as error:
        return f"it cannot be checked ({error})"
    return f"{', '.join(odd)} of its receipt: not what comes out" if odd else ""


def report(problems: Sequence[str]) -> str:
    """Return a sentence about all answers."""
    held = sum(not problem for problem in problems)
    return f"{held} of {len(problems)} answers hold (answered again)"
