"""How much memory there is, how much is left, and how a device says that nothing is. Knows nothing
of models.
"""

import os
from pathlib import Path

import torch

GIB = 2**30


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return (
        os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "sysconf")
        else 4 * GIB
    )


def installed_bytes() -> int:
    """Return the bytes of memory of this machine, or of the control group that this process is
    confined to.
    """
    size = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "sysconf")
        else 4 * GIB
    )
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(size, int(text)) if text.isdigit() else size


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out; on a CPU torch raises a plain
    ``RuntimeError``.
    """
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)
