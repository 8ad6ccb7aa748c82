"""Beams, and the scores by which the paper's methods rank them.

A score is a number or a tuple of numbers. Lower is better, because costs are minimised. The paper's
penalty n is infinite here: a tuple (1, ...) is worse than every (0, ...).
"""

import math
from dataclasses import dataclass

from .budget import SafetyState, is_safe
from .config import SearchConfig

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
