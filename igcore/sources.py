"""Where a table comes from: the runs that it was made of, and the commit and the processor that wrote it, as a file beside it.

Knows manifests and this machine; knows no table. A run whose manifest does not say something, such as an old one, has null there.
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

CODE = ("igcore", "notebooks", "params", "Snakefile")  # what a walk writes, figures above all, is no change of what wrote it


def of_runs(profile: str, names: Iterable[str]) -> dict[str, dict]:
    """Return what the manifests of finished runs say, for `sidecar`.

    Parameters
    ----------
    profile : str
        Folder of `runs`.
    names : iterable of str
        Of runs below it, in any order and any number of times, such as the column ``run`` of records. Of a run in shards each
        shard is named. Patterns are read as `igcore.runs.load_runs` does, and may be of other folders: ``*``, ``critics/*``.

    Returns
    -------
    dict
        By ``<profile>/<folder>``: ``root``, the hash over lines, parameters and prompts, and the ``commit`` and the ``processor``
        of the run.
    """
    from .runs import EXAMPLES, root  # here: it needs torch, and those who only write tables do not

    base = root() / "runs" / profile
    found = {
        folder
        for name in set(names)
        for shards in ("", ".*-of-*")
        for folder in base.glob(name + shards)
        if (folder / "manifest.json").exists() and not (name == "*" and folder.name.startswith(EXAMPLES))
    }
    return {f"{profile}/{folder.relative_to(base).as_posix()}": _said(folder) for folder in sorted(found)}


def _said(folder: Path) -> dict[str, str | None]:
    said = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return {"root": said.get("root"), "commit": said.get("git_commit"), "processor": said.get("processor")}


def sidecar(sources: Mapping[str, dict]) -> str:
    """Return the text of the file beside a table: its ``runs``, see `of_runs`, and by what it was ``written_by``.

    It holds no time: the same runs on the same machine give the same bytes.
    """
    made = {"runs": dict(sources), "written_by": {"commit": commit(), "processor": processor()}}
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def processor() -> str:
    """Return the name of the CPU and, where torch is in use and has one, of the GPU."""
    torch = sys.modules.get("torch")
    gpu = [torch.cuda.get_device_name()] if torch and torch.cuda.is_available() else []
    return ", ".join([_cpu(), *gpu])


def _cpu(described: Path = Path("/proc/cpuinfo")) -> str:
    text = described.read_text(encoding="utf-8") if described.is_file() else ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.M)
    return named[1].strip() if named else platform.processor() or platform.machine()


@cache
def commit() -> str | None:
    """Return the commit of the code, with ``+`` when `CODE` has changes; None outside a repository.

    Asked once: what a process runs is what it began with.
    """
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", *CODE], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")
