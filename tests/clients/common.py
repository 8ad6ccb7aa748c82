"""What the checks and the servers that they ask have in common."""

from collections.abc import Callable
from typing import Any

KEY = "a key of the test"  # of the server whose guard always abstains
REFUSAL = "I cannot answer that."


def within(text: str) -> bool:
    """True if a text is within the budget of the guard: no digit."""
    return not any(char.isdigit() for char in text)


def passes(check: Callable[..., Any], *given: Any) -> bool:
    """Print a line about a check, which raises an error if it fails; return whether it passed."""
    try:
        check(*given)
    except Exception as error:
        print(f"FAILED  {check.__doc__}: {type(error).__name__} {error}", flush=True)
        return False
    print(f"ok      {check.__doc__}", flush=True)
    return True
