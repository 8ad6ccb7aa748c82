"""The methods as options of one loop: how candidates are ranked, and what of the user's settings a
method fixes.

Knows scored candidates; knows nothing of sampling, models or text to be emitted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .baselines.args import TOKEN_SCORES
from .budget import SafetyState, is_safe
from .config import SearchConfig
from .errors import unknown_name


@dataclass
class Beam:
    """A candidate response.

    Attributes
    ----------
    state : SafetyState
        The safety state after its last block; untouched by methods that do not look at the cost
        while searching.
    cost, reward : float
        U_k and reward of the text so far; infinitely bad when the scorer failed, and `broken` is
        then set.
    row : int
        Row in the engine when the beam is kept, number of the candidate before.
    f1, f2 : float
        The critic's probability of ending inside the budget, and its expected task cost
        gamma_task^T c_task; NaN when it was not asked. An f1 that is no finite number counts as the
        lowest.
    let_through : bool
        By the critic, if it was asked.
    log_p : float
        Log-probability of its last block under the policy (nats).
    noise : float
        A Gumbel number for methods that draw among scored tokens; 0 for all others.
    """

    tokens: list[int]
    text: str
    finished: bool
    state: SafetyState
    ends: list[int]  # number of tokens at the end of each block
    row: int
    cost: float = 0.0
    reward: float = 0.0
    broken: bool = False
    f1: float = math.nan
    f2: float = math.nan
    let_through: bool = True
    log_p: float = 0.0
    noise: float = 0.0

    def passes(self, config: SearchConfig) -> bool:
        """Say whether E is below n: safe so far, and let through by the critic."""
        return self.let_through and self.safe(config)

    def judged(self, f1: float, f2: float, config: SearchConfig) -> None:
        """Take in what the critic says. Fail closed: what it cannot put into finite numbers it does
        not let through.
        """
        self.f1, self.f2 = f1 if math.isfinite(f1) else -math.inf, f2
        self.let_through = math.isfinite(f1) and math.isfinite(f2) and f1 > config.critic_threshold

    def safe(self, config: SearchConfig) -> bool:
        """Fail closed: a candidate whose score could not be read is not safe, whatever its state
        says.
        """
        return not self.broken and is_safe(self.state, config.strict)


@dataclass(frozen=True)
class Rank:
    """An order of candidates, best first.

    Attributes
    ----------
    key : callable
        Sort key of a beam under a config; lower is better. Ties keep the order of sampling.
    cost, reward : bool
        Whether candidates are scored by the cost model and by the reward model.
    safety_first : bool
        Whether unsafe candidates are dropped as soon as there is a safe one. The reward model is
        then asked only about those that pass.
    critic : bool
        Whether the critic is asked, about unfinished candidates that are safe so far.
    blind : bool
        Whether cost and reward are known of finished candidates only.
    """

    key: Callable[[Beam, SearchConfig], tuple]
    cost: bool
    reward: bool
    safety_first: bool = False
    critic: bool = False
    blind: bool = False


def _task(beam: Beam, config: SearchConfig) -> float:
    """Return gamma_task^T c_task, paid at the fixed T = max_new_tokens."""
    return -(config.gamma_task**config.max_new_tokens) * beam.reward


def _lagrangian(beam: Beam, config: SearchConfig) -> float:
    """Return c_task + lambda C, with C the cost model's score of the text so far; infinite for what
    could not be scored.
    """
    return math.inf if beam.broken else -beam.reward + config.lagrange_multiplier * beam.cost


def _token(beam: Beam, config: SearchConfig, score: float) -> tuple:
    """The score of a token by ARGS, with the noise that makes the best one a draw from the softmax
    of all.
    """
    if beam.broken:
        return (math.inf,)
    weigh = TOKEN_SCORES[config.token_score]
    return (
        weigh(beam.log_p, score, config.policy_weight, config.reward_weight)
        - config.token_temperature * beam.noise,
    )


def _failed(beam: Beam, config: SearchConfig) -> tuple:
    """n = infinity as a lexicographic order: what only the critic rejects, by f1, then what has
    overspent, least first.
    """
    return (1, -beam.f1) if beam.safe(config) else (2, -beam.state.omega)


RANKS = {
    "first": Rank(lambda b, c: (), cost=False, reward=False),
    "task": Rank(lambda b, c: (-b.reward,), cost=False, reward=True),
    "lagrangian": Rank(lambda b, c: (_lagrangian(b, c),), cost=True, reward=True),
    "token-task": Rank(lambda b, c: _token(b, c, -b.reward), cost=False, reward=True),
    "token-lagrangian": Rank(lambda b, c: _token(b, c, _lagrangian(b, c)), cost=True, reward=True),
    "token-cost": Rank(lambda b, c: _token(b, c, b.cost), cost=True, reward=False),
    # E_inter with n = infinity as a lexicographic order: unsafe, then overspent least, else task
    # cost (gamma^T is the same for all)
    "augmented": Rank(
        lambda b, c: (0, -b.reward) if b.safe(c) else (1, -b.state.omega),
        cost=True,
        reward=True,
        safety_first=True,
    ),
    # E_critic: f2 of an unfinished candidate that the critic lets through, the task cost of a
    # finished safe one
    "critic": Rank(
        lambda b, c: (0, _task(b, c) if b.finished else b.f2) if b.passes(c) else _failed(b, c),
        cost=True,
        reward=True,
        safety_first=True,
        critic=True,
        blind=True,
    ),
    # E_mix: the task cost so far and eta f2, of a candidate that is inside the budget and that the
    # critic lets through
    "mix": Rank(
        lambda b, c: (
            (0, _task(b, c) + (0 if b.finished else c.eta * b.f2)) if b.passes(c) else _failed(b, c)
        ),
        cost=True,
        reward=True,
        safety_first=True,
        critic=True,
    ),
}


@dataclass(frozen=True)
class Method:
    """Options of the loop.

    Attributes
    ----------
    rank : str
        A key of `RANKS`.
    settings : callable
        The settings that the method fixes, given the user's.
    gated : bool
        Whether a text that fails the check is held back; baselines always emit.
    accepts : callable
        Whether a candidate under a config spares its block a further round.
    proposes : bool
        Whether candidates are the most probable next tokens, instead of sampled blocks.
    steered : bool
        Whether tokens are drawn from logits that a value network changes.
    """

    rank: str
    settings: Callable[[SearchConfig], dict]
    gated: bool = False
    accepts: Callable[[Beam, SearchConfig], bool] = Beam.passes
    proposes: bool = False
    steered: bool = False

    @property
    def asks_critic(self) -> bool:
        """Whether it needs a critic to search with."""
        return RANKS[self.rank].critic


def _one_block(config: SearchConfig) -> dict:
    return {"block_size": config.max_new_tokens, "keep": 1, "rounds": 1}


def _one_token(config: SearchConfig) -> dict:
    return {"n_samples": config.top_k, "block_size": 1, "keep": 1, "rounds": 1}


def _one_sample(config: SearchConfig) -> dict:
    return _one_block(config) | {"n_samples": 1}


METHODS: dict[str, Method] = {
    "base": Method("first", _one_sample),
    "best-of-n": Method("task", _one_block),
    "best-of-n-lagrangian": Method("lagrangian", _one_block),
    "best-of-n-augmented": Method("augmented", _one_block),
    "beam-lagrangian": Method("lagrangian", lambda c: {"rounds": 1}),
    "beam-lagrangian-freq": Method(
        "lagrangian", lambda c: {}, accepts=lambda b, c: _lagrangian(b, c) <= c.lagrangian_threshold
    ),
    "beam-augmented": Method("augmented", lambda c: {"rounds": 1}),
    "args": Method(
        "token-task", lambda c: _one_token(c) | {"lagrange_multiplier": 0.0}, proposes=True
    ),
    "args-lagrangian": Method("token-lagrangian", _one_token, proposes=True),
    "args-cost": Method("token-cost", _one_token, proposes=True),
    "re-control": Method(
        "first", lambda c: _one_sample(c) | {"lagrange_multiplier": 0.0}, steered=True
    ),
    "re-control-lagrangian": Method("first", _one_sample, steered=True),
    "inferenceguard": Method("augmented", lambda c: {}, gated=True),
    "inferenceguard-critic": Method(
        "critic", lambda c: {"accounting": "terminal"}, gated=True
    ),  # costs at the end only
    "inferenceguard-mix": Method("mix", lambda c: {}, gated=True),
}


def settings_of(method: str, config: SearchConfig) -> SearchConfig:
    """Return the settings a method really runs under.

    Raises
    ------
    ParameterError
        For a name that is not in `METHODS`.
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    return replace(config, **METHODS[method].settings(config))
