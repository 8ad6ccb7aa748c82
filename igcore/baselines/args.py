"""How ARGS weighs a token: its probability under the policy against what the scorers say of the
text with it.

Knows numbers; lower is better, as everywhere. ARGS itself is an option of the one loop
(`igcore.beams`): blocks of one token, of which `igcore.engine.engine.Engine.propose` offers the k most
probable.
"""

import math
from collections.abc import Callable

# name -> f(log pi(token), c_task + lambda C of the text with it, omega, w)
TOKEN_SCORES: dict[str, Callable[[float, float, float, float], float]] = {
    "probability": lambda log_p, score, omega, w: (
        -omega * math.exp(log_p) + score
    ),  # as the paper prints it
    "log-probability": lambda log_p, score, omega, w: -omega * log_p + score,
    # the public code of ARGS adds w * reward to the logit, which differs from log pi by a constant
    # of the position
    "public": lambda log_p, score, omega, w: -log_p + w * score,
}
