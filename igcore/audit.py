"""``igcore audit``: whether a scorer of one's own keeps the contract of a scorer."""

import argparse
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from .contract import Contract
from .errors import ScorerWarning
from .policy import PROBE
from .scorers import Scorer, as_scorer, uncached
from .scoring import Tally, checked_score

HELP = "ask whether a scorer of your own keeps the contract of a scorer"
TEXTS = {
    "plain text": "They need light and water.",
    "empty text": "",
    "emoji": "Thanks \U0001f331\u200d\U0001f33b!",
    "long text": "word " * 20_000,
}


def add_audit(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to a parser's commands."""
    audit = commands.add_parser("audit", help=HELP, description=f"{HELP}.")
    audit.set_defaults(run=run)
    audit.add_argument("--cost", required=True, help="NAME or module:function")


def run(cost: str) -> tuple[list[str], list[str]]:
    """Print what a user's scorer answers; return the line to print at the end, and the problems."""
    problems = []
    for name, found, problem in examine(as_scorer(cost, "cost")):
        print(f"{name:14}{'FAILS: ' if problem else ''}{found}")
        problems += [problem] if problem else []
    return ["the audit found nothing"], problems


def examine(scorer: Scorer) -> Iterator[tuple[str, str, str]]:
    """Yield what was asked of a scorer, what it answered, and what is wrong with that, if it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScorerWarning)  # what it says is returned here
        contract = Contract.examined(scorer, Tally())
    yield "asked twice", f"differs by up to {contract.spread:.6g}", contract.problem
    for name, text in TEXTS.items():
        # these two may differ: a scorer may know a prefix for one
        scores = [
            checked_score(uncached(scorer), [PROBE], [text], [finished])[0]
            for finished in (True, False)
        ]
        readable = np.isfinite(scores).all()
        answered = f"{scores[0]:.6g}, unfinished {scores[1]:.6g}"
        yield name, answered, "" if readable else f"cost {scorer.name!r} has no number for {name}"
