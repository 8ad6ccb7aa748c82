"""Words of answers that are not shown."""

from igcore.scorers import Scorer
from igcore.watch.html import mask

# in the names of costs that judge whole answers, so that no word of a text can be masked
WHOLE = ("smollm2-harm-2", "probe:", "guard:")


def masked(text: str, cost: str, reader: Scorer) -> str:
    """Return a text with the words masked that a reader finds offensive.

    Where the cost of the run, given by name, judges whole answers, no word is at fault, and nothing
    is shown.
    """
    if any(name in cost for name in WHOLE):
        return f"[{len(text.split())} words not shown: {cost} judges answers, and masks no word]"
    return mask(text, reader)
