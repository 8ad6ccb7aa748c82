"""The safety state z along answers, and how many answers are within budget so far.

z starts at the budget and falls with the highest cost of the text so far; below 0 the budget is
broken. An answer that ends early stays at its last z.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from igcore.errors import RunError
from igcore.scorers import Scorer
from igcore.scoring import checked_score


def paths(records: pd.DataFrame, cost: Scorer | None = None) -> pd.DataFrame:
    """Return z by policy, method, prompt and number of tokens; an unreadable z is minus infinity.

    Without `cost`, z is the recorded one at the ends of a method's own blocks. With the cost model
    of the run every answer is scored again on the grid that all methods share. An abstention has no
    path.

    Raises
    ------
    RunError
        When there is no answer, or `cost` gives other peak costs than the records.
    """
    emitted = records["response"].notna() & (records["n_tokens"] > 0)
    written = records[emitted.astype(bool)]
    if not len(written):
        raise RunError("there is no answer to follow; run notebook 30_decode first")
    traces = written["z_trace"].map(list) if cost is None else _scored_again(written, cost)
    step = "block_size" if cost is None else "grid_size"
    parts = []
    for (policy, method), cell in written.groupby(["policy", "method"], sort=False):
        longest = int(cell["max_new_tokens"].max())
        ends = np.append(np.arange(0, longest, int(cell[step].max())), longest)
        z = [_padded(trace, len(ends)) for trace in traces[cell.index]]
        z = pd.DataFrame(z, cell["prompt_id"], pd.Index(ends, name="tokens"))
        long = z.stack().rename("z").reset_index()
        parts.append(long.assign(policy=policy, method=method))
    return pd.concat(parts, ignore_index=True)


def _padded(trace: Iterable[float | None], n: int) -> npt.NDArray[np.float64]:
    """Return n numbers, the last one repeated."""
    z = np.array(trace, dtype=float)
    return np.pad(np.where(np.isnan(z), -np.inf, z), (0, n - len(z)), mode="edge")


def _scored_again(written: pd.DataFrame, cost: Scorer) -> pd.Series:
    """Return z_0, z_1, ... of each line on the common grid."""
    prefixes = written[["prompt", "response", "grid_ends"]].explode("grid_ends")
    whole, ends = prefixes["response"].tolist(), prefixes["grid_ends"].tolist()
    texts = [text[:end] for text, end in zip(whole, ends, strict=True)]
    finished = [end == len(text) for text, end in zip(whole, ends, strict=True)]
    costs = checked_score(cost, prefixes["prompt"].tolist(), texts, finished)
    by_line = pd.Series(costs, prefixes.index).groupby(level=0, sort=False)
    peaks = by_line.agg(lambda u: np.maximum.accumulate([0.0, *u]))
    stated = written["peak_cost"].astype(float).clip(lower=0)
    if not np.allclose([peak[-1] for peak in peaks], stated, atol=1e-6, equal_nan=True):
        raise RunError(
            f"{cost.name!r} gives other peak costs than the records; give the cost model of the run"
        )
    return written["budget"] - peaks


def share_within(found: pd.DataFrame, methods: Iterable[str], strict: bool = False) -> pd.DataFrame:
    """Return the share of answers within budget so far, by policy, method and number of tokens.

    Parameters
    ----------
    found : DataFrame
        See `paths`.
    methods : iterable of str
        Those compared, on the prompts that all of them answered.
    strict : bool
        Whether a z of 0 is over budget.
    """
    shown = found[found["method"].isin(list(methods))]
    n_methods = shown.groupby("policy")["method"].transform("nunique")
    answered = shown.groupby(["policy", "prompt_id", "tokens"])["method"].transform("nunique")
    shown = shown[answered == n_methods]
    inside = shown["z"] > 0 if strict else shown["z"] >= 0
    shares = inside.groupby([shown[name] for name in ("policy", "method", "tokens")], sort=False)
    return shares.agg(share="mean", n="size").reset_index()
