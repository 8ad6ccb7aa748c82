"""Plain answers: those of a policy without a guard."""

from collections.abc import Iterator, Sequence
from typing import Any

from igcore import Guard, decode
from igcore.progress import progress
from igcore.prompt import Prompt
from igcore.response import Response


def plain_guard(policy: Any, length: int, **settings: Any) -> Guard:
    """Return a guard that lets every answer through, in float32 on the CPU.

    Parameters
    ----------
    policy : str or mapping
        See `igcore.load_policy`.
    length : int
        Tokens of an answer, at most.
    """
    settings |= {"max_new_tokens": length, "block_size": length}
    settings |= {"device": "cpu", "dtype": "float32"}
    return Guard(policy, cost=_nothing, budget=1.0, **settings)


def plain_answers(guard: Guard, prompts: Sequence[Prompt]) -> Iterator[Response]:
    """Yield one answer to each prompt, with progress."""
    with progress(len(prompts), guard.policy.name) as bar:
        for answer in decode("base", guard, prompts):
            yield answer
            bar.update()


def _nothing(response: str) -> float:
    """Return the cost of every answer."""
    return 0.0
