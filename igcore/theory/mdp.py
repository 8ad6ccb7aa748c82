"""Finite constrained token MDPs (paper, section 4.1) and their augmentation (section 4.2).

An MDP is a set of tables of numbers, floats or exact Fractions; `planning` solves it. A state is a
prefix, or its image under a latent map. An action is the next token; at a `chance` state nature
moves instead. Each action has a safety cost and a task cost; of both, higher is worse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product

import numpy as np

from ..budget import SafetyState, charge, check_accounting, is_safe, start
from ..errors import ParameterError

LIMIT = 20_000  # prefixes enumerated at most


@dataclass(frozen=True, kw_only=True, eq=False)
class MDP:
    """A finite constrained MDP without cycles; state 0 is the prompt (paper, section 4.1).

    Attributes
    ----------
    child : ndarray of int, shape (S, A)
        State after each action, always a larger number than the state itself; -1 where the action
        is not allowed. A state without actions is terminal.
    cost : ndarray, shape (S, A)
        C_safety of each action, or the score U of the prefix that it makes; in units of the cost
        model.
    task : ndarray, shape (S, A)
        C_task of each action, in units of minus the reward. Theorem 1 needs task >= 0.
    reference : ndarray, shape (S, A)
        pi_ref, and at chance states the probabilities of nature.
    chance : ndarray of bool, shape (S,)
        Where nature moves. The pure token MDP has no such state.
    names : tuple, length S
        What each state is, such as the prefix.
    gamma : float
        Task discount in (0, 1].
    signed : bool
        Whether `cost` may be negative.
    safe : ndarray of bool, shape (S,), optional
        False where the budget is broken; all True until `augment`.

    Raises
    ------
    ParameterError
        When probabilities do not sum to one, a cost is negative without `signed` or NaN, gamma is
        outside (0, 1], or a child does not come after its parent.
    """

    child: np.ndarray
    cost: np.ndarray
    task: np.ndarray
    reference: np.ndarray
    chance: np.ndarray
    names: tuple
    gamma: float = 1
    signed: bool = False
    safe: np.ndarray | None = None

    def __post_init__(self):
        check_gamma(self.gamma)
        if self.safe is None:
            object.__setattr__(self, "safe", np.ones(len(self.child), dtype=bool))
        late = self.allowed & (self.child <= np.arange(len(self.child))[:, None])
        if late.any():
            s, a = np.argwhere(late)[0]
            raise ParameterError(
                f"action {a} of state {s} leads to state {self.child[s, a]}; children need larger "
                "numbers"
            )
        if not (self.signed or (self.cost[self.allowed] >= 0).all()):
            least = self.cost[self.allowed].min()
            raise ParameterError(
                f"a safety cost is {least}; costs must be >= 0 unless signed=True, which voids the "
                "guarantees"
            )
        if (self.task != self.task).any():
            raise ParameterError("a task cost is nan; give a number, higher is worse")
        for s in np.flatnonzero(self.allowed.any(axis=1)):
            p = self.reference[s][self.allowed[s]]
            if not ((p >= 0).all() and abs(p.sum() - 1) <= 1e-9):
                given = ", ".join(f"{float(x):g}" for x in p)
                raise ParameterError(
                    f"the probabilities at {self.names[s]!r} are {given}; give numbers >= 0 with "
                    "sum 1"
                )

    @cached_property
    def allowed(self) -> np.ndarray:
        """Where an action exists, shape (S, A)."""
        return self.child >= 0

    @cached_property
    def layers(self) -> list[np.ndarray]:
        """States grouped by their height over the terminal states, which come first.

        This is the order of backward induction.
        """
        height = [0] * len(self.child)
        for s, row in reversed(list(enumerate(self.child.tolist()))):
            height[s] = max((height[c] + 1 for c in row if c >= 0), default=0)
        return [np.flatnonzero(np.equal(height, h)) for h in range(max(height) + 1)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Augmented(MDP):
    """The safety-augmented MDP of states [s_t, z_t] (paper, section 4.2).

    Unsafe states have no actions, because no action leads out of them.

    Attributes
    ----------
    origin : ndarray of int, shape (S,)
        The state s_t of the MDP that was augmented.
    z : ndarray, shape (S,)
        Scaled remaining budget z_t, in units of the cost model.
    total : ndarray, shape (S,)
        Safety cost charged so far, without discount.
    """

    origin: np.ndarray
    z: np.ndarray
    total: np.ndarray


def check_gamma(gamma: float) -> None:
    """Raise ``ParameterError`` unless 0 < gamma <= 1."""
    if not 0 < gamma <= 1:
        raise ParameterError(f"gamma is {gamma!r}; it must lie in (0, 1]")


def check_deterministic(mdp: MDP) -> None:
    """Raise ``ParameterError`` when the MDP has chance states."""
    if mdp.chance.any():
        raise ParameterError(
            f"{int(mdp.chance.sum())} states are chance states; this holds for deterministic "
            "dynamics only"
        )


def enumerate_prefixes(vocabulary: int, horizon: int, eos: int = 0) -> list[tuple[int, ...]]:
    """Return all nonempty prefixes of at most `horizon` tokens, the shortest first.

    Nothing follows `eos`.

    Raises
    ------
    ParameterError
        When there are more than `LIMIT`, the prompt included.
    """
    others = [token for token in range(vocabulary) if token != eos]
    count = 1 + sum(len(others) ** (t - 1) * vocabulary for t in range(1, horizon + 1))
    if count > LIMIT:
        raise ParameterError(
            f"vocabulary {vocabulary} and horizon {horizon} give {count} prefixes; at most {LIMIT} "
            "are enumerated"
        )
    prefixes: list[tuple[int, ...]] = []
    for t in range(horizon):
        for unfinished in product(others, repeat=t):
            prefixes += [(*unfinished, last) for last in range(vocabulary)]
    return prefixes


def token_mdp(
    table: Mapping[Sequence, tuple[float, float]],
    reference: Mapping[Sequence, Mapping] | None = None,
    chance: Sequence = (),
    gamma: float = 1,
    signed: bool = False,
) -> MDP:
    """Return the MDP of a prefix tree (paper, section 4.1: s_{t+1} = s_t + y_t).

    Parameters
    ----------
    table : mapping of prefix to (cost, task)
        What the last token of each nonempty prefix (a string or tuple of tokens) costs.
    reference : mapping of prefix to (mapping of token to probability), optional
        pi_ref; uniform where it is not given.
    chance : collection of prefixes
        Where nature moves, with the probabilities of `reference`.
    gamma, signed
        As in `MDP`.

    Raises
    ------
    ParameterError
        When a prefix has no parent, there are more than `LIMIT`, or as in `MDP`.
    """
    if len(table) >= LIMIT:
        raise ParameterError(
            f"the table has {len(table)} prefixes; at most {LIMIT - 1} are enumerated"
        )
    names = (next(iter(table))[:0], *sorted(table, key=len))
    index = {name: s for s, name in enumerate(names)}
    tokens = {token: a for a, token in enumerate(sorted({name[-1] for name in table}))}
    kind = object if np.array(list(table.values())).dtype == object else float
    child = np.full((len(names), len(tokens)), -1)
    cost, task = np.zeros((2, *child.shape), dtype=kind)
    for name in names[1:]:
        if name[:-1] not in index:
            raise ParameterError(f"prefix {name!r} has no parent; give a cost to {name[:-1]!r} too")
        edge = index[name[:-1]], tokens[name[-1]]
        child[edge] = index[name]
        cost[edge], task[edge] = table[name]
    allowed = child >= 0
    one = Fraction(1) if kind is object else 1.0
    share = allowed * (one / np.maximum(1, allowed.sum(axis=1, keepdims=True)).astype(kind))
    for name, row in (reference or {}).items():
        share[index[name]] = [row.get(token, 0) for token in tokens]
    moves = np.isin(np.arange(len(names)), [index[name] for name in chance])
    return MDP(
        child=child,
        cost=cost,
        task=task,
        reference=share,
        chance=moves,
        names=names,
        gamma=gamma,
        signed=signed,
    )


def augment(
    mdp: MDP,
    budget: float,
    gamma: float = 1,
    accounting: str = "sum",
    strict: bool = False,
    check_last: bool = True,
) -> Augmented:
    """Return the augmented MDP: the reachable pairs [s_t, z_t] (paper, section 4.2, equation 4).

    Parameters
    ----------
    mdp : MDP
        The constrained MDP; a prefix tree keeps its number of safe states, because z is a function
        of the prefix.
    budget : float
        d >= 0, in units of the cost model.
    gamma : float
        Safety discount in (0, 1].
    accounting : str
        How `mdp.cost` is charged, a key of `igcore.budget.ACCOUNTINGS`; ``sum`` charges C_safety as
        it is.
    strict : bool
        The paper's other reading (equation 6): z = 0 is unsafe too.
    check_last : bool
        Whether z is checked after the last action as well; without it Theorem 2 fails.

    Raises
    ------
    ParameterError
        For a negative budget, gamma outside (0, 1] or an unknown accounting.
    """
    check_gamma(gamma)
    check_accounting(accounting)
    ended = ~mdp.allowed.any(axis=1)
    first = start(budget)
    pairs, safe = [(0, first)], [is_safe(first, strict)]
    number: dict[tuple, int] = {}  # of each pair
    edges: list[list[int]] = []  # the pair that each action leads to; -1 where there is none
    for i, (s, state) in enumerate(pairs):  # grows while it is read: breadth first
        edges.append([-1] * mdp.child.shape[1])
        if not safe[i]:
            continue
        for a in np.flatnonzero(mdp.allowed[s]):
            y = int(mdp.child[s, a])
            last = bool(ended[y])
            after = charge(state, mdp.cost[s, a], accounting, gamma, last=last)
            # what the next cost depends on besides z: under `sum` nothing
            memory = () if accounting == "sum" else (after.peak, after.score)
            j = number.setdefault((y, after.z, *memory), len(pairs))
            edges[i][a] = j
            if j == len(pairs):
                pairs.append((y, after))
                unchecked = last and not check_last
                safe.append(is_safe(after, strict) or unchecked)
    return _in_order(mdp, pairs, safe, edges)


def _in_order(
    mdp: MDP, pairs: list[tuple[int, SafetyState]], safe: list[bool], edges: list[list[int]]
) -> Augmented:
    """Return the augmented MDP with its states sorted by the state of `mdp` that they extend.

    Children have larger numbers in `mdp`, and so they have in the augmented MDP.
    """
    origin = np.array([s for s, _ in pairs])
    order = np.argsort(origin, kind="stable")
    # the new number of each pair; the last entry keeps -1 at -1
    rank = np.append(np.argsort(order), -1)
    origin = origin[order]
    z = np.array([pairs[i][1].z for i in order])
    return Augmented(
        child=rank[np.array(edges)[order]],
        cost=mdp.cost[origin],
        task=mdp.task[origin],
        reference=mdp.reference[origin],
        chance=mdp.chance[origin],
        names=tuple((mdp.names[s], x) for s, x in zip(origin, z, strict=True)),
        gamma=mdp.gamma,
        signed=mdp.signed,
        safe=np.array(safe)[order],
        origin=origin,
        z=z,
        total=np.array([pairs[i][1].total for i in order]),
    )


def truncated_cost(mdp: MDP, n: float) -> np.ndarray:
    """Return the truncated task cost C^n_task (paper, section 4.2, equation 6 with n for infinity).

    An action costs C_task while budget is left and n where it is not. The paper takes z_t > 0 for
    "budget is left"; here that is what `augment` calls safe, by default z_t >= 0.

    Parameters
    ----------
    mdp : MDP
        An augmented MDP; in a plain one every state is safe and n plays no role.
    n : float
        In units of the task cost; infinite for the untruncated C^inf_task.

    Returns
    -------
    ndarray, shape (S, A)
        Meaningful where an action is allowed, and in every column of an unsafe state, which any
        action leads back to.
    """
    return np.where(mdp.safe[:, None], mdp.task, n)
