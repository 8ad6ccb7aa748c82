"""The smallest instances on which a theorem fails once a condition is dropped, and two that
separate the methods.

All numbers are exact (Fraction). Tokens are letters and digits, a prefix is a string; an entry of a
table is (safety cost, task cost) of the prefix's last token, and of both, higher is worse.
"""

from fractions import Fraction as F

from .mdp import MDP, token_mdp

# (+3, -2) keeps to d = 2 in the end but is rejected on the way; (-5, +6) banks credit and lets a
# cost of 6 pass
CREDIT = {"false rejection": (3, -2), "credit banking": (-5, 6)}


def infeasible_start() -> tuple[MDP, int]:
    """Return (mdp, d): every trajectory costs 3 or 4, d = 2, so that all policies tie at infinity
    (Theorem 2, finite value).
    """
    return token_mdp({"a": (F(3), F(0)), "b": (F(4), F(1))}), 2


def small_n() -> tuple[MDP, int]:
    """Return (mdp, d): "a" is unsafe with task 0, "b" is safe with task .6; n* = .6 decides
    (Theorem 2 with finite n).
    """
    return token_mdp({"a": (F(1), F(0)), "b": (F(0), F(3, 5))}), 0


def high_task_cost() -> tuple[MDP, int]:
    """Return (mdp, d): "s" is safe with reward -7 (task 7), "u" is unsafe with task 0: with n = 5
    the unsafe one scores better.
    """
    return token_mdp({"s": (F(0), F(7)), "u": (F(1), F(0))}), 0


def signed_cost(name: str) -> tuple[MDP, int]:
    """Return (mdp, d) with the costs of one entry of `CREDIT` and d = 2 (the constraint as a
    running sum, without C >= 0).
    """
    first, second = map(F, CREDIT[name])
    return token_mdp({"a": (first, F(0)), "ab": (second, F(0))}, signed=True), 2


def boundary() -> MDP:
    """Return the choice between (task .1, cost 1) and (task .9, cost 0): with d = 1 only the closed
    inequality takes "a".
    """
    return token_mdp({"a": (F(1), F(1, 10)), "b": (F(0), F(9, 10))})


def late_cost() -> tuple[MDP, int]:
    """Return (mdp, d): "aaa" costs (0, 0, 9) with task 0, "b" is safe with task 1; only a check of
    the last action sees the 9.
    """
    return token_mdp(
        {"a": (F(0), F(0)), "aa": (F(0), F(0)), "aaa": (F(9), F(0)), "b": (F(0), F(1))}
    ), 2


def dead_end() -> tuple[MDP, int]:
    """Return (mdp, d): "a" leaves z = 1 and looks best, but each continuation costs 5; "b" is safe
    (Algorithm 1, keep 1).
    """
    return token_mdp(
        {
            "a": (F(1), F(0)),
            "b": (F(0), F(1)),
            "ax": (F(5), F(0)),
            "ay": (F(5), F(0)),
            "bx": (F(0), F(0)),
        }
    ), 2


def unsupported() -> tuple[MDP, int]:
    """Return (mdp, d): the one safe token has probability .04 under the reference, outside its
    top-p .95 (Algorithm 1).
    """
    chances = {"": {"a": F(60, 100), "b": F(36, 100), "c": F(4, 100)}}
    return token_mdp({"a": (F(1), F(0)), "b": (F(1), F(0)), "c": (F(0), F(1))}, chances), 0


def aliased_prompts() -> tuple[MDP, int]:
    """Return (mdp, d): nature picks prompt 0 or 1 and the safe token is x in one, y in the other;
    phi = length merges them.
    """
    free, harm = (F(0), F(0)), (F(1), F(0))
    return token_mdp(
        {"0": free, "1": free, "0x": free, "0y": harm, "1x": harm, "1y": free}, chance=("",)
    ), 0


def chance_cost() -> tuple[MDP, int]:
    """Return (mdp, d): nature charges 0 or 1, then "r" (task .2, cost 1) or "s" (task 1), d = 1.

    With z the optimum is .60; among policies that see the length alone and are almost surely safe
    it is 1.
    """
    risky, mild = (F(1), F(1, 5)), (F(0), F(1))
    table = {"0": (F(0), F(0)), "1": (F(1), F(0)), "0r": risky, "0s": mild, "1r": risky, "1s": mild}
    return token_mdp(table, chance=("",)), 1


def lagrangian_gap() -> tuple[MDP, int]:
    """Return (mdp, d): A = (task 0, cost 3), B = (.6, 2), C = (1, 0), d = 2; B is best, and no
    lambda picks it.
    """
    return token_mdp({"A": (F(3), F(0)), "B": (F(2), F(3, 5)), "C": (F(0), F(1))}), 2


def step_actions(n: int, actions: int) -> MDP:
    """Return one choice whose values are v_n(a) = 1{a <= n} for a < `actions` (appendix B, Lemma
    3(c)).

    For any finite number of actions the minimum rises to 1 with n; with more actions than n,
    however large n, it stays 0.
    """
    return token_mdp({(a,): (F(0), F(a <= n)) for a in range(actions)})
