"""What a verifier loads: what they name themselves, or entries of this package's own tables.

A record may come from anybody. So a path, a repository or a revision that only the record names is
never loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import ParameterError
from ..models.policies import POLICIES, load_policy
from ..models.prompts import PROMPT_SETS, SOURCES, load_prompts
from ..models.registry import SCORERS, load_scorer
from ..policy import Policy, Prompt
from ..scorers import Scorer
from .decode_params import DecodeParams

# Options that a record may set for an entry of this package's tables. A revision is not among
# them: anybody may propose one to the hub, with files of their own.
SCORER = {"name", "dtype", "device", "self_check"}
POLICY = {"name", "template"}
PROMPTS = {"name", "part"}


@dataclass(frozen=True)
class Trusted:
    """What the verifier names in the place of what a record names.

    None takes it from the record, and only if this package's tables have it.

    Attributes
    ----------
    cost, reward : str or dict, optional
        See `igcore.load_scorer`.
    policy : str or dict, optional
        See `igcore.load_policy`.
    prompts : str or dict, optional
        See `igcore.load_prompts`.
    critic, value : str, optional
        Folder of a trained critic or value network.
    """

    cost: str | dict | None = None
    reward: str | dict | None = None
    policy: str | dict | None = None
    prompts: str | dict | None = None
    critic: str | None = None
    value: str | None = None


def known(named: object, table: Iterable[str], allowed: set[str]) -> dict | None:
    """Return name and options that a record gives if a table has them, else None."""
    options = {"name": named} if isinstance(named, str) else named
    if not isinstance(options, dict) or not options.keys() <= allowed:
        return None
    return options if options.get("name") in list(table) else None


def unnamed(what: str, named: object, option: str) -> ParameterError:
    """Return the error for what only the verifier may name."""
    return ParameterError(
        f"the record names the {what} {named!r}, which is none of the package's own as it is; name "
        f"the one that you trust with --{option}"
    )


def scorer_of(role: str, named: object, given: str | Mapping | None) -> Scorer:
    """Load the scorer that the verifier names, or the record's if it is one of `SCORERS`."""
    if given is not None:
        return load_scorer(given)
    if (options := known(named, SCORERS, SCORER)) is None:
        raise unnamed(f"{role} model", named, role)
    # the dtype counts; device and self_check are the verifier's own matter
    return load_scorer({key: options[key] for key in ("name", "dtype") if key in options})


def prompts_of(
    params: DecodeParams, cost: Scorer, given: str | Mapping | None
) -> list[Prompt] | None:
    """Return the prompts that a run had to answer, read again.

    None where only the run's own record says which they were.
    """
    if given is None:
        given = known(params.prompts, (*PROMPT_SETS, *SOURCES), PROMPTS)
    if given is None:
        return None
    ranked_by = cost if params.hardest else None
    return load_prompts(given, params.split, params.limit, params.hardest, ranked_by)


def policy_of(params: DecodeParams, given: str | Mapping | None) -> Policy:
    """Load the policy that the verifier names, or the record's if it is one of `POLICIES`."""
    if given is None:
        given = known(params.policy, POLICIES, POLICY)
    if given is None:
        raise unnamed("policy", params.policy, "policy")
    return load_policy(given, params.dtype, params.device)
