"""What a verifier loads: what he names himself, or what the record names if this package's own
tables have it as it is.

Knows names and tables. A record may come from anybody, so a path, a repository or a revision that
only it names is not loaded.
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
from .evidence import Evidence

# What of a record is believed beside the name of something in this package's tables. No revision:
# anybody may propose one to the hub, with files of his own.
BELIEVED = {
    # the dtype counts; device and self_check are the verifier's own matter
    "scorer": {"name", "dtype", "device", "self_check"},
    "policy": {"name", "template"},
    "prompts": {"name", "dedupe", "config", "part", "version"},
}


@dataclass(frozen=True)
class Trusted:
    """What the verifier names in the place of what a record names; None takes it from the tables of
    this package alone.

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


def known(named: object, kind: str, table: Iterable[str]) -> dict | None:
    """Return what a record names with its options if it is one of a table as it is, else None."""
    options = {"name": named} if isinstance(named, str) else named
    sound = (
        isinstance(options, dict)
        and options.get("name") in list(table)
        and options.keys() <= BELIEVED[kind]
    )
    return options if sound else None


def scorer_of(role: str, found: Evidence, given: str | Mapping | None) -> Scorer:
    """Load the scorer that the verifier names, or that the record names if it is one of `SCORERS`
    as it is.
    """
    if given is not None:
        return load_scorer(given)
    named = _scorer_named_by(found, role)
    if (options := known(named, "scorer", SCORERS)) is None:
        raise unnamed(f"{role} model", named, role)
    believed = {name: options[name] for name in ("name", "dtype") if name in options}
    return load_scorer(believed)


def _scorer_named_by(found: Evidence, role: str) -> object:
    """Return what the settings name as the scorer of a role, or else all the lines alike."""
    if found.params:
        return found.params.get(role)
    names = sorted({str(line.get(f"{role}_scorer")) for line in found.lines})
    if len(names) != 1:
        raise ParameterError(
            f"the lines name the {role} models {', '.join(names) or 'none'}; name the one to use "
            f"with --{role}"
        )
    return names[0]


def unnamed(what: str, named: object, option: str) -> ParameterError:
    """Return the error for what only the verifier may name."""
    return ParameterError(
        f"the record names the {what} {named!r}, which is none of the package's own as it is; name "
        f"the one that you trust with --{option}"
    )


def prompts_of(
    params: DecodeParams, cost: Scorer, given: str | Mapping | None
) -> list[Prompt] | None:
    """Return the prompts that a run had to answer, read again; None where only its own record says
    which they were.
    """
    if given is None:
        given = known(params.prompts, "prompts", (*PROMPT_SETS, *SOURCES))
    if given is None:
        return None
    ranked_by = cost if params.hardest else None
    return load_prompts(given, params.split, params.limit, params.hardest, ranked_by)


def policy_of(params: DecodeParams, given: str | Mapping | None) -> Policy:
    """Load the policy that the verifier names, or that the record names if it is one of `POLICIES`
    as it is.
    """
    if given is None:
        given = known(params.policy, "policy", POLICIES)
    if given is None:
        raise unnamed("policy", params.policy, "policy")
    return load_policy(given, params.dtype, params.device)
