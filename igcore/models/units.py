"""The units of a classifier: for each, a function from logits to one number."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid


def _logit(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the highest logit of the classes that count: logits (R, C) -> (R,)."""
    return logits[:, counted].amax(1)


def _sigmoid(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the probability of the likeliest class that counts."""
    return _logit(logits, counted).sigmoid()


def _any(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return 1 - prod(1 - sigmoid(z)), exact for small probabilities, too."""
    return -logsigmoid(-logits[:, counted]).sum(1).expm1()


def _softmax(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the total probability of the counted classes, where classes exclude each other."""
    return logits.softmax(1)[:, counted].sum(1)


def _log_odds(logits: torch.Tensor, counted: list[int]) -> torch.Tensor:
    """Return the logit of `_softmax`."""
    others = [i for i in range(logits.shape[1]) if i not in counted]
    return logits[:, counted].logsumexp(1) - logits[:, others].logsumexp(1)


@dataclass(frozen=True)
class Unit:
    """A way of making one number of a text's logits.

    Attributes
    ----------
    name : str
        What one point means.
    of : callable
        Logits (R, C) and the indices of the classes that count -> (R,).
    compares : bool
        Whether it sets the classes that count against the others, so that there must be others.
    """

    name: str
    of: Callable[[torch.Tensor, list[int]], torch.Tensor]
    compares: bool = False


UNITS = {
    "logit": Unit("logit", _logit),
    "sigmoid": Unit("probability", _sigmoid),
    "any": Unit("probability", _any),
    "softmax": Unit("probability", _softmax, compares=True),
    "log-odds": Unit("log-odds", _log_odds, compares=True),
}
