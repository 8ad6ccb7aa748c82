"""How large a finite n must be, and how often Algorithm 1 may find nothing."""

from collections.abc import Sequence

from .mdp import Augmented
from .planning import trajectories, unsafe_value, values


def n_star(mdp: Augmented, start: int = 0) -> float:
    """Return n*(s), how big the n of the truncated cost must be (paper, section 4.2: a big n).

    Above it V^{*,n}(s) = V^{*,inf}(s), and every optimal policy from s is safe: Theorem 2 of
    section 5.1, restated for finite n. The paper gives no formula; on deterministic dynamics::

        n*(s) = max(0, max over unsafe trajectories of (V^{*,inf}(s) - J_pre) / W)

    with J_pre the task cost before the violation and W the discounted weight of the unsafe steps.

    Returns
    -------
    float
        In units of the task cost; infinite when s has no safe trajectory.

    Raises
    ------
    ParameterError
        When nature moves, see `igcore.theory.planning.trajectories`.
    """
    best = values(mdp)[start]
    least = 0
    for way in trajectories(mdp, start):
        if not mdp.safe[way.leaf]:
            weight = mdp.gamma**way.steps * unsafe_value(mdp, 1)
            least = max(least, (best - way.task) / weight)
    return least


def abstention_bound(masses: Sequence[float], n_samples: int, rounds: int = 1) -> float:
    """Return sum_b (1 - p_b)^{N M} >= P(abstain), capped at 1.

    Algorithm 1 (paper, appendix C) samples finitely often, and the theorems do not speak of that.
    The bound is an equality for one block without a penalty.

    Parameters
    ----------
    masses : sequence of float
        p_b for each block b, the reference's mass of safe and viable next blocks: the least over
        the prefixes that may be kept there.
    n_samples, rounds : int
        N samples in a round and M rounds.
    """
    draws = n_samples * rounds
    failures = [(1 - p) ** draws for p in masses]
    return min(1, sum(failures))
