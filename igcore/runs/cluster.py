"""What the jobs of a cluster ask for, by the plan, and why those that failed did.

Snakemake loads this for every job, so it imports no torch. `igcore.runs.needs` makes the plan, in a
process of its own and once a walk; jobs read the file that it leaves.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

MIB = 1024  # of a GiB
PROCESS = 3.0  # GiB of Snakemake, papermill and a kernel with its libraries, beside the models
START = 15.0  # minutes in which a kernel starts and loads its models
MARGIN = 2.0  # nodes differ in speed, and the plan counts no training


@dataclass(frozen=True)
class Need:
    """What the plan knows of one run.

    Attributes
    ----------
    weights, prompt : float
        GiB, as in `igcore.runs.plan.Job`.
    group : int
        Prompts that are answered together.
    hours : float, optional
        At most, of the whole run; None when no speed was measured or given.
    """

    weights: float
    prompt: float
    group: int
    hours: float | None


class Asked:
    """What the jobs of a profile ask a cluster for.

    Parameters
    ----------
    file : Path
        Where the plan is kept.
    plan : sequence of str
        Arguments of `igcore.runs.needs`, to make the plan when it is first needed; none where it is
        only read.
    gpu : bool
        Whether jobs take a GPU.
    gpu_gb : float
        GiB of one GPU; a run that needs more takes several. 0: every job takes one.
    """

    def __init__(self, file: Path, plan: Sequence[str], gpu: bool, gpu_gb: float = 0.0):
        self.file, self.plan, self.gpu, self.gpu_gb = file, plan, gpu, gpu_gb

    @cached_property
    def needs(self) -> dict[str, Need]:
        """Return what the runs need, by name; only those whose models are known."""
        if self.plan:
            command = [sys.executable, "-m", "igcore.runs.needs", str(self.file), *self.plan]
            # what it cannot plan it says itself, and the jobs ask for the defaults
            subprocess.run(command, check=False)
        if not self.file.is_file():
            return {}
        known = json.loads(self.file.read_text(encoding="utf-8"))
        return {run: Need(**need) for run, need in known.items()}

    def of(self, resource: str, job: Mapping[str, Any], defaults: Iterable[str]) -> int | None:
        """Return what a job asks for, in the units of Snakemake.

        Parameters
        ----------
        resource : str
            ``gpu``, ``mem`` (MiB) or ``runtime`` (minutes).
        job : mapping
            Wildcards of a job of notebook 20 or 30, and ``runs``, the names of those that a job
            of notebook 30 decodes one after the other.
        defaults : iterable of str
            Snakemake's default resources, such as ``mem_mb=4000``. What has no default is not asked
            for, as on one machine: None.
        """
        given = dict(default.split("=", 1) for default in defaults)
        default = given.get(resource, given.get(f"{resource}_mb"))
        if resource == "gpu":
            return self._gpus(self._need(job) if self.gpu_gb and given.get("mem_mb") else None)
        if default is None:
            return None
        need = self._need(job)
        asked = None
        if need is not None:
            asked = self._memory(need) if resource == "mem" else _minutes(need, job)
        if asked is None:
            # an expression, such as Snakemake's own default, is left to the cluster
            return int(default) if default.isdigit() else None
        return math.ceil(asked)

    def most(
        self, resource: str, jobs: Iterable[Mapping[str, Any]], defaults: Sequence[str]
    ) -> int | None:
        """Return the most that any of several jobs asks for, see `of`.

        A job array is submitted with the resources of its first job.
        """
        asked = [self.of(resource, job, defaults) for job in jobs]
        return max(filter(None, asked), default=None)

    def _need(self, job: Mapping[str, Any]) -> Need | None:
        """Return what the plan knows of a job: the largest of its runs, and their hours in all."""
        names = job.get("runs", ())
        if "profile" in job:
            # a critic of another profile is in no plan of this one
            own = job["profile"] == self.file.parent.parent.name
            names = [f"critics/{job['run']}" if own else ""]
        known = [self.needs.get(name) for name in names]
        found = [need for need in known if need is not None]
        if not found or len(found) < len(known):
            return None
        hours = [need.hours for need in found if need.hours is not None]
        return Need(
            max(need.weights for need in found),
            max(need.prompt for need in found),
            max(need.group for need in found),
            sum(hours) if len(hours) == len(found) else None,
        )

    def _gpus(self, need: Need | None) -> int | None:
        """Return how many GPUs hold weights and a prompt; 1 where that is not known, else None."""
        if not self.gpu or need is None:
            return int(self.gpu) or None
        return math.ceil((need.weights + need.prompt) / self.gpu_gb) or None

    def _memory(self, need: Need) -> float:
        """Return the MiB of a job in the memory of its node."""
        # to a GPU the weights only pass through it
        prompts = 0 if self.gpu else need.group
        return (PROCESS + need.weights + prompts * need.prompt) * MIB


def _minutes(need: Need, job: Mapping[str, Any]) -> float | None:
    """Return the minutes of a job, which may be one shard of several; None when not known."""
    if need.hours is None:
        return None
    shards = int(job.get("suffix", "").rpartition("-of-")[2] or 1)
    return START + MARGIN * 60 * need.hours / shards


def reasons(folders: Iterable[Path | str], since: float) -> list[str]:
    """Return why runs have failed, one sentence a run, from their executed notebooks.

    Parameters
    ----------
    folders : iterable of Path or str
        Folders of runs.
    since : float
        Time (s) from which on a notebook counts.
    """
    found = []
    for folder in map(Path, folders):
        notebook = folder / "executed.ipynb"
        if notebook.is_file() and notebook.stat().st_mtime >= since:
            if why := _error_of(notebook):
                found.append(f"{folder}: {why}")
    return found


def _error_of(notebook: Path) -> str:
    """Return the error that stopped a notebook, or ""."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError):  # half-written when its job was killed
        return ""
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    errors = [output for output in outputs if output.get("output_type") == "error"]
    return f"{errors[-1]['ename']}: {errors[-1]['evalue']}" if errors else ""
