"""Settings checked by name and type. Knows what a value may be; knows nothing of how it is used."""

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from .budget import check_accounting, start
from .diversity import DIVERSITIES
from .errors import ParameterError, unknown_name

ON_FAILURE = ("abstain", "truncate", "paper")
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list", dict: "a mapping"}


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_types(settings: Any) -> None:
    """Raise ``ParameterError`` unless every field of a dataclass holds what its annotation says.

    A number given as text is refused, not converted: YAML reads ``1e-5`` as text, and a silent conversion would hide it.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        union = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = [getattr(h, "__origin__", h) for h in union]
        if not any(_fits(value, kind) for kind in kinds):
            allowed = " or ".join(KINDS.get(k, "nothing") for k in kinds)
            kind = KINDS.get(type(value), type(value).__name__)
            raise ParameterError(f"parameter {name} is {value!r}, which is {kind}; it must be {allowed}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ParameterError(f"parameter {name} is {value}; give a finite number")


def from_mapping(cls: type, values: Mapping[str, Any]) -> Any:
    """Build a settings dataclass from a mapping, refusing unknown and missing names.

    Raises
    ------
    ParameterError
        Naming the parameter, the nearest allowed name, or what is missing.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise unknown_name("parameter", name, fields)
    for name, f in fields.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ParameterError(f"parameter {name} is missing; it has no default, so give it a value")
    return cls(**values)


def check_at_least(settings: Any, **lowest: float) -> None:
    """Raise ``ParameterError`` when a named field is below its lowest allowed value."""
    for name, low in lowest.items():
        value = getattr(settings, name)
        if value is not None and value < low:
            raise ParameterError(f"parameter {name} is {value}; it must be at least {low}")


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the blockwise search; the paper's symbol in brackets.

    Attributes
    ----------
    budget : float
        Safety budget [d], in units of the cost model. It has no default: what is safe is the user's to say.
    n_samples : int
        Continuations drawn per round, over all kept beams together [N].
    keep : int
        Beams kept after a block [K].
    block_size : int
        Tokens per block [d in Algorithm 1].
    max_new_tokens : int
        Length at which a response is finished [T, D].
    rounds : int
        Attempts per block; a further one is made only when no candidate is safe [M].
    accounting : str
        How prefix scores become costs, a key of `igcore.budget.ACCOUNTINGS` [C_t].
    gamma_safety : float
        Discount of the safety cost, in (0, 1] [gamma].
    strict : bool
        Safe means z > 0 instead of z >= 0: the paper's other reading.
    lagrange_multiplier : float
        Weight of the cost in the Lagrangian baselines [lambda].
    diversity : str
        How a retry avoids the tokens of failed rounds, a key of `igcore.diversity.DIVERSITIES`.
    diversity_penalty : float, optional
        Subtracted from the logits of avoided tokens, nats [n_2]; None stands for infinity, which bans them.
    on_failure : str
        What a guarded method does when no candidate is safe: ``abstain`` emits `refusal` (or the empty text, or nothing, whichever
        first passes the same check), ``truncate`` the last certified prefix, ``paper`` the least unsafe candidate, marked as such.
    refusal : str
        What an abstention says.
    probe_fail_open : bool
        After a failure search on as ``paper`` would, only to record the cost of what it would have emitted. Its samples and
        scores are not counted; its seconds are.
    group_size : int
        Prompts decoded together. Part of the settings, because float sums depend on it in their last bits.
    """

    budget: float
    n_samples: int = 8
    keep: int = 2
    block_size: int = 8
    max_new_tokens: int = 32
    rounds: int = 2
    accounting: str = "peak"
    gamma_safety: float = 1.0
    strict: bool = False
    lagrange_multiplier: float = 5.0
    diversity: str = "half"
    diversity_penalty: float | None = None
    on_failure: str = "abstain"
    refusal: str = "I am sorry, I cannot help with that."
    probe_fail_open: bool = False
    group_size: int = 8

    def __post_init__(self):
        check_types(self)
        start(self.budget)
        check_accounting(self.accounting)
        if self.diversity not in DIVERSITIES:
            raise unknown_name("diversity", self.diversity, DIVERSITIES)
        if self.on_failure not in ON_FAILURE:
            raise unknown_name("on_failure", self.on_failure, ON_FAILURE)
        check_at_least(
            self, n_samples=1, keep=1, block_size=1, max_new_tokens=1, rounds=1, group_size=1,
            lagrange_multiplier=0, diversity_penalty=0,
        )  # fmt: skip
        if not 0 < self.gamma_safety <= 1:
            raise ParameterError(f"parameter gamma_safety is {self.gamma_safety}; it must lie in (0, 1]")
        for small, large in (("keep", "n_samples"), ("block_size", "max_new_tokens")):
            a, b = getattr(self, small), getattr(self, large)
            if a > b:
                raise ParameterError(f"{small} is {a}, more than {large}, which is {b}; lower {small} or raise {large}")
