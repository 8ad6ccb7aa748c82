"""How many prompts a run takes, before any is downloaded."""

import math
from collections.abc import Mapping

import numpy as np

from ..models.prompts import SPLITS, check_prompts, load_prompts

# published sizes of the prompt sets that would have to be downloaded
WHOLE = {"rtp": 623, "hex-phi": 300}
TEST_PARTS = {"hh-rlhf": 12451, "pku-saferlhf": 759}  # as the paper's percentages have it
SHARES = {"all": 1.0} | dict(zip(SPLITS, np.diff([0.0, *SPLITS.values()]), strict=True))


def count(prompts: str | Mapping, split: str, limit: int | None) -> float:
    """Return how many prompts a run takes, NaN when that is not known. Downloads nothing."""
    source, options = check_prompts(prompts)
    size = math.inf
    if source in WHOLE:
        size = round(WHOLE[source] * SHARES[split])
    elif source not in TEST_PARTS:
        size = len(load_prompts(prompts, split))
    elif (split, options.part) in (("all", "test"), ("test", None), ("all", None)):
        size = TEST_PARTS[source]
    least = min(size, limit or math.inf)
    return math.nan if math.isinf(least) else least
