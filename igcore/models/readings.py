"""The scores of fixed texts under an embedded scorer, kept in the cache of the downloads.

`igcore.contract` finds whether a scorer keeps its contract by reading these texts four times, which
takes seconds for a language model. The name of a file covers all that the scores depend on.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from ..errors import RunError
from ..files import digest_of, file_digest, replace_file
from ..scorers import Scorer, Texts
from .assets import home


def kept_readings(scorer: Scorer, texts: Texts, read: Callable[[], np.ndarray]) -> np.ndarray:
    """Return what `read` found or finds now: four readings of n texts, (4, n).

    A file that is damaged, or was written for something else, is ignored, and so is a cache that
    cannot be read or written. Readings with a failure are not kept.
    """
    model = getattr(getattr(scorer, "backbone", None), "model", None)
    place = [model.device.type, str(model.dtype)] if model else []
    cpu = [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    code = [file_digest(file) for file in sorted(Path(__file__).parent.parent.rglob("*.py"))]
    versions = [version(name) for name in ("numpy", "torch", "transformers")]
    key = digest_of([scorer.digest, place, cpu, code, versions, texts])
    path = home() / f"readings-{key}.json"
    with suppress(OSError, ValueError, TypeError):
        digest, numbers = json.loads(path.read_text(encoding="utf-8"))
        if digest == digest_of([key, numbers]):
            return np.array(numbers)
    numbers = read().tolist()
    if np.isfinite(numbers).all():
        with suppress(RunError):
            replace_file(path, json.dumps([digest_of([key, numbers]), numbers]))
    return np.array(numbers)
