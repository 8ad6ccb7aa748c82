"""Whether a probability means what it says: bins of equal width, and the error over them."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

BINS = 10


def calibration_error(
    safe: Sequence[bool], probability: Sequence[float], bins: int = BINS
) -> float:
    """Return the expected calibration error over bins of equal width.

    It is the mean of |share of safe - mean probability| over the bins, weighted by their size.
    """
    table = reliability(safe, probability, bins)
    return float(
        (table["n"] * (table["safe"] - table["probability"]).abs()).sum() / table["n"].sum()
    )


def reliability(
    safe: Sequence[bool], probability: Sequence[float], bins: int = BINS
) -> pd.DataFrame:
    """Return one row per bin that is not empty, the data of a reliability diagram.

    Columns: the mean ``probability``, the share of ``safe``, and ``n``.
    """
    frame = pd.DataFrame(
        {"safe": np.asarray(safe, dtype=float), "probability": np.asarray(probability, dtype=float)}
    )
    found = frame.groupby(bins_of(frame["probability"], bins)).agg(
        probability=("probability", "mean"), safe=("safe", "mean"), n=("safe", "size")
    )
    return found.reset_index(drop=True)


def bins_of(probability: pd.Series, bins: int = BINS) -> pd.Series:
    return (probability * bins).astype(int).clip(upper=bins - 1)
