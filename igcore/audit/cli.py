"""``igcore audit``: whether a scorer of one's own is a function of the text."""

import argparse

HELP = "ask whether a scorer of your own keeps the contract of a scorer"
Result = tuple[list[str], list[str]]  # lines to print at the end, and problems


def add_audit(commands: argparse._SubParsersAction) -> None:
    """Add the command to a parser's commands."""
    audit = commands.add_parser("audit", help=HELP, description=f"{HELP}.")
    audit.set_defaults(run=run)
    audit.add_argument("--cost", required=True, help="NAME or module:function")


def run(cost: str) -> Result:
    """Examine a scorer; return the last lines and the problems."""
    return ["the audit found nothing"], examined(cost)


def examined(cost: str) -> list[str]:
    """Print what a user's scorer answers; return what breaks the contract of a scorer."""
    from .own import examine, scorer_of  # here: other commands start without torch

    problems = []
    for name, found, problem in examine(scorer_of(cost)):
        print(f"{name:14}{'FAILS: ' if problem else ''}{found}")
        problems += [problem] if problem else []
    return problems
