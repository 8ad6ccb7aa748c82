"""What a run would have given under other settings, read off its records wherever that is exact.

Nothing is decoded.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..errors import ParameterError
from ..verdict import within
from .statistics import STATUSES

REPLAYED = "best-of-n-lagrangian"
# methods whose search never looks at the budget
BUDGET_FREE = ("base", "best-of-n", "best-of-n-lagrangian", "beam-lagrangian")
# what only decoding would tell: a record keeps one text of N, and the seconds and tokens of all
UNKNOWN = (
    "response tokens finished n_tokens peak_cost z_final z_trace block_ends grid_ends "
    "policy_tokens forward_tokens scorer_tokens near_ties generate_s cost_s reward_s critic_s "
    "score_s digest"
).split()
SAFE, ABSTAINED, UNSAFE = STATUSES


def replay_best_of_n(records: pd.DataFrame, n: int, lagrange_multiplier: float) -> pd.DataFrame:
    """Return what Best-of-N would have given with fewer samples or another multiplier.

    Exact, for sample i of a prompt is the same for every N above i, and lambda only ranks what was
    drawn: the answer is the one of the first `n` samples with the least c_task + lambda C, of
    equals the first.

    Parameters
    ----------
    records : DataFrame
        Lines of ``best-of-n-lagrangian`` with at least `n` samples.
    n : int
        Samples kept [N].
    lagrange_multiplier : float
        lambda; 0 gives ``best-of-n``.

    Returns
    -------
    DataFrame
        A line for each, with the ``status``, ``reason``, ``reward``, ``cost`` and counted work of
        that run; NaN or None stands for what only decoding would tell (`UNKNOWN`).

    Raises
    ------
    ParameterError
        For another method, or fewer than `n` samples.
    """
    return pd.DataFrame(
        [_best_of(line, n, float(lagrange_multiplier)) for line in records.to_dict("records")],
        columns=records.columns,
    )


def _best_of(line: Mapping, n: int, multiplier: float) -> dict:
    if line["method"] != REPLAYED:
        raise ParameterError(
            f"method {line['method']!r} cannot be replayed; give lines of {REPLAYED!r}"
        )
    finals = line["finals"]
    if not 1 <= n <= len(finals):
        raise ParameterError(
            f"n is {n}, but prompt {line['prompt_id']!r} has {len(finals)} samples; give 1 "
            f"to {len(finals)}"
        )
    losses = [_lagrangian(reward, cost, multiplier) for reward, cost in finals[:n]]
    reward, cost = finals[losses.index(min(losses))]  # the first of equals, as in the search
    unknown = dict.fromkeys(UNKNOWN, math.nan) | {"response": None, "digest": None}
    known = {"reward": reward, "cost": cost, "fail_open_cost": cost, "finals": finals[:n]}
    spent = {"samples_drawn": n, "scorer_calls": 2 * n}
    settings = {"n_samples": n, "lagrange_multiplier": multiplier}
    return _judged(line | unknown | known | spent | settings)


def _lagrangian(reward: float | None, cost: float | None, multiplier: float) -> float:
    """Return c_task + lambda C; infinite where a score is unknown."""
    return math.inf if None in (reward, cost) else -reward + multiplier * cost


def _judged(line: dict) -> dict:
    """Return the line of a method without a final check with the status that its cost earns.

    An unknown cost is not within the budget.
    """
    cost = math.nan if line["cost"] is None else line["cost"]
    if within(cost, pd.Series({"strict": False} | line)):
        return line | {"status": SAFE, "reason": ""}
    reason = "scorer_error" if math.isnan(cost) else "over_budget"
    return line | {"status": UNSAFE, "reason": reason}


def replay_budgets(records: pd.DataFrame, budgets: Sequence[float]) -> pd.DataFrame:
    """Return what methods that never look at the budget would have given under others.

    The texts are the same; they are judged anew.

    Parameters
    ----------
    records : DataFrame
        Lines of methods in `BUDGET_FREE`.
    budgets : sequence of float
        Units of the cost model.

    Raises
    ------
    ParameterError
        For a method that looks at the budget.
    """
    for method in records["method"].unique():
        if method not in BUDGET_FREE:
            raise ParameterError(
                f"method {method!r} may look at the budget; decode it anew, or give one of "
                f"{', '.join(BUDGET_FREE)}"
            )
    lines = records.to_dict("records")
    unknown = {"z_final": math.nan, "z_trace": None, "digest": None}
    found = [
        _judged(line | unknown | {"budget": float(budget)}) for budget in budgets for line in lines
    ]
    return pd.DataFrame(found, columns=records.columns)


def judged_under(records: pd.DataFrame, budget: float) -> pd.DataFrame:
    """Return the same answers as another budget judges them; an abstention stays one.

    An answer is safe where the cost of its text is within the budget. Unlike `replay_budgets` this
    is for any method, whose search may have looked at its own budget.
    """
    settings = pd.Series({"strict": bool(records["strict"].iloc[0]), "budget": budget})
    inside = within(records["cost"].astype(float), settings)  # never for NaN
    status = np.select([records["status"] == ABSTAINED, inside], [ABSTAINED, SAFE], UNSAFE)
    return records.assign(status=status, budget=budget)


def unsafe_samples(records: pd.DataFrame) -> np.ndarray:
    """Return which samples of each line are not within its budget.

    Returns
    -------
    ndarray of bool, shape (lines, N)
        True where the cost is unknown.
    """
    settings = pd.Series({"strict": False} | records.iloc[0].to_dict())
    costs = [[cost for _, cost in line.finals[: line.n_samples]] for line in records.itertuples()]
    return ~within(np.array(costs, dtype=float), settings)
