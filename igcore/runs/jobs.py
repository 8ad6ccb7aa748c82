"""What Snakemake needs to know of a job: its settings, its code by content, whether its run holds.

A file ``runs/<profile>/.jobs/<job>.yaml`` holds the settings for papermill, below comments with the
digests of the code. It is written only when its content changes, so that a comment, a docstring or
a notebook's outputs restart nothing. No model is imported: Snakemake loads this for every job.
"""

import fcntl
import json
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from ..config import SearchConfig
from ..errors import ParameterError, RunError
from ..paper import swept
from .identity import code_of, literal_table, notebook_code, versions
from .paramfiles import ParamFiles

ENTRIES = {kind: f"igcore.runs.{kind}_run" for kind in ("decode", "critic", "judge")}
LEFT = {  # kind of job -> what its folder holds when it has finished
    "decode": ["params.json", "responses.jsonl"],
    "judge": ["params.json", "verdicts.jsonl"],
    "critic": ["critic.csv", "reliability.csv"],
}
# all jobs of one Snakemake run share the same code, so hash it once
_code = cache(code_of)
_notebook = cache(notebook_code)


def request(path: Path | str, kind: str, notebook: str, settings: Mapping) -> str:
    """Write the file of a job unless it is there with the same content, and return its path.

    Parameters
    ----------
    kind : str
        A key of `ENTRIES`, or anything else for a notebook whose imports are its code.
    settings : mapping
        Text, numbers, true, false, null, lists and mappings.

    Raises
    ------
    ParameterError
        Naming a setting that papermill would not pass on unchanged.
    """
    settings = dict(settings)
    for name, value in settings.items():
        if not _survives(value):
            raise ParameterError(
                f"setting {name} is {value!r}, which no notebook receives as it is; give text (a "
                "date in quotes), a finite number, true, false, null, or a list or mapping of these"
            )
    # escaped and unwrapped, so that no reader takes a rare character for the end of a line
    text = yaml.safe_dump(settings, sort_keys=False, width=math.inf) if settings else ""
    digests = {notebook: _notebook(notebook)[0]} | code(kind, notebook, settings)
    known = [("version", versions()), ("code", digests)]
    comments = "".join(f"# {what} of {x}: {y}\n" for what, of in known for x, y in of.items())
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != comments + text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(comments + text, encoding="utf-8")
        part.replace(path)
    return str(path)


def _survives(value: object) -> bool:
    """Say whether a value reaches a notebook unchanged: it is plain JSON, and text can be encoded.

    Dates, numbers that are not finite and lone surrogates do not.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        return False
    return json.loads(text) == value


def code(kind: str, notebook: str, settings: Mapping) -> dict[str, str]:
    """Return the digests of the modules that decide what a job leaves, its scorers included."""
    if kind not in ENTRIES:
        return _code(*_notebook(notebook)[1])
    judge = settings.get("judge")
    roles = [settings.get("cost"), settings.get("reward")]
    scorers = judge.values() if isinstance(judge, dict) else roles
    names = [scorer.get("name") if isinstance(scorer, dict) else scorer for scorer in scorers]
    homes = {
        home.partition(":")[0]
        for name, home in literal_table("igcore.models.registry", "SCORERS").items()
        if None in names or name in names  # None: a scorer left to its default
    }
    return _code(ENTRIES[kind], *sorted(homes))


def shards_of(settings: Mapping, shards: int) -> int:
    """Return the number of shards of a run: no more than its limit makes groups.

    Settings that are no positive whole numbers are left to the notebook, which refuses them by
    name.
    """
    limit, size = settings.get("limit"), settings.get("group_size", SearchConfig.group_size)
    if not all(isinstance(number, int) and number > 0 for number in (limit, size)):
        return shards
    return min(shards, math.ceil(limit / size))


# --- runs that are there --------------------------------------------------------------------------


def lock(folder: Path) -> None:
    """Lock a folder for one run of Snakemake, until this process ends, also by a kill.

    Raises
    ------
    RunError
        When another process has locked the folder.
    """
    path = folder / ".snakemake/run.lock"
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT)  # stays open: closing it would free the lock
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RunError(
            f"another Snakemake runs in {folder.resolve()}; wait for it, or stop it first"
        ) from error


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
    wanted = [*LEFT[kind], *(_trained(settings) if kind == "critic" else ())]
    if missing := [name for name in wanted if not (manifest.parent / name).is_file()]:
        return f"{missing[0]} is not there any more"
    try:
        opened = json.loads(manifest.read_text(encoding="utf-8")).get("opened", {})
        known = {Path(path): tuple(size_and_time) for path, size_and_time in opened.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return "its manifest is damaged"
    there = {path: path.stat() for path in known if path.is_file()}
    now = {path: (stat.st_size, stat.st_mtime_ns) for path, stat in there.items()}
    changed = [path for path in now if now[path] != known[path]]
    return f"{changed[0]} has changed since" if changed else ""


def _trained(settings: Mapping) -> list[str]:
    """Return the files of rollouts and networks that a run of notebook 20 leaves."""
    splits = () if settings.get("rollouts") else ("train", "test")
    rollouts = [f"rollouts-{split}/responses.jsonl" for split in splits]
    critics = [f"{name}/critic.safetensors" for name in settings.get("critics") or ()]
    return [*rollouts, *critics, *(["value/value.safetensors"] if settings.get("value") else [])]


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
        raise RunError(
            f"the profile {profile!r} sweeps for no other, as {', '.join(swept.MAIN)} does; its "
            "notebooks 40 and 50 write everything"
        )
    both = swept.MAIN[profile], profile
    if missing := [f"{of}/{run}" for of in both for run in unfinished(of, base)]:
        raise RunError(
            f"{len(missing)} runs have not finished, the first {missing[0]}; run `make reproduce` "
            "and then `make ablations`"
        )


def unfinished(profile: str, base: Path) -> list[str]:
    """Return the names of a profile's decode runs that have not finished, whole or in shards."""
    files, folder = ParamFiles(profile, base=base / "params"), base / "runs" / profile
    names = [name for file in files.files("decode") for name, _ in files.points(file)]
    return [name for name in names if not _has_finished(folder, name)]


def _has_finished(folder: Path, run: str) -> bool:
    """Say whether a run has finished, as a whole or in all shards of one sharding."""
    shards = [path.parent.name for path in folder.glob(f"{run}.*-of-*/manifest.json")]
    in_shards = bool(shards) and len(shards) == int(shards[0].rpartition("-")[2])
    return in_shards or (folder / run / "manifest.json").exists()
