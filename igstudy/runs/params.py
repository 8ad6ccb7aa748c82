"""Validated parameters of the notebooks, read from their cells and checked by name, type and range.

This is the first step of a run: `notebook_params` turns a cell, or what papermill injected, into a
frozen dataclass. Parameters that need model code live in modules of their own, such as
`igstudy.runs.decode_params`, and are imported when they are asked for.
"""

import ast
from collections.abc import Mapping
from typing import Any

from igcore.catalog import found
from igcore.errors import ParameterError
from igcore.settings import settings
from igserve.trust import admit, named_modules

from ..settings import FolderName, InsideFolder


@settings(kw_only=True)
class OutputParams:
    """Which runs notebooks 40, 45, 50 and 65 read, and where they write.

    Attributes
    ----------
    profile : str
        Folder of ``runs`` whose finished runs are read.
    figures : str
        Folder, seen from `igstudy.files.root`, for pictures; tables go to its subfolder
        ``tables``.
    pattern : str
        Glob pattern for the names of the runs that are read.
    by_run : bool
        Whether each run has rows and panels of its own, in place of each policy.
    """

    profile: FolderName
    figures: InsideFolder
    pattern: str = "*"
    by_run: bool = False


@settings(kw_only=True)
class ClaimsParams:
    """Which claims notebook 80 decides, and where it writes.

    Attributes
    ----------
    profile, figures : str
        See `OutputParams`.
    claims : str
        Claims file, seen from `igstudy.files.root`, see `igstudy.report.claims`.
    pilot : bool
        Whether the runs are those from which power is computed; nothing is decided then.
    power_table : str, optional
        Where that power is written and read, seen from `igstudy.files.root`; it need not be there.
        By default it is among the tables of `figures`.
    suffix : str
        How the names of its tables end, where two profiles have some.
    """

    profile: FolderName
    claims: InsideFolder
    pilot: bool = False
    figures: InsideFolder
    power_table: InsideFolder | None = None
    suffix: str = ""


# kind -> its class, or where one is that needs models: it is imported on demand, so that the theory
# and the tables need no torch
PARAMS: dict[str, type | str] = {
    "output": OutputParams,
    "claims": ClaimsParams,
    "critic": "igstudy.runs.critic_params:CriticParams",
    "decode": "igstudy.runs.decode_params:DecodeParams",
    "judge": "igstudy.judge:JudgeParams",
}

# what an error calls the parameters that papermill, or a user, has set after the notebook's own
LATER = "a later cell than the first of parameters (restart, or use `python -m igstudy run`)"


def notebook_params(kind: str, namespace: Mapping[str, Any]) -> Any:
    """Return the checked parameters of a notebook.

    papermill only warns about a parameter that the notebook does not have. Checked by name here, a
    misspelling stops the run.

    Parameters
    ----------
    kind : str
        A key of `PARAMS`. The notebook's own cell is a small example: what a params file leaves out
        gets the default of its class in `PARAMS`, never the example's value. Values without a
        profile are no whole file, but single changes of the example, see `notebook_parameters`.
    namespace : mapping
        ``globals()`` of the notebook, in the cell after the parameters.

    Raises
    ------
    ParameterError
        Naming a parameter that is unknown, missing, of the wrong type or out of range.
    """
    return class_of(kind)(**notebook_parameters(namespace))


def class_of(kind: str) -> Any:
    """Return the class of a kind of parameters, a key of `PARAMS`."""
    return found(PARAMS[kind])


def notebook_parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what the cell that ran last of those that begin with ``# Parameters`` sets.

    papermill's cell runs after the notebook's own, which stays under values that name no profile:
    papermill was given single settings. By hand, the notebook's own cell runs alone, edited and
    rerun as often as one likes. Where a kernel keeps no history of its cells (nbval), collect all
    plain data in the namespace under a lower-case name instead.
    """
    sources = [source for source in namespace.get("In", ()) if source.startswith("# Parameters")]
    if sources:
        values = assigned(sources[-1])
        if len(sources) > 1:
            own = assigned(sources[0])
            admit(values, LATER, named_modules(own))
        if len(sources) > 1 and "profile" not in values:
            print(f"changed: {', '.join(values)}; all else is as this notebook sets it")
            values = assigned(sources[-2]) | values
        return values
    data = (bool, int, float, str, list, dict, type(None))
    return {
        name: value
        for name, value in namespace.items()
        if isinstance(value, data) and name.islower() and not name.startswith("_")
    }


def assigned(source: str) -> dict[str, Any]:
    """Return the names that a cell of parameters assigns, each with its value.

    Raises
    ------
    ParameterError
        For anything but a number, text, true, false, none, list or mapping assigned to one name.
    """
    values: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        try:
            (target,) = statement.targets  # type: ignore[attr-defined]
            values[target.id] = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
        except (AttributeError, ValueError):
            raise ParameterError(
                f"the cell of parameters has {ast.unparse(statement)!r:.100}; give plain values, "
                "such as limit = 6, and compute others in a later cell"
            ) from None
    return values
