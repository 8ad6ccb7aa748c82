"""What a guard is made of: a policy, its scorers and their contracts, settings, and a method."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Self

from .budget import SIGNED
from .config import SearchConfig
from .contract import Contract
from .critic.network import Judge, Steers
from .engine.sampling import AS_IS, Sampling
from .errors import ParameterError
from .methods import Method, method_of
from .policy import Policy
from .response import Response
from .scorers import Scorer


@dataclass(frozen=True, eq=False)
class Setup:
    """The parts that a search needs, checked and loaded; `igcore.Guard` makes them of a user's.

    Attributes
    ----------
    policy : Policy
    cost : Scorer
    reward : Scorer or None
    config : SearchConfig
    critic : Judge, Steers or None
    method : str
        A key of `igcore.METHODS`.
    seed : int
    contracts : dict of str to Contract
    answers : list of Response
        See `igcore.Guard`.
    """

    policy: Policy
    cost: Scorer
    reward: Scorer | None
    config: SearchConfig
    critic: Judge | Steers | None
    method: str
    seed: int
    contracts: Mapping[str, Contract] = field(repr=False)
    answers: list[Response] = field(default_factory=list, init=False, repr=False)

    def with_method(self, name: str) -> Self:
        """Return the setup with a method and the settings that it runs under.

        Raises
        ------
        ParameterError
            For an unknown method, one that the policy does not support, a missing reward or
            critic, or a critic that was trained for something else.
        """
        method = method_of(name)
        setup = replace(self, config=method.settings_under(self.config), method=name)
        setup.policy.check(name, method, setup.config)
        # the critics predict a reward, and ARGS weighs one against single tokens
        tokenwise = method.search and not method.stepwise
        if setup.reward is None and (method.network or tokenwise):
            raise ParameterError(
                f"method {name!r} needs a reward, and there is none; name or give one as reward"
            )
        if setup.config.stop and tokenwise:
            raise ParameterError(
                f"method {name!r} does not read stop, which is {[*setup.config.stop]}; leave it "
                "out, or name another method"
            )
        accounting = setup.config.accounting
        early = "keep_shown" in method.reads and accounting not in {"terminal", *SIGNED}
        if setup.config.keep_shown and not early:
            raise ParameterError(
                f"method {name!r} cannot stream under accounting {accounting!r}, because only its "
                "whole answers are judged, and keep_shown is True; leave keep_shown out, or name "
                "'backtracking' and 'peak'"
            )
        if method.network:
            _check_network(name, method, setup)
        return setup


def _check_network(name: str, method: Method, setup: Setup) -> None:
    """Refuse a missing critic or value network, and one that was trained for something else."""
    if setup.critic is None:
        raise ParameterError(
            f"method {name!r} needs a {method.network}; train one with notebook 20 and give it to "
            "Guard as critic="
        )
    spec = getattr(setup.critic, "spec", None)
    if spec is None:  # the user's own object, which does not say what it was trained for
        return
    if spec.KIND != method.network:
        raise ParameterError(
            f"method {name!r} needs a {method.network}, but critic= gives it a {spec.KIND}; give "
            f"it a {method.network}"
        )
    if Sampling.of(setup.config) != AS_IS:
        raise ParameterError(
            f"the {spec.KIND} was trained on samples of the policy itself, not of others; "
            "leave out temperature, top_p and top_k, or name another method"
        )
    spec.check_scorers(setup.policy, setup.cost, setup.reward)
    spec.check_settings(name, setup.config)


def check_seed(seed: int) -> int:
    """Return a seed, or raise ``ParameterError`` unless it is a whole number."""
    # a seed is hashed as text, so 0, 0.0 and False would give three different answers
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ParameterError(f"seed is {seed!r}; it must be a whole number")
    return int(seed)  # numpy has whole numbers, too
