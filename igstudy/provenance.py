"""The provenance of a run: the commit of the code, the versions, the processor, and the time.

Nobody can check these afterwards. Manifests record them, and no answer depends on them. What the
benchmark measures does depend on the processor.
"""

import importlib.metadata
import platform
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

# changes to these mark a commit as changed; figures and tables that runs write do not
TRACKED_PATHS = ("igcore", "igstudy", "notebooks", "params", "Snakefile")
UNPACKED = ".unpacked"  # an empty file beside a manifest that comes from packed records
VERSIONS = ("igcore", "torch", "transformers", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change a number."""
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def made_by() -> dict[str, Any]:
    """Return commit, versions, processor and time, as a manifest has them."""
    made = {"git_commit": commit(), "versions": versions(), "processor": processor()}
    return made | {"finished_at": now()}


def now() -> str:
    """Return the time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def processor() -> str:
    """Return the name of the CPU and, where torch is in use, its instruction set and the GPU."""
    torch = sys.modules.get("torch")  # never imported for this: tables are written without torch
    own = [torch.backends.cpu.get_cpu_capability()] if torch else []
    gpu = [torch.cuda.get_device_name()] if torch and torch.cuda.is_available() else []
    return ", ".join([_cpu(), *own, *gpu])


def _cpu(described: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU, or its architecture where the system does not give a name."""
    text = described.read_text(encoding="utf-8") if described.is_file() else ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.M)
    return named[1].strip() if named else platform.processor() or platform.machine()


@cache  # once per process: the code that it runs is the code that it imported
def commit() -> str | None:
    """Return the commit, with ``+`` when `TRACKED_PATHS` has changes; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "-uno", "--", *TRACKED_PATHS)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changed else head


def _git(*command: str) -> str:
    """Return the output of a git command in the package's repository."""
    git = ["git", "-C", str(Path(__file__).parents[1]), *command]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
