"""What each notebook may be told, read from its cells and checked by name, type and range. Knows
settings; runs nothing.
"""

import ast
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import check_at_least, check_inside, check_name, check_types, from_mapping
from ..errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class OutputParams:
    """Which runs the notebooks 40 and 50 read, and where they write.

    Attributes
    ----------
    profile : str
        Folder of `runs` whose finished runs are read.
    figures : str
        Folder, seen from `root`, for pictures; tables go to its subfolder ``tables``.
    pattern : str
        Of the names of the runs that are read.
    examples : str
        The same, of the runs from which notebook 50 takes the answers that it shows; by default
        those of `pattern`.
    """

    profile: str
    figures: str
    pattern: str = "*"
    examples: str | None = None

    def __post_init__(self):
        check_types(self)
        check_name("parameter profile", self.profile)
        check_inside("figures", self.figures)


@dataclass(frozen=True, kw_only=True)
class StartParams:
    """Parameters of notebook 00.

    Attributes
    ----------
    policy : str
        See `igcore.load_policy`.
    prompt : str
        What is answered.
    budget : float
        Safety budget, in units of the embedded cost.
    seed : int
        Decides every random number.
    """

    policy: str
    prompt: str
    budget: float
    seed: int

    def __post_init__(self):
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class TheoryParams:
    """Parameters of notebook 10.

    Attributes
    ----------
    seed : int
        Of the three random transformers.
    gamma : float
        Task discount, in (0, 1).
    """

    seed: int
    gamma: float

    def __post_init__(self):
        check_types(self)
        if not 0 < self.gamma < 1:
            raise ParameterError(f"gamma is {self.gamma}; it must lie strictly between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class AuditParams:
    """Parameters of notebook 70.

    Attributes
    ----------
    largest_n : int
        Of the numbers of prompts tried as denominators of the printed percentages, at least 1000.
    """

    largest_n: int

    def __post_init__(self):
        check_types(self)
        check_at_least(self, largest_n=1000)


# kind -> its class, or where that is: one that knows models is imported when it is asked for, so
# that the theory and the tables need no torch
PARAMS: dict[str, type | str] = {
    "start": StartParams,
    "theory": TheoryParams,
    "audit": AuditParams,
    "output": OutputParams,
    "critic": "igcore.runs.critic_params:CriticParams",
    "decode": "igcore.runs.decode_params:DecodeParams",
    "judge": "igcore.judge:JudgeParams",
}
# notebooks whose own cell is completed, not replaced, by what papermill is told
TEACHING = ("start", "theory", "audit")
WHOLE = (
    "give it a value: papermill takes a whole params file with -f, and single settings that change "
    "it with -p"
)


def notebook_params(kind: str, namespace: Mapping):
    """Return the checked parameters of a notebook.

    papermill only prints a line about a parameter that the notebook does not have; checked by name,
    a misspelling stops the run.

    Parameters
    ----------
    kind : str
        A key of `PARAMS`. Outside `TEACHING`, the notebook's own cell is a small sample: what a
        params file leaves out has the default that `PARAMS` says, never the sample's value.
    namespace : mapping
        ``globals()`` of the notebook, in the cell after the parameters.

    Raises
    ------
    ParameterError
        Naming a parameter that is unknown, missing, of the wrong type or out of range.
    """
    given = notebook_parameters(namespace, last=kind not in TEACHING)
    return from_mapping(_params_class(kind), given, WHOLE)


def _params_class(kind: str) -> type:
    known = PARAMS[kind]
    if not isinstance(known, str):
        return known
    module, _, name = known.partition(":")
    return getattr(importlib.import_module(module), name)


def notebook_parameters(namespace: Mapping, last: bool = False) -> dict:
    """Collect what the cells that begin with ``# Parameters`` have set, the one that papermill
    injects included.

    Where a kernel keeps no history of its cells (nbval), that is all plain data in the namespace
    under a lower-case name.

    Parameters
    ----------
    last : bool
        Whether only the cell that ran last counts. papermill's runs after the notebook's own; by
        hand the own one runs alone, edited and run again as often as one likes.
    """
    sources = [source for source in namespace.get("In", ()) if source.startswith("# Parameters")]
    if not sources:
        plain = (bool, int, float, str, list, dict, type(None))
        return {
            k: v
            for k, v in namespace.items()
            if isinstance(v, plain) and k.islower() and not k.startswith("_")
        }
    counted = sources[-1:] if last else sources
    targets = [
        t
        for source in counted
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for t in node.targets
    ]
    return {t.id: namespace[t.id] for t in targets if isinstance(t, ast.Name)}
