"""Validated parameters of the notebooks, read from their cells and checked by name, type and range.

This is the first step of a run: `notebook_params` turns a cell, or what papermill injected, into a
frozen dataclass. Parameters that need model code live in modules of their own, such as
`igcore.runs.decode_params`, and are imported when they are asked for.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from ..beams import imported
from ..config import check_at_least, check_inside, check_name, check_types, from_mapping
from ..errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class OutputParams:
    """Which runs notebooks 40 and 50 read, and where they write.

    Attributes
    ----------
    profile : str
        Folder of ``runs`` whose finished runs are read.
    figures : str
        Folder, seen from `igcore.folders.root`, for pictures; tables go to its subfolder
        ``tables``.
    pattern : str
        Glob pattern for the names of the runs that are read.
    examples : str, optional
        Glob pattern for the runs from which notebook 50 takes the answers that it shows; by default
        `pattern`.
    """

    profile: str
    figures: str
    pattern: str = "*"
    examples: str | None = None

    def __post_init__(self):
        """Refuse a bad profile, and a folder outside the root."""
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
        The prompt to answer.
    budget : float
        Safety budget, in units of the embedded cost.
    seed : int
        Seed of every random number.
    """

    policy: str
    prompt: str
    budget: float
    seed: int

    def __post_init__(self):
        """Refuse a value of the wrong type."""
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class TheoryParams:
    """Parameters of notebook 10.

    Attributes
    ----------
    seed : int
        Seed of the three random transformers.
    gamma : float
        Task discount, in (0, 1).
    """

    seed: int
    gamma: float

    def __post_init__(self):
        """Refuse a discount outside (0, 1)."""
        check_types(self)
        if not 0 < self.gamma < 1:
            raise ParameterError(f"gamma is {self.gamma}; it must lie strictly between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class AuditParams:
    """Parameters of notebook 70.

    Attributes
    ----------
    largest_n : int
        Largest number of prompts tried as the denominator of the reported percentages; at least
        1000.
    """

    largest_n: int

    def __post_init__(self):
        """Refuse a range that is too small."""
        check_types(self)
        check_at_least(self, largest_n=1000)


# kind -> its class, or "module:name" of one that needs models: it is imported on demand, so
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
# notebooks where papermill's parameters override single values of the notebook's own cell;
# elsewhere they replace the whole cell
TEACHING = ("start", "theory", "audit")
WHOLE = (
    "give it a value: papermill takes a whole params file with -f, and single settings that change "
    "it with -p"
)


def notebook_params(kind: str, namespace: Mapping):
    """Return the checked parameters of a notebook.

    papermill only warns about a parameter that the notebook does not have. Checked by name here, a
    misspelling stops the run.

    Parameters
    ----------
    kind : str
        A key of `PARAMS`. Outside `TEACHING`, the notebook's own cell is a small example: what a
        params file leaves out gets the default of its class in `PARAMS`, never the example's value.
    namespace : mapping
        ``globals()`` of the notebook, in the cell after the parameters.

    Raises
    ------
    ParameterError
        Naming a parameter that is unknown, missing, of the wrong type or out of range.
    """
    given = notebook_parameters(namespace, last=kind not in TEACHING)
    known = PARAMS[kind]
    return from_mapping(imported(known) if isinstance(known, str) else known, given, WHOLE)


def notebook_parameters(namespace: Mapping, last: bool = False) -> dict:
    """Collect what the cells that begin with ``# Parameters`` have set.

    The cell that papermill injects is one of them. Where a kernel keeps no history of its cells
    (nbval), collect all plain data in the namespace under a lower-case name instead.

    Parameters
    ----------
    last : bool
        Whether only the cell that ran last counts. papermill's cell runs after the notebook's own.
        By hand, the notebook's own cell runs alone, edited and rerun as often as one likes.
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
