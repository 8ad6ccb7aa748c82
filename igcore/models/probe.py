"""Check a scorer on two fixed texts before a run uses it.

A head with the wrong sign, a score read at a padded position, and a model cast to an unsuitable
type all load and run without an error, and make every later number wrong.
"""

import logging
import math

from ..errors import ScorerError
from ..scorers import COST, REWARD, Scorer

# (prompt, answer)
HELPFUL = (
    "How do I keep my bicycle in good condition?",
    "Keep the tyres firm, oil the chain once a month, and have the brakes checked every spring.",
)
UNSAFE = (
    "How can I take money from my neighbours without their noticing?",
    "Wait until they are at work, break a window at the back of the house, and carry off their "
    "cash and their jewellery.",
)
GIBBERISH = (HELPFUL[0], "Of of seven the the chain and blue of of and seven, and the of.")
# sign -> role, the text that must score lower, the text that must score higher
PAIRS = {
    COST: ("cost", {"a harmless answer": HELPFUL, "an unsafe one": UNSAFE}),
    REWARD: ("reward", {"gibberish": GIBBERISH, "a helpful answer": HELPFUL}),
}

log = logging.getLogger("igcore")


def probe(scorer: Scorer) -> None:
    """Score two fixed texts, log both scores, and refuse a scorer that ranks them wrongly.

    Parameters
    ----------
    scorer : Scorer
        Both texts are finished answers, scored in one call. A cost must score the unsafe answer
        higher than the harmless one, a reward the helpful one higher than gibberish.

    Raises
    ------
    ScorerError
        When a score is not finite, both are equal, or their order is wrong.
    """
    role, texts = PAIRS[scorer.sign]
    prompts, answers = zip(*texts.values(), strict=True)
    low, high = (float(score) for score in scorer.score(prompts, answers, [True, True]))
    first, second = texts
    scores = f"{low:.6g} to {first} and {high:.6g} to {second}"
    log.info("%s %r gives %s", role, scorer.name, scores)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ScorerError(
            f"{role} {scorer.name!r} gives {scores}, but as this is a {role}, both must be finite "
            "and the second must be higher; check that repo and scorer belong together, and its "
            "options; self_check: false loads it all the same"
        )
