"""The scores of fixed texts under an embedded scorer, kept in the cache of the downloads.

`igcore.contract` finds whether a scorer keeps its contract by reading these texts four times, which
takes seconds for a language model. What it finds depends on nothing but the key of the file.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RunError
from ..files import digest_of, file_digest, replace_file
from .assets import home

Numbers = npt.NDArray[np.float64]


def kept_readings(scorer: Any, texts: Sequence[str], read: Callable[[], Numbers]) -> Numbers:
    """Return what `read` found, or finds now: four readings of n texts, (4, n).

    A file that is damaged, or not of these texts and this scorer, is ignored, and so is a cache
    that cannot be read or written. Readings with a failure are not kept.
    """
    model = getattr(getattr(scorer, "backbone", None), "model", None)
    place = [] if model is None else [model.device.type, str(model.dtype)]
    place += [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    code = [file_digest(file) for file in sorted(Path(__file__).parent.parent.rglob("*.py"))]
    versions = [version(name) for name in ("numpy", "torch", "transformers")]
    key = digest_of([scorer.digest, place, code, versions, texts])
    path = home() / f"readings-{key}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        file = json.loads(path.read_text(encoding="utf-8"))
        found = np.array(file["readings"], float)
        sound = file["digest"] == digest_of([key, file["readings"]])
        if sound and found.shape == (4, len(texts)) and np.isfinite(found).all():
            return found
    found = read()
    if np.isfinite(found).all():
        numbers = found.tolist()
        with suppress(RunError):
            file = {"digest": digest_of([key, numbers]), "readings": numbers}
            replace_file(path, json.dumps(file))
    return found
