"""Batches that are halved when memory runs out."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ..errors import PolicyError
from .device import out_of_memory

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("igcore")


def halving(items: Sequence[T], size: int, work: Callable[[Sequence[T]], list[R]]) -> Iterator[R]:
    """Yield the results of `work` on batches of at most `size`, halved when memory runs out.

    Raises
    ------
    PolicyError
        When memory runs out for a single item.
    """
    at = 0
    while at < len(items):
        batch = items[at : at + size]
        try:
            done = work(batch)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            done = None
        if done is not None:  # `[]` is a result, too
            yield from done
            at += len(batch)
        elif len(batch) == 1:
            raise PolicyError(
                "memory ran out for a single text; lower n_samples, keep or max_new_tokens, or "
                "load the policy or the scorer in a smaller dtype"
            )
        # outside the except block: there the error still holds the frames, and so the tensors, that
        # filled the memory, and the next try would run out again
        else:
            # the smaller size stays: another batch of the old size would fail again
            size = len(batch) // 2
            log.warning(
                "memory ran out with %d prompts at a time; going on with %d; only near ties "
                "may change",
                len(batch),
                size,
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
