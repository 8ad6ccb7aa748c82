"""The smallest instances on which a theorem fails once a condition is dropped.

Every function returns the MDP and, where there is one, the budget d. All numbers are exact
(Fraction). Tokens are letters and digits, and a prefix is a string. An entry of a table is (safety
cost, task cost) of the prefix's last token; of both, higher is worse.
"""

from fractions import Fraction as F

from igstudy.theory.mdp import MDP, token_mdp

# under d = 2: (+3, -2) ends within budget but is rejected on the way; (-5, +6) banks credit, which
# lets a cost of 6 pass
CREDIT = {"false rejection": (3, -2), "credit banking": (-5, 6)}


def infeasible_start() -> tuple[MDP, int]:
    """Return an instance without a safe trajectory (Theorem 2 needs a finite value).

    Every trajectory costs 3 or 4 and d = 2, so that all policies tie at infinity.
    """
    return token_mdp({"a": (F(3), F(0)), "b": (F(4), F(1))}), 2


def small_n() -> tuple[MDP, int]:
    """Return an instance in which a small n makes an unsafe policy optimal (Theorem 2, finite n).

    "a" is unsafe with task 0, "b" is safe with task .6, and n* = .6.
    """
    return token_mdp({"a": (F(1), F(0)), "b": (F(0), F(3, 5))}), 0


def signed_cost(name: str) -> tuple[MDP, int]:
    """Return an instance with the signed costs of one entry of `CREDIT` (without C >= 0).

    The constraint is on the running sum, and d = 2.
    """
    first, second = map(F, CREDIT[name])
    return token_mdp({"a": (first, F(0)), "ab": (second, F(0))}, signed=True), 2


def boundary() -> MDP:
    """Return an MDP in which only the closed inequality accepts "a" at d = 1.

    The choice is between "a" (task .1, cost 1) and "b" (task .9, cost 0).
    """
    return token_mdp({"a": (F(1), F(1, 10)), "b": (F(0), F(9, 10))})


def aliased_prompts() -> tuple[MDP, int]:
    """Return an instance in which phi = length merges two prompts that need different tokens.

    Nature picks prompt 0 or 1; the safe token is x after 0 and y after 1.
    """
    free, harm = (F(0), F(0)), (F(1), F(0))
    return token_mdp(
        {"0": free, "1": free, "0x": free, "0y": harm, "1x": harm, "1y": free}, chance=("",)
    ), 0


def chance_cost() -> tuple[MDP, int]:
    """Return an instance in which a policy without z must be cautious.

    Nature charges 0 or 1; then the choice is "r" (task .2, cost 1) or "s" (task 1), and d = 1. With
    z the optimum is .60. The best almost surely safe policy that sees the length alone has 1.
    """
    risky, mild = (F(1), F(1, 5)), (F(0), F(1))
    table = {"0": (F(0), F(0)), "1": (F(1), F(0)), "0r": risky, "0s": mild, "1r": risky, "1s": mild}
    return token_mdp(table, chance=("",)), 1


def step_actions(n: int, actions: int) -> MDP:
    """Return an MDP of one choice with values v_n(a) = 1{a <= n}, a < `actions` (Lemma 3(c)).

    The lemma is in appendix B of the paper. For any finite number of actions the minimum rises to 1
    with n. With more actions than n, however large n is, it stays 0.
    """
    return token_mdp({(a,): (F(0), F(a <= n)) for a in range(actions)})
