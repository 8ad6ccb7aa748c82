"""How well a value network knows what is to come, by position."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from ..baselines.re_control import ValueNetwork
from ..baselines.value_training import outcomes, value_source, with_rows
from ..critic.latent import ENCODE
from ..critic.rollouts import Rollout
from ..policy import Policy

POSITIONS = (0, 8, 16, 24)
OUTCOMES = ("reward", "cost")
COLUMNS = "outcome position n explained correlation correlation_within_prompt".split()


def expectations(
    network: ValueNetwork, policy: Policy, rollouts: Sequence[Rollout]
) -> pd.DataFrame:
    """Return what a value network expects after every prefix of rollouts, and what came of them.

    Returns
    -------
    DataFrame
        One row per prefix: ``prompt_id``, ``position`` (tokens of the response so far), ``reward``
        and ``cost`` (expected), ``final_reward`` and ``final_cost`` (NaN where a scorer failed).
    """
    rollouts = with_rows(policy, rollouts)
    source, finals = value_source(policy, rollouts, memory_gb=0), outcomes(rollouts)
    frames = []
    for at in range(0, len(rollouts), ENCODE):
        index = range(at, min(at + ENCODE, len(rollouts)))
        x = source.take(index).to(network.centre.device, torch.float32)
        with torch.inference_mode():
            expected = network(x.hidden)[x.mask].cpu()  # (rows, 2)
        owner = [i for i in index for _ in source.responses[i]]
        # 1 where the bare prompt has no row
        first = [len(rollouts[i].words) + 1 - len(source.responses[i]) for i in index]
        position = [
            start + t
            for start, i in zip(first, index, strict=True)
            for t in range(len(source.responses[i]))
        ]
        numbers = torch.cat([expected, finals[owner]], dim=1).double().numpy()
        frame = pd.DataFrame(numbers, columns=[*OUTCOMES, *(f"final_{name}" for name in OUTCOMES)])
        frames.append(
            frame.assign(prompt_id=[rollouts[i].prompt_id for i in owner], position=position)
        )
    return pd.concat(frames, ignore_index=True)


def value_table(expected: pd.DataFrame, positions: Sequence[int] = POSITIONS) -> pd.DataFrame:
    """Return how expectations agree with outcomes, by outcome and position.

    Parameters
    ----------
    expected : DataFrame
        From `expectations`. Responses that have ended before a position are not in its row.

    Returns
    -------
    DataFrame
        ``outcome``, ``position``, ``n``, ``explained`` (1 - mean squared error / variance: share of
        the variance, below 0 when the mean would say more), ``correlation``, and
        ``correlation_within_prompt`` (of the deviations from the mean of each prompt: what steering
        lives on; undefined at position 0, where all responses to a prompt have one o_t).
    """
    rows = []
    for name in OUTCOMES:
        for position in positions:
            here = expected[(expected["position"] == position) & expected[f"final_{name}"].notna()]
            if not len(here):
                continue
            said, came = here[name], here[f"final_{name}"]
            apart = [x - x.groupby(here["prompt_id"]).transform("mean") for x in (said, came)]
            explained = math.nan
            if came.nunique() > 1:
                explained = 1 - float(((said - came) ** 2).mean() / came.var(ddof=0))
            within = _correlation(*apart) if position else math.nan
            rows.append([name, position, len(here), explained, _correlation(said, came), within])
    return pd.DataFrame(rows, columns=COLUMNS)


def _correlation(a: pd.Series, b: pd.Series) -> float:
    """Return Pearson's correlation; NaN where one of the two does not vary."""
    return float(np.corrcoef(a, b)[0, 1]) if min(a.std(ddof=0), b.std(ddof=0)) > 0 else math.nan
