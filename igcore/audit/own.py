"""A user's own scorer: found by name, and asked whether it is a function of the text."""

import os
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

import numpy as np

from ..errors import ParameterError
from ..scorers import Scorer, as_scorer

PROMPT = "How do plants grow?"
TEXTS = ["They need light.", "They need light and water", "No.", "Rain, and a tree."]
ODD = {
    "empty text": "",
    "emoji": "Thanks \U0001f331\u200d\U0001f33b!",
    "long text": "word " * 20_000,
}


@lru_cache(maxsize=1)  # a model is loaded once
def scorer_of(name: str) -> Scorer:
    """Return the cost named ``NAME`` or ``module:function``.

    Raises
    ------
    ParameterError
        When there is none, or it is no cost.
    """
    if ":" not in name:
        return as_scorer(name, "cost")
    if os.getcwd() not in sys.path:  # a program's path begins where the program lies
        sys.path.insert(0, os.getcwd())
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ParameterError(
            f"cost {name!r} cannot be imported ({error}); give module:function, with the module in "
            "this folder or installed"
        ) from None
    return as_scorer(found, "cost")


def numbers(
    scorer: Any, prompts: Sequence[str], texts: Sequence[str], finished: bool
) -> np.ndarray:
    """Return the scores of one call (n,); infinite where they are not n finite numbers."""
    n = len(texts)
    try:
        given = scorer.score(list(prompts), list(texts), [finished] * n)
        found = np.asarray(given)
        readable = found.shape == (n,) and found.dtype.kind in "fiu"
        if not readable or np.any(np.ma.getmask(given)):
            return np.full(n, np.inf)
    except Exception:  # whatever it is, this scorer calls no text safe
        return np.full(n, np.inf)
    return np.where(np.isfinite(found), found, np.inf).astype(float)


def asked(scorer: Scorer, texts: Sequence[str], finished: bool = True) -> np.ndarray:
    """Return the scores of one call with one prompt."""
    return numbers(scorer, [PROMPT] * len(texts), texts, finished)


def examine(scorer: Scorer) -> Iterator[tuple[str, str, bool]]:
    """Yield what was asked of a scorer, what it answered, and whether that is as it should be."""

    def one_by_one(finished: bool = True) -> np.ndarray:
        return np.concatenate([asked(scorer, [text], finished) for text in TEXTS])

    alone = one_by_one()
    yield "alone", f"{alone.tolist()}", bool(np.isfinite(alone).all())
    others = {
        "again": one_by_one(),
        "in a batch": asked(scorer, TEXTS),
        "in reverse": asked(scorer, TEXTS[::-1])[::-1],
        "among copies": asked(scorer, TEXTS * 8)[-len(TEXTS) :],
    }
    for name, found in others.items():
        same = np.allclose(found, alone, rtol=1e-5, atol=1e-6)  # up to the rounding of float32
        yield name, f"{found.tolist()}", bool(same)
    for name, text in ODD.items():
        (found,) = asked(scorer, [text])
        yield name, f"{found:.6g}", bool(np.isfinite(found))
    prefixes = one_by_one(finished=False)  # these may differ: a scorer may know a prefix for one
    yield "unfinished", f"{prefixes.tolist()}", bool(np.isfinite(prefixes).all())
