"""How a retry avoids failed blocks: the paper's sampling diversity, and safer forms of it.

The module imports no torch, so that notebook 10 can use it alone. Every prompt has a new `Failures`
in every block.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

Factors = dict[int, float]  # token -> factor on its reference probability
# node -> {token: (reference probability, node after it)}; a node's number is above its parent's
PrefixTree = list[dict[int, tuple[float, int]]]
# (failures, parent, sample, n_samples) -> the sample's penalty, or None where nothing changes
Diversity = Callable[["Failures", int, int, int], "Penalty | None"]


@dataclass(frozen=True, eq=False)
class Penalty:
    """Factors on reference probabilities after any prefix of a block, for samples that share them.

    Attributes
    ----------
    factors : dict of int to Factors
        By position in the block, or by node of a tree of blocks.
    after : dict of (int, int) to int, optional
        (Node, token) -> next node; the root is 0. None where the position alone decides.
    """

    factors: dict[int, Factors]
    after: dict[tuple[int, int], int] | None = None

    def at(self, prefix: Sequence[int]) -> Factors:
        """Return the factors of some next tokens after a prefix; other tokens keep theirs.

        Rows with the same factors get the same object, which no caller may change: `draw` builds
        one table per object.
        """
        if self.after is None:  # the paper's penalty: the position alone counts
            return self.factors.get(len(prefix), {})
        node = 0  # walk from the root along the prefix
        for token in prefix:
            if (node, token) not in self.after:  # no failed block begins like this
                return {}
            node = self.after[node, token]
        return self.factors[node]

    @cached_property
    def digest(self) -> str:
        """Hash of the factors after all prefixes: equal digests mean equal factors."""
        # a stored sample may be used again only under the same penalty, in any process: so a hash
        # of the content, and not `hash`, which is salted or by identity
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


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
    trees : dict of int to PrefixTree
        Parent -> tree of its failed blocks.
    """

    def __init__(self, spared: frozenset[int], penalty: float | None):
        self.spared = spared
        # subtracting n_2 from a logit multiplies the weight of its token by exp(-n_2)
        self.factor = 0.0 if penalty is None else math.exp(-penalty)
        self.seen: dict[int, set[int]] = defaultdict(set)
        self.trees: dict[int, PrefixTree] = defaultdict(lambda: [{}])
        self._penalties: dict[int | None, Penalty] = {}

    def add(self, parent: int, tokens: Sequence[int], log_p: Sequence[float]) -> None:
        """Note a failed block of beam `parent`, with its tokens' reference logprobs (nats)."""
        self._penalties.clear()  # penalties of the last round do not know this block
        tree, node = self.trees[parent], 0
        # walk down the parent's tree along the block, and add the nodes that are new
        for i, (token, logp) in enumerate(zip(tokens, log_p, strict=True)):
            # F > 0: a set, since the paper's penalty does not grow with the number of failures
            self.seen[i].add(token)
            # a server may not report a logprob: the tokens before it then keep all their mass, and
            # the failed block stays banned by its last token
            p = 0.0 if math.isnan(logp) else math.exp(logp)
            node = tree[node].setdefault(token, (p, len(tree)))[1]
            if node == len(tree):
                tree.append({})

    def shared(self, parent: int | None, build: Callable[[], Penalty]) -> Penalty:
        """Return the penalty of a parent, or of all parents for None; it is built once a round."""
        if parent not in self._penalties:
            self._penalties[parent] = build()
        return self._penalties[parent]


def diversity_penalty(
    failures: Failures, parent: int, sample: int, n_samples: int
) -> Penalty | None:
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
    Penalty or None
        None changes nothing.
    """
    return failures.shared(None, partial(_seen_tokens, failures))


def penalty_of_half(failures: Failures, parent: int, sample: int, n_samples: int) -> Penalty | None:
    """Penalise the smaller half of a parent's samples; the others stay reference samples.

    The chance that all fail is then bounded, see `half_bound` in notebook 10; the
    penalty alone may ban the only safe block.
    """
    # ceil: a parent with a single sample draws it from the reference
    if sample < math.ceil(n_samples / 2):
        return None
    return diversity_penalty(failures, parent, sample, n_samples)


def without_replacement(
    failures: Failures, parent: int, sample: int, n_samples: int
) -> Penalty | None:
    """Sample from the reference, given that the block is none of its parent's failed ones.

    The chance of a safe block never falls.
    """
    return failures.shared(parent, partial(_unused_shares, failures.trees[parent]))


def no_penalty(failures: Failures, parent: int, sample: int, n_samples: int) -> None:
    """Sample every retry from the reference."""


def _seen_tokens(failures: Failures) -> Penalty:
    """Return the factor of each token that a failed block has at a position."""
    factors = {}
    for i, tokens in failures.seen.items():
        # end tokens are spared, or a retry could not end where a failed block did
        factors[i] = dict.fromkeys(sorted(tokens - failures.spared), failures.factor)
    return Penalty(factors)


def _unused_shares(tree: PrefixTree) -> Penalty:
    """Return for each token after each prefix the share of its mass that no failed block used."""
    # 1. upwards: the share of the mass below each node that failed blocks have used. A leaf is the
    # end of a failed block, which is used up
    used = [1.0] * len(tree)
    for node in reversed(range(len(tree))):  # children have higher numbers, so they come first
        if tree[node]:
            # min: rounded probabilities may sum to a little more than 1
            used[node] = min(1.0, sum(p * used[child] for p, child in tree[node].values()))
    # 2. downwards: a token keeps the unused share of its mass. Sampled token by token with these
    # factors, a block has its reference probability, given that it is none of the failed ones
    factors: dict[int, Factors] = {}
    after: dict[tuple[int, int], int] = {}
    for node, children in enumerate(tree):
        factors[node] = {token: 1 - used[child] for token, (_, child) in children.items()}
        after |= {(node, token): child for token, (_, child) in children.items()}
    return Penalty(factors, after)


DIVERSITIES: dict[str, Diversity] = {
    "none": no_penalty,
    "paper": diversity_penalty,
    "half": penalty_of_half,
    "sequence": without_replacement,
}
