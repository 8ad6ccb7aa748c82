"""How a retry avoids what failed: the paper's sampling diversity (section 4, "Sampling Diversity")
and safer forms of it.

Knows token ids and probabilities; knows nothing of models, scores or budgets. One `Failures` is
kept per prompt and block and is thrown away with the block.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

Factors = dict[int, float]  # token -> factor on its reference probability


class Failures:
    """What the failed rounds of one block drew.

    Parameters
    ----------
    spared : collection of int
        End tokens; a position-wise ban never touches them.
    penalty : float or None
        n_2 of the paper, subtracted from the logits of banned tokens (nats); None stands for
        infinity.
    """

    def __init__(self, spared: frozenset[int], penalty: float | None):
        self.spared = spared
        self.factor = 0.0 if penalty is None else math.exp(-penalty)
        self._at: dict[int, set[int]] = defaultdict(
            set
        )  # position in the block -> tokens seen there, F > 0
        self._trees: dict[int, dict] = defaultdict(
            dict
        )  # parent -> tree: token -> (probability, subtree)

    def add(self, parent: int, tokens: Sequence[int], log_p: Sequence[float]) -> None:
        """Note a failed block drawn from beam `parent`; `log_p` are the reference log-probabilities
        of its tokens (nats).
        """
        node = self._trees[parent]
        for i, (token, logp) in enumerate(zip(tokens, log_p, strict=True)):
            self._at[i].add(token)
            node = node.setdefault(token, (math.exp(logp), {}))[1]

    def by_position(self, prefix: tuple[int, ...]) -> Factors:
        """Ban every token seen at this position in a failed round: softmax(W o - n_2 [F > 0])."""
        return dict.fromkeys(self._at[len(prefix)] - self.spared, self.factor)

    def by_sequence(self, parent: int, prefix: tuple[int, ...]) -> Factors:
        """Remove the probability mass of whole failed blocks of the same parent: sampling without
        replacement.

        Below `prefix` a token keeps the share of its mass that no failed block has used, so that
        the next block is drawn from the reference conditioned on not being one of them. The chance
        of a safe block never falls.
        """
        node = self._trees[parent]
        for token in prefix:
            if token not in node:
                return {}
            node = node[token][1]
        return {token: 1 - _removed(child) for token, (_, child) in node.items()}


def _removed(node: dict) -> float:
    """Share of the probability mass below a node that failed blocks have used; a node without
    children is a whole block.
    """
    return min(1.0, sum(p * _removed(child) for p, child in node.values())) if node else 1.0


# (failures, parent, index among the parent's samples, number of these) -> factors as a function of
# the block's prefix, or None
DIVERSITIES: dict[str, Callable] = {
    "none": lambda failures, parent, i, n: None,
    "paper": lambda failures, parent, i, n: failures.by_position,
    "half": lambda failures, parent, i, n: None if i < math.ceil(n / 2) else failures.by_position,
    "sequence": lambda failures, parent, i, n: partial(failures.by_sequence, parent),
}
