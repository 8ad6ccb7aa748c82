"""``make audit``: try to break the guarantee by hostile scorers.

Every answer that is shown is judged again, text by text, by new calls of the same scorer. For
scorers that depend on more than the text no method can give a guarantee; their violations are
reported and are no error. `zoo` has the scorers, `emissions` decodes with them and judges all that
is shown again.

A second process is asked for the scores of a named cost, in another order and with another hash
seed. Within one process nobody sees a cost that keeps scores by a part of the text, which holds the
score of whichever text came first; nor one that is made of ``hash``, ``id``, the number of the
process or a salt that is drawn when its module is imported.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from igcore.contract import ROUNDING, Contract
from igcore.errors import IgcoreError, ParameterError, ScorerWarning
from igcore.models.registry import as_scorer
from igcore.progress import progress
from igcore.prompt import PROBE
from igcore.scorers import uncached
from igcore.scoring import Tally as Calls
from igcore.scoring import TextKey, checked_score, word_ends
from igstudy.commands import printable
from tests.audit.emissions import Tally, cases, tallies_of
from tests.audit.zoo import KINDS

QUICK = 10_000  # emissions: under a minute
COLUMNS = ("tried", "verified_safe", "abstained", "violations")
# its parts share a beginning, an end or a length, and differ in cost
SENTENCE = "You do not like this, you stupid idiot; I hate it. Thank you!"
OTHER_PROMPT = "How do plants live?"  # as long as PROBE, and beginning like it
SECOND = """
import json, sys
from tests.audit.__main__ import scores
cost, texts = json.load(sys.stdin)
print("SCORES", json.dumps(scores(cost, texts)))
"""


# --- a second process -----------------------------------------------------------------------------


def texts() -> list[TextKey]:
    """Return prompts, texts and whether these are finished; each part is shared by several."""
    found = []
    for end in word_ends(SENTENCE):
        cut = SENTENCE[:end]
        for text in (cut, SENTENCE[end:], cut[::-1], cut.upper()):
            found += [(PROBE, text, True), (PROBE, text, False), (OTHER_PROMPT, text, True)]
    return found


def scores(cost: Any, asked: list[TextKey]) -> list[float]:
    """Return the scores of texts, each alone; NaN where the cost failed."""
    scorer = uncached(as_scorer(cost, "cost"))
    return [checked_score(scorer, [p], [text], [ended]).item() for p, text, ended in asked]


def second_scores(cost: str, asked: list[TextKey]) -> list[float]:
    """Return the scores that a second process gives, which is asked in the reverse order.

    Raises
    ------
    OSError
        When it gives none; the message is the last line of its errors.
    """
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", SECOND],
        input=json.dumps([cost, asked[::-1]]),
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    given = done.stdout.rpartition("SCORES ")[2]
    if done.returncode or not given:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or "it gives no scores")
    return json.loads(given)[::-1]


def across_processes(cost: Any) -> tuple[str, str]:
    """Return what two processes say of a cost, in a sentence, and the problem or ``""``.

    A cost without a name cannot be made in a second process; the sentence says so.
    """
    if not isinstance(cost, str):
        return "not audited across processes: name the cost NAME or module:function", ""
    asked, scorer = texts(), as_scorer(cost, "cost")
    first = scores(scorer, asked)
    try:
        second = second_scores(cost, asked)
    except OSError as error:
        return f"not audited across processes: a second one cannot make the cost ({error})", ""
    contract = Contract(scorer, tolerance=ROUNDING * max(1.0, *map(abs, first)))
    how = "the process or the order: asked here, and in a second process in reverse order,"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)  # the problem is returned instead
        contract = contract.compared(first, second, how)
    return f"two processes differ by up to {contract.spread:.6g}", contract.problem


# --- the audit ------------------------------------------------------------------------------------


def emitted(cost: str, emissions: int, processes: int) -> list[str]:
    """Decode with every kind of scorer and print the table; return what must not happen."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    with progress(emissions, "answers") as bar:
        for kind, tally in tallies_of(list(cases(emissions, cost)), processes):
            tallies[kind].add(tally)
            bar.update(tally.counts["tried"])
    print("\n".join(table(tallies)))
    detected = [kind for kind, tally in tallies.items() if tally.detected]
    missed = [kind for kind in tallies if not KINDS[kind].deterministic and kind not in detected]
    print(f"warned of by the package: {', '.join(detected) or 'none'}")
    print(f"depend on more than the text, unnoticed: {', '.join(missed) or 'none'}")
    fixed = [tally for kind, tally in tallies.items() if KINDS[kind].deterministic]
    problems = [example for tally in fixed for example in tally.examples]
    if problems:
        n = sum(tally.counts["violations"] for tally in fixed)
        problems.append(f"{n} answers to deterministic scorers are over budget")
    return problems


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    """Yield the lines of the table of kinds."""
    yield f"{'kind':28}" + "".join(f"{name:>15}" for name in COLUMNS)
    for kind, tally in tallies.items():
        yield f"{kind:28}" + "".join(f"{tally.counts[name]:15}" for name in COLUMNS)
    sums = [sum(tally.counts[name] for tally in tallies.values()) for name in COLUMNS]
    yield f"{'all':28}" + "".join(f"{number:15}" for number in sums)


def audit(cost: str, emissions: int, processes: int) -> list[str]:
    """Run the audit; return the problems."""
    for name, value in (("emissions", emissions), ("processes", processes)):
        if value < 1:
            raise ParameterError(f"--{name} is {value}; give a whole number of at least 1")
    if not cost:
        return emitted(cost, emissions, processes)
    contract = Contract.examined(as_scorer(cost, "cost"), Calls())
    print(f"scored twice, it differs by up to {contract.spread:.6g}")
    if contract.problem:
        return [contract.problem]
    found, problem = across_processes(cost)
    print(found)
    return [problem] if problem else emitted(cost, emissions, processes)


def main(arguments: list[str] | None = None) -> int:
    """Audit from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    cost = "a scorer of your own, NAME or module:function: its contract, and hostile forms of it"
    parser.add_argument("--cost", default="", help=cost)
    many = "answers to decode and to judge (default %(default)s)"
    parser.add_argument("--emissions", type=int, default=QUICK, metavar="N", help=many)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default %(default)s")
    try:
        problems = audit(**vars(parser.parse_args(arguments)))
    except IgcoreError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"error: {printable(problem)}", file=sys.stderr)
    if not problems:
        print("the audit found nothing")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
