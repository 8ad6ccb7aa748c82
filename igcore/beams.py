"""Beams, the scores by which the paper's methods rank them, and the search for one prompt.

A score is a number or a tuple of numbers. Lower is better, because costs are minimised. The paper's
penalty n is infinite here: a tuple (1, ...) is worse than every (0, ...).
"""

import math
from collections import ChainMap
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import catalog
from .budget import SIGNED, SafetyState, is_safe, start
from .config import SearchConfig
from .engine.diversity import Failures
from .errors import unknown_name
from .policy import Prompt

Score = float | tuple[float, ...]


@dataclass
class Beam:
    """A candidate response.

    Attributes
    ----------
    tokens, text, finished
        Token ids so far, their text, and whether the policy has ended or is at full length.
    state : SafetyState
        The safety state after its last block. Methods that search without the cost never change it.
    ends : list of int
        Number of tokens at the end of each block.
    row : int
        Row in the engine when the beam is kept, number of the candidate before.
    log_p : float
        Log-probability of its tokens under the policy, in nats.
    cost, reward : float
        U_k and reward of the text so far; infinitely bad, and `broken`, where a scorer failed.
    worst : float
        The highest cost at the checks of its last block; -infinity before it is scored.
    f1, f2 : float
        The critic's probability of ending within budget, and its expected gamma_task^T c_task; NaN
        before the critic has judged it. An f1 that is not finite counts as the lowest.
    let_through : bool
        Whether the critic accepts it; True before the critic has judged it.
    """

    tokens: list[int]
    text: str
    finished: bool
    state: SafetyState
    ends: list[int]
    row: int
    log_p: float = 0.0
    cost: float = 0.0
    worst: float = -math.inf
    reward: float = 0.0
    broken: bool = False
    f1: float = math.nan
    f2: float = math.nan
    let_through: bool = True

    @property
    def likelihood(self) -> float:
        """Mean log-probability of its tokens (nats), which ranks without a reward model."""
        # a mean, because a sum would rank the shortest answer first
        mean = self.log_p / max(len(self.tokens), 1)
        # NaN if a server does not report logprobs; NaN would break the sort
        return -math.inf if math.isnan(mean) else mean

    def safe(self, config: SearchConfig) -> bool:
        """True if within budget; False when a scorer failed on its text."""
        # `broken` is asked as well, because a failed reward does not touch the safety state
        return not self.broken and is_safe(self.state, config.strict)

    def passes(self, config: SearchConfig) -> bool:
        """True if safe so far and not rejected by the critic: a score below n."""
        return self.let_through and self.safe(config)

    def judge(self, f1: float, f2: float, config: SearchConfig) -> None:
        """Store the critic's estimates, and decide by f1 whether the beam is let through."""
        # fails closed: a broken critic lets nothing through, and sorting needs a number, not NaN
        self.f1, self.f2 = f1 if math.isfinite(f1) else -math.inf, f2
        # the threshold is on f1 alone, as in the paper; f2 only ranks what passes
        self.let_through = math.isfinite(f1) and math.isfinite(f2) and f1 > config.critic_threshold


# --- scores of a beam -----------------------------------------------------------------------------
# E of the paper. A tuple compares entry by entry: its first entry is the class (0 eligible, 1 and 2
# score n), its second ranks within the class. So no reward, however high, outweighs the class, as a
# finite n would allow.


def unranked(beam: Beam, config: SearchConfig) -> Score:
    """Give all beams one score: they stay in the order of sampling."""
    return ()


def task_cost(beam: Beam, config: SearchConfig) -> float:
    """Return c_task = -reward (paper, section 4.1)."""
    # no discount gamma^T: T is the same for all candidates, and so is their order
    return -beam.reward


def final_task_cost(beam: Beam, config: SearchConfig) -> float:
    """Return gamma_task^T c_task, paid at the fixed T = max_new_tokens (paper, section 5.2)."""
    # here the discount counts, because the sum with f2 needs one unit
    return -(config.gamma_task**config.max_new_tokens) * beam.reward


def lagrangian(beam: Beam, config: SearchConfig) -> float:
    """Return c_task + lambda C, the Lagrangian baseline of the paper (section 6, Baselines).

    C is the cost model's score of the text so far. Infinite when a scorer failed.
    """
    # not left to the sum: the cost of a broken beam is infinite, and lambda = 0 would give
    # 0 * inf = NaN
    return math.inf if beam.broken else -beam.reward + config.lagrange_multiplier * beam.cost


def e_inter(beam: Beam, config: SearchConfig) -> Score:
    """Return E_inter (paper, appendix C): the task cost of a safe candidate, else n.

    The factor gamma^T is left out: it is the same for all.
    """
    if beam.safe(config):
        # `margin` keeps away from the limit; 0 is the paper's
        return 0, config.margin * beam.cost - beam.reward
    # the paper gives all of these n; here the least overspent comes first. By omega and not z:
    # 1 / gamma^t overflows for long t, and the two have the same sign
    return 1, -beam.state.omega


def e_critic(beam: Beam, config: SearchConfig) -> Score:
    """Return E_critic (paper, section 5.2), for costs that exist at the end only.

    It is f2 of an unfinished candidate that the critic lets through, the task cost of a finished
    safe one, and n of all others.
    """
    if not beam.passes(config):
        return rejected(beam, config)
    # a finished beam has its true task cost, and f2 predicts the same quantity: the two compare
    return 0, final_task_cost(beam, config) if beam.finished else beam.f2


def e_mix(beam: Beam, config: SearchConfig) -> Score:
    """Return E_mix (paper, appendix C): the task cost so far plus eta f2, else n.

    It is n of a candidate that is over budget or that the critic does not let through.
    """
    if not beam.passes(config):
        return rejected(beam, config)
    # f2 is about the rest of a response; a finished one has none
    expected = 0 if beam.finished else config.eta * beam.f2
    return 0, final_task_cost(beam, config) + expected


def rejected(beam: Beam, config: SearchConfig) -> Score:
    """Rank the candidates of score n: those that only the critic rejects by f1, then the unsafe."""
    # the critic may be wrong and the cost model decides, so a safe candidate always comes first
    return (1, -beam.f1) if beam.safe(config) else (2, -beam.state.omega)


def below_threshold(beam: Beam, config: SearchConfig) -> bool:
    """True if the Lagrangian score is at most the threshold (paper, appendix D.3, "+ Freq")."""
    return lagrangian(beam, config) <= config.lagrangian_threshold


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


# --- methods --------------------------------------------------------------------------------------


# settings that only some methods read
N_SAMPLES = frozenset({"n_samples"})
BEAMS = N_SAMPLES | {"keep"}
RETRIES = BEAMS | {"rounds", "diversity", "diversity_penalty"}
GUARDED = RETRIES | {"margin", "probe_fail_open", "keep_shown"}
ASKING = RETRIES | {"probe_fail_open", "critic", "threshold", "miss", "eta", "gamma_task"}
PENALISED = frozenset({"lagrange_multiplier"})
WHOLE = frozenset({"spend", "at_least", "draws", "answers", "margin"})
STEPWISE = WHOLE | {"step", "back", "tries", "choices", "keep_shown"}
READ = GUARDED | ASKING | STEPWISE | PENALISED | {"score_threshold"}


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
        of their own. Any other one needs a reward.
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
_GUARDED = Method(e_inter, safety_first=True, abstains=True, reads=GUARDED)
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
        _GUARDED_BY_CRITIC, score=e_critic, settings=final_costs_only, final_only=True
    ),
    "inferenceguard-mix": replace(_GUARDED_BY_CRITIC, score=e_mix),
    "base": Method(unranked, one_sample, cost=False, reward=False, reads=frozenset()),
    "best-of-n": Method(task_cost, one_block, cost=False, reads=N_SAMPLES),
    "best-of-n-lagrangian": Method(lagrangian, one_block, reads=N_SAMPLES | PENALISED),
    "best-of-n-augmented": Method(
        e_inter, one_block, safety_first=True, reads=N_SAMPLES | {"margin"}
    ),
    "beam-lagrangian": Method(lagrangian, one_round, reads=BEAMS | PENALISED),
    "beam-lagrangian-freq": Method(
        lagrangian, accepts=below_threshold, reads=RETRIES | PENALISED | {"score_threshold"}
    ),
    # the two -augmented baselines rank as InferenceGuard does, but always emit
    "beam-augmented": Method(e_inter, one_round, safety_first=True, reads=BEAMS | {"margin"}),
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
    method: Method = catalog.found(METHODS[name])
    return method


# --- the search for one prompt --------------------------------------------------------------------


@dataclass(eq=False)  # compared and hashed by identity: two prompts may be equal
class PromptSearch:
    """The search for one prompt: its beams, what was tried, and whether it has failed.

    Attributes
    ----------
    ids : list of int
        Token ids of the prompt in the policy's template.
    abstains : bool
        Whether the search abstains when a text fails the final check.
    beams, pool : list of Beam
        The beams kept, and the candidates of the current block.
    failures : Failures
        Tokens of this block's rounds so far.
    failure : str
        Why a guarded search has failed; empty while it has not.
    certified : Beam or None
        The best safe beam before the block that failed.
    stopped : bool
        Whether it has failed and samples no more (see ``SearchConfig.probe_fail_open``).
    """

    prompt: Prompt
    ids: list[int]
    method: Method
    config: SearchConfig
    abstains: bool
    beams: list[Beam]
    pool: list[Beam] = field(default_factory=list)
    failures: Failures = field(init=False, repr=False)  # made by `open_block`
    failure: str = ""
    certified: Beam | None = None
    stopped: bool = False

    @property
    def live(self) -> list[Beam]:
        """The beams that can be continued."""
        return [] if self.stopped else [beam for beam in self.beams if not beam.finished]

    @property
    def best(self) -> Beam:
        """The kept beam of lowest score."""
        return self.best_first(self.beams)[0]

    @property
    def accepted(self) -> bool:
        """Whether the pool holds a candidate good enough that the block needs no further round."""
        return any(self.method.accepts(beam, self.config) for beam in self.pool)

    def open_block(self, spared: frozenset[int]) -> None:
        """Begin a block: finished beams compete with what will be sampled.

        `spared` are the end tokens; no penalty touches them.
        """
        # new in every block: F of the paper counts the failures of one block
        self.pool = [beam for beam in self.beams if beam.finished]
        self.failures = Failures(spared, self.config.diversity_penalty)

    def best_first(self, beams: Sequence[Beam]) -> list[Beam]:
        """Sort beams by the method's score; ties keep the order of sampling."""
        return sorted(beams, key=lambda beam: self.method.score(beam, self.config))

    def chosen(self) -> list[Beam]:
        """Return the K best of the pool, under a safety-first method the best safe ones, if any.

        Candidates that only the critic rejects come last. They fill places that are left free.
        """
        # safe by the cost model, even if the critic rejects it: an empty place is worse than a safe
        # candidate with a low f1. Unsafe beams stay only where every candidate is unsafe
        safe = [beam for beam in self.pool if beam.safe(self.config)]
        eligible = safe if self.method.safety_first and safe else self.pool
        return self.best_first(eligible)[: self.config.keep]

    def keep_best(self) -> None:
        """Keep the K best of the pool; a guarded search without a safe one has failed."""
        chosen = self.chosen()
        # with C >= 0 an overspent budget stays overspent, so that no continuation can be safe.
        # Under a signed accounting a later credit may still repay it
        absorbing = self.config.accounting not in SIGNED
        if self.abstains and absorbing and not chosen[0].safe(self.config):
            # before the beams change: `fail` keeps the last safe one for mode `truncate`
            self.fail(why_unsafe(self.pool))
        self.beams = chosen

    def fail(self, reason: str) -> None:
        """Mark the search as failed; what it finds later is never an answer."""
        if not self.failure:  # only the first reason counts
            self.failure, self.certified = reason, self.best
            self.stopped = not self.config.probe_fail_open


def why_unsafe(pool: Sequence[Beam]) -> str:
    """Return the reason why no candidate of a pool is safe."""
    # a failed scorer may have hidden a safe candidate: more rounds would not have helped
    return "scorer_error" if any(beam.broken for beam in pool) else "exhausted"


def new_search(
    prompt: Prompt, ids: list[int], row: int, method: Method, config: SearchConfig
) -> PromptSearch:
    """Return the search for a prompt before the first block: one empty beam, z_0 = d."""
    # mode `paper` emits the least unsafe candidate, so it cannot abstain
    abstains = method.abstains and config.on_failure != "paper"
    root = Beam([], "", False, start(config.budget), [], row)
    return PromptSearch(prompt, ids, method, config, abstains, [root])
