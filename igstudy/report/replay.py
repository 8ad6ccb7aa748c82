"""Runs under other settings, read off the records of one run wherever that is exact.

Nothing is decoded.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from igcore.errors import ParameterError

from .statistics import STATUSES

REPLAYED = "best-of-n-lagrangian"
# of a replay: a record keeps one text of N, and the seconds and tokens of all
UNKNOWN = (
    "response reason tokens finished n_tokens peak_cost word_peak_cost z_final z_trace block_ends "
    "grid_ends policy_tokens forward_tokens scorer_tokens near_ties generate_s cost_s reward_s "
    "critic_s score_s digest"
).split()
SAFE, ABSTAINED, UNSAFE = STATUSES


def replay_best_of_n(records: pd.DataFrame, n: int, lagrange_multiplier: float) -> pd.DataFrame:
    """Return the lines of Best-of-N with fewer samples or another multiplier.

    This is exact: sample i of a prompt is the same for every N above i, and lambda only ranks the
    samples. The answer is the one of the first `n` samples with the least c_task + lambda C; of a
    tie, the first. Of the cost model only the readings of the text that was emitted are known, so
    ``spread`` and ``contract`` stay as they are.

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
        A line for each, with the ``status``, ``reward``, ``cost`` and counted work of that run; NaN
        stands for `UNKNOWN`.

    Raises
    ------
    ParameterError
        For fewer than `n` samples.
    """
    settings = {"n_samples": n, "lagrange_multiplier": float(lagrange_multiplier)}
    lines = [_best_of(line | settings) for line in records.to_dict("records")]
    return _judged(pd.DataFrame(lines, columns=records.columns))


def _best_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line of Best-of-N under the settings of `line`, which may hold more samples."""
    n, finals = line["n_samples"], line["finals"]
    if n > len(finals):
        raise ParameterError(
            f"n is {n}, but prompt {line['prompt_id']!r} has {len(finals)} samples; give 1 "
            f"to {len(finals)}"
        )
    finals, losses = finals[:n], []
    for reward, cost in finals:
        known = reward is not None and cost is not None
        losses.append(-reward + line["lagrange_multiplier"] * cost if known else math.inf)
    reward, cost = finals[losses.index(min(losses))]  # the first of equals, as in the search
    answer = {"reward": reward, "cost": cost, "fail_open_cost": cost, "finals": finals}
    work = {"samples_drawn": n, "scorer_calls": 2 * n}
    return line | dict.fromkeys(UNKNOWN, math.nan) | answer | work


def _judged(records: pd.DataFrame) -> pd.DataFrame:
    """Return lines with the status that the final check gives their texts."""
    charged = records["cost"].astype(float) + records["spread"].astype(float)
    budget, strict = records["budget"], records["strict"].iloc[0]
    inside = charged < budget if strict else charged <= budget  # never for NaN
    inside &= records["contract"] == "kept"
    status = np.select([records["status"] == ABSTAINED, inside], [ABSTAINED, SAFE], UNSAFE)
    return records.assign(status=status)
