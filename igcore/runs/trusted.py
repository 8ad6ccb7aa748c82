"""What a verifier loads: what they name themselves, or entries of this package's own tables.

A record may come from anybody. So a path, a repository or a revision that only the record names is
never loaded.
"""

from collections.abc import Collection
from typing import Any

from ..errors import ParameterError
from ..models.policies import POLICIES
from ..models.prompts import PROMPT_SETS, SOURCES
from ..models.registry import SCORERS
from ..settings import Named, written

SCORER = {"dtype", "device", "self_check"}
# role -> tables of this package, and the options that a record may set beside a name. A revision
# is not among them: anybody may propose one to the hub, with files of their own.
BELIEVED: dict[str, tuple[list[Collection[str]], set[str]]] = {
    "cost": ([SCORERS], SCORER),
    "reward": ([SCORERS], SCORER),
    "policy": ([POLICIES], {"template"}),
    "prompts": ([PROMPT_SETS, SOURCES], {"part"}),
}
ROLES = (*BELIEVED, "critic", "value")  # all that a verifier may name; a network has no table
OWN_MATTER = ("device", "self_check")  # options that the verifier's machine decides


def believed(role: str, recorded: Any, named: Any) -> Any:
    """Return what to load: what the verifier names, else what the record names if a table has it.

    Parameters
    ----------
    role : str
        A key of `BELIEVED`, or a network, which has no table.
    recorded : Named or str, optional
        Name and options in the record.
    named : Named, str or dict, optional
        Name and options that the verifier gives.

    Returns
    -------
    Named, str, dict or None
        None where the record has none, such as of a reward.

    Raises
    ------
    ParameterError
        When only the record names it, and no table has it.
    """
    if named is not None or recorded is None:
        return named
    tables, allowed = BELIEVED.get(role, ([], set()))
    recorded = Named.of(recorded)
    in_table = any(recorded.name in table for table in tables)
    if in_table and recorded.options.keys() <= allowed:
        own = {key: value for key, value in recorded.options.items() if key not in OWN_MATTER}
        return Named(recorded.name, own)
    raise ParameterError(
        f"the record names the {role} {written(recorded)!r}, which is none of the package's own as "
        f"it is; name the one that you trust with --{role}"
    )
