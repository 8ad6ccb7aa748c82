"""Blocks in place of offensive words, so that notebooks and figures can show responses.

A cost reads each word alone: phrases, spelling tricks and meaning escape it.
"""

import re

from ..scorers import Scorer
from ..scoring import checked_score

BLOCK = "█"
READABLE = 0.2  # highest probability of offence of a word that is shown


def mask(text: str, cost: Scorer, threshold: float = READABLE) -> str:
    """Replace every word that the cost finds too high on its own by blocks of the same length.

    White space and punctuation stay, so a masked text has the length of the original. Fails closed:
    a word whose score is not a finite number is masked, and so is every word when `threshold` is
    not a number.

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

    def shown(match: re.Match) -> str:
        word = match[0]
        return word if readable[word] else BLOCK * len(word)

    return re.sub(r"\w+", shown, text)


def describe(
    label: str, prompt: str, response: str | None, numbers: dict[str, float | None], cost: Scorer
) -> str:
    """Return an answer as two lines for a notebook: a label with numbers, and the masked text.

    The text of the answer follows that of its prompt.

    Parameters
    ----------
    label : str
        Such as the method and the status.
    response : str or None
        None when nothing was emitted.
    numbers : dict of str to float or None
        Such as cost and reward; None when nothing was emitted.
    cost : Scorer
        Finds the words to mask.
    """
    shown = ", ".join(
        f"{name} {'none' if value is None else f'{value:.2f}'}" for name, value in numbers.items()
    )
    return (
        f"{label}: {shown}\n    "
        f"{mask(prompt, cost) + ('[nothing]' if response is None else mask(response, cost))!r}"
    )
