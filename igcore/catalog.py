"""The catalogue: where the parts of optional rooms are that the core asks for by name.

This module and the lazy front of the package are the only ones that know the optional rooms. A
room is imported when something in it is asked for, so that importing igcore stays light.
"""

from typing import Any

from .rooms import enter


def part(name: str) -> Any:
    """Return a function, class or method by its name in the core, see `igcore.rooms.room`.

    Raises
    ------
    KeyError
        For a name that is not here.
    """
    match name:
        case "answer_rows":
            from .adapters.generate import answer_rows

            return answer_rows
        case "explore":
            from .watch.explore import explore

            return explore
        case "Recorder":
            from .watch.record import Recorder

            return Recorder
        case "Tree":
            from .watch.tree import Tree

            return Tree
        case "answer_html":
            from .watch.html import answer_html

            return answer_html
        case "load_policy":
            from .models.policies import load_policy

            return load_policy
        case "policy_of":
            from .models.policies import policy_of

            return policy_of
        case "load_served":
            from .serve.policy import load_served

            return load_served
        case "load_scorer":
            from .models.registry import load_scorer

            return load_scorer
        case "maximum_of":
            from .models.maximum import maximum_of

            return maximum_of
        case "Pool":
            from .pool import Pool

            return Pool
        case "pooled_engine":
            from .pool.engine import pooled_engine

            return pooled_engine
        case "args" | "args-lagrangian" | "args-cost":
            from .baselines.args import METHODS

            return METHODS[name]
        case "re-control" | "re-control-lagrangian":
            from .baselines.re_control import METHODS as steered

            return steered[name]
    raise KeyError(name)


enter(part)
