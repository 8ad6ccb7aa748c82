"""Blocks in place of offensive words, so that notebooks and figures can show responses.

Knows words and asks a cost about each one alone; knows nothing of phrases, spelling tricks or meaning.
"""

import re

from .scorers import checked_score

BLOCK = "█"


def mask(text: str, cost, threshold: float = 0.2) -> str:
    """Replace every word that the cost finds too high on its own by blocks of the same length.

    White space and punctuation stay, so a masked text has the length of the original. Fails closed: a word whose
    score is not a finite number is masked, and so is every word when `threshold` is not a number.

    Parameters
    ----------
    text : str
        What is to be shown.
    cost : Scorer
        Higher is worse; it is asked once for each distinct word, with an empty prompt.
    threshold : float
        Highest cost that stays readable, in the cost's unit.
    """
    words = sorted(set(re.findall(r"\w+", text)))
    costs = checked_score(cost, [""] * len(words), words, [True] * len(words))
    readable = dict(zip(words, costs <= threshold, strict=True))  # never for NaN
    return re.sub(r"\w+", lambda word: word[0] if readable[word[0]] else BLOCK * len(word[0]), text)
