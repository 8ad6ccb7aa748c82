"""What a device has left, and how it says that nothing is. Knows nothing of models."""

import os

import torch

GIB = 2**30


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 * GIB


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out; on a CPU torch raises a plain ``RuntimeError``."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
