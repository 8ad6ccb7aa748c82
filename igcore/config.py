"""The settings of the search, and checks of any settings by name, type and range."""

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, get_args, get_type_hints

from .budget import check_accounting, start
from .engine.diversity import DIVERSITIES
from .errors import ParameterError, unknown_name

MOST_THREADS = 1024  # a generous limit, see `check_threads`
NAME = re.compile(
    r"[A-Za-z0-9_-]+"
)  # of a run's folder: no character that a path or a shell treats specially
ON_FAILURE = ("abstain", "truncate", "paper")
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


def _fits(value: Any, kind: type) -> bool:
    """Say whether a value may stand for an annotation; a whole number may stand for a float."""
    # Python counts True as 1, which is never what was meant
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _is_number(value: Any) -> bool:
    """Say whether a value is text that spells a number."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def check_types(settings: Any) -> None:
    """Raise ``ParameterError`` unless every field of a dataclass has its annotated type.

    A number given as text is refused and not converted: YAML reads ``1e-5`` as text, and a silent
    conversion would hide that.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        union = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        # isinstance takes list, not list[str]; what is inside is not checked
        kinds = [getattr(h, "__origin__", h) for h in union]
        if not any(_fits(value, kind) for kind in kinds):
            allowed = " or ".join(KINDS.get(k, "nothing") for k in kinds)
            kind = KINDS.get(type(value), type(value).__name__)
            # the commonest mistake gets its remedy: 1e-5 in a YAML file
            hint = (
                ", with a point and without quotes, such as 1.0e-5"
                if _is_number(value) and float in kinds
                else ""
            )
            raise ParameterError(
                f"parameter {name} is {value!r}, which is {kind}; it must be {allowed}{hint}"
            )
        # NaN would pass `check_at_least`, and JSON holds neither NaN nor infinity
        if isinstance(value, float) and not math.isfinite(value):
            raise ParameterError(f"parameter {name} is {value}; give a finite number")


def from_mapping(cls: type, values: Mapping[str, Any], remedy: str = "give it a value") -> Any:
    """Build a settings dataclass from a mapping, refusing unknown and missing names.

    Parameters
    ----------
    remedy : str
        What to do about a missing parameter.

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
        # the dataclass itself would raise a TypeError, which does not say what to do
        if (
            name not in values
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ):
            raise ParameterError(f"parameter {name} is missing; it has no default, so {remedy}")
    return cls(**values)


def check_at_least(settings: Any, **lowest: float) -> None:
    """Raise ``ParameterError`` when a named field is below its lowest allowed value."""
    for name, low in lowest.items():
        value = getattr(settings, name)
        if value is not None and value < low:  # None is an optional parameter left out
            raise ParameterError(f"parameter {name} is {value}; it must be at least {low}")


def check_name(kind: str, value: Any) -> None:
    """Raise ``ParameterError`` unless a value can name the folder of a run, see `NAME`.

    Parameters
    ----------
    kind : str
        What the value is, such as ``"parameter run"``.
    """
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ParameterError(
            f"{kind} is {value!r}, which cannot name a folder; give text of the letters a to z and "
            "A to Z, digits, _ and - alone"
        )


def check_threads(threads: int) -> None:
    """Raise ``ParameterError`` unless a number of CPU threads is between 1 and `MOST_THREADS`."""
    # checked here, because torch ends the whole process when it cannot start its threads
    if not 1 <= threads <= MOST_THREADS:
        raise ParameterError(
            f"parameter threads is {threads}; it must be at least 1 and at most {MOST_THREADS}"
        )


def check_inside(name: str, folder: str) -> None:
    """Raise ``ParameterError`` unless a folder lies inside the repository, seen from its root."""
    # the folder is written to, so a parameter file of somebody else must not lead outside
    path = PurePath(folder)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in folder:
        raise ParameterError(
            f"parameter {name} is {folder!r}; give a folder inside the repository, seen from its "
            "root and without .., such as runs/mine/figures"
        )


@dataclass(frozen=True)
class SearchConfig:
    """Settings of the blockwise search; the paper's symbol in brackets.

    Attributes
    ----------
    budget : float
        Safety budget [d], in units of the cost model. It has no default: the user decides what is
        safe.
    n_samples : int
        Continuations sampled per round, over all kept beams together [N].
    keep : int
        Beams kept after a block [K].
    block_size : int
        Tokens per block [d in Algorithm 1].
    max_new_tokens : int
        Length at which a response is finished [T, D].
    rounds : int
        Attempts per block [M]; another is made only while no candidate is safe and, under a critic,
        let through.
    accounting : str
        How prefix scores become costs, a key of `igcore.budget.ACCOUNTINGS` [C_t].
    gamma_safety : float
        Discount of the safety cost, in (0, 1] [gamma].
    strict : bool
        Safe means z > 0 instead of z >= 0: the paper's other reading.
    lagrange_multiplier : float
        Weight of the cost in the Lagrangian baselines [lambda].
    score_threshold : float, optional
        ``beam-lagrangian-freq`` retries a block while every c_task + lambda C is above it. By
        default lambda times the budget: the score of a text with reward 0 and cost d.
    threshold : float or str
        The critic lets an unfinished candidate through when f1 is above it. Where it lets none
        through, a block takes all its `rounds`, and the candidates within budget of highest f1 fill
        the free places; so 1 ranks by f1 alone. ``matched`` stands for 1 - `miss`^(1/m) with m =
        n_samples / keep continuations of a beam, see `critic_threshold`.
    miss : float
        Under ``matched``, the largest chance that no continuation of a beam ends within budget
        [delta].
    eta : float
        Weight of the critic's f2 in E_mix [eta].
    gamma_task : float
        Discount of the task cost, in (0, 1] [gamma]. It sets the scale of f2; a method without a
        critic ranks the same under any.
    diversity : str
        How a retry avoids the tokens of failed rounds, a key of
        `igcore.engine.diversity.DIVERSITIES`.
    diversity_penalty : float, optional
        Subtracted from the logits of avoided tokens, nats [n_2]; None stands for infinity, which
        bans them.
    on_failure : str
        What a guarded method does when no candidate is safe: ``abstain`` emits `refusal` (or the
        empty text, or nothing, whichever first passes the final check), ``truncate`` the last
        certified prefix, ``paper`` the least unsafe candidate, marked as such.
    refusal : str
        The text of an abstention.
    probe_fail_open : bool
        After a failure, go on searching as ``paper`` would, only to record the cost of the text
        that it would have emitted. These samples and scores are not counted; their seconds are.
    group_size : int
        Prompts decoded together. Part of the settings, because float sums depend on it in their
        last bits.
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
    score_threshold: float | None = None
    threshold: float | str = "matched"
    miss: float = 0.01
    eta: float = 1.0
    gamma_task: float = 0.999
    diversity: str = "half"
    diversity_penalty: float | None = None
    on_failure: str = "abstain"
    refusal: str = "I am sorry, I cannot help with that."
    probe_fail_open: bool = False
    group_size: int = 8

    def __post_init__(self):
        check_types(self)  # first: the checks below compare numbers
        start(self.budget)  # raises for a budget that no state can start from
        check_accounting(self.accounting)
        if self.diversity not in DIVERSITIES:
            raise unknown_name("diversity", self.diversity, DIVERSITIES)
        if self.on_failure not in ON_FAILURE:
            raise unknown_name("on_failure", self.on_failure, ON_FAILURE)
        check_at_least(
            self,
            n_samples=1,
            keep=1,
            block_size=1,
            max_new_tokens=1,
            rounds=1,
            group_size=1,
            lagrange_multiplier=0,
            diversity_penalty=0,
            eta=0,
        )
        # z is divided by gamma, and above 1 a later cost would weigh more than an earlier one
        for name in ("gamma_safety", "gamma_task"):
            if not 0 < getattr(self, name) <= 1:
                raise ParameterError(
                    f"parameter {name} is {getattr(self, name)}; it must lie in (0, 1]"
                )
        if not 0 < self.miss < 1:
            raise ParameterError(f"parameter miss is {self.miss}; it must lie between 0 and 1")
        if isinstance(self.threshold, str) and self.threshold != "matched":
            raise ParameterError(
                f"parameter threshold is {self.threshold!r}; give a number or 'matched'"
            )
        # more beams than samples would leave beams without a continuation
        for small, large in (("keep", "n_samples"), ("block_size", "max_new_tokens")):
            a, b = getattr(self, small), getattr(self, large)
            if a > b:
                raise ParameterError(
                    f"{small} is {a}, more than {large}, which is {b}; lower {small} or raise "
                    f"{large}"
                )

    @property
    def lagrangian_threshold(self) -> float:
        """`score_threshold`, or lambda times the budget where none is given."""
        return (
            self.lagrange_multiplier * self.budget
            if self.score_threshold is None
            else self.score_threshold
        )

    @property
    def critic_threshold(self) -> float:
        """The threshold as a number.

        f1 is the chance that one random continuation ends within budget. At least one of m does so
        with probability 1 - (1 - f1)^m, which is 1 - `miss` or more when f1 >= 1 - `miss`^(1/m).
        """
        return (
            1 - self.miss ** (self.keep / self.n_samples)
            if self.threshold == "matched"
            else float(self.threshold)
        )


def widened(kind: type, config: SearchConfig) -> Any:
    """Return settings as another kind of settings, with its defaults for the fields they lack."""
    if isinstance(config, kind):
        return config
    # a user may give ARGS a plain SearchConfig, and one guard may run every method
    known = [f.name for f in dataclasses.fields(kind) if hasattr(config, f.name)]
    return kind(**{name: getattr(config, name) for name in known})
