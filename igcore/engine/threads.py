"""The number of threads that a model computes with: one, or all that torch has.

A decoding step is short, and its threads wait for each other. Where other programs use the cores,
or a container has fewer of them than torch counts, one thread can be many times faster. So both are
tried, once for each model. A call leaves torch's number as it was.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .device import device_of
from .kv_cache import forward, inputs_of, padded
from .prepack import use_prepacked

_FASTER: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()  # all, the faster
_HERE = threading.local()  # has `inside` in a thread that computes
# torch's number before the first of the calls that compute now, once for each of them. torch has a
# number for each thread of Python, but a new thread begins with the last that any thread has set
_BEFORE: list[int] = []
if hasattr(os, "register_at_fork"):  # a forked child has none of the other threads
    os.register_at_fork(after_in_child=_BEFORE.clear)


@contextmanager
def faster_threads(model: PreTrainedModel) -> Iterator[None]:
    """Compute in a with-block with the number of threads that is faster for a model on a CPU."""
    on_cpu = isinstance(model, nn.Module) and device_of(model).type == "cpu"
    before = (_BEFORE[:1] or [torch.get_num_threads()])[0]
    # a call inside a call changes nothing
    if not on_cpu or before == 1 or hasattr(_HERE, "inside"):
        yield
        return
    _BEFORE.append(before)
    _HERE.inside = True
    try:
        torch.set_num_threads(_faster(model, before))
        yield
    finally:
        del _HERE.inside
        torch.set_num_threads(before)  # first: a new thread must not take our number for its own
        _BEFORE.pop()


def _faster(model: PreTrainedModel, most: int) -> int:
    """Return the faster of one thread and the most, for a step of one row."""
    inputs = inputs_of(*padded([[0]], device_of(model)))

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        times = []
        for _ in range(3):  # the first starts the threads
            began = time.perf_counter()
            forward(model, None, None, logits_to_keep=1, **inputs)
            times.append(time.perf_counter() - began)
        return min(times[1:])

    if _FASTER.get(model, (0, 0))[0] != most:
        with use_prepacked(model):
            _FASTER[model] = most, min(1, most, key=seconds)
    return _FASTER[model][1]
