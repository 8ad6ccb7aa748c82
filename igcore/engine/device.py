"""The devices of this machine, their memory, and the errors of a full memory."""

from pathlib import Path
from typing import Any

import psutil
import torch

from ..errors import ParameterError, one_line

CGROUP = Path("/sys/fs/cgroup/memory.max")


def usable(device: str) -> str:
    """Return a device, or raise ``ParameterError`` when a model cannot be put there."""
    available = ["auto", "cpu"]
    # check_available: a build of torch for CUDA names CUDA also on a machine without a GPU
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        numbers = range(torch.accelerator.device_count())
        available += [accelerator.type, *(f"{accelerator.type}:{i}" for i in numbers)]
    if device not in available:
        raise ParameterError(
            f"device is {device!r}, which this machine does not have; choose one of "
            f"{', '.join(available)}"
        )
    return device


def device_of(model: Any) -> torch.device:
    """Return the device on which a model computes, also where its weights are offloaded."""
    device: torch.device = model.device
    # offloaded weights are on "meta", where nothing can be computed: accelerate loads the weights
    # of a module when it runs, and its hook knows where
    if device.type == "meta":
        hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
        places = [getattr(hook, "execution_device", None) for hook in hooks]
        device = next((torch.device(place) for place in places if place is not None), device)
    return device


def multiplies_bfloat16() -> bool:
    """True if this processor has units for bfloat16."""
    # torch has no public name for it before 2.11
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def installed_bytes() -> int:
    """Return the bytes of memory of this machine, or of the control group around this process."""
    # in a container the limit of the group counts: beyond it the kernel ends the process
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else "max"
    installed = int(psutil.virtual_memory().total)
    return min(installed, int(limit)) if limit.isdigit() else installed


def out_of_memory(error: BaseException) -> bool:
    """True if an error means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "can't allocate memory" in one_line(error)  # on a CPU torch raises a plain RuntimeError
