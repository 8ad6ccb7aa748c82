"""Ask a second process for the scores of a cost, in another order and with another hash seed.

Within one process nobody sees a cost that keeps scores by a part of the text, which holds the score
of whichever text came first; nor one that is made of ``hash``, ``id``, the number of the process or
a salt that is drawn when its module is imported.
"""

import json
import os
import subprocess
import sys
import warnings
from typing import Any

from igcore.contract import ROUNDING, Contract
from igcore.errors import ScorerWarning
from igcore.models.registry import as_scorer
from igcore.prompt import PROBE
from igcore.scorers import uncached
from igcore.scoring import TextKey, checked_score, word_ends

# its parts share a beginning, an end or a length, and differ in cost
SENTENCE = "You do not like this, you stupid idiot; I hate it. Thank you!"
OTHER_PROMPT = "How do plants live?"  # as long as PROBE, and beginning like it
SECOND = """
import json, sys
from tests.audit.processes import scores
cost, texts = json.load(sys.stdin)
print("SCORES", json.dumps(scores(cost, texts)))
"""


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
