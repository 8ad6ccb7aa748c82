"""The methods: a score of beams, and what else each of them fixes of one and the same search."""

from collections import ChainMap
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from . import beams, catalog
from .beams import Beam, Score
from .budget import SIGNED
from .config import SearchConfig
from .errors import unknown_name

# --- settings that a method fixes -----------------------------------------------------------------


def as_given(config: SearchConfig) -> SearchConfig:
    """Return the settings as the user gave them."""
    return config


def one_round(config: SearchConfig) -> SearchConfig:
    """Return settings under which a block has one attempt."""
    return replace(config, rounds=1)


def one_block(config: SearchConfig) -> SearchConfig:
    """Return settings under which N whole responses are sampled at once."""
    # Best-of-N as one block of the search: the same engine, keys and accounting as every method
    return replace(config, block_size=config.max_new_tokens, keep=1, rounds=1, checks="block")


def one_sample(config: SearchConfig) -> SearchConfig:
    """Return settings under which a single response is sampled."""
    return replace(one_block(config), n_samples=1)


def one_at_a_time(config: SearchConfig) -> SearchConfig:
    """Return settings under which one sample is drawn at a time, and no failure is probed."""
    length = config.max_new_tokens
    # a total that may fall again, or that exists at the end alone, says nothing about a prefix
    whole = config.accounting == "terminal" or config.accounting in SIGNED
    return replace(
        config,
        step=length if whole else config.step or config.block_size,
        spend=config.spend or 4 * length,
        n_samples=1,
        keep=1,
        rounds=1,
        probe_fail_open=False,
    )


def whole_answers(config: SearchConfig) -> SearchConfig:
    """Return settings under which a step is a whole answer, so that there is no way back."""
    return one_at_a_time(replace(config, step=config.max_new_tokens, tries=1, choices=1))


def final_costs_only(config: SearchConfig) -> SearchConfig:
    """Return settings under which only finished answers have a cost."""
    return replace(config, accounting="terminal")


# --- methods -------------------------------------------------------------------------------------


# settings that only some methods read
N_SAMPLES = frozenset({"n_samples"})
BEAMS = N_SAMPLES | {"keep"}
RETRIES = BEAMS | {"rounds", "diversity", "diversity_penalty"}
GUARDED = RETRIES | {"margin", "probe_fail_open", "keep_shown"}
ASKING = RETRIES | {"probe_fail_open", "critic", "threshold", "miss", "eta", "gamma_task"}
PENALISED = frozenset({"lagrange_multiplier"})
THRESHOLD = PENALISED | {"score_threshold"}
WHOLE = frozenset({"spend", "at_least", "draws", "answers", "margin"})
STEPWISE = WHOLE | {"step", "back", "tries", "choices", "keep_shown"}
READ = GUARDED | ASKING | STEPWISE | THRESHOLD


@dataclass(frozen=True)
class Method:
    """How a method searches.

    Attributes
    ----------
    score : callable
        Score of a beam under settings; lower is better. Ties keep the order of sampling.
    settings : callable
        From the user's settings to those that the method runs under.
    cost, reward : bool
        Whether candidates are scored by the cost and by the reward model.
    abstains : bool
        Whether it abstains when a text fails the final check; baselines always emit.
    safety_first : bool
        Whether unsafe candidates are dropped if there is a safe one; they then need no reward.
    final_only : bool
        Whether cost and reward exist for finished candidates only.
    accepts : callable
        Whether a beam under settings is good enough that its block needs no further round.
    network : str
        The network it needs besides the scorers: ``critic``, ``value network``, or none (empty).
    search : callable or str, optional
        Runs it instead of `igcore.search.guarded_beam_search`; a text is where it is.
    stepwise : bool
        Whether that is `igcore.backtracking.backtracking`: one sample at a time, prompts at depths
        of their own. All others need a reward.
    reads : frozenset of str
        What it reads of the settings in `READ`; all of them by default.
    """

    score: Callable[[Beam, SearchConfig], Score]
    settings: Callable[[SearchConfig], SearchConfig] = as_given
    cost: bool = True
    reward: bool = True
    abstains: bool = False
    safety_first: bool = False
    final_only: bool = False
    accepts: Callable[[Beam, SearchConfig], bool] = Beam.passes
    network: str = ""
    search: Callable[[Any], list[Any]] | str | None = None
    stepwise: bool = False
    reads: frozenset[str] = READ

    @property
    def asks_critic(self) -> bool:
        """Whether a critic judges the unfinished candidates."""
        return self.network == "critic"

    def settings_under(self, config: SearchConfig) -> SearchConfig:
        """Return the settings that the method runs under, given the user's."""
        config = self.settings(config)
        # only a method that checks the budget during the search uses checks inside a block
        if self.safety_first and config.accounting == "peak":
            return config
        return replace(config, checks="block")


# one loop runs all but the stepwise ones, so that methods differ in these fields alone and share
# random keys, counting and the final check
_GUARDED = Method(beams.e_inter, safety_first=True, abstains=True, reads=GUARDED)
_GUARDED_BY_CRITIC = replace(_GUARDED, network="critic", reads=ASKING)
_STEPWISE = replace(
    _GUARDED,
    settings=one_at_a_time,
    search="igcore.backtracking:backtracking",
    stepwise=True,
    reads=STEPWISE,
)

_OWN: dict[str, Method | str] = {
    "backtracking": _STEPWISE,
    "rejection": replace(_STEPWISE, settings=whole_answers, reads=WHOLE),
    "inferenceguard": _GUARDED,
    # an unfinished text has no cost or reward here: the critic alone steers until the end
    "inferenceguard-critic": replace(
        _GUARDED_BY_CRITIC, score=beams.e_critic, settings=final_costs_only, final_only=True
    ),
    "inferenceguard-mix": replace(_GUARDED_BY_CRITIC, score=beams.e_mix),
    "base": Method(beams.unranked, one_sample, cost=False, reward=False, reads=frozenset()),
    "best-of-n": Method(beams.task_cost, one_block, cost=False, reads=N_SAMPLES),
    "best-of-n-lagrangian": Method(beams.lagrangian, one_block, reads=N_SAMPLES | PENALISED),
    "best-of-n-augmented": Method(
        beams.e_inter, one_block, safety_first=True, reads=N_SAMPLES | {"margin"}
    ),
    "beam-lagrangian": Method(beams.lagrangian, one_round, reads=BEAMS | PENALISED),
    "beam-lagrangian-freq": Method(
        beams.lagrangian, accepts=beams.below_threshold, reads=RETRIES | THRESHOLD
    ),
    # the two -augmented baselines rank as InferenceGuard does, but always emit
    "beam-augmented": Method(beams.e_inter, one_round, safety_first=True, reads=BEAMS | {"margin"}),
}
# methods added by a user or by igstudy come first; a value may be an import path, loaded when used
METHODS: MutableMapping[str, Method | str] = ChainMap(catalog.METHODS, _OWN)
ELSEWHERE = "; args and re-control come with igstudy"


def method_of(name: str) -> Method:
    """Return a method by name.

    Raises
    ------
    ParameterError
        For a name that is not in `METHODS`.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, ELSEWHERE)
    return catalog.found(METHODS[name])
