"""What Snakemake needs to know of a job: its settings, its code by content, whether its run holds.

A file ``runs/<profile>/.jobs/<job>.yaml`` holds the settings for papermill, below comments with the
digests of the code. It is written only when its content changes, so that a comment, a docstring or
a notebook's outputs restart nothing. No model is imported: Snakemake loads this for every job.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import yaml

from ..closure import PACKAGE
from ..config import SearchConfig
from ..errors import ParameterError, RunError, unknown_name
from ..files import locked, replace_file
from ..paper import swept
from ..report.provenance import versions
from ..report.yamlfile import read_yaml
from .identity import code_of, notebook_digest, package_digest
from .paramfiles import ParamFiles

LEFT = {  # kind of job -> what its folder holds when it has finished
    "decode": ["params.json", "responses.jsonl"],
    "judge": ["params.json", "verdicts.jsonl"],
    "critic": ["critic.csv", "reliability.csv"],
}
# what may stand after --config: texts, and numbers
TEXTS = ("profile", "with", "hub", "judge_key")
NUMBERS = ("limit", "shards", "gpu")
# a cost or reward that is module:function of a user, in the settings as JSON
OWN = re.compile(r'"([\w.]+):[\w.]+"')


def configured(config: Mapping) -> dict:
    """Check what stands after ``--config``, and return the settings of the file named by ``with``.

    Raises
    ------
    ParameterError
        For a key that nothing would read, a value that is no number where one is read, and a file
        that holds no mapping.
    """
    for key, value in config.items():
        if key not in (*TEXTS, *NUMBERS):
            raise unknown_name("key after --config", key, (*TEXTS, *NUMBERS))
        if key in NUMBERS and not (isinstance(value, int) and value >= 0):
            raise ParameterError(
                f"{key} after --config is {value!r}; give a number of 0 or more, such as {key}=4"
            )
    if not config.get("with"):
        return {}
    return read_yaml(str(config["with"]), "name a file with a mapping of settings after with=")


def request(path: Path | str, kind: str, notebook: str, settings: Mapping) -> str:
    """Write the file of a job unless it is there with the same content, and return its path.

    Parameters
    ----------
    kind : str
        See `code`.
    settings : mapping
        Text, numbers, true, false, null, lists and mappings.
    """
    digests = {notebook: notebook_digest(notebook)} | code(kind, settings)
    lines = [f"# version of {name}: {version}" for name, version in versions().items()]
    lines += [f"# code of {name}: {digest}" for name, digest in digests.items()]
    if settings:
        # escaped and unwrapped, so that no reader takes a rare character for the end of a line
        lines.append(yaml.safe_dump(dict(settings), sort_keys=False, width=math.inf))
    text = "\n".join(lines)
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        replace_file(path, text)
    return str(path)


def code(kind: str, settings: Mapping) -> dict[str, str]:
    """Return the digests of the code that decides what a job leaves, a user's scorers included."""
    modules = OWN.findall(json.dumps(settings, ensure_ascii=False))
    # a judge asks by the pairs of `igcore.report.verdicts`; its replies stay when that changes
    whole = {} if kind in ("decode", "critic") else {PACKAGE: package_digest()}
    return code_of(*modules) | whole


def shards_of(settings: Mapping, shards: int) -> int:
    """Return the number of shards of a run: no more than its limit makes groups.

    What is no positive whole number is left to the notebook, which refuses it by name.
    """
    limit = settings.get("limit")
    size = settings.get("group_size") or SearchConfig.group_size
    if not all(isinstance(number, int) and number > 0 for number in (limit, size)):
        return shards
    return min(shards, math.ceil(limit / size))


# --- runs that are there --------------------------------------------------------------------------


@cache  # which keeps it; a process that asks again has its own lock
def lock(folder: Path) -> AbstractContextManager[object]:
    """Lock a folder for one run of Snakemake, until this process ends, also by a kill.

    Parameters
    ----------
    folder : Path
        Absolute.

    Raises
    ------
    RunError
        When another process has locked the folder, or its file system has no locks.
    """
    path = folder / ".snakemake/run.lock"
    busy = f"another Snakemake runs in {folder}; wait for it, or stop it first"
    return locked(path, busy)


def check_run(folder: Path | str, kind: str, settings: Mapping) -> str:
    """Remove the manifest of a run that no longer holds; return why, or "" where nothing changed.

    A finished run holds while its files are there, and those that it loaded keep size and time.
    """
    manifest = Path(folder) / "manifest.json"
    why = _broken(manifest, kind, settings) if manifest.is_file() else ""
    if not why:
        return ""
    manifest.unlink()
    return f"{folder}: {why}, so it runs again"


def _broken(manifest: Path, kind: str, settings: Mapping) -> str:
    """Return why a finished run no longer holds, or ""."""
    wanted = LEFT[kind] + (_trained(settings) if kind == "critic" else [])
    for name in wanted:
        if not (manifest.parent / name).is_file():
            return f"{name} is not there any more"
    try:
        opened = json.loads(manifest.read_text(encoding="utf-8")).get("opened", {})
        for path, size_and_time in opened.items():
            if Path(path).is_file():
                stat = Path(path).stat()
                if [stat.st_size, stat.st_mtime_ns] != size_and_time:
                    return f"{path} has changed since"
    except (ValueError, AttributeError, RecursionError):
        return "its manifest is damaged"
    return ""


def _trained(settings: Mapping) -> list[str]:
    """Return the files of rollouts and networks that a run of notebook 20 leaves."""
    files = [f"{name}/critic.safetensors" for name in settings.get("critics") or ()]
    if settings.get("value"):
        files.append("value/value.safetensors")
    if not settings.get("rollouts"):
        files += ["rollouts-train/responses.jsonl", "rollouts-test/responses.jsonl"]
    return files


def check_finished(profile: str, base: Path) -> None:
    """Raise ``RunError`` unless the runs of a profile of sweeps and of its main one have finished.

    Parameters
    ----------
    profile : str
        A key of `igcore.paper.swept.MAIN`.
    base : Path
        The folder that holds ``params`` and ``runs``.
    """
    if profile not in swept.MAIN:
        names = ", ".join(swept.MAIN)
        raise RunError(
            f"the profile {profile!r} has no main profile; choose {names}, or see notebook 40"
        )
    for of in (swept.MAIN[profile], profile):
        if missing := unfinished(of, base):
            raise RunError(
                f"{len(missing)} runs have not finished, the first {of}/{missing[0]}; run "
                "`make reproduce` and then `make ablations`"
            )


def unfinished(profile: str, base: Path) -> list[str]:
    """Return the names of a profile's decode runs that have not finished, whole or in shards."""
    files = ParamFiles(profile, base=base / "params")
    missing = []
    for file in files.files("decode"):
        for run, _ in files.points(file):
            folder = base / "runs" / profile
            shards = [path.parent.name for path in folder.glob(f"{run}.*-of-*/manifest.json")]
            in_shards = bool(shards) and len(shards) == int(shards[0].rpartition("-")[2])
            if not in_shards and not (folder / run / "manifest.json").exists():
                missing.append(run)
    return missing


# --- runs that failed -----------------------------------------------------------------------------


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
