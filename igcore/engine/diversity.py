"""How a retry avoids failed blocks: the paper's sampling diversity, and safer forms of it.

The module imports no torch, so that notebook 10 can use it alone. Every prompt has a new `Failures`
in every block.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

Prefix = tuple[int, ...]  # tokens of the block so far
Factors = dict[int, float]  # token -> factor on its reference probability
Tree = dict[int, tuple[float, "Tree"]]  # token -> (reference probability, subtree)
# (failures, parent, sample, n_samples) -> factors by prefix, or None where nothing changes
Diversity = Callable[["Failures", int, int, int], Callable[[Prefix], Factors] | None]


class Failures:
    """The samples of the failed rounds of one block.

    Parameters
    ----------
    spared : collection of int
        End tokens; the penalty by position leaves them alone.
    penalty : float or None
        n_2 of the paper, subtracted from the logits of penalised tokens (nats); None stands for
        infinity.

    Attributes
    ----------
    seen : dict of int to set of int
        Position in the block -> tokens that failed blocks have there, the paper's F > 0.
    trees : dict of int to Tree
        Parent -> tree of its failed blocks.
    """

    def __init__(self, spared: frozenset[int], penalty: float | None):
        self.spared = spared
        self.factor = 0.0 if penalty is None else math.exp(-penalty)
        self.seen: dict[int, set[int]] = defaultdict(set)
        self.trees: dict[int, Tree] = defaultdict(dict)

    def add(self, parent: int, tokens: Sequence[int], log_p: Sequence[float]) -> None:
        """Note a failed block of beam `parent`, with its tokens' reference logprobs (nats)."""
        node = self.trees[parent]
        # walk down the parent's tree along the block, adding what is new
        for i, (token, logp) in enumerate(zip(tokens, log_p, strict=True)):
            self.seen[i].add(token)
            node = node.setdefault(token, (math.exp(logp), {}))[1]


def diversity_penalty(
    failures: Failures, parent: int, sample: int, n_samples: int
) -> Callable[[Prefix], Factors] | None:
    """Return the paper's sampling diversity (section 5.2, "Sampling Diversity"; appendix C).

    Step i of a retry samples from softmax(W o - n_2 [F_i > 0]): every token that a failed block has
    at this position loses n_2 from its logit, whatever comes before it. Subtracting n_2 from a
    logit multiplies the probability by exp(-n_2).

    Parameters
    ----------
    failures : Failures
        The failed rounds of this block, with n_2.
    parent : int
        Beam that the sample continues.
    sample, n_samples : int
        Number of the sample among those of its parent, from 0, and how many there are.

    Returns
    -------
    callable or None
        From the block's tokens so far to factors on reference probabilities; None changes nothing.
    """

    def factors(prefix: Prefix) -> Factors:
        # end tokens are spared, or a retry could not end where a failed block did
        penalised = failures.seen[len(prefix)] - failures.spared
        return dict.fromkeys(penalised, failures.factor)

    return factors


def penalty_of_half(
    failures: Failures, parent: int, sample: int, n_samples: int
) -> Callable[[Prefix], Factors] | None:
    """Penalise the smaller half of a parent's samples; the others stay reference samples.

    The chance that all fail is then bounded, see `half_bound` in notebook 10; the
    penalty alone may ban the only safe block.
    """
    if sample < math.ceil(n_samples / 2):
        return None
    return diversity_penalty(failures, parent, sample, n_samples)


def without_replacement(
    failures: Failures, parent: int, sample: int, n_samples: int
) -> Callable[[Prefix], Factors] | None:
    """Sample from the reference, given that the block is none of its parent's failed ones.

    The chance of a safe block never falls.
    """
    return partial(_unused_shares, failures.trees[parent])


def no_penalty(failures: Failures, parent: int, sample: int, n_samples: int) -> None:
    """Sample every retry from the reference."""


def _unused_shares(node: Tree, prefix: Prefix) -> Factors:
    """Return for each token after `prefix` the share of its mass that no failed block has used."""
    for token in prefix:
        if token not in node:  # no failed block begins like this
            return {}
        node = node[token][1]
    return {token: 1 - _used_share(child) for token, (_, child) in node.items()}


def _used_share(node: Tree) -> float:
    """Return the share of the mass below a node that failed blocks have used."""
    if not node:  # the end of a failed block
        return 1.0
    return min(1.0, sum(p * _used_share(child) for p, child in node.values()))


DIVERSITIES: dict[str, Diversity] = {
    "none": no_penalty,
    "paper": diversity_penalty,
    "half": penalty_of_half,
    "sequence": without_replacement,
}
