"""Finite constrained token MDPs (paper, section 4.1) and their augmentation (section 4.2).

An MDP is a set of tables of numbers, floats or exact Fractions; `planning` solves it. A state is a
prefix, or its image under a latent map. An action is the next token; at a `chance` state nature
moves instead. Each action has a safety cost and a task cost; of both, higher is worse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from igcore.budget import SafetyState, charge, is_safe, start
from igcore.errors import ParameterError

Prefix = Sequence[Any]  # a string or tuple of tokens
Key = tuple[Any, ...]  # the part of a safety state that later costs depend on


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
    safe : ndarray of bool, shape (S,)
        False where the budget is broken; all True until `augment`.

    Raises
    ------
    ParameterError
        When probabilities do not sum to one, a safety cost is NaN or, without `signed`, negative,
        or gamma is outside (0, 1].
    """

    child: np.ndarray
    cost: np.ndarray
    task: np.ndarray
    reference: np.ndarray
    chance: np.ndarray
    names: tuple[Any, ...]
    safe: np.ndarray
    gamma: float = 1
    signed: bool = False

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        costs = self.cost[self.allowed]
        if not (self.signed or (costs >= 0).all()):
            raise ParameterError(
                f"a safety cost is {costs.min()}; costs must be >= 0 unless signed=True, which "
                "voids the guarantees"
            )
        inner = self.allowed.any(axis=1)
        p = np.where(self.allowed, self.reference, 0)[inner]
        if not ((p >= 0).all() and (abs(p.sum(axis=1) - 1) <= 1e-9).all()):
            raise ParameterError("probabilities do not sum to 1; give each state numbers >= 0")

    @cached_property
    def allowed(self) -> np.ndarray:
        """Where an action exists, shape (S, A)."""
        return self.child >= 0


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


def token_mdp(
    table: Mapping[Prefix, tuple[float, float]],
    reference: Mapping[Prefix, Mapping[Any, Any]] | None = None,
    chance: Sequence[Prefix] = (),
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
        When a prefix has no parent, or as in `MDP`.
    """
    empty = next(iter(table))[:0]
    names = (empty, *sorted(table, key=len))
    index = {name: s for s, name in enumerate(names)}
    tokens = sorted({name[-1] for name in table})
    shape = (len(names), len(tokens))
    child = np.full(shape, -1)
    # the numbers stay exact where Fractions are given
    dtype = np.result_type(np.array(list(table.values())), float)
    cost = np.zeros(shape, dtype)
    task = np.zeros(shape, dtype)
    for name in names[1:]:
        parent = name[:-1]
        if parent not in index:
            raise ParameterError(f"prefix {name!r} has no parent; give a cost to {parent!r} too")
        action = index[parent], tokens.index(name[-1])
        child[action] = index[name]
        cost[action], task[action] = table[name]
    allowed = child >= 0
    n_actions = allowed.sum(axis=1, keepdims=True).clip(1)
    uniform = allowed / (n_actions.astype(object) * Fraction(1))
    probabilities = uniform.astype(dtype)
    for name, row in (reference or {}).items():
        probabilities[index[name]] = [row.get(token, 0) for token in tokens]
    return MDP(
        child=child,
        cost=cost,
        task=task,
        reference=probabilities,
        chance=np.array([name in chance for name in names]),
        names=names,
        safe=np.ones(len(names), dtype=bool),
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
    ended = np.logical_not(mdp.allowed.any(axis=1))
    # of each state: what later costs depend on -> the safety state
    reached: list[dict[Key, SafetyState]] = [{} for _ in mdp.child]
    reached[0][()] = start(budget)
    number: dict[tuple[int, Key], int] = {}  # of each pair [s, key], in the order of s
    origin: list[int] = []
    states: list[SafetyState] = []
    safe: list[bool] = []
    edges: list[tuple[int, int, tuple[int, Key]]] = []  # number of a pair, action, next pair
    for s, here in enumerate(reached):  # children come later
        for key, state in here.items():
            i = number[s, key] = len(states)
            origin.append(s)
            states.append(state)
            unchecked = ended[s] and not check_last
            safe.append(bool(unchecked or is_safe(state, strict)))
            for a in np.flatnonzero(mdp.allowed[s] & safe[i]).tolist():
                y = int(mdp.child[s, a])
                after = charge(state, mdp.cost[s, a], accounting, gamma, last=ended[y])
                # the accountings other than "sum" compare a score with those before it
                memory = () if accounting == "sum" else (after.peak, after.score)
                key_after = (after.z, *memory)
                reached[y].setdefault(key_after, after)
                edges.append((i, a, (y, key_after)))
    child = np.full((len(states), mdp.child.shape[1]), -1)
    for i, a, pair in edges:
        child[i, a] = number[pair]
    z = [state.z for state in states]
    names = [mdp.names[s] for s in origin]
    return Augmented(
        child=child,
        cost=mdp.cost[origin],
        task=mdp.task[origin],
        reference=mdp.reference[origin],
        chance=mdp.chance[origin],
        names=tuple(zip(names, z, strict=True)),
        gamma=mdp.gamma,
        signed=mdp.signed,
        safe=np.array(safe),
        origin=np.array(origin),
        z=np.array(z),
        total=np.array([state.total for state in states]),
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
